"""The kit's contracts against kernels that are wrong on purpose: none may pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.formats import E4M3, E5M2
from fp8lab.testing.checking import find_fault
from fp8lab.testing.contracts.base import contract_from
from fp8lab.testing.findings import Finding
from fp8lab.testing.mutants import RIGHT, Choices
from fp8lab.testing.profiles import QUICK
from fp8lab.testing.running import LocalRunner

Kernel = Callable[..., Any]

SETTINGS: dict[str, dict[str, Any]] = {
    "cast": {"fmt": E4M3},
    "dequantize": {"fmt": E5M2},
    "requantize": {"source": E5M2, "target": E4M3},
    "amax": {},
    "block_quantize": {"fmt": E4M3, "power_of_two": True},
    "mx_quantize": {"fmt": E5M2},
    "scale_from_amax": {"fmt": E4M3},
    "scale_update": {"fmt": E4M3},
    "matmul": {"promote_every": 128},
    "adamw": {},
    "norm": {},
    "clip": {},
    "unscale": {},
}
IN_PLACE = ("scale_update", "adamw", "clip")  # None says that the inputs hold the results
BRIEF = replace(QUICK, examples=5, minimise_calls=20)
EVERY = pytest.mark.parametrize("contract", SETTINGS)


def found(contract: str, kernel: Kernel) -> Finding:
    """What the contract finds; it must find something."""
    held = contract_from(contract, SETTINGS[contract])
    finding = find_fault(held, LocalRunner(kernel, "cpu", BRIEF.time_limit), BRIEF)
    assert finding is not None, f"{held} lets it pass"
    assert finding.report().startswith(finding.kernel.rpartition(":")[2].rpartition(".")[2])
    return finding


def right(contract: str) -> Kernel:
    return RIGHT[contract](Choices(**SETTINGS[contract]))


def mapped(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A kernel's result with each tensor changed."""
    if isinstance(result, torch.Tensor):
        return change(result)
    return type(result)(mapped(part, change) for part in result)


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of a kernel's result."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in tensors(part)]


def test_each_contract_is_here() -> None:
    assert set(SETTINGS) == set(RIGHT)


@EVERY
def test_zeros_do_not_pass(contract: str) -> None:
    kernel = right(contract)

    def zeros(*given: Any, **options: Any) -> Any:
        return mapped(kernel(*given, **options), torch.zeros_like)

    assert found(contract, zeros).verdict.kind == "differs"


@EVERY
def test_an_exception_is_reported_as_one(contract: str) -> None:
    def raises(*given: Any, **options: Any) -> Any:
        raise RuntimeError("out of registers")

    verdict = found(contract, raises).verdict
    assert verdict.kind == "raised"
    assert "RuntimeError: out of registers" in verdict.text


@EVERY
def test_none_does_not_pass(contract: str) -> None:
    def nothing(*given: Any, **options: Any) -> None:
        pass

    kind = "differs" if contract in IN_PLACE else "wrong_result"
    assert found(contract, nothing).verdict.kind == kind


@EVERY
def test_another_dtype_does_not_pass(contract: str) -> None:
    kernel = right(contract)

    def narrower(*given: Any, **options: Any) -> Any:
        return mapped(kernel(*given, **options), lambda tensor: tensor.half())

    verdict = found(contract, narrower).verdict
    assert verdict.kind == "wrong_result"
    assert "of dtype float16; accepted:" in verdict.text


@EVERY
def test_another_shape_does_not_pass(contract: str) -> None:
    kernel = right(contract)

    def longer(*given: Any, **options: Any) -> Any:
        return mapped(kernel(*given, **options), lambda t: torch.stack([t, t]))

    verdict = found(contract, longer).verdict
    assert verdict.kind == "wrong_result"
    assert "of shape" in verdict.text


@EVERY
def test_a_changed_input_is_reported(contract: str) -> None:
    kernel = right(contract)

    def clobbers(*given: Any, **options: Any) -> Any:
        result = mapped(kernel(*given, **options), torch.clone)
        for tensor in tensors([part for part in given if not isinstance(part, float)]):
            tensor.view(torch.uint8).bitwise_not_() if tensor.is_contiguous() and tensor.ndim else 0
        return result

    verdict = found(contract, clobbers).verdict
    assert verdict.kind == "changed_input"


@EVERY
def test_a_nan_for_a_number_does_not_pass(contract: str) -> None:
    kernel = right(contract)

    def spoiled(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32 or not tensor.numel():
            return tensor
        flat = tensor.clone().reshape(-1)
        flat[-1] = torch.nan
        return flat.view(tensor.shape)

    def poisons(*given: Any, **options: Any) -> Any:
        return mapped(kernel(*given, **options), spoiled)

    held = contract_from(contract, SETTINGS[contract])
    if contract in ("cast", "requantize", "mx_quantize"):  # they give codes alone
        assert find_fault(held, LocalRunner(poisons, "cpu", 30.0), BRIEF) is None
        return
    assert found(contract, poisons).verdict.kind == "differs"


@settings(max_examples=60)
@given(
    contract=st.sampled_from(sorted(SETTINGS)),
    place=st.integers(0, 10**6),
    bit=st.integers(0, 31),
    data=st.data(),
)
def test_one_flipped_bit_anywhere_does_not_pass(
    contract: str, place: int, bit: int, data: st.DataObject
) -> None:
    kernel = right(contract)
    which = data.draw(st.integers(0, 2))

    def flips(*given: Any, **options: Any) -> Any:
        result = mapped(kernel(*given, **options), torch.clone)
        outputs = tensors(result)
        flip(outputs[which % len(outputs)] if outputs else None, place, bit)
        return result

    assert found(contract, flips).verdict.kind == "differs"


def flip(tensor: torch.Tensor | None, place: int, bit: int) -> None:
    """Flip a bit of one element, in place. A NaN of a wide type stays: any equals any other."""
    if tensor is None or not tensor.numel():
        return
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
        return
    flat = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.uint8).reshape(-1)
    index = place % flat.numel()
    if tensor.dtype == torch.float32 and bool(torch.isnan(tensor.reshape(-1)[index])):
        return
    width = 32 if tensor.dtype == torch.float32 else 8
    mask = torch.tensor(1 << bit % width, dtype=torch.int64).to(flat.dtype)
    flat[index] ^= mask
