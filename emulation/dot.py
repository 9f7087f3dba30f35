"""One element of a matrix product in exact arithmetic: slow, and meant to be obviously right.

Everything is a Fraction or an integer; nothing is shared with the fast form in
`fp8lab.emulation.chain`, which is tested against this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.tensorcore import TensorCore
from fp8lab.formats import TARGETS, FloatFormat

FLOAT32 = FloatFormat("float32", 8, 23, 127, "ieee", True, "float32")
_FORMATS = {fmt.dtype: fmt for fmt in TARGETS.values()}

# A finite value is a Fraction; infinities, NaN and -0 are floats.
Value = Fraction | float


def value_of(code: int, fmt: FloatFormat) -> Value:
    """The value of a code of a signed format."""
    magnitude = code & ~fmt.sign_bit
    sign = -1 if code & fmt.sign_bit else 1
    if fmt.nan == "negative_zero" and code == fmt.sign_bit:
        return math.nan
    if magnitude > fmt.max_code:
        return sign * math.inf if magnitude == fmt.infinity_code else math.nan
    if code == fmt.sign_bit:
        return -0.0
    field, mantissa = divmod(magnitude, 1 << fmt.mantissa_bits)
    significand = Fraction(mantissa, 1 << fmt.mantissa_bits) + (1 if field else 0)
    return sign * significand * Fraction(2) ** (max(field, 1) - fmt.bias)


def exponent_of(value: Fraction, fmt: FloatFormat) -> int:
    """The exponent of a value that is not zero, in a format: subnormals share the smallest."""
    numerator, denominator = abs(value).numerator, value.denominator
    exponent = numerator.bit_length() - denominator.bit_length()
    if Fraction(2) ** exponent > abs(value):
        exponent -= 1
    return max(exponent, fmt.min_exponent)


def rounded(value: Fraction, significand_bits: int, fmt: FloatFormat, *, nearest: bool) -> Value:
    """A value at that many bits, no finer than the format's subnormals; +0 for zero.

    What is past the largest finite value becomes infinite.
    """
    if value == 0:
        return Fraction(0)
    quantum = Fraction(2) ** (
        max(
            exponent_of(value, fmt) - significand_bits + 1,
            fmt.min_exponent - fmt.mantissa_bits,
        )
    )
    steps = abs(value) / quantum
    # round() takes ties to even.
    magnitude = (round(steps) if nearest else math.floor(steps)) * quantum
    sign = -1 if value < 0 else 1
    return sign * magnitude if magnitude < Fraction(2) ** (fmt.bias + 1) else sign * math.inf


def dot(
    a: npt.NDArray[np.generic],
    b: npt.NDArray[np.generic],
    core: TensorCore,
    *,
    accumulator: float = 0.0,
) -> float:
    """The chain over one row of A and one column of B.

    Args:
        a, b: Operands of shape (K,), of dtypes that the core takes.
        core: The arithmetic.
        accumulator: What the chain starts from, a value of the core's accumulator type.

    Returns:
        The accumulator after the last step, exact in a Python float. Without a step it is the one
        given.

    >>> import numpy as np
    >>> from fp8lab.emulation.tensorcore import HOPPER_FP8
    >>> from fp8lab.formats import E4M3
    >>> a = np.array([448, 0.875], np.float32).astype(E4M3.dtype)
    >>> b = np.array([448, 0.5], np.float32).astype(E4M3.dtype)
    >>> dot(a, b, HOPPER_FP8)
    200704.0
    """
    terms = [(_decoded(x, core), _decoded(y, core)) for x, y in zip(a, b, strict=True)]
    terms += [(_ZERO, _ZERO)] * (-len(terms) % core.block_k)
    if core.order:
        size = len(core.order)
        terms = [terms[start + k] for start in range(0, len(terms), size) for k in core.order]
    total = accumulator
    for start in range(0, len(terms), core.step_k):
        total = _step(terms[start : start + core.step_k], total, core)
    return total


# A decoded operand: its value, and its exponent (of no meaning for zero, Inf and NaN).
_Operand = tuple[Value, int]
_ZERO: _Operand = (Fraction(0), 0)


def _decoded(x: np.generic, core: TensorCore) -> _Operand:
    fmt = _FORMATS[x.dtype]
    value = value_of(int(np.asarray(x).view(fmt.code_dtype)), fmt)
    if isinstance(value, float) or value == 0:
        return value, 0
    return value, exponent_of(value, fmt if core.read_as is None else TARGETS[core.read_as])


def _step(terms: Sequence[tuple[_Operand, _Operand]], c: float, core: TensorCore) -> float:
    factors = [(float(x), float(y)) for (x, _), (y, _) in terms]
    # IEEE arithmetic on float64 decides what NaN and infinities give; a finite sum of these ranges
    # never overflows there.
    outcome = sum((x * y for x, y in factors), start=c)
    if not math.isfinite(outcome):
        return outcome
    fmt = TARGETS["float16"] if core.accumulator == "float16" else FLOAT32
    parts = [
        (x * y, ex + ey)
        for (x, ex), (y, ey) in terms
        if isinstance(x, Fraction) and isinstance(y, Fraction) and x * y != 0
    ]
    if c != 0:
        parts.append((Fraction(c), exponent_of(Fraction(c), fmt)))
    if core.fraction_bits is None:
        total = sum((part for part, _ in parts), start=Fraction(0))
    else:
        emax = max([core.min_exponent, *(exponent for _, exponent in parts)])
        quantum = Fraction(2) ** (emax - core.fraction_bits)
        total = sum((math.trunc(part / quantum) * quantum for part, _ in parts), Fraction(0))
    result = rounded(total, core.significand_bits, fmt, nearest=core.rounding == "nearest_even")
    if result == 0 and core.fraction_bits is None:
        return math.copysign(0.0, outcome)  # a fused multiply-add knows -0; a tensor core does not
    return float(result)
