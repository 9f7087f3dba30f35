"""What the audit holds the fast oracle to: the same contracts, once more, one element at a time.

Values are Fractions and Python's integers, and are rounded once by `emulation.dot.rounded` and
`emulation.scalar`; nothing is shared with the arrays, tables and chains of the fast forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.dot import FLOAT32, dot, rounded, value_of
from fp8lab.emulation.scalar import quantize_scalar
from fp8lab.emulation.tensorcore import HOPPER_FP8
from fp8lab.formats import BFLOAT16, E8M0, FLOAT16, FORMATS, Float8Format, FloatFormat

Array = npt.NDArray[Any]

_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), 2.0**-127
LEAF, LANES = 16384, 1024


def nearest(exact: Fraction) -> float:
    """A fraction as the nearest float32, ties to even; +0 for zero."""
    return float(rounded(exact, 24, FLOAT32, nearest=True))


def times(x: float, y: float) -> float:
    """x*y of two float32, rounded once."""
    plain = x * y  # exact, or not finite, or a zero with its sign
    if plain == 0 or not math.isfinite(plain):
        return plain
    return math.copysign(nearest(Fraction(x) * Fraction(y)), plain)


def fused(x: float, y: float, z: float) -> float:
    """x*y + z of three float32, rounded once."""
    plain = x * y + z
    if not all(map(math.isfinite, (x, y, z))):
        return plain
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    return math.copysign(nearest(exact), plain if exact == 0 else exact)


def plus(x: float, y: float) -> float:
    """x + y of two float32, rounded once."""
    return fused(x, 1.0, y)


def inverse(scale: float) -> float:
    """1 / scale."""
    return nearest(1 / Fraction(scale))


def floats(values: Array) -> list[float]:
    """An array of any of the floating types as Python's floats."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        found: list[float] = values.astype(np.float64).reshape(-1).tolist()
    return found


def codes(x: Array, fmt: FloatFormat, scales: Sequence[float], overflow: Any = "saturate") -> Array:
    """Codes of some elements, each multiplied by its scale first; a NaN scale gives NaN."""
    found = [
        quantize_scalar(times(value, scale), fmt, overflow=overflow)
        for value, scale in zip(floats(x), scales, strict=True)
    ]
    return np.array(found, fmt.code_dtype).view(fmt.dtype)


def amax(x: Array) -> float:
    """The largest magnitude, by comparing numbers; NaN if there is one."""
    if x.size == 0:
        return 0.0
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        # The magnitude of a maximum that is -0 is 0.
        return math.nan if np.isnan(wide).any() else abs(max(float(wide.max()), -float(wide.min())))


def scale_from(
    largest: float, fmt: Float8Format, *, margin: int, power_of_two: bool, previous: float = 1.0
) -> float:
    """`fp8lab.emulation.scaling.scale_from_amax` of one amax."""
    if not 0 < largest < math.inf:
        return previous
    exact = Fraction(fmt.max_finite) / 2**margin / Fraction(largest)
    scale = min(max(nearest(exact), _SMALLEST), _LARGEST)
    return _power_below(scale) if power_of_two else scale


def torchao_scale(largest: float, fmt: Float8Format, *, power_of_two: bool) -> float:
    """Current scaling as torchao has it; what is no scale is 1."""
    if not largest < math.inf:
        return 1.0
    scale = nearest(Fraction(fmt.max_finite / max(largest, 1e-12)))
    return _power_below(scale) if power_of_two else scale


def mx_code(largest: float, fmt: Float8Format, rounding: str) -> int:
    """`fp8lab.emulation.scaling.mx_scale` of one amax."""
    if math.isnan(largest):
        return 255
    if math.isinf(largest):
        return 254
    if largest == 0:
        return 0
    emax = math.frexp(fmt.max_finite)[1] - 1
    exact = Fraction(largest)
    power = math.frexp(largest)[1] - 1 - emax  # the floor
    if rounding == "nearest" and exact / Fraction(2) ** (power + emax) >= Fraction(3, 2):
        power += 1
    if rounding == "up":
        power -= 1
        while Fraction(2) ** power < exact / Fraction(fmt.max_finite):
            power += 1
    return max(power + 127, 0)


def mx_value(code: int) -> float:
    """The value of an E8M0 code."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


def update(
    scale: float,
    history: Sequence[float],
    fmt: Float8Format,
    *,
    margin: int,
    algorithm: str,
    power_of_two: bool,
    group_amax: float | None,
) -> tuple[float, list[float]]:
    """`fp8lab.emulation.scaling.update_delayed` of one tensor's state."""
    last = history[0] if group_amax is None else group_amax
    if last == 0:
        return scale, list(history)
    seen = [last, *history[1:]] if algorithm == "max" else [last]
    largest = math.nan if any(map(math.isnan, seen)) else max(seen)
    new = scale_from(largest, fmt, margin=margin, power_of_two=power_of_two, previous=scale)
    return new, [0.0, *history[2:], last][: len(history)]


def decoded(given: Array, inverses: Sequence[float]) -> Array:
    """Values of some codes, each times its inverse scale."""
    fmt = next(own for own in FORMATS.values() if own.dtype == given.dtype)
    words = given.view(np.uint8).reshape(-1).tolist()
    found = [times(float(value_of(w, fmt)), s) for w, s in zip(words, inverses, strict=True)]
    return np.array(found, np.float32)


class Scales:
    """The inverse scales of one operand of a product, told apart by their shape.

    Args:
        table: float32 or E8M0 codes: one element; (rows, 1); (rows, K/128) or (rows, K/32); or
            (rows/128, K/128); rounded up.
        rows, k: The operand's shape.
    """

    def __init__(self, table: Array, rows: int, k: int) -> None:
        self.table = table.reshape(1, 1) if table.size == 1 else table
        self.single = table.size == 1
        self.block: int | None = None
        self.square = False
        if self.single or table.shape == (rows, 1):
            return
        self.block = 128
        if table.shape == (rows, -(-k // 128)):
            return
        if table.shape == (rows, -(-k // 32)):
            self.block = 32
            return
        self.square = True

    def of(self, row: int, block: int = 0) -> float:
        """The scale of a row in one block of K."""
        down = 0 if self.single else row // (128 if self.square else 1)
        value = self.table[down, min(block, self.table.shape[1] - 1)]
        if self.table.dtype == E8M0.dtype:
            return mx_value(int(np.asarray(value).view(np.uint8)))
        return float(value)


def product_element(
    a: Array,
    b: Array,
    scale_a: tuple[Scales, int],
    scale_b: tuple[Scales, int],
    promote: int | None,
) -> float:
    """One element of `fp8lab.emulation.matmul.matmul`, up to the bias, a float32.

    Args:
        a, b: One row of each operand, codes (K,).
        scale_a, scale_b: The operand's scales, and which of its rows this is.
        promote: k between promotions; None is one chain, or the length of the scales' blocks.
    """
    (left, row), (right, column) = scale_a, scale_b
    block = left.block or right.block
    if block is None:
        length = promote or max(len(a), 1)
        total = 0.0
        for start in range(0, len(a), length):
            part = dot(a[start : start + length], b[start : start + length], HOPPER_FP8)
            total = plus(total, part) if promote else part
        x, y = left.of(row), right.of(column)
        if left.single and right.single:
            return times(total, times(x, y))
        return times(times(total, y), x)
    total = 0.0
    for place, start in enumerate(range(0, len(a), block)):
        part = dot(a[start : start + block], b[start : start + block], HOPPER_FP8)
        x, y = left.of(row, place), right.of(column, place)
        if left.square or right.square:
            total = fused(part, times(x, y), total)
        else:
            total = fused(times(part, x), y, total)
    return total


def narrowed(value: float, dtype: np.dtype[Any]) -> Any:
    """A float32 as bfloat16 or float16, to nearest even, or as it is."""
    fmt = {"bfloat16": BFLOAT16, "float16": FLOAT16}.get(dtype.name)
    if fmt is None:
        return np.float32(value)
    code = quantize_scalar(value, fmt, overflow="ieee")
    return np.array(code, fmt.code_dtype).view(
        ml_dtypes.bfloat16 if fmt is BFLOAT16 else np.float16
    )


def norm(
    grads: Sequence[Array], unscale: float, max_norm: float | None
) -> tuple[float, int, float]:
    """`fp8lab.emulation.gradients.gradient_norm`: norm, 1 where something is not finite, factor."""
    leaves = [0.0]
    for grad in grads:
        with np.errstate(all="ignore"):
            wide = grad.astype(np.float64).reshape(-1) * unscale  # exact: 48 bits
            flat = wide.astype(np.float32).tolist()
        for start in range(0, len(flat), LEAF):
            lanes = [0.0] * LANES
            for place, x in enumerate(flat[start : start + LEAF]):
                lanes[place % LANES] += x * x
            leaves.append(_order_free(lanes))
    total = _order_free(leaves)
    root = math.sqrt(total) if total >= 0 else math.nan
    found = nearest(Fraction(root)) if math.isfinite(root) else root
    factor = unscale
    if max_norm is not None and math.isnan(found):
        factor = math.nan
    elif max_norm is not None:
        above = plus(found, nearest(Fraction(1e-6)))
        reciprocal = 0.0 if math.isinf(above) else inverse(above)
        factor = times(unscale, min(times(reciprocal, nearest(Fraction(max_norm))), 1.0))
    return found, int(not math.isfinite(total)), factor


def _order_free(terms: Sequence[float]) -> float:
    """`fp8lab.emulation.gradients.order_free_sum` in Python's integers."""
    if any(map(math.isnan, terms)):
        return math.nan
    top = max(terms)
    if top == 0 or math.isinf(top):
        return top
    exponent = math.frexp(top)[1] - 1
    counted = [int(math.ldexp(term, 60 - exponent)) for term in terms]
    upper, lower = sum(c >> 30 for c in counted), sum(c & (2**30 - 1) for c in counted)
    return math.ldexp(float(upper) * 2.0**30 + float(lower), exponent - 60)


def _power_below(scale: float) -> float:
    return math.ldexp(0.5, math.frexp(scale)[1])
