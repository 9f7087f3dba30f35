"""Steps of FP8 tensor cores that keep 13 fraction bits, in float32: the fast form for Hopper.

Nothing is allocated while steps are walked. What a step needs lies in buffers that a thread keeps
from tile to tile: with two threads, memory that is taken and given back at every step costs a third
of the time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.chain_operands import Float32Array, Operand, TileOperands

# Steps whose exponents are added in one go: with fewer and longer calls, threads wait for the
# interpreter lock less often.
_GROUP = 2

_SHIFT = np.uint32(23)
_EXPONENT = np.uint32(0x7F800000)
_KEPT = np.uint32(0xFFFFFC00)  # 14 significant bits
_BIASES = np.uint32((127 + 127 + 13) << 23)  # 2**(13 - emax) is _BIASES - emax, as words


class Buffers:
    """What the steps of a tile of one shape work in.

    Attributes:
        terms: The products of a step, and C: (step_k + 1, m, n) float32.
        sums: Sums of exponent bytes of some steps.
        largest: The largest of each element's, and `emax` those as they stand in float32 words.
        field: emax with C's, then the scale, as words; `scale` is the same as float32.
        total: The sum of a step.
    """

    def __init__(self, step_k: int, m: int, n: int) -> None:
        self.terms = np.empty((step_k + 1, m, n), np.float32)
        self.products, self.c = self.terms[:-1], self.terms[-1]
        self.c_words = self.c.view(np.uint32)
        self.sums = np.empty((_GROUP, step_k, m, n), np.uint8)
        self.largest = np.empty((_GROUP, m, n), np.uint8)
        self.emax = np.empty((_GROUP, m, n), np.uint32)
        self.field = np.empty((m, n), np.uint32)
        self.scale = self.field.view(np.float32)
        self.total = np.empty((m, n), np.float32)


class Workspace:
    """The buffers of one thread, a set for each shape of tile."""

    def __init__(self) -> None:
        self._by_shape: dict[tuple[int, int, int], Buffers] = {}

    def buffers(self, step_k: int, m: int, n: int) -> Buffers:
        """Those for tiles of m by n."""
        shape = step_k, m, n
        if shape not in self._by_shape:
            self._by_shape[shape] = Buffers(*shape)
        return self._by_shape[shape]


class NarrowSteps(TileOperands):
    """FP8 with 13 fraction bits and 14 significand bits, in float32.

    Why float32 is exact here. A product of two FP8 values has at most 8 significant bits. Scaled
    by 2**(13 - emax) it is below 2**15, so cut toward zero it is an integer of at most 15 bits, and
    C likewise one of at most 14. The sum of 32 such products and C stays below 2**21: every partial
    sum is an integer that float32 holds. Scaling it back by a power of two is exact, and the cut to
    14 bits clears the low 10 bits of the word. Where emax is C's and so large that a scaled product
    underflows, the product is below one unit and cut to zero anyway.
    """

    def __init__(
        self,
        a: Operand,
        b: Operand,
        a_bytes: npt.NDArray[np.uint8],
        b_bytes: npt.NDArray[np.uint8],
        rows: slice,
        columns: slice,
        workspace: Workspace,
    ) -> None:
        super().__init__(a, b, rows, columns)
        self.a_bytes, self.b_bytes = a_bytes[:, :, rows], b_bytes[:, :, columns]
        step_k, m, n = self.a.shape[1], self.a.shape[2], self.b.shape[2]
        self.buffers = workspace.buffers(step_k, m, n)

    def __call__(self, first: int, last: int, c: Float32Array) -> Float32Array:
        special = self.outcome(first, last, c)
        if special is not None:
            c = np.where(np.isfinite(c), c, np.float32(0))
        self.buffers.c[...] = c
        for start in range(first, last, _GROUP):
            stop = min(start + _GROUP, last)
            self._add_exponents(start, stop)
            for step in range(start, stop):
                self._step(step, step - start)
        c = self.buffers.c.copy()
        if special is not None:
            c = np.where(np.isfinite(special), c, special.astype(np.float32))
        return c

    def _add_exponents(self, start: int, stop: int) -> None:
        """emax of the products of each step, as it stands in a float32 word: biased, shifted."""
        a, b, buffers = self.a_bytes[start:stop], self.b_bytes[start:stop], self.buffers
        sums, largest = buffers.sums[: len(a)], buffers.largest[: len(a)]
        np.add(a[:, :, :, None], b[:, :, None, :], out=sums)
        np.maximum.reduce(sums, axis=1, out=largest)
        np.left_shift(largest, _SHIFT, out=buffers.emax[: len(a)], dtype=np.uint32)

    def _step(self, step: int, place: int) -> None:
        """From C to the next, in its place among the terms."""
        buffers = self.buffers
        terms, field, scale, total = buffers.terms, buffers.field, buffers.scale, buffers.total
        np.multiply(self.a[step][:, :, None], self.b[step][:, None, :], out=buffers.products)
        np.bitwise_and(buffers.c_words, _EXPONENT, out=field)
        np.maximum(buffers.emax[place], field, out=field)
        np.subtract(_BIASES, field, out=field)
        np.multiply(terms, scale, out=terms)
        np.trunc(terms, out=terms)
        # From 0.0, because a sum of nothing but -0 is +0 on the card.
        np.add.reduce(terms, axis=0, initial=np.float32(0), out=total)
        np.divide(total, scale, out=buffers.c)
        np.bitwise_and(buffers.c_words, _KEPT, out=buffers.c_words)
