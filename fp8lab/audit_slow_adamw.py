"""The AdamW step that the audit holds the oracle's to, written once more.

Where the oracle computes in float32, this computes every operation in float64 and rounds it to
float32: the same bits, since 53 >= 2 * 24 + 2 bits make the second rounding of a sum, product,
quotient or root innocuous (Figueroa, 1995). Fused multiply-adds are Fractions, codes are
`emulation.scalar`'s, halves of words are Python's integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.audit_slow import fused
from fp8lab.audit_slow_moments import r
from fp8lab.emulation.scalar import quantize_scalar
from fp8lab.formats import BFLOAT16, FloatFormat
from fp8lab.optimizer_formats import (
    AdamOrder,
)

Array = npt.NDArray[Any]

_PHILOX_KEY, _PHILOX = (0x9E3779B9, 0xBB67AE85), (0xD2511F53, 0xCD9E8D57)
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Numbers:
    """A step's numbers: Python floats, as the optimizer was given them."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def new_values(
    order: AdamOrder,
    decoupled: bool,
    numbers: Numbers,
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    places: Array,
    size: int,
) -> tuple[Array, Array, Array]:
    """Parameter and moments after a step, float32 values in float64.

    Args:
        order, decoupled: What is computed.
        numbers: The step's.
        p, g, m, v: float32 values in float64, 1-D.
        places, size: Where each element lies in its parameter, and how many that has.
    """
    k = _constants(order, decoupled, numbers)
    with np.errstate(all="ignore"):
        still = order.skips_zero_decay and k["decay"] == 0
        if not decoupled and not still:
            plain = r(g + r(k["decay"] * p))
            turn = places if size % 4 == 0 else places // 512
            keep = np.full(len(p), order.l2 == "rounded")
            if order.l2 == "first_rounded":
                keep = turn % 4 == 0
            g = plain if keep.all() else np.where(keep, plain, fma(k["decay"], p, g))
        if decoupled and order.decay == "multiply":
            p = r(p * k["decay"])
        elif decoupled and order.decay == "subtract" and not still:
            p = r(p - r(k["decay"] * p))
        elif decoupled and order.decay == "subtract_fused" and not still:
            p = fma(-k["decay"], p, p)
        m = _first(order.first_moment, m, g, k)
        new = _second(order.second_moment, v, g, k)
        last = places >= size // 8 * 8
        if order.tail is not None and last.any():
            new = np.where(last, _second(order.tail, v, g, k), new)
        if order.denominator == "corrected_square":
            d = r(r(np.sqrt(r(new / k["correction2"]))) + k["eps"])
        else:
            d = r(r(r(np.sqrt(new)) / k["correction2"]) + k["eps"])
        if order.update == "moment":
            p = r(p - r(k["lr"] * r(r(m / k["correction1"]) / d)))
        elif order.update == "step_size":
            p = r(p - r(r(k["correction1"] * m) / d))
        elif order.update == "step_size_fused":
            p = fma(-k["correction1"], r(m / d), p)
        else:
            u = r(r(m / k["correction1"]) / d)
            p = fma(-k["lr"], fma(k["decay"], p, u) if decoupled else u, p)
    return p, m, new


def fma(x: Any, y: Any, z: Any) -> Array:
    """x*y + z in exact fractions, rounded once."""
    rows = zip(*(a.tolist() for a in np.broadcast_arrays(x, y, z)), strict=True)
    return np.array([fused(*row) for row in rows], np.float64)


def _first(rule: str, m: Array, g: Array, k: dict[str, float]) -> Array:
    b1, w1 = k["beta1"], k["weight1"]
    if rule == "weighted":
        return r(r(b1 * m) + r(w1 * g))
    if rule == "decay_fused":
        return fma(b1, m, r(w1 * g))
    if rule == "nested_fused":
        return fma(b1, m, fma(-b1, g, g))
    if w1 < 0.5:
        return fma(w1, r(g - m), m)
    return fma(float(r(w1 - 1)), r(g - m), g)


def _second(rule: str, v: Array, g: Array, k: dict[str, float]) -> Array:
    b2, w2 = k["beta2"], k["weight2"]
    if rule == "square":
        return r(r(b2 * v) + r(w2 * r(g * g)))
    if rule == "weight_fused":
        return fma(r(w2 * g), g, r(b2 * v))
    if rule == "decay_fused":
        return fma(b2, v, r(r(w2 * g) * g))
    if rule == "square_fused":
        return fma(w2, r(g * g), r(b2 * v))
    return fma(b2, v, fma(-b2, r(g * g), r(g * g)))


def _constants(order: AdamOrder, decoupled: bool, own: Numbers) -> dict[str, float]:
    """The float32 constants, as `AdamOrder` says they are made."""

    def narrow(value: float) -> float:
        return float(r(value))

    lr, decay, (b1, b2) = own.lr, own.weight_decay, own.betas
    if order.constants == "float32":
        lr, decay, b1, b2 = (narrow(value) for value in (lr, decay, b1, b2))
        w1, w2 = narrow(1 - b1), narrow(1 - b2)
        c1 = narrow(1 - narrow(_power(b1, own.step)))
        c2 = narrow(1 - narrow(_power(b2, own.step)))
    else:
        w1, w2 = 1 - b1, 1 - b2
        if order.constants == "float32_betas":
            b1, b2 = narrow(b1), narrow(b2)
            w1, w2 = narrow(1 - b1), narrow(1 - b2)
        c1, c2 = 1 - _power(b1, own.step), 1 - _power(b2, own.step)
    if decoupled and order.decay == "multiply":
        decay = 1 - lr * decay
    elif decoupled and order.decay != "inside":
        decay = lr * decay
    found = {
        "decay": decay,
        "beta1": b1,
        "weight1": w1,
        "beta2": b2,
        "weight2": w2,
        "correction1": lr / c1 if order.update.startswith("step_size") else c1,
        "correction2": math.sqrt(c2) if order.denominator == "corrected_root" else c2,
        "eps": own.eps,
        "lr": lr,
    }
    return {name: narrow(value) for name, value in found.items()}


def _power(base: float, exponent: int) -> float:
    """base**exponent by square and multiply from the lowest bit: the contract's order."""
    result = 1.0
    for bit in bin(exponent)[:1:-1]:
        result = result * base if bit == "1" else result
        base = base * base
    return result


def split(master: Array) -> tuple[Array, Array]:
    """`fp8lab.emulation.masters.split_master`, from words as numbers."""
    high, low = [], []
    with np.errstate(invalid="ignore"):
        words = master.astype(np.float32).view(np.uint32).tolist()
    for word in words:
        nan = word & 0x7FFFFFFF > 0x7F800000
        rest = (word & 0xFFFF) - (0x10000 if word & 0x8000 else 0)
        high.append(0x7FFF if nan else (word - rest) >> 16)
        low.append(0 if nan else rest)
    return np.array(high, np.uint16).view(BFLOAT16.dtype), np.array(low, np.int16)


def join(weight: Array, remainder: Array) -> Array:
    """`fp8lab.emulation.masters.join_master`: float32 values in float64."""
    pairs = zip(weight.view(np.uint16).tolist(), remainder.tolist(), strict=True)
    words = np.array([((high << 16) + low) & _WORD for high, low in pairs], np.uint32)
    with np.errstate(invalid="ignore"):
        return words.view(np.float32).astype(np.float64)


def round_stochastically(values: Sequence[float], words: Sequence[int]) -> Array:
    """`fp8lab.emulation.masters.round_master`."""
    found = []
    for value, word in zip(values, words, strict=True):
        code = 0x7FFF if math.isnan(value) else quantize_scalar(value, BFLOAT16, overflow="ieee")
        if math.isfinite(value):
            code = quantize_scalar(
                value, BFLOAT16, rounding="stochastic", random_bits=word & 0xFFFF, bit_count=16
            )
        found.append(code)
    return np.array(found, np.uint16).view(BFLOAT16.dtype)


def random_word(seed: int, place: int) -> int:
    """One word of `fp8lab.emulation.random.random_words`, place counted in words from 0."""
    counter, key = place // 4, seed % (1 << 64)
    c = [counter & _WORD, counter >> 32, 0, 0]
    k = [key & _WORD, key >> 32]
    for _ in range(10):
        first, second = c[0] * _PHILOX[0], c[2] * _PHILOX[1]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & _WORD,
            (first >> 32) ^ c[3] ^ k[1],
            first & _WORD,
        ]
        k = [(word + step) & _WORD for word, step in zip(k, _PHILOX_KEY, strict=True)]
    return c[place % 4]


def narrow_codes(values: Sequence[float], fmt: FloatFormat, scale: float | None) -> Array:
    """Codes of float32 values for the copies that a step writes; without a scale, IEEE's."""
    overflow = "ieee" if scale is None else "saturate"
    factor = 1.0 if scale is None else scale
    found = [quantize_scalar(float(r(x * factor)), fmt, overflow=overflow) for x in values]
    return np.array(found, fmt.code_dtype).view(fmt.dtype)
