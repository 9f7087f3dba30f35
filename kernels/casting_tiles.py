"""The kernel that casts a tile of a matrix, in one or both layouts, from one read.

A program takes ROWS x COLUMNS elements as four blocks: block j holds rows j, j + 4, j + 8, ... So
the codes of four neighbours of a column lie at one place of the four blocks, and make one 32-bit
word of the transposed codes without moving between threads; then words are transposed, not bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.casting_arithmetic import (
    INFINITY,
    MAGNITUDE,
    as_bits,
    as_floats,
    as_words,
    cast_four_to_codes,
    given_factor,
    random_word,
    widened,
)
from fp8lab.kernels.launch import interpreted
from fp8lab.kernels.scaling_tiles_device import block_scales, largest_of_four

_INTERPRETED = tl.constexpr(interpreted())
_TRANSPOSE_BYTES = tl.constexpr(
    """
    {
        .reg .b32 low01, low23, high01, high23;
        prmt.b32 low01, $4, $5, 0x5140;
        prmt.b32 low23, $6, $7, 0x5140;
        prmt.b32 high01, $4, $5, 0x7362;
        prmt.b32 high23, $6, $7, 0x7362;
        prmt.b32 $0, low01, low23, 0x5410;
        prmt.b32 $1, low01, low23, 0x7632;
        prmt.b32 $2, high01, high23, 0x5410;
        prmt.b32 $3, high01, high23, 0x7632;
    }
    """
)


_ANY_VALUE = ["height", "down", "across", "down_t", "across_t", "seed", "offset"]


# What does not decide how wide an access is: batches of another height compile nothing new.
@triton.jit(do_not_specialize=_ANY_VALUE)
def quantize_tiles_kernel(
    x,  # (height, width), neighbours in a row side by side
    codes,  # (height, width) contiguous, or None
    codes_t,  # (width, stride_t), or None
    kept,  # what is kept for each block of codes, and of codes_t; or None
    kept_t,
    height,
    width,
    stride,  # elements from a row of x to the next
    stride_t,  # bytes from a row of codes_t to the next, a multiple of 4
    down,  # elements of kept from a block to the one below, and to the one on the right
    across,
    down_t,  # the same of kept_t, below and right being as in x
    across_t,
    scale,  # by SCALES
    scale_t,
    amax_out,  # None or a pointer to one float32
    seed,
    offset,
    SCALES: tl.constexpr,  # "one", "columns", "vectors" or "blocks", see `casting_matrix`
    SCALING: tl.constexpr,  # for "blocks": a ScaleRule
    BLOCK_ROWS: tl.constexpr,  # for "blocks": the blocks of codes, and of codes_t, as x lies
    BLOCK_COLUMNS: tl.constexpr,
    T_BLOCK_ROWS: tl.constexpr,
    T_BLOCK_COLUMNS: tl.constexpr,
    RULE: tl.constexpr,  # a CastRule
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    EVEN: tl.constexpr,  # tiles fill the matrix
):
    """A tile a program."""
    QUARTER: tl.constexpr = ROWS // 4
    top, left = corner_of_tile(height, width, ROWS, COLUMNS, BAND)
    base = as_words(x) + top * stride + left
    rows_left = tl.minimum(height - top, ROWS).to(tl.int32)
    columns_left = tl.minimum(width - left, COLUMNS).to(tl.int32)
    element: tl.constexpr = x.dtype.element_ty
    HARDWARE: tl.constexpr = RULE.hardware
    b0 = load_block(
        base, 0, stride, rows_left, columns_left, element, HARDWARE, QUARTER, COLUMNS, EVEN
    )
    b1 = load_block(
        base, 1, stride, rows_left, columns_left, element, HARDWARE, QUARTER, COLUMNS, EVEN
    )
    b2 = load_block(
        base, 2, stride, rows_left, columns_left, element, HARDWARE, QUARTER, COLUMNS, EVEN
    )
    b3 = load_block(
        base, 3, stride, rows_left, columns_left, element, HARDWARE, QUARTER, COLUMNS, EVEN
    )
    if amax_out is not None:
        raise_amax(amax_out, largest_of_four(b0, b1, b2, b3))
    cast_tile(
        b0, b1, b2, b3, codes, codes_t, kept, kept_t, top, left, height, width,
        rows_left, columns_left, stride_t, down, across, down_t, across_t,
        scale, scale_t, seed, offset,
        SCALES, SCALING, BLOCK_ROWS, BLOCK_COLUMNS, T_BLOCK_ROWS, T_BLOCK_COLUMNS,
        RULE, QUARTER, COLUMNS, EVEN,
    )  # fmt: skip


@triton.jit
def raise_amax(amax_out, magnitudes):
    """Merge the largest of a tile's magnitudes, as int32 bits."""
    largest = tl.max(tl.max(magnitudes, axis=1), axis=0)
    tl.atomic_max(as_words(amax_out), largest, sem="relaxed")


@triton.jit
def cast_tile(
    b0,  # the float32 bits of rows 0, 4, 8, ... of a tile, (QUARTER, COLUMNS)
    b1,
    b2,
    b3,
    codes,  # this and what follows: as for `quantize_tiles_kernel`
    codes_t,
    kept,
    kept_t,
    top,  # the tile's place in the matrix
    left,
    height,  # of the matrix that the codes are of
    width,
    rows_left,  # how much of the tile there is
    columns_left,
    stride_t,
    down,
    across,
    down_t,
    across_t,
    scale,
    scale_t,
    seed,
    offset,
    SCALES: tl.constexpr,
    SCALING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    T_BLOCK_ROWS: tl.constexpr,
    T_BLOCK_COLUMNS: tl.constexpr,
    RULE: tl.constexpr,
    QUARTER: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Store the codes of a tile, and what is kept of its blocks."""
    # One factor for each of the four blocks, and the same for the transposed codes.
    MX: tl.constexpr = SCALES == "blocks" and SCALING.is_mx
    ONE_WAY: tl.constexpr = (SCALES == "one" or SCALES == "columns") or (
        SCALES == "blocks" and BLOCK_ROWS == T_BLOCK_ROWS and BLOCK_COLUMNS == T_BLOCK_COLUMNS
    )
    f0, f1, f2, f3 = None, None, None, None
    t0, t1, t2, t3 = None, None, None, None
    if SCALES == "one":
        if scale is not None:
            f0 = given_factor(scale)
            f1, f2, f3 = f0, f0, f0
    elif SCALES == "columns":
        f0 = _column_factors(scale, left, columns_left, COLUMNS)
        f1, f2, f3 = f0, f0, f0
    elif SCALES == "vectors":
        if codes is not None:
            f0 = _row_factors(scale, top, 0, rows_left, QUARTER)
            f1 = _row_factors(scale, top, 1, rows_left, QUARTER)
            f2 = _row_factors(scale, top, 2, rows_left, QUARTER)
            f3 = _row_factors(scale, top, 3, rows_left, QUARTER)
        if codes_t is not None:
            t0 = _column_factors(scale_t, left, columns_left, COLUMNS)
            t1, t2, t3 = t0, t0, t0
    else:
        if codes is not None or ONE_WAY:
            f0, f1, f2, f3 = block_scales(
                b0, b1, b2, b3, kept, top, left, height, width, down, across,
                SCALING, BLOCK_ROWS, BLOCK_COLUMNS, QUARTER, COLUMNS,
            )  # fmt: skip
        if codes_t is not None and not ONE_WAY:
            t0, t1, t2, t3 = block_scales(
                b0, b1, b2, b3, kept_t, top, left, height, width, down_t, across_t,
                SCALING, T_BLOCK_ROWS, T_BLOCK_COLUMNS, QUARTER, COLUMNS,
            )  # fmt: skip

    r0, r1, r2, r3 = None, None, None, None
    if RULE.rounding == "stochastic":
        r0 = _random(seed, offset, top, left, 0, width, QUARTER, COLUMNS)
        r1 = _random(seed, offset, top, left, 1, width, QUARTER, COLUMNS)
        r2 = _random(seed, offset, top, left, 2, width, QUARTER, COLUMNS)
        r3 = _random(seed, offset, top, left, 3, width, QUARTER, COLUMNS)
    if codes is not None or ONE_WAY:
        c0 = _cast(b0, f0, r0, MX, RULE)
        c1 = _cast(b1, f1, r1, MX, RULE)
        c2 = _cast(b2, f2, r2, MX, RULE)
        c3 = _cast(b3, f3, r3, MX, RULE)
    if codes is not None:
        out = as_words(codes) + top * width + left
        store_block(out, c0, 0, width, rows_left, columns_left, QUARTER, COLUMNS, EVEN)
        store_block(out, c1, 1, width, rows_left, columns_left, QUARTER, COLUMNS, EVEN)
        store_block(out, c2, 2, width, rows_left, columns_left, QUARTER, COLUMNS, EVEN)
        store_block(out, c3, 3, width, rows_left, columns_left, QUARTER, COLUMNS, EVEN)
    if codes_t is not None:
        if not ONE_WAY:
            c0 = _cast(b0, t0, r0, MX, RULE)
            c1 = _cast(b1, t1, r1, MX, RULE)
            c2 = _cast(b2, t2, r2, MX, RULE)
            c3 = _cast(b3, t3, r3, MX, RULE)
        words = tl.trans(_words_down(c0, c1, c2, c3))
        down_words = codes_t.to(tl.pointer_type(tl.uint32), bitcast=True)
        column = tl.arange(0, COLUMNS)[:, None]
        word = tl.arange(0, QUARTER)[None, :]
        out_t = down_words + (left * stride_t + top) // 4 + column * (stride_t // 4) + word
        if EVEN:
            tl.store(out_t, words)
        else:
            tl.store(out_t, words, mask=(column < columns_left) & (4 * word < rows_left))


@triton.jit
def _words_down(c0, c1, c2, c3):
    """Four codes, one of each block, as the bytes of one word, the first one lowest."""
    if _INTERPRETED:
        low = c0.to(tl.uint32) | (c1.to(tl.uint32) << 8)
        words = low | (c2.to(tl.uint32) << 16) | (c3.to(tl.uint32) << 24)
    else:
        # A thread holds four codes of a row in one register: a 4 x 4 transpose of bytes. Written
        # with shifts it takes three times the instructions, and ptxas 12.8 crashes on what LLVM
        # makes of them in Triton 3.7.
        words = tl.inline_asm_elementwise(
            _TRANSPOSE_BYTES,
            "=r,=r,=r,=r,r,r,r,r",
            [c0, c1, c2, c3],
            dtype=tl.uint32,
            is_pure=True,
            pack=4,
        )
    return words


@triton.jit
def corner_of_tile(height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """The first row and column of this program's tile, as int64."""
    tile = tl.program_id(0)
    tiles_across = tl.cdiv(width, COLUMNS).to(tl.int32)
    if BAND == 1:
        row = tile // tiles_across
        column = tile % tiles_across
    else:
        tiles_down = tl.cdiv(height, ROWS).to(tl.int32)
        band = tile // (BAND * tiles_across)
        here = tl.minimum(tiles_down - band * BAND, BAND)
        inside = tile - band * (BAND * tiles_across)
        row = band * BAND + inside % here
        column = inside // here
    return row.to(tl.int64) * ROWS, column.to(tl.int64) * COLUMNS


@triton.jit
def load_block(
    base,
    FIRST: tl.constexpr,
    stride,
    rows_left,
    columns_left,
    element: tl.constexpr,
    HARDWARE: tl.constexpr,
    QUARTER: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The float32 bits of rows FIRST, FIRST + 4, ... of a tile; 0 beyond the matrix."""
    row = (4 * tl.arange(0, QUARTER) + FIRST)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    places = base + row.to(tl.int64) * stride + column
    if EVEN:
        words = tl.load(places)
    else:
        words = tl.load(places, mask=(row < rows_left) & (column < columns_left), other=0)
    return widened(words, element, HARDWARE)


@triton.jit
def store_block(
    out,
    codes,
    FIRST: tl.constexpr,
    width,
    rows_left,
    columns_left,
    QUARTER: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    row = (4 * tl.arange(0, QUARTER) + FIRST)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    places = out + row.to(tl.int64) * width + column
    if EVEN:
        tl.store(places, codes)
    else:
        tl.store(places, codes, mask=(row < rows_left) & (column < columns_left))


@triton.jit
def _cast(bits, factor, random, MX: tl.constexpr, RULE: tl.constexpr):
    y = bits
    if factor is not None:
        y = as_bits(as_floats(bits) * factor)
        if RULE.keep_nan_sign and MX:
            # Every NaN of MX is its block's, and positive.
            bits = tl.where((y & MAGNITUDE) > INFINITY, 0, bits)
    return cast_four_to_codes(y, bits, random, RULE)


@triton.jit
def _random(
    seed,
    offset,
    top,
    left,
    FIRST: tl.constexpr,
    width,
    QUARTER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The random words of a block: an element's word goes by its place in the whole matrix."""
    row = top + (4 * tl.arange(0, QUARTER) + FIRST)[:, None]
    column = left + tl.arange(0, COLUMNS)[None, :]
    return random_word(seed, offset, row * width + column)


@triton.jit
def _row_factors(scale, top, FIRST: tl.constexpr, rows_left, QUARTER: tl.constexpr):
    row = 4 * tl.arange(0, QUARTER) + FIRST
    return tl.load(scale + top + row, mask=row < rows_left, other=1.0)[:, None]


@triton.jit
def _column_factors(scale, left, columns_left, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    return tl.load(scale + left + column, mask=column < columns_left, other=1.0)[None, :]
