"""fp8lab's own kernels, held to every contract of the kit: its first users.

Under the interpreter with few drawn cases; on a GPU in the profile "thorough".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fp8lab.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8lab.kernels import adamw as adamw_kernels
from fp8lab.kernels import casting, gradients, scaling
from fp8lab.kernels.matmul import matmul
from fp8lab.testing import (
    PROFILES,
    check_adamw,
    check_amax,
    check_block_quantize,
    check_cast,
    check_clip,
    check_dequantize,
    check_matmul,
    check_mx_quantize,
    check_norm,
    check_requantize,
    check_scale_from_amax,
    check_scale_update,
    check_unscale,
    takes_tensor_scale,
)
from fp8lab.testing.contracts.inputs import dtype_named

Check = Callable[..., None]
HALVES = ("float32", "bfloat16", "float16")
BOTH = (E4M3, E5M2)


def cast(fmt: Any, **options: Any) -> Check:
    overflow = options.get("overflow", "saturate")
    rounding = options.get("rounding", "nearest_even")

    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        return casting.quantize(x, fmt, scale=scale, overflow=overflow, rounding=rounding)

    return partial(check_cast, kernel, fmt, **options)


def dequantize(fmt: Any) -> Check:
    def kernel(codes: torch.Tensor, inverse_scale: float) -> torch.Tensor:
        return casting.dequantize(codes, inverse_scale=inverse_scale)

    return partial(check_dequantize, kernel, fmt)


def requantize(source: Any, target: Any) -> Check:
    def kernel(codes: torch.Tensor, inverse: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return casting.requantize(codes, target, inverse_scale=inverse, scale=scale)

    return partial(check_requantize, takes_tensor_scale(kernel), source, target)


def blocks(fmt: Any, block: Any, power_of_two: bool, dtypes: tuple[str, ...] = HALVES) -> Check:
    def kernel(x: torch.Tensor) -> Any:
        return scaling.quantize_blocks(x, fmt, block=block, power_of_two=power_of_two)

    return partial(
        check_block_quantize, kernel, fmt, block=block, power_of_two=power_of_two, dtypes=dtypes
    )


def mx(fmt: Any, scale_rounding: str) -> Check:
    def kernel(x: torch.Tensor) -> Any:
        return scaling.quantize_mx(x, fmt, scale_rounding=scale_rounding)

    return partial(check_mx_quantize, kernel, fmt, scale_rounding=scale_rounding, dtypes=HALVES)


def scale_of(fmt: Any, **options: Any) -> Check:
    def kernel(amax: torch.Tensor) -> torch.Tensor:
        return scaling.scale_from_amax(amax, fmt, **options)

    return partial(check_scale_from_amax, kernel, fmt, **options)


def update(fmt: Any, **options: Any) -> Check:
    def kernel(scale: torch.Tensor, history: torch.Tensor) -> None:
        scaling.update_delayed_(scaling.DelayedScalingState(scale, history), fmt, **options)

    return partial(check_scale_update, kernel, fmt, **options)


def adamw(order: str) -> Check:
    def kernel(*tensors: torch.Tensor, **numbers: Any) -> Any:
        return adamw_kernels.adamw(*tensors, order=order, **numbers)

    return partial(check_adamw, kernel, order=order)


def norm(grads: list[torch.Tensor]) -> torch.Tensor:
    if not grads:  # the kernel asks for at least one
        return torch.zeros(())
    return gradients.gradient_norm(grads).norm.reshape(())


def clip(grads: list[torch.Tensor], max_norm: float) -> list[torch.Tensor]:
    if not grads:
        return []
    factor = gradients.gradient_norm(grads, max_norm=max_norm).factor.reshape(())
    return [grad * factor for grad in grads]


def unscale(grads: list[torch.Tensor], inverse_loss_scale: float) -> Any:
    if not grads:
        return [], False
    summary = gradients.gradient_norm(grads, inverse_scale=inverse_loss_scale)
    return [grad * summary.factor.reshape(()) for grad in grads], summary.skip.reshape(())


def product(**options: Any) -> Check:
    def kernel(a: Any, b: Any, scale_a: Any, scale_b: Any) -> torch.Tensor:
        return matmul(
            a,
            b,
            promote_every=options.get("promote_every"),
            inverse_scale_a=scale_a,
            inverse_scale_b=scale_b,
        )

    return partial(check_matmul, kernel, **options)


CHECKS: dict[str, Check] = {
    **{f"cast {fmt.name}": cast(fmt, dtypes=HALVES) for fmt in BOTH},
    **{f"cast {fmt.name}": cast(fmt) for fmt in (E4M3FNUZ, E5M2FNUZ)},
    "cast E4M3 ieee": cast(E4M3, overflow="ieee"),
    "cast E5M2 ieee": cast(E5M2, overflow="ieee"),
    "cast E5M2 toward zero": cast(E5M2, rounding="toward_zero"),
    **{f"dequantize {fmt.name}": dequantize(fmt) for fmt in BOTH},
    "requantize": requantize(E5M2, E4M3),
    "amax": partial(check_amax, scaling.amax, dtypes=HALVES),
    "blocks 1x128": blocks(E4M3, (1, 128), True),
    "blocks 1x128, any scale": blocks(E5M2, (1, 128), False),
    "blocks 128x128": blocks(E4M3, (128, 128), True, ("float32",)),
    "blocks 1x32": blocks(E4M3, (1, 32), False),
    "rows": blocks(E4M3, (1, None), False, ("bfloat16",)),
    **{f"mx {rounding}": mx(E4M3, rounding) for rounding in ("floor", "up", "nearest")},
    "mx E5M2": mx(E5M2, "floor"),
    "scale": scale_of(E4M3),
    "scale, margin": scale_of(E5M2, margin=2, power_of_two=True),
    "scale update": update(E4M3),
    "scale update, most recent": update(E5M2, algorithm="most_recent", margin=1, power_of_two=True),
    "norm": partial(check_norm, norm),
    "clip": partial(check_clip, clip),
    "unscale": partial(check_unscale, unscale),
    **{f"adamw {order}": adamw(order) for order in ("plain", "torch", "torch_foreach", "apex")},
}
ON_CPU = {
    **CHECKS,
    "product, exact sums": product(exact_sums=True),
    "product, exact sums, promoted": product(exact_sums=True, promote_every=128),
}
PRODUCTS = {
    **{
        f"product {a.name} {b.name} {promote}": product(formats=(a, b), promote_every=promote)
        for a in BOTH
        for b in BOTH
        for promote in (None, 128)
    },
    "product 32": product(promote_every=32),
}
FEW = replace(PROFILES["quick"], name="few", examples=2, fixed=7)


@pytest.mark.parametrize("name", ON_CPU)
def test_kernels_hold_under_the_interpreter(name: str, device: str) -> None:
    if device != "cpu":
        pytest.skip("on a GPU the thorough profile runs")
    ON_CPU[name](device="cpu", profile=FEW)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CHECKS, *PRODUCTS])
def test_kernels_hold_on_the_gpu(name: str) -> None:
    {**CHECKS, **PRODUCTS}[name](device="cuda", profile="thorough")


def test_every_input_type_is_known() -> None:
    assert [dtype_named(name).name for name in HALVES] == list(HALVES)
