"""From a failing input to the smallest one that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.testing.cases import laid_out_as
from fp8lab.testing.contracts.base import Axis, Contract
from fp8lab.testing.contracts.inputs import plainness

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Fails = Callable[[Arrays], bool]

_SINGLES = 32  # places that are tried alone, the plainest first
_PIECES = 100  # tries at cutting pieces from one axis
_PASSES = 3
_MANTISSAS = (0, 2, 5, 9, 14)  # bits that are kept, in turn


def minimised(
    contract: Contract, inputs: Arrays, wrong: Sequence[int], fails: Fails, calls: int
) -> Arrays:
    """The smallest input that is found to fail still.

    First whole inputs are left out, then each axis is cut to the one place that fails (or by ever
    smaller pieces where no one place fails alone), then values are made plainer; and again until
    nothing gets smaller.

    Args:
        contract: Says what can be cut and what is plainer.
        inputs: They fail.
        wrong: Flat indices into the first output at which it is wrong; may be empty.
        fails: Whether other inputs fail in the same way; it calls the kernel.
        calls: How often that may be asked.
    """
    search = _Search(contract, inputs, fails, calls)
    try:
        for _ in range(_PASSES):
            before = _measure(search.best)
            search.leave_out()
            search.cut(wrong if search.best is inputs else ())
            search.simplify()
            if _measure(search.best) == before:
                break
    except _OutOfCalls:
        pass
    return search.best


class _OutOfCalls(Exception):
    """The search has used up its calls of the kernel."""


class _Search:
    """The best input so far, and the ways to a better one."""

    def __init__(self, contract: Contract, inputs: Arrays, fails: Fails, calls: int) -> None:
        self.contract, self.best = contract, inputs
        self._fails, self._left = fails, calls

    def took(self, candidate: Arrays) -> bool:
        """Take a candidate as the best where it fails still."""
        if self._left == 0:
            raise _OutOfCalls
        self._left -= 1
        if not self._fails(candidate):
            return False
        self.best = candidate
        return True

    def leave_out(self) -> None:
        """Without the inputs that can be missing."""
        for name in self.contract.droppable(self.best):
            self.took({other: array for other, array in self.best.items() if other != name})

    def cut(self, wrong: Sequence[int]) -> None:
        """Shorter axes; `wrong` holds flat indices into the first output of the present best."""
        # Without any output (no gradients, say) there is nothing to be known of its places.
        outputs = iter(self.contract.expected(self.best).values())
        shape = next((output.shape for output in outputs), ())
        flat = np.asarray(wrong, dtype=np.intp)
        for group, axes in enumerate(self.contract.axes(self.best)):
            multiple = self.contract.multiples(group)
            name, axis = axes[0]
            length = self.best[name].shape[axis]
            if length <= multiple:
                continue
            along = self.contract.output_axis(group)
            known = flat.size > 0 and along is not None and along < len(shape)
            where = np.unravel_index(flat, shape)[along or 0] if known else np.arange(length)
            place = None
            if multiple == 1:
                place = self._single(axes, dict.fromkeys(where.tolist()))
            if place is None:
                self._pieces(axes, multiple, self.contract.shortest(group))
            elif known:
                flat = flat[where == place]

    def simplify(self) -> None:
        """Plainer values, the plainest that fail."""
        while any(
            _plainer(candidate, self.best) and self.took(candidate)
            for candidate in chain(self.contract.simpler(self.best), self._shorter_mantissas())
        ):
            pass

    def _shorter_mantissas(self) -> Iterator[Arrays]:
        """The tensors with all but a few mantissa bits cut off, one at a time."""
        for bits in _MANTISSAS:
            for name, array in self.best.items():
                with np.errstate(invalid="ignore"):  # a signalling NaN
                    wide = array.astype(np.float64)
                if name not in self.contract.scalars and np.isfinite(wide).all():
                    mantissa, exponent = np.frexp(wide)
                    short = np.ldexp(np.trunc(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)
                    yield {**self.best, name: laid_out_as(short.astype(array.dtype), array)}

    def _single(self, axes: Sequence[Axis], places: Iterable[int]) -> int | None:
        """One place of an axis that fails alone, or None."""
        for place in _plainest(self.best, axes, list(places))[:_SINGLES]:
            if self.took(_taken(self.best, axes, np.array([place]))):
                return place
        return None

    def _pieces(self, axes: Sequence[Axis], multiple: int, shortest: int) -> None:
        """Without ever smaller pieces of an axis."""
        name, axis = axes[0]
        size = -(-self.best[name].shape[axis] // 2)
        start = 0
        for _ in range(_PIECES):
            length = self.best[name].shape[axis]
            if start >= length:
                if size == 1:
                    return
                size, start = -(-size // 2), 0
            kept = np.delete(np.arange(length), slice(start, start + size))
            fits = kept.size % multiple == 0 and shortest <= kept.size < length
            if not (fits and self.took(_taken(self.best, axes, kept))):
                start += size


def _measure(inputs: Mapping[str, Array]) -> tuple[int, float]:
    sizes = sum(array.size for array in inputs.values())
    return sizes, float(sum(plainness(array).sum() for array in inputs.values()))


def _plainest(inputs: Arrays, axes: Sequence[Axis], places: Sequence[int]) -> list[int]:
    """Places along an axis, those with the plainest values first where they hold one value each."""
    if any(inputs[name].ndim != 1 for name, _ in axes):
        return list(places)
    chosen = np.asarray(places, dtype=np.intp)
    hard = np.sum([plainness(inputs[name][chosen]) for name, _ in axes], axis=0)
    return [int(place) for place in chosen[np.argsort(hard, kind="stable")]]


def _taken(inputs: Arrays, axes: Sequence[Axis], kept: Array) -> Arrays:
    """The inputs with some places of an axis alone."""
    taken = dict(inputs)
    for name, axis in axes:
        taken[name] = laid_out_as(np.take(inputs[name], kept, axis=axis), inputs[name])
    return taken


def _plainer(candidate: Arrays, inputs: Arrays) -> bool:
    """Whether values or layout got plainer; otherwise a search could go round in a circle."""
    return _layouts(candidate) < _layouts(inputs) or (
        _layouts(candidate) == _layouts(inputs) and _measure(candidate) < _measure(inputs)
    )


def _layouts(inputs: Arrays) -> int:
    """Dimensions, and arrays that are not contiguous."""
    return sum(a.ndim + (not a.flags.forc) for a in inputs.values())
