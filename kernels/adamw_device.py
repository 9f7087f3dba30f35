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
    load_words,
    moment_top,
    read_moment,
    store_words,
    write_moment,
)

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
        weight: The format of the copy of a float32 parameter that is written: bfloat16, or None.
        codes: The format of the FP8 codes of the weight, or None.
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
    if skip is not None:  # noqa: SIM102 (decided when it is compiled)
        if tl.load(skip) != 0:
            return
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    row = table + tensor * COLUMNS
    n = tl.load(row + SIZE)
    start = (chunk - tl.load(row + FIRST_CHUNK)) * STEP.block
    # Full chunks carry no mask: one that depends on n would make every access a scalar one. Each
    # branch holds the whole body, so that neither decides how the other spreads over threads.
    if start + STEP.block <= n:
        _step(
            row,
            tensor,
            start,
            n,
            constants,
            factor,
            seed,
            tops,
            ORDER,
            M,
            V,
            STEP,
            ONLY_TOPS,
            False,
        )
    else:
        _step(
            row, tensor, start, n, constants, factor, seed, tops, ORDER, M, V, STEP, ONLY_TOPS, True
        )


@triton.jit
def _step(
    row,
    tensor,
    start,
    n,
    constants,
    factor,
    seed,
    tops,
    ORDER: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    STEP: tl.constexpr,
    ONLY_TOPS: tl.constexpr,
    MASKED: tl.constexpr,
):
    # Named here: an attribute of a compile-time object is none itself when it is passed on.
    ALIGNED: tl.constexpr = STEP.aligned
    HARDWARE: tl.constexpr = STEP.hardware
    BLOCK: tl.constexpr = STEP.block
    INPUT: tl.constexpr = STEP.grad
    offsets = start + tl.arange(0, BLOCK)
    k = constants + tl.load(row + GROUP) * CONSTANTS
    p = _read_param(row, offsets, n, STEP, MASKED)
    if STEP.grad == "float32":
        words = load_words(tl.load(row + GRAD), offsets, n, MASKED, tl.int32, ALIGNED)
    else:
        words = load_words(tl.load(row + GRAD), offsets, n, MASKED, tl.int16, ALIGNED)
    g = widened(words, INPUT, HARDWARE)
    if factor is not None:
        g = g * tl.load(factor)
    m = read_moment(
        tl.load(row + EXP_AVG),
        tl.load(row + EXP_AVG_SCALE),
        tl.load(row + EXP_AVG_POWER),
        offsets,
        start,
        n,
        M,
        MASKED,
        ALIGNED,
        HARDWARE,
        BLOCK,
    )
    v = read_moment(
        tl.load(row + EXP_AVG_SQ),
        tl.load(row + EXP_AVG_SQ_SCALE),
        tl.load(row + EXP_AVG_SQ_POWER),
        offsets,
        start,
        n,
        V,
        MASKED,
        ALIGNED,
        HARDWARE,
        BLOCK,
    )
    decayed = g
    if not STEP.decoupled:
        decayed = with_l2(p, g, k, offsets, n, ORDER, STEP)
    m = first_moment(m, decayed, k, ORDER, STEP)
    v = second_moment(v, decayed, k, offsets, n, ORDER, STEP, MASKED)
    if ONLY_TOPS:
        if M.by_tensor:
            tl.atomic_max(tops + 2 * tensor, moment_top(m, M, BLOCK), sem="relaxed")
        if V.by_tensor:
            tl.atomic_max(tops + 2 * tensor + 1, moment_top(v, V, BLOCK), sem="relaxed")
    else:
        p = new_param(p, m, v, k, ORDER, STEP)
        m_top = 0
        v_top = 0
        if M.by_tensor:
            m_top = tl.load(tops + 2 * tensor)
        if V.by_tensor:
            v_top = tl.load(tops + 2 * tensor + 1)
        write_moment(
            tl.load(row + EXP_AVG),
            tl.load(row + EXP_AVG_SCALE),
            tl.load(row + EXP_AVG_POWER),
            m,
            g,
            m_top,
            offsets,
            start,
            n,
            M,
            MASKED,
            ALIGNED,
            HARDWARE,
            BLOCK,
        )
        write_moment(
            tl.load(row + EXP_AVG_SQ),
            tl.load(row + EXP_AVG_SQ_SCALE),
            tl.load(row + EXP_AVG_SQ_POWER),
            v,
            g,
            v_top,
            offsets,
            start,
            n,
            V,
            MASKED,
            ALIGNED,
            HARDWARE,
            BLOCK,
        )
        _write_param(row, p, offsets, start, n, seed, STEP, MASKED)


@triton.jit
def _read_param(row, offsets, n, STEP: tl.constexpr, MASKED: tl.constexpr):
    ALIGNED: tl.constexpr = STEP.aligned
    address = tl.load(row + PARAM)
    if STEP.master == "float32":
        bits = load_words(address, offsets, n, MASKED, tl.int32, ALIGNED)
    else:
        high = load_words(address, offsets, n, MASKED, tl.int16, ALIGNED).to(tl.int32)
        if STEP.master == "bfloat16_remainder":
            rest = tl.load(row + REMAINDER)
            low = load_words(rest, offsets, n, MASKED, tl.int16, ALIGNED).to(tl.int32) & 0xFFFF
            bits = ((high - (low >> 15)) << 16) | low
        else:
            bits = high << 16
    return float_of(bits)


@triton.jit
def _write_param(row, p, offsets, start, n, seed, STEP: tl.constexpr, MASKED: tl.constexpr):
    ALIGNED: tl.constexpr = STEP.aligned
    HARDWARE: tl.constexpr = STEP.hardware
    address = tl.load(row + PARAM)
    bits = bits_of(p)
    magnitude = bits & MAGNITUDE
    if STEP.master == "float32":
        store_words(address, offsets, bits, n, MASKED, tl.int32, ALIGNED)
        visible = p
        if STEP.weight is not None:
            W: tl.constexpr = STEP.weight
            weight = narrowed(p, W, HARDWARE)
            store_words(tl.load(row + WEIGHT), offsets, weight, n, MASKED, tl.int16, ALIGNED)
            visible = widened(weight, "bfloat16", HARDWARE)
    else:
        low = bits & 0xFFFF
        if STEP.master == "bfloat16_remainder":
            low = tl.where(magnitude > INFINITY, 0, low)
            up = low >> 15
            rest = tl.load(row + REMAINDER)
            store_words(rest, offsets, low.to(tl.int16), n, MASKED, tl.int16, ALIGNED)
        else:
            draws = _random_words(row, start, seed, STEP) & 0xFFFF
            up = ((draws < low) & (magnitude < 0x7F7F0000)).to(tl.int32)
        high = ((bits >> 16) & 0xFFFF) + up
        high = tl.where(magnitude > INFINITY, 0x7FFF, high).to(tl.int16)
        store_words(address, offsets, high, n, MASKED, tl.int16, ALIGNED)
        visible = widened(high, "bfloat16", HARDWARE)
    if STEP.codes is not None:
        _write_codes(row, visible, offsets, n, STEP, MASKED)


@triton.jit
def _write_codes(row, weight, offsets, n, STEP: tl.constexpr, MASKED: tl.constexpr):
    """The FP8 codes of the new weight, cast with overflow "saturate", and its amax."""
    ALIGNED: tl.constexpr = STEP.aligned
    HARDWARE: tl.constexpr = STEP.hardware
    E: tl.constexpr = STEP.codes
    amax = tl.load(row + CODES_AMAX).to(tl.pointer_type(tl.int32))
    seen = bits_of(weight) & MAGNITUDE
    if MASKED:
        seen = tl.where(offsets < n, seen, 0)
    tl.atomic_max(amax, tl.max(seen, axis=0), sem="relaxed")
    y = weight * tl.load(tl.load(row + CODES_SCALE).to(tl.pointer_type(tl.float32)))
    # Infinities saturate: to them the largest float32 is as large.
    bits = bits_of(y)
    capped = tl.where((bits & MAGNITUDE) == INFINITY, bits - 1, bits)
    code = narrowed(float_of(capped), E, HARDWARE)
    store_words(tl.load(row + CODES), offsets, code, n, MASKED, tl.uint8, ALIGNED)


@triton.jit
def _random_words(row, start, seed, STEP: tl.constexpr):
    """Word i % 4 of group i // 4 for element i, as `fp8lab.emulation.random.random_words`."""
    BLOCK: tl.constexpr = STEP.block
    first = tl.load(row + RANDOM_OFFSET) + start // 4
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
        tl.store(scale, inverse_scale_of(tl.load(tops + 2 * tensor), M))
        tl.store(tops + 2 * tensor, 0)
    if V.by_tensor:
        scale = tl.load(row + EXP_AVG_SQ_SCALE).to(tl.pointer_type(tl.float32))
        tl.store(scale, inverse_scale_of(tl.load(tops + 2 * tensor + 1), V))
        tl.store(tops + 2 * tensor + 1, 0)
