"""Bounds for kernels that promise less than equality. Each is named and derived.

With u = 2**-24, the unit of rounding to nearest in float32, n roundings one after the other change
a value by a factor of at most 1 + gamma(n), gamma(n) = n*u / (1 - n*u) (Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., lemma 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.testing.comparison import differing, ulps_between
from fp8lab.testing.contracts.base import Contract

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Indices = npt.NDArray[np.intp]

UNIT = 2.0**-24
_UNIT64 = 2.0**-53
_SMALLEST = 2.0**-149
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Bound:
    """How far a kernel's results may be from the oracle's.

    Attributes:
        name: What reports call it.
        derivation: Why it holds, in a sentence.
        contracts: The contracts it is for, by name.
        outside: From (inputs, output's name, actual, expected) to the flat indices at which it is
            broken.
    """

    name: str
    derivation: str
    contracts: tuple[str, ...]
    outside: Callable[[Arrays, str, Array, Array], Indices]

    def check_for(self, contract: Contract) -> None:
        """Refuse a contract that the bound is not for.

        Raises:
            ValueError: It is for others.
        """
        if contract.name not in self.contracts:
            raise ValueError(
                f"the bound {self.name} is for {', '.join(self.contracts)}; the contract is"
                f" {contract.name}"
            )

    def broken(self, inputs: Arrays, output: str, actual: Array, expected: Array) -> Indices:
        """The flat indices at which an output breaks the bound."""
        return self.outside(inputs, output, actual, expected)


def gamma(roundings: int, unit: float = UNIT) -> float:
    """The largest relative change that this many roundings one after the other can make.

    >>> gamma(1) > UNIT and gamma(1) < 1.0001 * UNIT
    True
    """
    return roundings * unit / (1 - roundings * unit)


def _any_order(inputs: Arrays, output: str, actual: Array, expected: Array) -> Indices:
    a, b = (inputs[name].astype(np.float64) for name in ("a", "b"))
    scale_a, scale_b = (float(inputs[f"inverse_scale_{side}"]) for side in "ab")
    k = a.shape[1]
    with np.errstate(all="ignore"):
        exact = (a @ b) * (scale_a * scale_b)
        magnitude = (np.abs(a) @ np.abs(b)) * (scale_a * scale_b)
        room = (gamma(k + 2) + gamma(k + 2, _UNIT64)) * magnitude
        # What a result, or the product of both scales, loses where it is subnormal.
        room += _SMALLEST * (1 + magnitude / max(scale_a * scale_b, _SMALLEST))
        near = np.abs(actual.astype(np.float64) - exact) <= room
        special = ~np.isfinite(a @ b)
    judged = np.isfinite(magnitude) & (magnitude < _LARGEST / 2) & (scale_a * scale_b < _LARGEST)
    wrong = judged & ~near
    if special.any():  # NaN and Inf have no distance: they are the oracle's
        other = np.zeros(exact.size, bool)
        other[differing(actual, expected)] = True
        wrong |= special & other.reshape(exact.shape)
    return np.flatnonzero(wrong)


def _within_ulps(most: int) -> Callable[[Arrays, str, Array, Array], Indices]:
    def outside(inputs: Arrays, output: str, actual: Array, expected: Array) -> Indices:
        where = differing(actual, expected)
        got, want = actual.reshape(-1)[where], expected.reshape(-1)[where]
        with np.errstate(invalid="ignore"):
            numbers = np.isfinite(got.astype(np.float64)) & np.isfinite(want.astype(np.float64))
        return where[~(numbers & (ulps_between(got, want) <= most))]

    return outside


def _norm_any_order(inputs: Arrays, output: str, actual: Array, expected: Array) -> Indices:
    values = [array.astype(np.float64).reshape(-1) for array in inputs.values()]
    joined = np.concatenate([np.zeros(0), *values])
    total = float(np.sum(joined * joined))
    if not np.isfinite(total):
        return differing(actual, expected)
    squares = gamma(joined.size + 1) * total + joined.size * _SMALLEST
    room = squares / max(np.sqrt(total), _SMALLEST) + gamma(2) * np.sqrt(total) + _SMALLEST
    judged = total < _LARGEST / 2  # beyond it float32 squares leave their range
    near = abs(float(actual) - np.sqrt(total)) <= room
    return np.flatnonzero(np.atleast_1d(judged and not near))


any_order_bound = Bound(
    "any_order",
    "products of FP8 codes are exact in float32; k additions in any order, each rounded to"
    " nearest, and two products with scales move a sum by at most gamma(k + 2) times the sum of"
    " magnitudes (where that leaves float32 nothing is judged)",
    ("matmul",),
    _any_order,
)

one_code_bound = Bound(
    "one_code",
    "one more rounding of the scale, or of its product with x, moves y by less than a part in"
    " 2**22, which crosses at most one midpoint between neighbouring codes; NaN and Inf stay",
    ("cast", "requantize"),
    _within_ulps(1),
)

reciprocal_scale_bound = Bound(
    "reciprocal_scale",
    "max_finite * (1 / amax) rounds twice and max_finite / amax once: they differ by at most 3 * u"
    " of their value, an ulp is more than u of it, and so by at most 2 ulp",
    ("scale_from_amax",),
    _within_ulps(2),
)

norm_any_order_bound = Bound(
    "norm_any_order",
    "n rounded squares added in any order in float32 move the sum by at most gamma(n + 1) of it,"
    " and its root, rounded once, by no larger part (where the sum leaves float32 nothing is"
    " judged)",
    ("norm",),
    _norm_any_order,
)

BOUNDS: dict[str, Bound] = {
    bound.name: bound
    for bound in (any_order_bound, one_code_bound, reciprocal_scale_bound, norm_any_order_bound)
}
