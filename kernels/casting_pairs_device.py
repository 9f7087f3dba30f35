"""The fast cast of bfloat16 tiles to both layouts, in Gluon: what runs on the device.

Elements stay in pairs, two to a 32-bit register, wherever that gives the same bits as one by one:

- bfloat16 magnitudes are in the order of their patterns, so the amax of pairs is the maximum of
  16-bit integers, two at a time.
- A factor that is a power of two (an MX scale, or one of `power_of_two`) is a bfloat16, and so is
  its product with one: exact, infinite where float32's is, and inexact only below 2**-126, where
  every FP8 code is a zero whatever the last bits are.
- The factor's own bits follow from those of the amax by a few operations on both halves at once.

As in `fp8lab.kernels.casting_tiles`, block j of four holds rows j, j + 4, j + 8, ..., so that codes
of four neighbours of a column make one word of the transposed codes. Nothing here runs in the
interpreter; the bits are those of the tile kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fp8lab.kernels.scaling_pairs_device import (
    MAGNITUDES,
    WORDS,
    factors_of,
    keep_columns,
    keep_rows,
    larger,
    largest_of_columns,
    largest_of_rows,
    over_columns,
    over_row,
)

# Codes of two words by two words of factors, which are bfloat16.
_CAST_BY_PAIRS = """
    {
        .reg .b32 first, second, low0, high0, low1, high1;
        .reg .b16 front, back;
        mul.rn.bf16x2 first, $1, $3;
        mul.rn.bf16x2 second, $2, $4;
        shl.b32 low0, first, 16;
        and.b32 high0, first, 0xFFFF0000;
        shl.b32 low1, second, 16;
        and.b32 high1, second, 0xFFFF0000;
        cvt.rn.satfinite.FORMATx2.f32 front, high0, low0;
        cvt.rn.satfinite.FORMATx2.f32 back, high1, low1;
        mov.b32 $0, {front, back};
    }
"""
# Codes of two words by one float32.
_CAST_BY_FLOAT = """
    {
        .reg .b32 low0, high0, low1, high1;
        .reg .f32 y0, y1, y2, y3;
        .reg .b16 front, back;
        shl.b32 low0, $1, 16;
        and.b32 high0, $1, 0xFFFF0000;
        shl.b32 low1, $2, 16;
        and.b32 high1, $2, 0xFFFF0000;
        mul.rn.f32 y0, low0, $3;
        mul.rn.f32 y1, high0, $3;
        mul.rn.f32 y2, low1, $4;
        mul.rn.f32 y3, high1, $4;
        cvt.rn.satfinite.FORMATx2.f32 front, y1, y0;
        cvt.rn.satfinite.FORMATx2.f32 back, y3, y2;
        mov.b32 $0, {front, back};
    }
"""
_PAIRS_E4M3 = gl.constexpr(_CAST_BY_PAIRS.replace("FORMAT", "e4m3"))
_PAIRS_E5M2 = gl.constexpr(_CAST_BY_PAIRS.replace("FORMAT", "e5m2"))
_FLOAT_E4M3 = gl.constexpr(_CAST_BY_FLOAT.replace("FORMAT", "e4m3"))
_FLOAT_E5M2 = gl.constexpr(_CAST_BY_FLOAT.replace("FORMAT", "e5m2"))
# Four codes of a row in each of four words, to four codes of a column: even columns, then odd ones.
_TRANSPOSE_BYTES = gl.constexpr(
    """
    {
        .reg .b32 low01, low23, high01, high23;
        prmt.b32 low01, $4, $5, 0x5140;
        prmt.b32 low23, $6, $7, 0x5140;
        prmt.b32 high01, $4, $5, 0x7362;
        prmt.b32 high23, $6, $7, 0x7362;
        prmt.b32 $0, low01, low23, 0x5410;
        prmt.b32 $2, low01, low23, 0x7632;
        prmt.b32 $1, high01, high23, 0x5410;
        prmt.b32 $3, high01, high23, 0x7632;
    }
    """
)


@gluon.jit(do_not_specialize=["height"])
def quantize_pairs_kernel(
    x,  # (height, width) bfloat16, rows and columns multiples of the tile's
    codes,  # (height, width) contiguous
    codes_t,  # (width, stride_t)
    kept,  # what is kept of blocks of codes: (blocks across, height); None for one scale
    kept_t,  # the same of codes_t: (blocks down, width)
    height,
    width,
    stride,  # elements from a row of x to the next
    stride_t,  # bytes from a row of codes_t to the next
    across,  # elements of kept, and of kept_t, from a block of all rows to the next
    down_t,
    scale,  # for one scale: a float32 or a pointer to one; otherwise None
    amax_out,  # for one scale: None or a pointer to one float32
    SCALING: gl.constexpr,  # a ScaleRule with powers of two, or None for one scale
    BLOCK: gl.constexpr,  # elements that share a scale: 128, or 32 for MX
    FLOAT8: gl.constexpr,  # "fp8e4nv" or "fp8e5"
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """A tile a program."""
    QUARTER: gl.constexpr = ROWS // 4
    HALF: gl.constexpr = COLUMNS // 2
    TILE: gl.constexpr = layout_of_pairs(HALF, gl.num_warps())
    tiles_across = width // COLUMNS
    top = (gl.program_id(0) // tiles_across).to(gl.int64) * ROWS
    left = (gl.program_id(0) % tiles_across).to(gl.int64) * COLUMNS
    words = x.to(gl.pointer_type(gl.int32), bitcast=True) + (top * stride + left) // 2
    p0 = gl.load(places_of_pairs(words, 0, stride // 2, QUARTER, HALF, TILE))
    p1 = gl.load(places_of_pairs(words, 1, stride // 2, QUARTER, HALF, TILE))
    p2 = gl.load(places_of_pairs(words, 2, stride // 2, QUARTER, HALF, TILE))
    p3 = gl.load(places_of_pairs(words, 3, stride // 2, QUARTER, HALF, TILE))
    seen = cast_pairs(
        p0, p1, p2, p3, codes, codes_t, kept, kept_t, top, left, width, stride_t, across, down_t,
        scale, SCALING, BLOCK, FLOAT8, ROWS, COLUMNS,
    )  # fmt: skip
    if amax_out is not None:
        # Last: threads that wait for each other here hold back no store.
        raise_amax(amax_out, seen)


@gluon.constexpr_function
def layout_of_pairs(half, warps):
    """Of the words of a tile's rows, `half` of them in each: 16 bytes of codes a thread."""
    lanes = min(half // WORDS.value, 8)
    warps_across = half // (WORDS.value * lanes)
    return gl.BlockedLayout(
        [1, WORDS.value], [32 // lanes, lanes], [warps // warps_across, warps_across], [1, 0]
    )


@gluon.jit
def raise_amax(amax_out, seen):
    """Merge the largest of pairs of magnitudes."""
    largest = gl.reduce(gl.reduce(seen, 1, larger), 0, larger)
    bits = gl.maximum(largest << 16, largest & -65536)
    gl.atomic_max(amax_out.to(gl.pointer_type(gl.int32), bitcast=True), bits, sem="relaxed")


@gluon.jit
def cast_pairs(
    p0,  # the pairs of rows 0, 4, 8, ... of a tile, (ROWS / 4, COLUMNS / 2)
    p1,
    p2,
    p3,
    codes,  # this and what follows: as for `quantize_pairs_kernel`
    codes_t,
    kept,
    kept_t,
    top,  # the tile's place in the matrix
    left,
    width,  # of the matrix that the codes are of
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
    """Store the codes of a tile, and what is kept of its blocks.

    Returns:
        The largest magnitudes at each place of the four blocks of rows, in pairs.
    """
    QUARTER: gl.constexpr = ROWS // 4
    HALF: gl.constexpr = COLUMNS // 2
    low = larger(p0 & MAGNITUDES, p1 & MAGNITUDES)
    high = larger(p2 & MAGNITUDES, p3 & MAGNITUDES)
    seen = larger(low, high)
    out = codes.to(gl.pointer_type(gl.int16), bitcast=True) + (top * width + left) // 2
    if SCALING is None:
        factor = _given(scale)
        c0 = _cast_by_float(p0, factor, FLOAT8)
        c1 = _cast_by_float(p1, factor, FLOAT8)
        c2 = _cast_by_float(p2, factor, FLOAT8)
        c3 = _cast_by_float(p3, factor, FLOAT8)
        _store(out, c0, c1, c2, c3, width // 2, QUARTER, HALF)
    else:
        WIDE: gl.constexpr = COLUMNS // BLOCK
        f01 = factors_of(largest_of_rows(p0, p1, BLOCK, QUARTER, HALF), SCALING)
        f23 = factors_of(largest_of_rows(p2, p3, BLOCK, QUARTER, HALF), SCALING)
        keep_rows(f01, f23, kept, top, left // BLOCK, across, SCALING, QUARTER, WIDE)
        c0 = _cast_by_pairs(p0, over_row(_low_twice(f01), p0), FLOAT8)
        c1 = _cast_by_pairs(p1, over_row(_high_twice(f01), p1), FLOAT8)
        c2 = _cast_by_pairs(p2, over_row(_low_twice(f23), p2), FLOAT8)
        c3 = _cast_by_pairs(p3, over_row(_high_twice(f23), p3), FLOAT8)
        _store(out, c0, c1, c2, c3, width // 2, QUARTER, HALF)
        factors = factors_of(largest_of_columns(seen, BLOCK, QUARTER, HALF), SCALING)
        keep_columns(factors, kept_t, top // BLOCK, left, down_t, SCALING, ROWS // BLOCK, HALF)
        factors = over_columns(factors, p0)
        c0 = _cast_by_pairs(p0, factors, FLOAT8)
        c1 = _cast_by_pairs(p1, factors, FLOAT8)
        c2 = _cast_by_pairs(p2, factors, FLOAT8)
        c3 = _cast_by_pairs(p3, factors, FLOAT8)
    _store_transposed(c0, c1, c2, c3, codes_t, top, left, stride_t, QUARTER, COLUMNS)
    return seen


@gluon.jit
def places_of_pairs(
    first,
    FIRST: gl.constexpr,
    pitch,
    QUARTER: gl.constexpr,
    HALF: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Where the pairs of rows FIRST, FIRST + 4, ... of a tile lie."""
    row = 4 * gl.arange(0, QUARTER, gl.SliceLayout(1, LAYOUT))[:, None] + FIRST
    column = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    return first + row * pitch + column


@gluon.jit
def _store(out, c0, c1, c2, c3, pitch, QUARTER: gl.constexpr, HALF: gl.constexpr):
    LAYOUT: gl.constexpr = c0.type.layout
    gl.store(places_of_pairs(out, 0, pitch, QUARTER, HALF, LAYOUT), c0)
    gl.store(places_of_pairs(out, 1, pitch, QUARTER, HALF, LAYOUT), c1)
    gl.store(places_of_pairs(out, 2, pitch, QUARTER, HALF, LAYOUT), c2)
    gl.store(places_of_pairs(out, 3, pitch, QUARTER, HALF, LAYOUT), c3)


@gluon.jit
def _store_transposed(
    c0, c1, c2, c3, codes_t, top, left, stride_t, QUARTER: gl.constexpr, COLUMNS: gl.constexpr
):
    """Words of four codes of a column change places through shared memory; rows of codes_t are
    written 16 bytes a thread.
    """
    even, odd = gl.inline_asm_elementwise(
        _TRANSPOSE_BYTES,
        "=r,=r,=r,=r,r,r,r,r",
        [c0, c1, c2, c3],
        dtype=(gl.uint32, gl.uint32),
        is_pure=True,
        pack=2,
    )
    words = gl.join(even, odd).reshape([QUARTER, COLUMNS]).permute([1, 0])
    LANES: gl.constexpr = QUARTER // 4 if QUARTER < 128 else 32
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 4], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    words = gl.convert_layout(words, LAYOUT)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))[:, None]
    word = gl.arange(0, QUARTER, gl.SliceLayout(0, LAYOUT))[None, :]
    first = codes_t.to(gl.pointer_type(gl.uint32), bitcast=True) + (left * stride_t + top) // 4
    gl.store(first + column * (stride_t // 4) + word, words)


@gluon.jit
def _given(factor):
    """A factor that is a number or a pointer to one."""
    if factor.dtype.is_ptr():
        value = gl.load(factor)
    else:
        value = factor
    return value


@gluon.jit
def _low_twice(words):
    return (words & 0xFFFF) | (words << 16)


@gluon.jit
def _high_twice(words):
    return ((words >> 16) & 0xFFFF) | (words & -65536)


@gluon.jit
def _cast_by_pairs(words, factors, FLOAT8: gl.constexpr):
    """Two codes of each word."""
    return gl.inline_asm_elementwise(
        _PAIRS_E4M3 if FLOAT8 == "fp8e4nv" else _PAIRS_E5M2,
        "=r,r,r,r,r",
        [words, factors],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _cast_by_float(words, factor, FLOAT8: gl.constexpr):
    return gl.inline_asm_elementwise(
        _FLOAT_E4M3 if FLOAT8 == "fp8e4nv" else _FLOAT_E5M2,
        "=r,r,r,f,f",
        [words, factor],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )
