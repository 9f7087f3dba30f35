"""Guessing the fault: which wrong computation gives exactly the bits that a kernel gave?

Each hypothesis (`fp8lab.testing.faults`) is one: the oracle's own pieces with one step of them
changed. A guess is made when a hypothesis explains every element of every output, those that are
right included; a hypothesis that explains the differences but not the rest is no guess. Where
several fit, the first is taken: they stand from the narrowest, which changes the fewest results, to
the widest. Where nothing explains a cast, its numbers and its NaNs may have a fault each; that of
the numbers is named where that of the NaNs is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.testing.faults import FAULTS, hypotheses_of
from fp8lab.testing.faults.hypothesis import same_bits

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Named = dict[str, Array]
Suspect = tuple[str, int]

# Where each element of a result depends on its own inputs alone, so that a sample will do.
ELEMENTWISE = frozenset({"cast", "dequantize"})
LARGEST = 1 << 15  # elements of an elementwise case that is looked at whole
_NAN_UNKNOWN = "NaN gives wrong codes too, by a fault that has no name here."
MOST_CASES = 16  # further calls that are asked for to tell faults apart


@dataclass(frozen=True)
class Guess:
    """What is probably wrong with a kernel.

    Attributes:
        fault: The fault's name, a key of `fp8lab.testing.faults.FAULTS`.
        sentence: What was seen and what to do about it, in one or two sentences.
    """

    fault: str
    sentence: str


def guess_fault(
    contract: str,
    settings: Mapping[str, object],
    inputs: Arrays,
    expected: Arrays,
    actual: Arrays,
    *,
    more: Iterable[tuple[Arrays, Arrays, Arrays]] = (),
    sure: bool = False,
) -> Guess | None:
    """Name the fault that explains a kernel's results to the last bit.

    Args:
        contract: Which contract failed: "cast", "matmul", ...
        settings: The contract's choices by parameter name (fmt, rounding, block, ...), as objects
            or as the JSON values of a saved case.
        inputs: What the kernel was given, by parameter name; a Python number is a 0-d array. A
            list of tensors is one array each, "gradients[0]", "gradients[1]", ...
        expected, actual: What is right and what came, by the output's name.
        more: Inputs, expected and actual outputs of other calls, right ones too. They are asked
            for while more than one fault fits, to tell those apart.
        sure: Whether to give no guess where several faults fit to the end.

    Returns:
        The narrowest fault that fits; for casts and decoding also one of the numbers, with another
        of the NaNs, or that theirs is not known, in its sentence. None where no known fault
        explains every element, where the results have other shapes or names than expected, or where
        nothing is wrong.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> guess_fault(
    ...     "cast",
    ...     {"fmt": E4M3},
    ...     {"x": np.float32([1.0625, 1.125, 1.2, 3]), "scale": np.float32(1)},
    ...     {"codes": np.uint8([0x38, 0x39, 0x3A, 0x44])},
    ...     {"codes": np.uint8([0x39, 0x39, 0x3A, 0x44])},
    ... ).fault
    'ties-away'
    """
    suspects = fitting_hypotheses(contract, settings, inputs, expected, actual)
    for case in islice(more, MOST_CASES):
        if len({fault for fault, _ in suspects}) < 2:
            break
        # When nothing fits any more, the cases before decide.
        suspects = fitting_hypotheses(contract, settings, *case, among=suspects) or suspects
    faults = list(dict.fromkeys(fault for fault, _ in suspects))
    if not faults and not sure:
        return _guess_in_two(contract, settings, inputs, expected, actual)
    if not faults or (len(faults) > 1 and sure):
        return None
    return Guess(faults[0], FAULTS[faults[0]].sentence)


def fitting_hypotheses(
    contract: str,
    settings: Mapping[str, object],
    inputs: Arrays,
    expected: Arrays,
    actual: Arrays,
    *,
    among: Collection[Suspect] | None = None,
) -> list[Suspect]:
    """Every hypothesis that explains some results, the narrowest first.

    Args:
        contract, settings, inputs, expected, actual: As for `guess_fault`.
        among: Those that are asked for; then right results are explained, too. None for all, of
            which none explains right results.

    Returns:
        The fault of each, and which of that fault's hypotheses it is.
    """
    wanted = {name: _words(array) for name, array in expected.items()}
    found = {name: _words(array) for name, array in actual.items() if name in wanted}
    if not _comparable(wanted, found) or (among is None and same_bits(found, wanted)):
        return []
    given = {name: np.asarray(array) for name, array in inputs.items()}
    if contract in ELEMENTWISE:
        given, wanted, found = _sample(given, wanted, found)
    fitting = []
    counts: Counter[str] = Counter()
    left = None if among is None else set(among)
    with np.errstate(all="ignore"):
        for fault, outputs in hypotheses_of(contract, settings, given, wanted):
            suspect = fault, counts[fault]
            counts[fault] += 1
            if left is not None and suspect not in left:
                continue
            if same_bits(found, {name: _words(array) for name, array in outputs.items()}):
                fitting.append(suspect)
            if left is not None:
                left.remove(suspect)
                if not left:  # what comes after them need not be computed
                    break
    return fitting


def _guess_in_two(
    contract: str, settings: Mapping[str, object], inputs: Arrays, expected: Arrays, actual: Arrays
) -> Guess | None:
    """Two faults at once: one in what becomes of numbers and another in what becomes of NaN."""
    values = np.asarray(next(iter(inputs.values())))
    if contract not in ELEMENTWISE or values.dtype.kind in "iu":
        return None
    with np.errstate(invalid="ignore"):  # a signalling NaN of bfloat16
        nan = np.isnan(values)

    def faults_of(chosen: Array) -> list[str]:
        def part(arrays: Arrays) -> Named:
            held = {name: np.asarray(array) for name, array in arrays.items()}
            return {
                name: array[chosen] if array.shape == values.shape else array
                for name, array in held.items()
            }

        cases = part(inputs), part(expected), part(actual)
        return [fault for fault, _ in fitting_hypotheses(contract, settings, *cases)]

    of_numbers, of_nan = faults_of(~nan), faults_of(nan)
    if not of_numbers:
        return None
    also = f"{of_nan[0]}: {FAULTS[of_nan[0]].sentence}" if of_nan else _NAN_UNKNOWN
    return Guess(of_numbers[0], f"{FAULTS[of_numbers[0]].sentence} And {also}")


def _comparable(expected: Arrays, actual: Arrays) -> bool:
    return set(expected) == set(actual) and all(
        expected[name].shape == actual[name].shape and expected[name].dtype == actual[name].dtype
        for name in expected
    )


def _words(array: Any) -> Array:
    """FP8 codes as bytes; anything else as it is."""
    values = np.asarray(array)
    return values.view(np.uint8) if values.dtype.itemsize == 1 and values.dtype != bool else values


def _sample(inputs: Named, expected: Named, actual: Named) -> tuple[Named, Named, Named]:
    """An elementwise case of at most `LARGEST` elements: wrong ones first, and some right ones."""
    name = next(iter(expected))
    shape = expected[name].shape
    if expected[name].size <= LARGEST:
        return inputs, expected, actual
    wrong = np.flatnonzero(expected[name].reshape(-1) != actual[name].reshape(-1))
    half = LARGEST // 2
    chosen = np.union1d(
        wrong[:half], np.arange(0, expected[name].size, expected[name].size // half)
    )

    def of(arrays: Named) -> Named:
        return {
            key: array.reshape(-1)[chosen] if array.shape == shape else array
            for key, array in arrays.items()
        }

    return of(inputs), of(expected), of(actual)
