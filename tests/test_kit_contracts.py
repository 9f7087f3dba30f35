"""The contracts themselves: the oracle holds every one, and no wrong bit, type or habit does."""

from __future__ import annotations

import doctest
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.emulation.tensorcore import HOPPER_BF16, IEEE_FLOAT32
from fp8lab.formats import BFLOAT16, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0
from fp8lab.testing import (
    PROFILES,
    KernelFault,
    Profile,
    check_adamw,
    check_amax,
    check_block_quantize,
    check_cast,
    check_matmul,
    check_norm,
    check_scale_update,
    check_unscale,
    contract,
    contracts,
    to_numpy,
    to_torch,
)
from fp8lab.testing.checking import cases, find_fault
from fp8lab.testing.contracts.base import CONTRACTS, Contract, contract_from
from fp8lab.testing.minimise import minimised
from fp8lab.testing.running import LocalRunner, Outcome

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

QUICK = PROFILES["quick"]
FEW = replace(QUICK, name="few", examples=3, fixed=9)

EVERY: list[Contract] = [
    *(contracts.Cast(fmt) for fmt in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0)),
    contracts.Cast(E4M3, dtypes=("float16", "bfloat16"), strided=True),
    contracts.Cast(E5M2, rounding="stochastic"),
    contracts.Cast(E4M3, rounding="toward_zero", overflow="ieee"),
    *(contracts.Dequantize(fmt) for fmt in (E4M3, E5M2FNUZ, E8M0)),
    contracts.Requantize(E5M2, E4M3),
    contracts.Amax(("float32", "bfloat16", "float16"), strided=True),
    contracts.ScaleFromAmax(E4M3, margin=1),
    contracts.ScaleUpdate(E5M2, algorithm="most_recent"),
    contracts.BlockQuantize(E4M3, strided=True),
    contracts.BlockQuantize(E5M2, block=(4, None), power_of_two=False, ragged=False),
    contracts.MxQuantize(E4M3, scale_rounding="up", dtypes=("float32", "bfloat16")),
    contracts.Matmul(),
    contracts.Matmul((E5M2, E4M3), promote_every=128, multiple_of=(4, 8, 16)),
    contracts.Matmul(exact_sums=True, core=IEEE_FLOAT32),
    contracts.Matmul((BFLOAT16, BFLOAT16), core=HOPPER_BF16),
    contracts.AdamW(),
    contracts.AdamW("torch"),
    contracts.Norm(),
    contracts.Clip(),
    contracts.Unscale(),
]


class Playback:
    """A runner that gives the oracle's outputs, or what `change` makes of them."""

    device = "cpu"
    name = "playback"
    traits: frozenset[str] = frozenset()

    def __init__(self, change: Callable[[Arrays], Arrays] = lambda outputs: outputs) -> None:
        self.change = change

    def run(self, contract: Contract, inputs: Any) -> Outcome:
        outputs = {name: array.copy() for name, array in contract.expected(inputs).items()}
        return Outcome("returned", outputs=self.change(outputs))

    def sweep(self, contract: Any) -> Any:
        raise NotImplementedError


def oracle_of(contract: Contract) -> Callable[..., Any]:
    """The oracle as a kernel on tensors, called as the contract calls one."""
    inputs: dict[str, Any] = {}

    def kernel(*args: Any, **keywords: Any) -> Any:
        names = [name for name in inputs if name not in keywords]
        given: Arrays = {}
        if isinstance(contract, contracts.Norm | contracts.Clip | contracts.Unscale):
            given = {f"gradients[{i}]": to_numpy(grad) for i, grad in enumerate(args[0])}
            names, args = [name for name in names if name in contract.scalars], args[1:]
        for name, arg in zip(names, args, strict=True):
            given[name] = to_numpy(arg) if isinstance(arg, torch.Tensor) else np.asarray(arg)
        given |= {name: np.asarray(value) for name, value in keywords.items()}
        found = {name: to_torch(array.copy()) for name, array in contract.expected(given).items()}
        if isinstance(contract, contracts.Unscale):
            return [found[f"gradients[{i}]"] for i in range(len(found) - 1)], found["found_inf"]
        return list(found.values()) if len(found) != 1 or "norm" not in found else found["norm"]

    first = next(contract.fixed(QUICK, frozenset()))
    inputs.update(first)
    return kernel


@pytest.mark.parametrize("contract", EVERY, ids=str)
def test_the_oracle_holds(contract: Contract) -> None:
    oracle = oracle_of(contract)

    def kernel(*args: Any, **keywords: Any) -> Any:
        found = oracle(*args, **keywords)
        one = isinstance(found, list) and len(found) == 1 and not isinstance(contract, _LISTS)
        return found[0] if one else found

    assert find_fault(contract, LocalRunner(kernel, "cpu", 30.0), QUICK) is None


_LISTS = (contracts.Clip, contracts.Unscale)


@pytest.mark.parametrize("contract", EVERY, ids=str)
def test_one_flipped_bit_anywhere_is_found(contract: Contract) -> None:
    for number, output in enumerate(contract.expected(next(contract.fixed(QUICK, frozenset())))):

        def flip(outputs: Arrays, output: str = output, number: int = number) -> Arrays:
            array = outputs.get(output, np.empty(0, np.uint8))
            if array.size:
                words = array.reshape(-1).view(f"u{array.dtype.itemsize}")
                bit = 0 if array.dtype == bool else (7 * number) % (8 * array.dtype.itemsize)
                words[-1] ^= words.dtype.type(1 << bit)
            return outputs

        finding = find_fault(contract, Playback(flip), FEW)
        assert finding is not None
        assert finding.verdict.kind == "differs"
        assert output in finding.verdict.wrong
        assert f"{output}" in finding.report()


@pytest.mark.parametrize("contract", EVERY, ids=str)
def test_a_wrong_shape_dtype_or_nan_is_found(contract: Contract) -> None:
    def longer(outputs: Arrays) -> Arrays:
        return {
            n: np.concatenate([a.reshape(-1)] * 2 + [a.reshape(-1)[:1]]) for n, a in outputs.items()
        }

    def wider(outputs: Arrays) -> Arrays:
        return {
            name: np.zeros(array.shape, np.complex64).real.astype(np.int16)
            for name, array in outputs.items()
        }

    for change in (longer, wider):
        finding = find_fault(contract, Playback(change), FEW)
        assert finding is not None
        assert finding.verdict.kind == "wrong_result"
        assert "accepted: " in finding.report()

    def nan(outputs: Arrays) -> Arrays:
        for array in outputs.values():
            if array.size and array.dtype.kind in "fV":
                array.reshape(-1)[0] = np.nan
        return outputs

    kinds = {
        array.dtype.kind
        for array in contract.expected(next(contract.fixed(QUICK, frozenset()))).values()
    }
    if kinds & {"f", "V"}:
        finding = find_fault(contract, Playback(nan), FEW)
        assert finding is not None
        assert finding.verdict.kind == "differs"


@pytest.mark.parametrize("contract", EVERY, ids=str)
def test_settings_survive_json_and_inputs_are_what_is_said(contract: Contract) -> None:
    import json

    again = contract_from(contract.name, json.loads(json.dumps(contract.settings)))
    assert again == contract
    for inputs in cases(contract, FEW, frozenset()):
        assert set(contract.scalars) <= set(inputs)
        for axes in contract.axes(inputs):
            assert len({inputs[name].shape[axis] for name, axis in axes}) == 1
        for candidate in islice(contract.simpler(inputs), 3):
            contract.expected(candidate)


def test_every_contract_is_tried_here() -> None:
    assert {contract.name for contract in EVERY} == set(CONTRACTS)


# What a kernel may do wrong besides its bits


def right(x: torch.Tensor, scale: float) -> torch.Tensor:
    from fp8lab.emulation.casting import quantize

    return to_torch(quantize(to_numpy(x), E4M3, scale=scale))


def failure_of(kernel: Any, **options: Any) -> KernelFault:
    with pytest.raises(KernelFault) as caught:
        check_cast(kernel, E4M3, device="cpu", **options)
    return caught.value


def test_an_exception_is_reported_with_its_place_and_the_smallest_input() -> None:
    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        if x.numel() >= 65:
            raise IndexError("tile 2 of 2")
        return right(x, scale)

    fault = failure_of(kernel)
    assert "it raised IndexError: tile 2 of 2 (test_kit_contracts.py:" in str(fault)
    assert fault.finding.case.inputs["x"].shape == (65,)
    assert set(fault.finding.case.inputs["x"].tolist()) == {1.0}


def test_wrong_results_are_reported() -> None:
    for kernel, text in [
        (lambda x, scale: None, "returned None; accepted: codes, a tensor"),
        (lambda x, scale: x.half(), "codes of dtype float16; accepted: float8_e4m3fn, uint8"),
        (lambda x, scale: [1.0], "gave codes as list; accepted: a torch tensor"),
        (lambda x, scale: right(x, scale).reshape(-1)[1:], "gave codes of shape"),
        (lambda x, scale, more: x, "raised TypeError"),
        (lambda x, scale: sys.exit("gave up"), "raised SystemExit: gave up"),
    ]:
        assert text in str(failure_of(kernel))
    with pytest.raises(KernelFault, match="returned 2 values; accepted: a tuple of 3: param"):
        check_adamw(lambda p, g, m, v, **numbers: (p, m), device="cpu")
    with pytest.raises(KernelFault, match="returned Tensor; accepted: a tuple of 2: gradients"):
        check_unscale(lambda grads, inverse: torch.zeros(()), device="cpu")


def test_codes_as_bytes_are_taken() -> None:
    check_cast(lambda x, scale: right(x, scale).view(torch.uint8), E4M3, device="cpu")


def test_changed_inputs_are_reported() -> None:
    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        codes = right(x, scale)
        x.mul_(scale)
        return codes

    assert "it changed its input x" in str(failure_of(kernel))

    def adamw_that_scales(
        param: torch.Tensor, grad: torch.Tensor, *moments: torch.Tensor, **numbers: Any
    ) -> None:
        grad.mul_(0.5)

    with pytest.raises(KernelFault, match="changed its input grad"):
        check_adamw(adamw_that_scales, device="cpu")


def test_writes_outside_of_an_input_are_reported() -> None:
    def beyond(scale: torch.Tensor, history: torch.Tensor) -> None:
        size = history.numel()
        torch.as_strided(history, (size + 3,), (1,), history.storage_offset())[size:] = 0

    with pytest.raises(KernelFault, match="wrote outside of amax_history, past its end, the first"):
        check_scale_update(beyond, E4M3, device="cpu")


def test_a_read_past_the_end_is_a_nan() -> None:
    """A mask that is missing: the margins of every input are NaN."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        size = -(-max(x.numel(), 1) // 32) * 32
        return torch.as_strided(x, (size,), (1,), x.storage_offset()).abs().max()

    with pytest.raises(KernelFault, match="1 of 1 elements differ"):
        check_amax(kernel, device="cpu")


def test_a_kernel_that_does_not_end_is_reported() -> None:
    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        while x.numel() == 33:
            time.sleep(0.01)
        return right(x, scale)

    fault = failure_of(kernel, profile=replace(QUICK, time_limit=0.2))
    assert "it did not return within 0.2 s" in str(fault)


def test_a_kernel_that_is_not_steady_is_reported() -> None:
    calls = []

    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(1)
        codes = right(x, scale)
        return codes if len(calls) != 3 else codes.view(torch.uint8) ^ 1

    assert "the kernel is not steady" in str(failure_of(kernel))


def test_mistakes_in_the_check_are_values() -> None:
    with pytest.raises(ValueError, match="unknown rounding 'up'"):
        check_cast(right, E4M3, rounding="up")
    with pytest.raises(ValueError, match="unknown profile 'fast'; accepted: quick, ci, thorough"):
        check_cast(right, E4M3, profile="fast")
    with pytest.raises(ValueError, match="unknown dtype 'int32'; accepted: float32"):
        check_amax(torch.amax, dtypes=("int32",))
    with pytest.raises(ValueError, match="dtypes is 'float32'; accepted: a tuple"):
        check_amax(torch.amax, dtypes="float32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device is 'tpu'; accepted: cpu, cuda"):
        check_cast(right, E4M3, device="tpu")
    with pytest.raises(ValueError, match=r"unknown bound 0\.1; accepted: any_order"):
        check_cast(right, E4M3, bound=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kernel is None; accepted: something callable"):
        check_cast(None, E4M3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"formats is \(E4M3, E4M3, E5M2\); accepted: a tuple"):
        check_matmul(torch.matmul, formats=(E4M3, E4M3, E5M2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="core is 'hopper'; accepted: HOPPER_FP8"):
        check_matmul(torch.matmul, core="hopper")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple_of is 16; accepted: a tuple of three"):
        check_matmul(torch.matmul, multiple_of=16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"block is \(1, 2, 3\); accepted: \(rows, columns\)"):
        check_block_quantize(right, E4M3, block=(1, 2, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'a contract is given by its name, as in \("cast"'):
        contract(right)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="promote_every is 48"):
        check_matmul(torch.matmul, promote_every=48)
    with pytest.raises(ValueError, match=r"unknown contract 'cats'; accepted: .*cast"):
        contract_from("cats", {})
    with pytest.raises(ValueError, match=r"cast: .*'speed'; settings it has: fmt, rounding"):
        contract_from("cast", {"fmt": "E4M3", "speed": 1})
    with pytest.raises(ValueError, match="unknown format 'E9M9'; accepted: E4M3"):
        contract_from("cast", {"fmt": "E9M9"})
    with pytest.raises(ValueError, match="unknown order"):
        check_adamw(right, order="odd")


def test_after_a_gpu_fault_no_smaller_input_is_looked_for() -> None:
    """All that is called in the process afterwards fails, whatever it is."""
    calls = []

    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(x.numel())
        if max(calls) > 1000:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return right(x, scale)

    fault = failure_of(kernel)
    assert "CUDA error" in str(fault)
    assert fault.finding.case.inputs["x"].size == 2568
    assert len(calls) == 2


# The smallest input


def test_the_smallest_input_is_the_plainest_element() -> None:
    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        codes = right(x, scale).view(torch.uint8)
        return torch.where(x.abs() >= 2.0, codes ^ 1, codes)

    inputs = failure_of(kernel).finding.case.inputs
    assert {name: array.tolist() for name, array in inputs.items()} == {"x": [2.0], "scale": 1.0}


def test_a_product_shrinks_to_the_k_that_matter() -> None:
    contract = contracts.Matmul()
    rng = np.random.default_rng(0)
    a = rng.integers(1, 8, (20, 100)).astype(np.float32)
    a[7, 33], a[7, 80] = 448, 416

    def fails(inputs: Arrays) -> bool:
        wide = inputs["a"].astype(np.float32)
        return bool(((wide == 448).any(axis=1) & (wide == 416).any(axis=1)).any())

    ones = np.ones((100, 9), E4M3.dtype)
    one = np.ones((), np.float32)
    inputs = {"a": a.astype(E4M3.dtype), "b": np.asfortranarray(ones)}
    inputs |= {"inverse_scale_a": 3 * one, "inverse_scale_b": one}
    smallest = minimised(contract, inputs, [7 * 9 + 4], fails, 300)
    assert smallest["a"].astype(np.float32).tolist() == [[448, 416]]
    assert smallest["b"].shape == (2, 1)
    assert smallest["inverse_scale_a"] == 1


def test_the_search_ends_when_its_calls_are_used_up() -> None:
    asked = []

    def fails(inputs: Arrays) -> bool:
        asked.append(1)
        return inputs["x"].size > 50

    inputs = {"x": np.arange(1000, dtype=np.float32), "scale": np.asarray(1.0)}
    smallest = minimised(contracts.Cast(E4M3), inputs, [], fails, 40)
    assert len(asked) == 40
    assert 50 < smallest["x"].size < 1000


def test_whole_gradients_are_left_out() -> None:
    def kernel(grads: list[torch.Tensor]) -> torch.Tensor:
        if any(grad.numel() == 0 for grad in grads):
            raise ValueError("an empty gradient")
        return torch.zeros(())

    with pytest.raises(KernelFault) as caught:
        check_norm(kernel, device="cpu", profile=replace(QUICK, fixed=1, examples=0))
    assert caught.value.finding.verdict.kind in ("raised", "differs")
    assert len(caught.value.finding.case.inputs) == 1


# Profiles


def test_profiles_draw_the_same_cases_where_they_say_so() -> None:
    contract = contracts.AdamW()
    few: Profile = replace(QUICK, fixed=1, examples=6)
    first, second = ([dict(case) for case in cases(contract, few, frozenset())] for _ in range(2))
    assert len(first) == len(second) > 1
    for one, other in zip(first, second, strict=True):
        assert all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)


def test_traits_narrow_what_is_tried() -> None:
    scales = {
        float(case["scale"])
        for case in cases(contracts.Cast(E4M3), QUICK, frozenset({"power_of_two_scales"}))
        if case["x"].ndim == 1
    }
    assert all(np.frexp(scale)[0] == 0.5 for scale in scales)


@pytest.mark.parametrize(
    "name", ["adapters", "bounds", "comparison", "diagnosis", "marks", "profiles", "values"]
)
def test_examples_in_the_docstrings_hold(name: str) -> None:
    done = doctest.testmod(importlib.import_module(f"fp8lab.testing.{name}"))
    assert done.attempted > 0
    assert done.failed == 0
