"""Quotients and roots rounded to nearest, without the checks that the card's own ones begin with.

The card has no instruction for either. `div.rn` and `sqrt.rn` are an approximation, a few fused
multiply-adds, and a check whether anything on the way leaves float32's range; each check is a
branch, and between branches nothing overlaps. Here are the same approximations and the same
multiply-adds as ptxas makes of `div.rn` and `sqrt.rn`, so the same bits, for callers that have
checked a whole block at once: every operand, quotient and root is a normal number, and so is each
remainder (a remainder is a multiple of 2**-47 times the dividend). Only on a card.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.float_device import negated


@triton.jit
def reciprocal(d):
    """1/d, rounded to nearest, as `rcp.rn` gives it; 1/d is normal as well."""
    near = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.fma(near, tl.fma(d, negated(near), 1.0), near)


@triton.jit
def quotient(n, d, inverse):
    """n/d, rounded to nearest; inverse is `reciprocal(d)`."""
    near = n * inverse
    return tl.fma(inverse, tl.fma(d, negated(near), n), near)


@triton.jit
def root(x):
    """The square root of x, rounded to nearest, for x of at least 2**-101."""
    inverse = tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    near = x * inverse
    return tl.fma(tl.fma(near, negated(near), x), inverse * 0.5, near)
