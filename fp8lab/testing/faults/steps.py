"""One step of a tensor core with each of its rules replaceable, in float64: for wrong ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.chain_operands import Operand, decoded
from fp8lab.emulation.tensorcore import TensorCore

Array = npt.NDArray[Any]
_TINY = -1000  # an exponent below all others


@dataclass(frozen=True)
class Step:
    """Which rules of a step hold; by default all do.

    Attributes:
        normalised: Products are brought to a significand in [1, 2) before they are aligned.
        accumulator_in_emax: The accumulator takes part in the largest exponent.
        cuts_products, cuts_accumulator: The terms are cut when they are aligned.
        aligns_to_nearest: Terms are rounded to nearest even when they are aligned.
        aligns_down: Terms are cut toward minus infinity, as an arithmetic shift does.
        accumulator_late: The products are summed and cut alone; then the accumulator is added and
            the sum is cut again.
    """

    normalised: bool = False
    accumulator_in_emax: bool = True
    cuts_products: bool = True
    cuts_accumulator: bool = True
    aligns_to_nearest: bool = False
    aligns_down: bool = False
    accumulator_late: bool = False


def chain(a: Array, b: Array, core: TensorCore, step: Step, promote: int | None) -> Array:
    """The sum over k by wrong steps, promoted every `promote` of k; (M, N) float32.

    Args:
        a, b: Codes, (M, K) and (K, N).
        core: A core with a float32 accumulator that cuts toward zero.
    """
    left, right = decoded(a.T, core), decoded(b, core)
    count = left.values.shape[0]
    length = max(promote // core.step_k, 1) if promote else max(count, 1)
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for first in range(0, count, length):
        c = np.zeros_like(total)
        for index in range(first, min(first + length, count)):
            c = _one_step(left, right, index, c, core, step)
        total = total + c if promote else c
    return total


def _one_step(a: Operand, b: Operand, index: int, c: Array, core: TensorCore, step: Step) -> Array:
    assert core.fraction_bits is not None
    x, y = (o.values if o.raw is None else o.raw for o in (a, b))
    products = x[index][:, :, None].astype(np.float64) * y[index][:, None, :]
    outcome = products.sum(axis=0) + c
    special = ~np.isfinite(outcome)
    products = np.where(np.isfinite(products), products, 0.0)
    c = np.where(np.isfinite(c), c, np.float32(0))

    exponents = a.exponents[index][:, :, None].astype(np.int64) + b.exponents[index][:, None, :]
    if step.normalised:
        exponents = _exponent(products)
    exponents = np.where(products == 0, _TINY, exponents)
    own = np.where(c == 0, _TINY, np.maximum(_exponent(c.astype(np.float64)), -126))
    emax = np.maximum(exponents.max(axis=0, initial=_TINY), core.min_exponent)
    if step.accumulator_in_emax and not step.accumulator_late:
        emax = np.maximum(emax, own)
    quantum = np.ldexp(1.0, emax - core.fraction_bits)

    terms = _aligned(products / quantum, step) if step.cuts_products else products / quantum
    total = terms.sum(axis=0) * quantum
    addend = c.astype(np.float64)
    if step.accumulator_late:
        total = _cut(total, core.significand_bits) + addend
    else:
        total += _aligned(addend / quantum, step) * quantum if step.cuts_accumulator else addend
    result = (_cut(total, core.significand_bits) + 0.0).astype(np.float32)
    return np.where(special, outcome.astype(np.float32), result)


def _aligned(terms: Array, step: Step) -> Array:
    if step.aligns_to_nearest:
        return np.rint(terms)
    return np.floor(terms) if step.aligns_down else np.trunc(terms)


def _cut(values: Array, bits: int) -> Array:
    """Toward zero to that many significant bits, no finer than float32's subnormals."""
    quantum = np.ldexp(1.0, np.maximum(_exponent(values) - bits + 1, -149))
    return np.asarray(np.trunc(values / quantum) * quantum)


def _exponent(values: Array) -> Array:
    return np.frexp(values)[1].astype(np.int64) - 1
