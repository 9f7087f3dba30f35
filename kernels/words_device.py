"""Tensors that a table gives by their addresses, read and written as integers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_words(
    address, offsets, n, MASKED: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr
):
    """Elements of a tensor as integers, from its address; 0 past its end."""
    pointer = address.to(tl.pointer_type(WORD))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if MASKED:
        words = tl.load(pointer + offsets, mask=offsets < n, other=0)
    else:
        words = tl.load(pointer + offsets)
    return words


@triton.jit
def store_words(
    address, offsets, words, n, MASKED: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store integers to a tensor, given its address."""
    pointer = address.to(tl.pointer_type(WORD))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if MASKED:
        tl.store(pointer + offsets, words, mask=offsets < n)
    else:
        tl.store(pointer + offsets, words)
