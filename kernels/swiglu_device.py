"""SwiGLU and its gradients with the cast of what they give: a tile of a matrix a program.

The arithmetic is `fp8lab.emulation.swiglu`'s, operation by operation. It also serves the kernel
that takes bfloat16 by pairs: Gluon calls functions of Triton that keep an element in its place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels import quotients_device
from fp8lab.kernels.casting_arithmetic import MAGNITUDE, as_words
from fp8lab.kernels.casting_tiles import (
    cast_tile,
    corner_of_tile,
    load_block,
    raise_amax,
    store_block,
)
from fp8lab.kernels.float_device import bits_of, float_of, fma, narrowed, negated, widened
from fp8lab.kernels.scaling_tiles_device import largest_of_four
from fp8lab.swiglu_constants import EXP, HIGHEST, LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, SHIFTER

_LOWEST = tl.constexpr(LOWEST)
_HIGHEST = tl.constexpr(HIGHEST)
_SHIFTER = tl.constexpr(SHIFTER)
_MINUS_LOG2_E = tl.constexpr(-LOG2_E)
_MINUS_LN2_HIGH = tl.constexpr(-LN2_HIGH)
_MINUS_LN2_LOW = tl.constexpr(-LN2_LOW)
_EXP6, _EXP5, _EXP4, _EXP3, _EXP2 = (tl.constexpr(number) for number in EXP)
_ANY_VALUE = ["height", "down", "across", "down_t", "across_t"]


@triton.jit
def swiglu_value(gate, up, HARDWARE: tl.constexpr):
    """silu(gate) * up, float32, not yet rounded to the result's type."""
    raised, _, _, sigmoid = _sigmoid(gate, HARDWARE)
    return raised * sigmoid * up


@triton.jit
def swiglu_gradients(dh, gate, up, HARDWARE: tl.constexpr):
    """The gradients of gate and up, likewise."""
    raised, x, exp, sigmoid = _sigmoid(gate, HARDWARE)
    slope = _fma(x * sigmoid, exp * sigmoid, sigmoid, HARDWARE)
    return dh * up * slope, dh * (raised * sigmoid)


@triton.jit
def _sigmoid(gate, HARDWARE: tl.constexpr):
    """The gate, clamped from below and on both sides; exp(-x); the sigmoid of x."""
    raised = tl.maximum(gate, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(raised, _HIGHEST, propagate_nan=tl.PropagateNan.ALL)
    z = _fma(x, _MINUS_LOG2_E, _SHIFTER, HARDWARE)
    n = z - _SHIFTER
    y = _fma(n, _MINUS_LN2_HIGH, negated(x), HARDWARE)
    y = _fma(n, _MINUS_LN2_LOW, y, HARDWARE)
    p = _fma(y, _EXP6, _EXP5, HARDWARE)
    p = _fma(p, y, _EXP4, HARDWARE)
    p = _fma(p, y, _EXP3, HARDWARE)
    p = _fma(p, y, _EXP2, HARDWARE)
    p = _fma(p, y, 1.0, HARDWARE)
    p = _fma(p, y, 1.0, HARDWARE)
    # Times 2**n: z ends in n. Where x is NaN, p may be any number, and what it is used with is NaN.
    exp = float_of(bits_of(p) + (bits_of(z) << 23))
    if HARDWARE:
        sigmoid = quotients_device.reciprocal(1.0 + exp)
    else:
        sigmoid = 1.0 / (1.0 + exp)
    return raised, x, exp, sigmoid


@triton.jit
def _fma(a, b, c, HARDWARE: tl.constexpr):
    """a*b + c, rounded once; b and c may be numbers."""
    if HARDWARE:
        result = tl.fma(a, b, c)
    else:
        result = fma(a, tl.cast(b, tl.float32), tl.cast(c, tl.float32), False)
    return result


@triton.jit(do_not_specialize=_ANY_VALUE)
def swiglu_tiles_kernel(
    gate_up,  # (height, 2 * width): gate on the left, up on the right
    dh,  # (height, width); None for the result, otherwise both gradients are made, side by side
    values,  # where results go in the type of gate_up, contiguous; or None
    codes,  # this and what follows: as for `casting_tiles.quantize_tiles_kernel`
    codes_t,
    kept,
    kept_t,
    height,
    width,
    stride,  # elements from a row to the next
    stride_dh,
    stride_t,
    down,
    across,
    down_t,
    across_t,
    scale,
    amax_out,
    SCALES: tl.constexpr,  # "one" or "blocks"
    SCALING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    RULE: tl.constexpr,  # a CastRule; None where there are no codes
    NARROW: tl.constexpr,  # the ElementCode of a type of 16 bits; None for float32
    HARDWARE: tl.constexpr,  # on a card
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A tile of gate and the same tile of up a program."""
    QUARTER: tl.constexpr = ROWS // 4
    top, left = corner_of_tile(height, width, ROWS, COLUMNS, BAND)
    rows_left = tl.minimum(height - top, ROWS).to(tl.int32)
    columns_left = tl.minimum(width - left, COLUMNS).to(tl.int32)
    gates = as_words(gate_up) + top * stride + left
    SIDES: tl.constexpr = 1 if dh is None else 2
    grads = None
    if dh is not None:
        grads = as_words(dh) + top * stride_dh + left
    element: tl.constexpr = gate_up.dtype.element_ty
    a0, b0 = _block(
        gates, width, grads, 0, stride, stride_dh, rows_left, columns_left,
        element, NARROW, HARDWARE, QUARTER, COLUMNS, EVEN,
    )  # fmt: skip
    a1, b1 = _block(
        gates, width, grads, 1, stride, stride_dh, rows_left, columns_left,
        element, NARROW, HARDWARE, QUARTER, COLUMNS, EVEN,
    )  # fmt: skip
    a2, b2 = _block(
        gates, width, grads, 2, stride, stride_dh, rows_left, columns_left,
        element, NARROW, HARDWARE, QUARTER, COLUMNS, EVEN,
    )  # fmt: skip
    a3, b3 = _block(
        gates, width, grads, 3, stride, stride_dh, rows_left, columns_left,
        element, NARROW, HARDWARE, QUARTER, COLUMNS, EVEN,
    )  # fmt: skip
    if amax_out is not None:
        largest = largest_of_four(a0, a1, a2, a3)
        if SIDES == 2:
            largest = tl.maximum(largest, largest_of_four(b0, b1, b2, b3))
        raise_amax(amax_out, largest)
    pitch = SIDES * width
    for side in tl.static_range(SIDES):
        if side == 1:
            a0, a1, a2, a3 = b0, b1, b2, b3
        if values is not None:
            out = as_words(values) + top * pitch + left + side * width
            _keep(
                out, a0, 0, pitch, rows_left, columns_left,
                NARROW, HARDWARE, QUARTER, COLUMNS, EVEN,
            )  # fmt: skip
            _keep(
                out, a1, 1, pitch, rows_left, columns_left,
                NARROW, HARDWARE, QUARTER, COLUMNS, EVEN,
            )  # fmt: skip
            _keep(
                out, a2, 2, pitch, rows_left, columns_left,
                NARROW, HARDWARE, QUARTER, COLUMNS, EVEN,
            )  # fmt: skip
            _keep(
                out, a3, 3, pitch, rows_left, columns_left,
                NARROW, HARDWARE, QUARTER, COLUMNS, EVEN,
            )  # fmt: skip
        if RULE is not None:
            cast_tile(
                a0, a1, a2, a3, codes, codes_t, kept, kept_t, top, left + side * width,
                height, pitch, rows_left, columns_left,
                stride_t, down, across, down_t, across_t, scale, None, None, 0,
                SCALES, SCALING, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_COLUMNS, BLOCK_ROWS,
                RULE, QUARTER, COLUMNS, EVEN,
            )  # fmt: skip


@triton.jit
def _block(
    gates,
    width,
    grads,
    FIRST: tl.constexpr,
    stride,
    stride_dh,
    rows_left,
    columns_left,
    element: tl.constexpr,
    NARROW: tl.constexpr,
    HARDWARE: tl.constexpr,
    QUARTER: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The float32 bits of what rows FIRST, FIRST + 4, ... give, rounded; twice, or both gradients.

    Beyond the matrix gate, up and dh are 0, and so is what they give.
    """
    gate = float_of(
        load_block(
            gates, FIRST, stride, rows_left, columns_left,
            element, HARDWARE, QUARTER, COLUMNS, EVEN,
        )
    )  # fmt: skip
    up = float_of(
        load_block(
            gates + width, FIRST, stride, rows_left, columns_left,
            element, HARDWARE, QUARTER, COLUMNS, EVEN,
        )
    )  # fmt: skip
    if grads is None:
        a = _rounded(swiglu_value(gate, up, HARDWARE), NARROW, HARDWARE)
        b = a
    else:
        dh = float_of(
            load_block(
                grads, FIRST, stride_dh, rows_left, columns_left,
                element, HARDWARE, QUARTER, COLUMNS, EVEN,
            )
        )  # fmt: skip
        dgate, dup = swiglu_gradients(dh, gate, up, HARDWARE)
        a = _rounded(dgate, NARROW, HARDWARE)
        b = _rounded(dup, NARROW, HARDWARE)
    return a, b


@triton.jit
def _rounded(value, NARROW: tl.constexpr, HARDWARE: tl.constexpr):
    """The float32 bits of a value rounded to a type of 16 bits, or as it is; NaN is positive."""
    if NARROW is None:
        bits = bits_of(value)
        bits = tl.where(value == value, bits, MAGNITUDE)
    else:
        KIND: tl.constexpr = NARROW.name
        bits = bits_of(widened(narrowed(value, NARROW, HARDWARE), KIND, HARDWARE))
    return bits


@triton.jit
def _keep(
    out,
    bits,
    FIRST: tl.constexpr,
    pitch,
    rows_left,
    columns_left,
    NARROW: tl.constexpr,
    HARDWARE: tl.constexpr,
    QUARTER: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Store rounded values in their own type: nothing is rounded again."""
    words = bits
    if NARROW is not None:
        words = narrowed(float_of(bits), NARROW, HARDWARE)
    store_block(out, words, FIRST, pitch, rows_left, columns_left, QUARTER, COLUMNS, EVEN)
