"""Philox against its authors' vectors and against Triton's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from fp8lab.emulation.casting import quantize
from fp8lab.emulation.random import philox, randint4x, random_words
from fp8lab.emulation.scalar import quantize_scalar
from fp8lab.formats import E4M3
from fp8lab.testing import assert_bits_equal, run_kernel, to_numpy, to_torch

BLOCK = 64


@triton.jit  # type: ignore[untyped-decorator]
def randint4x_kernel(offsets: Any, seed: Any, words: Any, BLOCK: tl.constexpr) -> None:
    place = tl.arange(0, BLOCK)
    r0, r1, r2, r3 = tl.randint4x(tl.load(seed), tl.load(offsets + place))
    tl.store(words + place, r0)
    tl.store(words + BLOCK + place, r1)
    tl.store(words + 2 * BLOCK + place, r2)
    tl.store(words + 3 * BLOCK + place, r3)


@triton.jit  # type: ignore[untyped-decorator]
def random_words_kernel(words, seed, offset, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `random_words` says a kernel does."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    group = offset + start // 4 + tl.arange(0, BLOCK // 4)
    r0, r1, r2, r3 = tl.randint4x(tl.load(seed), group)
    interleaved = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    tl.store(words + start + tl.arange(0, BLOCK), interleaved)


def in_triton(seed: int, offsets: np.ndarray[Any, Any], device: str) -> np.ndarray[Any, Any]:
    key = torch.from_numpy(np.array([seed % (1 << 64)], np.uint64).view(np.int64)).to(device)
    words = torch.zeros(4 * BLOCK, dtype=torch.int32, device=device)
    run_kernel(randint4x_kernel[(1,)], to_torch(offsets, device=device), key, words, BLOCK=BLOCK)
    return to_numpy(words).view(np.uint32).reshape(4, BLOCK)


untyped: Any = randint4x  # some calls below no type checker would let through

# The known answers of Random123 for philox4x32-10: counter, key, words.
KNOWN = [
    ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        (0xFFFFFFFF, 0xFFFFFFFF),
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: list[int], key: tuple[int, int], words: list[int]) -> None:
    found = philox([np.array(word, np.uint32) for word in counter], key)
    assert [int(word) for word in found] == words


SEEDS = [0, 1, 42, -1, -123456789, 2**31, 2**32 - 1, 2**32, 0x123456789ABCDEF, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_randint4x_is_tritons(seed: int, dtype: type[np.signedinteger[Any]], device: str) -> None:
    info = np.iinfo(dtype)
    offsets = np.random.default_rng(0).integers(info.min, info.max, BLOCK, dtype, endpoint=True)
    edges = [0, 1, -1, info.max, info.min, 2**31 - 1]
    if dtype is np.int64:
        edges += [2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**40 + 3]
    offsets[: len(edges)] = edges
    expected = np.stack(randint4x(seed, offsets))
    assert_bits_equal(in_triton(seed, offsets, device), expected)


@given(seed=st.integers(-(2**63), 2**64 - 1), first=st.integers(0, 2**40))
def test_randint4x_is_tritons_for_any_seed(seed: int, first: int, device: str) -> None:
    offsets = np.arange(first, first + BLOCK, dtype=np.int64)
    assert_bits_equal(in_triton(seed, offsets, device), np.stack(randint4x(seed, offsets)))


@pytest.mark.parametrize("offset", [0, 5, 2**31 - 3, 2**33])
def test_random_words_are_what_a_kernel_gets(offset: int, device: str) -> None:
    programs = 3
    words = torch.zeros(programs * BLOCK, dtype=torch.int32, device=device)
    key = torch.tensor([-7], dtype=torch.int64, device=device)
    start = torch.tensor(offset, dtype=torch.int64, device=device)
    run_kernel(random_words_kernel[(programs,)], words, key, start.item(), BLOCK=BLOCK)
    expected = random_words(-7, programs * BLOCK, offset=offset)
    assert_bits_equal(to_numpy(words).view(np.uint32), expected)


def test_random_words_depend_on_the_place_alone() -> None:
    flat = random_words(3, 1000)
    assert_bits_equal(random_words(3, (10, 100)), flat.reshape(10, 100))
    assert_bits_equal(random_words(3, 13), flat[:13])
    assert_bits_equal(random_words(3, 96, offset=25), flat[100:196])
    assert random_words(3, (4, 0)).shape == (4, 0)
    assert random_words(3, ()).shape == ()
    assert not np.array_equal(random_words(4, 1000), flat)


def test_every_bit_is_set_half_of_the_time() -> None:
    """Within five standard deviations: so that this seed is no lucky one."""
    n = 1 << 16
    words = random_words(11, n)
    for bit in range(32):
        share = float(((words >> np.uint32(bit)) & 1).mean())
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(n), bit


def test_a_stochastic_cast_can_be_replayed_one_element_at_a_time() -> None:
    x = np.random.default_rng(5).standard_normal((7, 9)).astype(np.float32)
    words = random_words(99, x.shape, offset=2**32)
    codes = quantize(x, E4M3, rounding="stochastic", random_bits=words)
    for index, value in enumerate(x.reshape(-1)):
        word = randint4x(99, 2**32 + index // 4)[index % 4]
        one = quantize_scalar(float(value), E4M3, rounding="stochastic", random_bits=int(word))
        assert int(codes.reshape(-1)[index].view(np.uint8)) == one


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (partial(untyped, 1.5, 0), TypeError, "seed is 1.5; accepted: an integer"),
        (lambda: randint4x(2**64, 0), ValueError, r"accepted: -2\*\*63 to 2\*\*64 - 1"),
        (lambda: randint4x(0, 1.0), TypeError, "offset has dtype float64; accepted: int32"),
        (lambda: randint4x(0, np.int16(1)), TypeError, "offset has dtype int16"),
        (lambda: random_words(0, 8, offset=-1), ValueError, "offset is -1; accepted"),
        (lambda: random_words(0, 8, offset=2**63), ValueError, r"integer from 0 to 2\*\*63 - 2"),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
