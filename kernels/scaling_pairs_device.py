"""The scales of bfloat16 pairs, in Gluon: their amaxes, the factors, and what is kept of blocks.

A word holds two numbers of 16 bits: two neighbours of a row of x, or what belongs to them. They are
compared, lifted and turned into factors two at a time. Part of `casting_pairs_device`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Both halves of a word: 15 magnitude bits.
MAGNITUDES = gl.constexpr(0x7FFF7FFF)
WORDS = gl.constexpr(8)  # of x that lie side by side in a thread: 16 elements, 16 bytes of codes
_LARGER = gl.constexpr("max.u16x2 $0, $1, $2;")
_SMALLER = gl.constexpr("min.u16x2 $0, $1, $2;")
# The lower halves of four 16-bit numbers, as bytes.
_FOUR_BYTES = gl.constexpr("prmt.b32 $0, $1, $2, 0x6420;")


@gluon.jit
def larger(a, b):
    """Of each half, as unsigned integers."""
    return gl.inline_asm_elementwise(
        _LARGER, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _smaller(a, b):
    return gl.inline_asm_elementwise(
        _SMALLER, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _both(half: gl.constexpr, like):
    """The same 16 bits in both halves of each word."""
    WORD: gl.constexpr = half * 0x10001 - (0x100000000 if half > 0x7FFF else 0)
    return gl.full(like.shape, WORD, gl.int32, like.type.layout)


@gluon.jit
def largest_of_rows(first, second, BLOCK: gl.constexpr, QUARTER: gl.constexpr, HALF: gl.constexpr):
    """The amax of each block, (QUARTER, blocks): of a row of `first` below, of `second` above."""
    RUNS: gl.constexpr = HALF // WORDS
    a = gl.reduce((first & MAGNITUDES).reshape([QUARTER, RUNS, WORDS]), 2, larger)
    b = gl.reduce((second & MAGNITUDES).reshape([QUARTER, RUNS, WORDS]), 2, larger)
    # One word for both rows before it goes from thread to thread.
    low = (a & 0xFFFF) | (b << 16)
    high = ((a >> 16) & 0xFFFF) | (b & -65536)
    runs = larger(low, high).reshape([QUARTER, 2 * HALF // BLOCK, BLOCK // (2 * WORDS)])
    return gl.reduce(runs, 2, larger)


@gluon.jit
def largest_of_columns(seen, BLOCK: gl.constexpr, QUARTER: gl.constexpr, HALF: gl.constexpr):
    """The amax of each pair of columns of each block: (blocks, HALF).

    Through shared memory, so that a thread holds few columns: what follows is done once for each,
    not once for each row of threads.
    """
    WARPS: gl.constexpr = gl.num_warps()
    # A block is 8 rows of these in MX, 32 otherwise: 8 in a thread, the rest in neighbours.
    DOWN: gl.constexpr = BLOCK // 32
    ACROSS: gl.constexpr = 32 // DOWN
    WARPS_ACROSS: gl.constexpr = HALF // ACROSS if HALF // ACROSS < WARPS else WARPS
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [8, 1], [DOWN, ACROSS], [WARPS // WARPS_ACROSS, WARPS_ACROSS], [0, 1]
    )
    HIGH: gl.constexpr = 4 * QUARTER // BLOCK
    moved = gl.convert_layout(seen, LAYOUT).reshape([HIGH, BLOCK // 4, HALF])
    return gl.reduce(moved, 1, larger)


@gluon.jit
def factors_of(largest, SCALING: gl.constexpr):
    """The bfloat16 factors of two amaxes a word: `block_factors`, on both halves at once.

    Everything is at least 0 and below 2**16 on the way, so that no half touches the other.
    """
    EXPONENT: gl.constexpr = SCALING.exponent
    TOP_MANTISSA: gl.constexpr = SCALING.mantissa >> 16
    if SCALING.is_mx:
        # 2**-code, where code is what the field of the amax is above that of the format's top.
        LIFT: gl.constexpr = (
            0x7F - TOP_MANTISSA
            if SCALING.kind == "mx_up"
            else (0x40 if SCALING.kind == "mx_nearest" else 0)
        )
        TOP: gl.constexpr = EXPONENT << 7
        seen = _smaller(largest, _both(0x7F81, largest))
        field = (seen + _both(LIFT, largest)) & _both(0xFF80, largest)
        factor = _both(0x7F00 + TOP, largest) - larger(field, _both(TOP, largest))
        # 1 for Inf and 2 for NaN. What would be 2**(EXPONENT - 128) is 2**-127, and NaN a NaN.
        endless = larger(seen, _both(0x7F7F, largest)) - _both(0x7F7F, largest)
        nan = larger(seen, _both(0x7F80, largest)) - _both(0x7F80, largest)
        factor = (factor ^ (endless * (((EXPONENT - 1) << 7) ^ 0x40))) | (nan * 0x7FFF)
    else:
        seen = _smaller(largest, _both(0x7F80, largest))
        # The bits that are added carry into the field where the mantissa is above the top's.
        field = (seen + _both(0x7F - TOP_MANTISSA, largest)) & _both(0xFF80, largest)
        # At most 2**127; 1 for an amax of 0.
        most = _smaller(largest, _both(1, largest)) * 0x3F80 + _both(0x3F80, largest)
        factor = _smaller(_both((EXPONENT + 254) << 7, largest) - field, most)
        # 1 for Inf and NaN.
        endless = larger(seen, _both(0x7F7F, largest)) - _both(0x7F7F, largest)
        factor = factor + endless * ((128 - EXPONENT) << 7)
    return factor


@gluon.jit
def _mx_codes(factors):
    """The E8M0 codes of two factors a word, in the low bytes of its halves."""
    return _both(0x01FE, factors) - ((factors >> 7) & _both(0x01FF, factors))


@gluon.jit
def _inverse(factor):
    """The float32 bits of 1 / factor, from the 16 bits of a power of two up to 2**127."""
    return gl.where(factor == 0x7F00, 0x00400000, (0x7F00 - factor) << 16)


@gluon.jit
def keep_rows(
    f01,
    f23,
    kept,
    top,
    block,
    across,
    SCALING: gl.constexpr,
    QUARTER: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Store what is kept of four neighbouring rows from each thread."""
    LAYOUT: gl.constexpr = f01.type.layout
    row = 4 * gl.arange(0, QUARTER, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))[None, :]
    first = block * across + top
    if SCALING.is_mx:
        four = gl.inline_asm_elementwise(
            _FOUR_BYTES,
            "=r,r,r",
            [_mx_codes(f01), _mx_codes(f23)],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
        places = kept.to(gl.pointer_type(gl.int32), bitcast=True) + first // 4
        gl.store(places + (row + column * across) // 4, four)
    else:
        places = kept.to(gl.pointer_type(gl.int32), bitcast=True) + first + row + column * across
        gl.store(places, _inverse(f01 & 0xFFFF))
        gl.store(places + 1, _inverse((f01 >> 16) & 0xFFFF))
        gl.store(places + 2, _inverse(f23 & 0xFFFF))
        gl.store(places + 3, _inverse((f23 >> 16) & 0xFFFF))


@gluon.jit
def keep_columns(
    factors,
    kept_t,
    block,
    left,
    down_t,
    SCALING: gl.constexpr,
    HIGH: gl.constexpr,
    HALF: gl.constexpr,
):
    """Store what is kept of pairs of columns."""
    LAYOUT: gl.constexpr = factors.type.layout
    row = gl.arange(0, HIGH, gl.SliceLayout(1, LAYOUT))[:, None]
    pair = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    first = (block * down_t + left) // 2
    if SCALING.is_mx:
        codes = _mx_codes(factors)
        two = ((codes & 0xFF) | ((codes >> 8) & 0xFF00)).to(gl.int16)
        places = kept_t.to(gl.pointer_type(gl.int16), bitcast=True) + first
        gl.store(places + row * (down_t // 2) + pair, two)
    else:
        low = _inverse(factors & 0xFFFF).to(gl.int64)
        high = _inverse((factors >> 16) & 0xFFFF).to(gl.int64)
        places = kept_t.to(gl.pointer_type(gl.int64), bitcast=True) + first
        gl.store(places + row * (down_t // 2) + pair, low | (high << 32))


@gluon.jit
def over_row(factors, words):
    """(QUARTER, blocks) over the pairs of each block, in the layout of words (QUARTER, HALF)."""
    QUARTER: gl.constexpr = words.shape[0]
    WIDE: gl.constexpr = factors.shape[1]
    by_block = words.reshape([QUARTER, WIDE, words.shape[1] // WIDE])
    factors = gl.convert_layout(factors, gl.SliceLayout(2, by_block.type.layout))
    spread, _ = gl.broadcast(gl.expand_dims(factors, 2), by_block)
    return gl.convert_layout(spread.reshape(words.shape), words.type.layout, assert_trivial=True)


@gluon.jit
def over_columns(factors, words):
    """(blocks, HALF) over the rows of each block, in the layout of words (QUARTER, HALF)."""
    HIGH: gl.constexpr = factors.shape[0]
    by_block = words.reshape([HIGH, words.shape[0] // HIGH, words.shape[1]])
    factors = gl.convert_layout(factors, gl.SliceLayout(1, by_block.type.layout))
    spread, _ = gl.broadcast(gl.expand_dims(factors, 1), by_block)
    return gl.convert_layout(spread.reshape(words.shape), words.type.layout, assert_trivial=True)
