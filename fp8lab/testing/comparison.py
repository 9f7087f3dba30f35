"""Equality of bits, and a report worth reading when it fails.

NumPy and ml_dtypes are all that this needs; torch tensors are taken where torch is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.bridge import to_numpy
from fp8lab.formats import FORMATS

Array = npt.NDArray[Any]

SHOWN = 8  # differences that a report lists
_FLOATS = tuple(np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
_FLOAT8 = {fmt.dtype: fmt for fmt in FORMATS.values()}
_WORDS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
}


def assert_bits_equal(
    actual: Any,
    expected: Any,
    *,
    inputs: Any = None,
    compare_nan_bits: bool = False,
) -> None:
    """Raise an AssertionError unless two arrays have the same shape, dtype and bits.

    -0 and +0 differ. In float64, float32, float16 and bfloat16 any NaN equals any other NaN, and
    never a number, unless `compare_nan_bits`. FP8 codes are compared as codes: NaN codes always
    count.

    Args:
        actual, expected: NumPy or ml_dtypes arrays, torch tensors on any device, or anything that
            `np.asarray` takes, in any mix: bool, integer or floating, of any shape.
        inputs: What the values were computed from, to be shown beside them: one array that
            broadcasts to the shape of `expected`, or a mapping from names to such arrays.
        compare_nan_bits: Whether the sign and payload of NaN count in the wide types too.

    Raises:
        AssertionError: They differ. The message says how many elements do and, for the first ones,
            their index, input, expected and actual value with their bits, and how far apart they
            are, counted in steps between neighbouring values of the type (ulps). For FP8 codes of
            an input "x" (and a "scale") it names the fault of a cast that explains every code.
        TypeError: An argument is of a type without bits to compare (object, complex, ...).
        ValueError: An input does not broadcast to the shape of `expected`.

    >>> import numpy as np
    >>> assert_bits_equal(np.float32([1, -0.0]), np.float32([1, -0.0]))
    >>> assert_bits_equal(np.float32([0.0]), np.float32([-0.0]), inputs=np.float32([-1e-50]))
    Traceback (most recent call last):
    AssertionError: 1 of 1 elements differ (float32, shape (1,)); first at 0
      input     -0.0 (0x80000000)
      expected  -0.0 (0x80000000)
      actual    0.0 (0x00000000)
      distance  0 ulp
    1 zero of the wrong sign
    """
    __tracebackhide__ = True  # pytest shows the report, not this function
    got = _as_array("actual", actual)
    want = _as_array("expected", expected)
    if got.shape != want.shape:
        raise AssertionError(f"shapes differ: actual {got.shape}, expected {want.shape}")
    if got.dtype != want.dtype:
        raise AssertionError(f"dtypes differ: actual {got.dtype}, expected {want.dtype}")
    shape = want.shape
    named = _named_inputs(inputs, shape)

    where = differing(got, want, compare_nan_bits=compare_nan_bits)
    if where.size:
        report = _report(got.reshape(-1), want.reshape(-1), where, shape, named)
        raise AssertionError(report + _cast_fault(got, want, named))


def differing(
    actual: Array, expected: Array, *, compare_nan_bits: bool = False
) -> npt.NDArray[np.intp]:
    """The flat indices, in C order, at which two arrays of one shape and dtype differ.

    They differ as for `assert_bits_equal`.
    """
    # Flat copies only where the memory is not in order already.
    got, want = actual.reshape(-1), expected.reshape(-1)
    where = np.flatnonzero(_bits(got) != _bits(want))
    if not compare_nan_bits and want.dtype in _FLOATS:
        where = where[~(_is_nan(got[where]) & _is_nan(want[where]))]
    return where


def _as_array(name: str, value: Any) -> Array:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        array = to_numpy(value)
    else:
        array = np.asarray(value)
    if array.dtype.kind not in "biu" and array.dtype not in (*_FLOATS, *_FLOAT8):
        raise TypeError(f"{name} has dtype {array.dtype}; accepted: bool, integers, floats, FP8")
    return array


def _named_inputs(inputs: Any, shape: tuple[int, ...]) -> dict[str, Array]:
    """The inputs by name, each broadcast to the shape of what was computed from them."""
    if inputs is None:
        return {}
    given = inputs if isinstance(inputs, Mapping) else {"input": inputs}
    arrays = {str(name): _as_array(str(name), value) for name, value in given.items()}
    for name, array in arrays.items():
        try:
            arrays[name] = np.broadcast_to(array, shape)
        except ValueError:
            raise ValueError(
                f"{name} has shape {array.shape}, which does not broadcast to {shape}"
            ) from None
    return arrays


def _bits(array: Array) -> Array:
    return array.view(_WORDS[array.dtype.itemsize])


def _is_nan(array: Array) -> npt.NDArray[np.bool_]:
    if array.dtype.kind in "biu":
        return np.zeros(array.shape, dtype=bool)
    with np.errstate(invalid="ignore"):  # a signalling NaN is still only a NaN
        return np.asarray(np.isnan(array.astype(np.float64)))


def ulps_between(got: Array, want: Array) -> npt.NDArray[np.uint64]:
    """How many steps between neighbouring values of the type lie between two arrays.

    Magnitude bits count values in order in every type here, so sign and magnitude make an integer
    that does; the two zeros share one.
    """
    first, second = _ordinals(got), _ordinals(want)
    with np.errstate(over="ignore"):
        forward = first.view(np.uint64) - second.view(np.uint64)
        return np.where(first > second, forward, np.uint64(0) - forward)


def _ordinals(array: Array) -> npt.NDArray[np.int64]:
    bits = _bits(array)
    if array.dtype == np.uint64:
        return np.asarray((bits ^ np.uint64(1 << 63)).view(np.int64))
    if array.dtype.kind in "biu":
        return array.astype(np.int64)
    fmt = _FLOAT8.get(array.dtype)
    if fmt is not None and not fmt.signed:
        return bits.astype(np.int64)
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    magnitude = (bits & ~sign).astype(np.int64)
    return np.asarray(np.where(bits & sign != 0, -magnitude, magnitude))


def _cast_fault(got: Array, want: Array, inputs: dict[str, Array]) -> str:
    """The fault of a cast from x to FP8 that gives just these codes, or nothing."""
    fmt, x = _FLOAT8.get(want.dtype), inputs.get("x", inputs.get("input"))
    scale = inputs.get("scale", np.ones(want.shape, np.float32)).reshape(-1)
    known = {"x", "scale", "input"}.issuperset(inputs) and bool((scale == scale[:1]).all())
    if fmt is None or x is None or x.dtype not in _FLOATS[1:] or not known:
        return ""
    from fp8lab.testing.diagnosis import guess_fault

    settings = {"fmt": fmt, "rounding": "nearest_even", "overflow": "saturate"}
    given = {"x": np.ascontiguousarray(x), "scale": np.asarray(scale[0], np.float64)}
    guess = guess_fault("cast", settings, given, {"codes": want}, {"codes": got})
    return "" if guess is None else f"\nprobable fault: {guess.fault}: {guess.sentence}"


def _report(
    got: Array, want: Array, where: Array, shape: tuple[int, ...], inputs: dict[str, Array]
) -> str:
    """The text for flat arrays that differ at the flat indices `where`."""
    positions = [position(int(index), shape) for index in where[:SHOWN]]
    first_got, first_want = got[where], want[where]
    one_nan = _is_nan(first_got) ^ _is_nan(first_want)
    two_nan = _is_nan(first_got) & _is_nan(first_want)
    ulps = ulps_between(first_got, first_want)
    numbers = ~(one_nan | two_nan)
    distances = [
        f"{ulp} ulp" if number else "NaN"
        for ulp, number in zip(ulps[:SHOWN], numbers[:SHOWN], strict=True)
    ]
    columns = {
        name: [cell_text(array.flat[int(index)]) for index in where[:SHOWN]]
        for name, array in inputs.items()
    }
    columns["expected"] = [cell_text(value) for value in first_want[:SHOWN]]
    columns["actual"] = [cell_text(value) for value in first_got[:SHOWN]]
    columns["distance"] = distances

    width = max(map(len, columns))
    lines = [
        f"{where.size} of {want.size} elements differ ({want.dtype}, shape {shape});"
        f" first at {positions[0]}",
        *(f"  {name:<{width}}  {cells[0]}" for name, cells in columns.items()),
    ]
    notes = [
        (one_nan.sum(), "NaN against a number"),
        (two_nan.sum(), "NaN of other bits"),
        ((numbers & (ulps == 0)).sum(), "zero of the wrong sign"),
    ]
    summary = [f"{count} {what}" for count, what in notes if count]
    if numbers.sum() > 1:
        summary.insert(0, f"largest distance {ulps[numbers].max()} ulp")
    if summary:
        lines.append("; ".join(summary))
    if where.size > 1:
        lines += _table({"index": positions, **columns})
    return "\n".join(lines)


def position(index: int, shape: tuple[int, ...]) -> str:
    place = tuple(int(i) for i in np.unravel_index(index, shape))
    return str(place[0]) if len(place) == 1 else str(place)


def cell_text(value: Any) -> str:
    """A value and its bits. The value of an FP8 code, too, is written out in full."""
    array = np.asarray(value)
    text = str(float(array)) if array.dtype in _FLOAT8 else str(value)
    return f"{text} (0x{int(_bits(array)):0{2 * array.dtype.itemsize}X})"


def _table(columns: dict[str, list[str]]) -> list[str]:
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    header = "  ".join(f"{name:<{width}}" for name, width in widths.items())
    rows = (
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths.values(), strict=True))
        for row in zip(*columns.values(), strict=True)
    )
    return [line.rstrip() for line in (header, *rows)]
