"""SwiGLU and its gradients with the cast of what they give, for bfloat16 by pairs, in Gluon.

The arithmetic is `swiglu_device`'s, the cast `casting_pairs_device`'s: between them two results
make a word, as if they had been read. Nothing here runs in the interpreter.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fp8lab.kernels.casting_pairs_device import (
    cast_pairs,
    layout_of_pairs,
    places_of_pairs,
    raise_amax,
)
from fp8lab.kernels.scaling_pairs_device import larger
from fp8lab.kernels.swiglu_device import swiglu_gradients, swiglu_value

_NARROW = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@gluon.jit(do_not_specialize=["height"])
def swiglu_pairs_kernel(
    gate_up,  # (height, 2 * width) bfloat16, height and width multiples of the tile's
    dh,  # (height, width); None for the result, otherwise both gradients are made, side by side
    values,  # bfloat16, where results go, contiguous; or None
    codes,  # this and what follows: as for `quantize_pairs_kernel`
    codes_t,
    kept,
    kept_t,
    height,
    width,
    stride,  # elements from a row to the next
    stride_dh,
    stride_t,
    across,
    down_t,
    scale,
    amax_out,
    SCALING: gl.constexpr,
    BLOCK: gl.constexpr,
    FLOAT8: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """A tile of gate and the same tile of up a program."""
    QUARTER: gl.constexpr = ROWS // 4
    HALF: gl.constexpr = COLUMNS // 2
    TILE: gl.constexpr = layout_of_pairs(HALF, gl.num_warps())
    SIDES: gl.constexpr = 1 if dh is None else 2
    tiles_across = width // COLUMNS
    top = (gl.program_id(0) // tiles_across).to(gl.int64) * ROWS
    left = (gl.program_id(0) % tiles_across).to(gl.int64) * COLUMNS
    gates = gate_up.to(gl.pointer_type(gl.int32), bitcast=True) + (top * stride + left) // 2
    half = width // 2
    pitch = stride // 2
    if dh is None:
        a0 = _result(gates, half, 0, pitch, QUARTER, HALF, TILE)
        a1 = _result(gates, half, 1, pitch, QUARTER, HALF, TILE)
        a2 = _result(gates, half, 2, pitch, QUARTER, HALF, TILE)
        a3 = _result(gates, half, 3, pitch, QUARTER, HALF, TILE)
    else:
        grads = dh.to(gl.pointer_type(gl.int32), bitcast=True) + (top * stride_dh + left) // 2
        pitch_dh = stride_dh // 2
        a0, b0 = _gradients(gates, half, grads, 0, pitch, pitch_dh, QUARTER, HALF, TILE)
        a1, b1 = _gradients(gates, half, grads, 1, pitch, pitch_dh, QUARTER, HALF, TILE)
        a2, b2 = _gradients(gates, half, grads, 2, pitch, pitch_dh, QUARTER, HALF, TILE)
        a3, b3 = _gradients(gates, half, grads, 3, pitch, pitch_dh, QUARTER, HALF, TILE)
    seen = _finish(
        a0, a1, a2, a3, values, codes, codes_t, kept, kept_t, top, left, SIDES * width,
        stride_t, across, down_t, scale, SCALING, BLOCK, FLOAT8, ROWS, COLUMNS,
    )  # fmt: skip
    if dh is not None:
        other = _finish(
            b0, b1, b2, b3, values, codes, codes_t, kept, kept_t, top, left + width, SIDES * width,
            stride_t, across, down_t, scale, SCALING, BLOCK, FLOAT8, ROWS, COLUMNS,
        )  # fmt: skip
        seen = larger(seen, other)
    if amax_out is not None:
        raise_amax(amax_out, seen)


@gluon.jit
def _result(
    gates,
    half,
    FIRST: gl.constexpr,
    pitch,
    QUARTER: gl.constexpr,
    HALF: gl.constexpr,
    TILE: gl.constexpr,
):
    """Pairs of silu(gate) * up, of rows FIRST, FIRST + 4, ..."""
    places = places_of_pairs(gates, FIRST, pitch, QUARTER, HALF, TILE)
    gate = gl.load(places)
    up = gl.load(places + half)
    low = swiglu_value(_low(gate), _low(up), True)
    high = swiglu_value(_high(gate), _high(up), True)
    return _pair(low, high)


@gluon.jit
def _gradients(
    gates,
    half,
    grads,
    FIRST: gl.constexpr,
    pitch,
    pitch_dh,
    QUARTER: gl.constexpr,
    HALF: gl.constexpr,
    TILE: gl.constexpr,
):
    """Pairs of the gradients of gate and of up."""
    places = places_of_pairs(gates, FIRST, pitch, QUARTER, HALF, TILE)
    gate = gl.load(places)
    up = gl.load(places + half)
    dh = gl.load(places_of_pairs(grads, FIRST, pitch_dh, QUARTER, HALF, TILE))
    gate_low, up_low = swiglu_gradients(_low(dh), _low(gate), _low(up), True)
    gate_high, up_high = swiglu_gradients(_high(dh), _high(gate), _high(up), True)
    return _pair(gate_low, gate_high), _pair(up_low, up_high)


@gluon.jit
def _finish(
    p0,
    p1,
    p2,
    p3,
    values,
    codes,
    codes_t,
    kept,
    kept_t,
    top,
    left,
    width,
    stride_t,
    across,
    down_t,
    scale,
    SCALING: gl.constexpr,
    BLOCK: gl.constexpr,
    FLOAT8: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Store pairs as they are where that is asked for, and their codes."""
    if values is not None:
        QUARTER: gl.constexpr = ROWS // 4
        HALF: gl.constexpr = COLUMNS // 2
        TILE: gl.constexpr = p0.type.layout
        out = values.to(gl.pointer_type(gl.int32), bitcast=True) + (top * width + left) // 2
        gl.store(places_of_pairs(out, 0, width // 2, QUARTER, HALF, TILE), p0)
        gl.store(places_of_pairs(out, 1, width // 2, QUARTER, HALF, TILE), p1)
        gl.store(places_of_pairs(out, 2, width // 2, QUARTER, HALF, TILE), p2)
        gl.store(places_of_pairs(out, 3, width // 2, QUARTER, HALF, TILE), p3)
    return cast_pairs(
        p0, p1, p2, p3, codes, codes_t, kept, kept_t, top, left, width, stride_t, across, down_t,
        scale, SCALING, BLOCK, FLOAT8, ROWS, COLUMNS,
    )  # fmt: skip


@gluon.jit
def _low(words):
    return (words << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _high(words):
    return (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _pair(low, high):
    """Two float32, each rounded to bfloat16, as a word."""
    return gl.inline_asm_elementwise(
        _NARROW, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )
