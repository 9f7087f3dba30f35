"""Adapters: other signatures hold the same contracts; poisons and margins show what is wrong."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.emulation.casting import quantize
from fp8lab.emulation.scaling import quantize_blocks
from fp8lab.formats import E4M3, E5M2
from fp8lab.testing import (
    KernelFault,
    check_adamw,
    check_block_quantize,
    check_cast,
    check_dequantize,
    flat_input,
    on_cupy,
    takes_inverse_scale,
    takes_tensor_scale,
    to_numpy,
    to_torch,
    transposed_output,
    writes_output,
)


def cast(x: torch.Tensor, scale: float) -> torch.Tensor:
    return to_torch(quantize(to_numpy(x), E4M3, scale=scale))


def cast_into(x: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    out.view(torch.uint8).copy_(cast(x, scale).view(torch.uint8))


def test_a_kernel_that_writes_into_an_output() -> None:
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        check_cast(writes_output(cast_into, dtype), E4M3, device="cpu")

    def out_first(out: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        cast_into(x, scale, out)

    check_cast(writes_output(out_first, torch.uint8, place=0), E4M3, device="cpu")
    check_cast(writes_output(cast_into, torch.uint8, place="out"), E4M3, device="cpu")


def test_two_outputs_of_their_own_shapes() -> None:
    def into(x: torch.Tensor, codes: torch.Tensor, inverse: torch.Tensor) -> None:
        found = [to_torch(array) for array in quantize_blocks(to_numpy(x), E5M2, block=(1, 32))]
        codes.view(torch.uint8).copy_(found[0].view(torch.uint8))
        inverse.copy_(found[1])

    def shapes(x: torch.Tensor) -> Any:
        return [tuple(x.shape), (x.shape[0], -(-x.shape[1] // 32))]

    kernel = writes_output(into, (torch.uint8, torch.float32), shape=shapes)
    check_block_quantize(kernel, E5M2, block=(1, 32), device="cpu")


def test_what_is_not_written_is_reported() -> None:
    def forgets_the_last(x: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        whole = x.numel() // 64 * 64
        flat = cast(x, scale).reshape(-1)[:whole].view(torch.uint8)
        out.view(torch.uint8).reshape(-1)[:whole] = flat

    with pytest.raises(KernelFault, match="did not write 1 of 1 elements of its output"):
        check_cast(writes_output(forgets_the_last, torch.float8_e4m3fn), E4M3, device="cpu")

    # Even where the poison is the right code by chance: two poisons cannot both be.
    poison = np.array([0xA5], np.uint8).view(E4M3.dtype).astype(np.float32)

    def writes_nothing(x: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        pass

    kernel = writes_output(writes_nothing, torch.uint8)
    with pytest.raises(AssertionError, match="did not write 1 of 1 elements"):
        kernel(to_torch(poison), 1.0)


@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        (0, 1, "wrote outside of its output, past its end, the first 0 bytes after it .1 bytes"),
        (-1, 0, "wrote outside of its output, before its start, the nearest 1 bytes ahead"),
    ],
)
def test_writes_past_an_end_are_reported(first: int, last: int, text: str) -> None:
    def kernel(x: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        cast_into(x, scale, out)
        size, start = out.numel() + last - first, out.storage_offset() + first
        around = torch.as_strided(out, (size,), (1,), start)
        around[0 if first else -1] = 0

    with pytest.raises(KernelFault, match=text):
        check_cast(writes_output(kernel, torch.uint8), E4M3, device="cpu")


def test_a_kernel_that_takes_the_inverse_scale() -> None:
    def divides(x: torch.Tensor, inverse_scale: float) -> torch.Tensor:
        return cast(x / inverse_scale, 1.0)

    def multiplies(x: torch.Tensor, inverse_scale: float) -> torch.Tensor:
        return cast(x * (1 / inverse_scale), 1.0)

    for kernel in (divides, multiplies):
        check_cast(takes_inverse_scale(kernel), E4M3, device="cpu")
    with pytest.raises(KernelFault):
        check_cast(takes_inverse_scale(cast), E4M3, device="cpu")
    # What an inner adapter says is said by the outer one, too.
    nested = writes_output(takes_inverse_scale(cast_into), torch.uint8)
    assert "power_of_two_scales" in nested.fp8lab_traits  # type: ignore[attr-defined]


def test_a_kernel_that_takes_the_scale_as_a_tensor() -> None:
    for shape in ((), (1,)):
        seen: list[Any] = []

        def kernel(x: torch.Tensor, scale: torch.Tensor, seen: Any = seen) -> torch.Tensor:
            seen.append((scale.dtype, tuple(scale.shape)))
            return cast(x, float(scale))

        check_cast(takes_tensor_scale(kernel, shape=shape), E4M3, device="cpu")
        assert set(seen) == {(torch.float32, shape)}


def test_a_transposed_output() -> None:
    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        codes = cast(x, scale)
        return codes.transpose(-2, -1).contiguous() if x.ndim >= 2 else codes

    check_cast(transposed_output(kernel), E4M3, device="cpu")
    with pytest.raises(KernelFault, match="gave codes of shape"):
        check_cast(kernel, E4M3, device="cpu")


def test_a_kernel_on_flat_tensors() -> None:
    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        if x.ndim != 1:
            raise ValueError(f"x has {x.ndim} dimensions")
        return cast(x, scale)

    check_cast(flat_input(kernel), E4M3, device="cpu")
    with pytest.raises(KernelFault, match="raised ValueError: x has 0 dimensions"):
        check_cast(kernel, E4M3, device="cpu")


def test_decoding_into_an_output() -> None:
    def kernel(codes: torch.Tensor, inverse_scale: float, out: torch.Tensor) -> None:
        out.copy_(codes.float() * inverse_scale)

    check_dequantize(writes_output(kernel, torch.float32), E4M3, device="cpu")


def test_adamw_as_torch_functions_in_place() -> None:
    """A plain torch function, with no adapter: what returns None works in place."""

    def adamw(param: Any, grad: Any, m: Any, v: Any, **k: Any) -> None:
        one = torch.tensor  # float32 constants, each rounded once from float64
        (beta1, beta2), step = k["betas"], k["step"]
        lr, decay = one(k["lr"]), one(k["lr"] * k["weight_decay"])
        weight1, weight2 = one(1 - beta1), one(1 - beta2)
        c1, c2 = one(1 - power(beta1, step)), one(1 - power(beta2, step))
        param.sub_(decay * param)
        m.copy_(one(beta1) * m + weight1 * grad)
        v.copy_(one(beta2) * v + weight2 * (grad * grad))
        # torch's root of float32 on a CPU is MKL's, which is not always the nearest.
        root = torch.sqrt((v / c2).double()).float()
        param.sub_(lr * ((m / c1) / (root + one(k["eps"]))))

    def power(base: float, exponent: int) -> float:
        result = 1.0
        for bit in bin(exponent)[:1:-1]:
            result *= base if bit == "1" else 1.0
            base *= base
        return result

    check_adamw(adamw, device="cpu")


def test_cupy_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ModuleNotFoundError, match="cupy"):
        on_cupy(cast)


@pytest.mark.parametrize("older", [False, True], ids=["from_external", "ExternalStream"])
def test_arrays_cross_to_cupy_and_back_without_a_copy(
    monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    """With a stand-in that has CuPy's names, since CuPy wants a GPU."""
    entered = []

    def entering(stream: Any) -> Any:
        entered.append(stream if older else stream.__cuda_stream__())
        return contextlib.nullcontext()

    streams = {} if older else {"from_external": entering}
    cuda = SimpleNamespace(ExternalStream=entering, Stream=SimpleNamespace(**streams))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(from_dlpack=np.from_dlpack, cuda=cuda))
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    def kernel(x: Any, scale: float) -> Any:
        assert isinstance(x, np.ndarray)
        return quantize(x, E4M3, scale=scale).view(np.uint8)

    check_cast(on_cupy(kernel), E4M3, device="cpu")
    assert set(entered) == {77 if older else (0, 77)}  # torch's stream, each time
