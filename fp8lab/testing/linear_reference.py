"""The three products of a linear layer for each preset, written out once more in NumPy.

It takes casts, scales and products from the oracle and nothing from recipes, layers or ops, so that
a layer that wires them wrongly differs from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp8lab.emulation import casting, scaling
from fp8lab.emulation.matmul import matmul
from fp8lab.formats import E4M3, E5M2, Float8Format

Array = npt.NDArray[Any]
Cast = Callable[[Array, Float8Format], tuple[Array, Array]]  # of rows: codes, inverse scales


class Gradients(NamedTuple):
    """y, dx and dw; dw is None where it is a product in BF16, whose bits are torch's."""

    y: Array
    dx: Array
    dw: Array | None


def whole(x: Array, fmt: Float8Format) -> tuple[Array, Array]:
    """One scale from the tensor itself."""
    return scaled(x, fmt, scaling.scale_from_amax(scaling.amax(x), fmt))


def scaled(x: Array, fmt: Float8Format, scale: Any) -> tuple[Array, Array]:
    """A scale that is given."""
    return casting.quantize(x, fmt, scale=scale), np.float32(1) / np.asarray(scale, np.float32)


def unit(x: Array, fmt: Float8Format) -> tuple[Array, Array]:
    """Scale 1: static, and delayed scaling's first step."""
    return scaled(x, fmt, np.float32(1))


def rows(x: Array, fmt: Float8Format) -> tuple[Array, Array]:
    """One scale a row."""
    return scaling.quantize_blocks(x, fmt, block=(1, None), power_of_two=False)


def runs(x: Array, fmt: Float8Format) -> tuple[Array, Array]:
    """1 x 128."""
    return scaling.quantize_blocks(x, fmt, block=(1, 128))


def squares(x: Array, fmt: Float8Format) -> tuple[Array, Array]:
    """128 x 128."""
    return scaling.quantize_blocks(x, fmt, block=(128, 128))


def mx(x: Array, fmt: Float8Format) -> tuple[Array, Array]:
    """32 elements to an E8M0 scale, rounded up."""
    return scaling.quantize_mx(x, fmt, scale_rounding="up")


def torchao_rows(x: Array, fmt: Float8Format) -> tuple[Array, Array]:
    """One scale a row, a power of two."""
    return scaling.quantize_blocks(x, fmt, block=(1, None), power_of_two=True)


def torchao_whole(x: Array, fmt: Float8Format) -> tuple[Array, Array]:
    """One scale, divided in float64, a power of two."""
    scale = scaling.current_scale(scaling.amax(x), fmt, preset="torchao", power_of_two=True)
    return scaled(x, fmt, scale)


class Preset(NamedTuple):
    """Casts of input, weight and output gradient; the gradient's format; who is promoted."""

    x: Cast
    w: Cast
    dy: Cast
    gradient: Float8Format = E5M2
    forward: int | None = None
    backward: int | None = 128
    w_transposed: Cast | None = None
    weight_grad_fp8: bool = True


PRESETS = {
    "tensorwise": Preset(whole, whole, whole),
    "current": Preset(whole, whole, whole),
    "static": Preset(unit, unit, unit),
    "delayed": Preset(unit, unit, unit),
    "rowwise": Preset(rows, rows, rows, E4M3),
    "blockwise": Preset(runs, squares, runs, E4M3, None, None),
    "mx": Preset(mx, mx, mx, E4M3, None, None),
    "hybrid": Preset(unit, whole, whole),
    "torchao_rowwise": Preset(torchao_rows, torchao_rows, torchao_rows, E4M3),
    "torchao_rowwise_with_gw_hp": Preset(
        torchao_rows,
        torchao_rows,
        torchao_rows,
        E4M3,
        w_transposed=torchao_whole,
        weight_grad_fp8=False,
    ),
}


def reference(
    name: str, x: Array, w: Array, dy: Array, *, bias: Array | None = None, out: Any = np.float32
) -> Gradients:
    """The three products of a preset's first step.

    Args:
        name: Of `PRESETS`.
        x: (rows, K). w: (N, K). dy: (rows, N). All of one dtype.
        bias: (N,).
        out: The dtype of the results.
    """
    preset = PRESETS[name]

    def product(a: tuple[Array, Array], b: tuple[Array, Array], promote: int | None) -> Array:
        inverse_b = b[1].T if np.ndim(b[1]) == 2 else b[1]
        return matmul(
            a[0],
            b[0].T,
            promote_every=promote,
            inverse_scale_a=a[1],
            inverse_scale_b=inverse_b,
            bias=added,
            out_dtype=out,
        )

    added = bias
    y = product(preset.x(x, E4M3), preset.w(w, E4M3), preset.forward)
    added = None
    w_cast = preset.w_transposed or preset.w
    w_t = np.ascontiguousarray(w.T)
    dx = product(preset.dy(dy, preset.gradient), w_cast(w_t, E4M3), preset.backward)
    if not preset.weight_grad_fp8:
        return Gradients(y, dx, None)
    dy_t, x_t = np.ascontiguousarray(dy.T), np.ascontiguousarray(x.T)
    dw = product(preset.dy(dy_t, preset.gradient), preset.x(x_t, E4M3), preset.backward)
    return Gradients(y, dx, dw)
