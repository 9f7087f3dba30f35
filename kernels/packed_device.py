"""Conversions of several neighbours at a time, in the registers that hold them: only on a card.

Loads and stores move words of 32 bits. Taken apart one by one, 8- and 16-bit elements cost several
instructions each; taken together, one or two. The bits are those of `fp8lab.kernels.float_device`
and of the master formats' contracts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.float_device import bits_of, float_of

_WIDEN = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
# (high << 16) + the remainder as a signed number.
_JOIN = tl.constexpr("""
    {
        .reg .b32 high, low;
        shl.b32 high, $2, 16;
        prmt.b32 low, $3, 0, 0x9910;
        add.s32 $0, high, low;
        and.b32 high, $2, 0xffff0000;
        shr.s32 low, $3, 16;
        add.s32 $1, high, low;
    }
""")
# A NaN is 0x7FFFFFFF, as every operation of the card gives it: the one number above 0x7FFF0000.
# The upper half counts up where the lower one is 0x8000 or more.
_SPLIT = tl.constexpr("""
    {
        .reg .b32 first, second, up, down;
        min.s32 first, $2, 0x7fff0000;
        min.s32 second, $3, 0x7fff0000;
        add.s32 up, first, 0x8000;
        add.s32 down, second, 0x8000;
        prmt.b32 $0, up, down, 0x7632;
        prmt.b32 $1, first, second, 0x5410;
    }
""")
# x + x*0 is x, but NaN where x is infinite: the conversion alone would saturate it.
_E4M3 = tl.constexpr("""
    {
        .reg .b16 low, high;
        .reg .f32 first, second, third, fourth;
        fma.rn.f32 first, $1, 0f00000000, $1;
        fma.rn.f32 second, $2, 0f00000000, $2;
        fma.rn.f32 third, $3, 0f00000000, $3;
        fma.rn.f32 fourth, $4, 0f00000000, $4;
        cvt.rn.satfinite.e4m3x2.f32 low, second, first;
        cvt.rn.satfinite.e4m3x2.f32 high, fourth, third;
        mov.b32 $0, {low, high};
    }
""")


@triton.jit
def widened_bfloat16(words):
    """The float32 of the words of bfloat16."""
    bits = tl.inline_asm_elementwise(
        _WIDEN.value, "=r,=r,r", [words], dtype=tl.int32, is_pure=True, pack=2
    )
    return float_of(bits)


@triton.jit
def joined(high, low):
    """The float32 masters of bfloat16 weights and their remainders, both as int16."""
    bits = tl.inline_asm_elementwise(
        _JOIN.value, "=r,=r,r,r", [high, low], dtype=tl.int32, is_pure=True, pack=2
    )
    return float_of(bits)


@triton.jit
def split(p):
    """Weights and remainders, both int16, of float32 masters that an operation of the card gave."""
    return tl.inline_asm_elementwise(
        _SPLIT.value,
        "=r,=r,r,r",
        [bits_of(p)],
        dtype=(tl.int16, tl.int16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def e4m3_or_nan(x):
    """E4M3 codes, uint8, rounded to nearest even; finite overflow saturates, Inf becomes NaN."""
    return tl.inline_asm_elementwise(
        _E4M3.value, "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4
    )
