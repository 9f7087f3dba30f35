"""AdamW on the device, over a table of tensors: the twin of `fp8lab.emulation.adamw_states`."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from fp8lab.kernels.adamw_constants_device import CONSTANTS
from fp8lab.kernels.adamw_orders_device import first_moment, new_param, second_moment, with_l2
from fp8lab.kernels.float_device import (
    INFINITY,
    MAGNITUDE,
    ElementCode,
    bits_of,
    float_of,
    narrowed,
    widened,
)
from fp8lab.kernels.moments_device import (
    inverse_scale_of,
    moment_top,
    raise_to,
    read_moment,
    write_moment,
)
from fp8lab.kernels.packed_device import joined, split, widened_bfloat16
from fp8lab.kernels.words_device import load_words, store_words

# Columns of the table: one row a tensor, addresses and numbers as int64.
COLUMNS = tl.constexpr(18)
SIZE = tl.constexpr(0)
FIRST_CHUNK = tl.constexpr(1)
GROUP = tl.constexpr(2)  # the row of constants
RANDOM_OFFSET = tl.constexpr(3)
PARAM = tl.constexpr(4)
GRAD = tl.constexpr(5)
REMAINDER = tl.constexpr(6)
EXP_AVG = tl.constexpr(7)
EXP_AVG_SCALE = tl.constexpr(8)
EXP_AVG_POWER = tl.constexpr(9)
EXP_AVG_SQ = tl.constexpr(10)
EXP_AVG_SQ_SCALE = tl.constexpr(11)
EXP_AVG_SQ_POWER = tl.constexpr(12)
WEIGHT = tl.constexpr(13)
CODES = tl.constexpr(14)
CODES_SCALE = tl.constexpr(15)
CODES_AMAX = tl.constexpr(16)


@dataclass(frozen=True)
class StepCode:
    """What a step does besides its order and its moments, as a compile-time argument.

    Attributes:
        grad: "float32", "bfloat16" or "float16".
        master: One of `MASTER_FORMATS`.
        weight: The format of the copy that is written of float32 parameters: bfloat16, or None.
            A tensor whose address in the table is 0 has none.
        codes: The format of the weights' FP8 codes, or None; likewise.
        decoupled: Whether weight decay is decoupled.
        hardware: Whether the card's conversions and fused multiply-add are used.
        aligned: Whether every address is a multiple of 16.
        block: Elements a program.
    """

    grad: str
    master: str
    weight: ElementCode | None
    codes: ElementCode | None
    decoupled: bool
    hardware: bool
    aligned: bool
    block: int


@triton.jit
def adamw_kernel(
    table,
    chunk_tensor,  # int32: which tensor each program's chunk is of
    constants,  # float32
    factor,  # None or a float32: multiplies the gradient
    skip,  # None or an int32: leave everything as it is unless it is 0
    seed,  # None or an int64: of the random words
    tops,  # None or two int32 a tensor: bits of the new moments' largest magnitudes
    ORDER: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    STEP: tl.constexpr,
    ONLY_TOPS: tl.constexpr,
):
    """One chunk of one tensor a program. With ONLY_TOPS, nothing but `tops` is written."""
    # Loads that do not wait for each other come first, all of them.
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    if skip is not None:  # noqa: SIM102 (decided when it is compiled)
        if tl.load(skip) != 0:
            return
    row = table + tensor * COLUMNS
    n = tl.load(row + SIZE)
    first_chunk = tl.load(row + FIRST_CHUNK)
    k = constants + tl.load(row + GROUP) * CONSTANTS
    # Addresses: of param, remainder and weight; of each moment's codes, scales and powers; of the
    # gradient; of the weight's FP8 codes, their scale and amax.
    places = (
        (tl.load(row + PARAM), tl.load(row + REMAINDER), tl.load(row + WEIGHT)),
        (tl.load(row + EXP_AVG), tl.load(row + EXP_AVG_SCALE), tl.load(row + EXP_AVG_POWER)),
        (
            tl.load(row + EXP_AVG_SQ),
            tl.load(row + EXP_AVG_SQ_SCALE),
            tl.load(row + EXP_AVG_SQ_POWER),
        ),
        tl.load(row + GRAD),
        (tl.load(row + CODES), tl.load(row + CODES_SCALE), tl.load(row + CODES_AMAX)),
    )
    random = tl.load(row + RANDOM_OFFSET)
    start = (chunk - first_chunk) * STEP.block
    top = tops + 2 * tensor
    # Full chunks carry no mask: one that depends on n would make every access a scalar one. Each
    # branch holds the whole body, so that neither decides how the other spreads over threads.
    if start + STEP.block <= n:
        _step(places, top, start, n, k, factor, random, seed, ORDER, M, V, STEP, ONLY_TOPS, False)
    else:
        _step(places, top, start, n, k, factor, random, seed, ORDER, M, V, STEP, ONLY_TOPS, True)


@triton.jit
def _step(
    places,
    top,  # where the tops of the two moments are
    start,
    n,
    k,  # the row of constants
    factor,
    random,  # the tensor's first group of random words
    seed,
    ORDER: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    STEP: tl.constexpr,
    ONLY_TOPS: tl.constexpr,
    MASKED: tl.constexpr,
):
    master, first, second, grad, codes = places
    offsets = start + tl.arange(0, STEP.block)
    p = _read_param(master, offsets, n, STEP, MASKED)
    g = _read_grad(grad, offsets, n, STEP, MASKED)
    if factor is not None:
        g = g * tl.load(factor)
    m = read_moment(first, offsets, start, n, M, STEP, MASKED)
    v = read_moment(second, offsets, start, n, V, STEP, MASKED)
    decayed = g
    if not STEP.decoupled:
        decayed = with_l2(p, g, k, offsets, n, ORDER, STEP)
    m = first_moment(m, decayed, k, ORDER, STEP)
    v = second_moment(v, decayed, k, offsets, n, ORDER, STEP, MASKED)
    if ONLY_TOPS:
        if M.by_tensor:
            raise_to(top, moment_top(m))
        if V.by_tensor:
            raise_to(top + 1, moment_top(v))
    else:
        p = new_param(p, m, v, k, ORDER, STEP, MASKED)
        write_moment(first, m, g, top, offsets, start, n, M, STEP, MASKED)
        write_moment(second, v, g, top + 1, offsets, start, n, V, STEP, MASKED)
        weight = _write_param(master, p, random + start // 4, seed, offsets, n, STEP, MASKED)
        if STEP.codes is not None:  # noqa: SIM102 (decided when it is compiled)
            if codes[0] != 0:
                _write_codes(codes, weight, offsets, n, STEP, MASKED)


@triton.jit
def _read_grad(address, offsets, n, STEP: tl.constexpr, MASKED: tl.constexpr):
    ALIGNED: tl.constexpr = STEP.aligned  # an attribute is no compile-time value when passed on
    INPUT: tl.constexpr = STEP.grad
    HARDWARE: tl.constexpr = STEP.hardware
    if STEP.grad == "float32":
        g = float_of(load_words(address, offsets, n, MASKED, tl.int32, ALIGNED))
    elif STEP.grad == "bfloat16" and STEP.hardware:
        g = widened_bfloat16(load_words(address, offsets, n, MASKED, tl.int16, ALIGNED))
    else:
        words = load_words(address, offsets, n, MASKED, tl.int16, ALIGNED)
        g = widened(words, INPUT, HARDWARE)
    return g


@triton.jit
def _read_param(master, offsets, n, STEP: tl.constexpr, MASKED: tl.constexpr):
    ALIGNED: tl.constexpr = STEP.aligned
    address = master[0]
    if STEP.master == "float32":
        p = float_of(load_words(address, offsets, n, MASKED, tl.int32, ALIGNED))
    else:
        high = load_words(address, offsets, n, MASKED, tl.int16, ALIGNED)
        if STEP.master == "bfloat16_remainder":
            low = load_words(master[1], offsets, n, MASKED, tl.int16, ALIGNED)
            if STEP.hardware:
                p = joined(high, low)
            else:
                p = float_of((high.to(tl.int32) << 16) + low.to(tl.int32))
        else:
            p = widened(high, "bfloat16", STEP.hardware)
    return p


@triton.jit
def _write_param(master, p, group, seed, offsets, n, STEP: tl.constexpr, MASKED: tl.constexpr):
    """Store the master; the weight that the next forward pass sees, as float32."""
    ALIGNED: tl.constexpr = STEP.aligned
    HARDWARE: tl.constexpr = STEP.hardware
    bits = bits_of(p)
    magnitude = bits & MAGNITUDE
    if STEP.master == "float32":
        store_words(master[0], offsets, bits, n, MASKED, tl.int32, ALIGNED)
        visible = p
        if STEP.weight is not None:
            W: tl.constexpr = STEP.weight
            if master[2] != 0:
                weight = narrowed(p, W, HARDWARE)
                store_words(master[2], offsets, weight, n, MASKED, tl.int16, ALIGNED)
                visible = widened(weight, "bfloat16", HARDWARE)
    else:
        if STEP.master == "bfloat16_remainder":
            if HARDWARE:
                high, low = split(p)
            else:
                bits = tl.where(magnitude > INFINITY, 0x7FFF0000, bits)
                low = bits.to(tl.int16)
                high = ((bits - low.to(tl.int32)) >> 16).to(tl.int16)
            store_words(master[1], offsets, low, n, MASKED, tl.int16, ALIGNED)
        else:
            draws = _random_words(group, seed, STEP) & 0xFFFF
            up = ((draws < (bits & 0xFFFF)) & (magnitude < 0x7F7F0000)).to(tl.int32)
            high = ((bits >> 16) & 0xFFFF) + up
            high = tl.where(magnitude > INFINITY, 0x7FFF, high).to(tl.int16)
        store_words(master[0], offsets, high, n, MASKED, tl.int16, ALIGNED)
        visible = widened(high, "bfloat16", HARDWARE)
    return visible


@triton.jit
def _write_codes(places, weight, offsets, n, STEP: tl.constexpr, MASKED: tl.constexpr):
    """The FP8 codes of the new weight, cast with overflow "saturate", and its amax."""
    ALIGNED: tl.constexpr = STEP.aligned
    HARDWARE: tl.constexpr = STEP.hardware
    E: tl.constexpr = STEP.codes
    seen = bits_of(weight) & MAGNITUDE
    if MASKED:
        seen = tl.where(offsets < n, seen, 0)
    raise_to(places[2].to(tl.pointer_type(tl.int32)), tl.max(seen, axis=0))
    y = weight * tl.load(places[1].to(tl.pointer_type(tl.float32)))
    # Infinities saturate: to them the largest float32 is as large.
    bits = bits_of(y)
    capped = tl.where((bits & MAGNITUDE) == INFINITY, bits - 1, bits)
    code = narrowed(float_of(capped), E, HARDWARE)
    store_words(places[0], offsets, code, n, MASKED, tl.uint8, ALIGNED)


@triton.jit
def _random_words(first, seed, STEP: tl.constexpr):
    """Word i % 4 of group i // 4 for element i, as `fp8lab.emulation.random.random_words`."""
    BLOCK: tl.constexpr = STEP.block
    groups = first + tl.arange(0, BLOCK // 4).to(tl.int64)
    r0, r1, r2, r3 = tl.randint4x(tl.load(seed), groups)
    return tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3)).to(tl.int32)


@triton.jit
def scales_kernel(table, tops, skip, M: tl.constexpr, V: tl.constexpr):
    """One tensor a program: the scales of moments that are scaled by tensor; `tops` are 0 again."""
    if skip is not None:  # noqa: SIM102 (decided when it is compiled)
        if tl.load(skip) != 0:
            return
    tensor = tl.program_id(0)
    row = table + tensor * COLUMNS
    if M.by_tensor:
        scale = tl.load(row + EXP_AVG_SCALE).to(tl.pointer_type(tl.float32))
        tl.store(scale, inverse_scale_of(tl.load(tops + 2 * tensor), M, False))
        tl.store(tops + 2 * tensor, 0)
    if V.by_tensor:
        scale = tl.load(row + EXP_AVG_SQ_SCALE).to(tl.pointer_type(tl.float32))
        tl.store(scale, inverse_scale_of(tl.load(tops + 2 * tensor + 1), V, False))
        tl.store(tops + 2 * tensor + 1, 0)
