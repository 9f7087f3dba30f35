"""Matrix products of codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.matmul import HOPPER_FP8, TensorCore, matmul
from fp8lab.formats import E4M3, FloatFormat
from fp8lab.testing import strategies
from fp8lab.testing.contracts.base import Contract, Kernel, one, register, shown
from fp8lab.testing.products import OPERAND_KINDS, operand_values, small_integers
from fp8lab.testing.profiles import Profile
from fp8lab.testing.values import random_words

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Sizes = tuple[int, int, int]

# (M, N, K) around the edges of tiles and steps, promotion intervals, and nothing at all.
SIZES: tuple[Sizes, ...] = (
    *((1, 1, 1), (1, 1, 32), (16, 8, 33), (17, 9, 31), (64, 64, 64), (65, 33, 127), (33, 65, 128)),
    *((31, 17, 129), (5, 3, 255), (3, 5, 257), (2, 2, 1000), (129, 2, 96), (2, 129, 160)),
    *((0, 4, 32), (4, 0, 32), (3, 4, 0)),
    *((1030, 3, 33), (3, 1030, 33), (2, 3, 4100)),  # many tiles of one side, and many steps
)
WIDE_SIZES: tuple[Sizes, ...] = ((130, 131, 520), (257, 40, 1025), (40, 257, 2049))
# The order of scales shows where their product rounds, is subnormal, or leaves float32.
SCALE_PAIRS = (
    *((1.0, 1.0), (1 / 3, 0.1), (2.0**-9, 3.0), (1e-25, 1e-17), (1e-30, 1e20), (3e30, 1e-28)),
    *((1.9999999, 1.0000001), (1e25, 1e20), (1.0, 0.1), (0.1, 1.0)),
)


@register
@dataclass(frozen=True)
class Matmul(Contract):
    """`matmul`: kernel(a, b, inverse_scale_a, inverse_scale_b) -> float32.

    Inputs "a" (M, K) row-major codes, "b" (K, N) column-major codes, "inverse_scale_a" and
    "inverse_scale_b", 0-d float32 tensors; output "product" (M, N).

    Attributes:
        formats: Of a and b.
        core, promote_every: As for `matmul`.
        exact_sums: Only operands whose sums every order of accumulation gives alike, with scales
            that are powers of two: for kernels that run where there is no such core, as under
            Triton's interpreter.
        multiple_of: What M, N and K are multiples of.
    """

    name: ClassVar[str] = "matmul"

    formats: tuple[FloatFormat, FloatFormat] = (E4M3, E4M3)
    core: TensorCore = HOPPER_FP8
    promote_every: int | None = None
    exact_sums: bool = False
    multiple_of: Sizes = (1, 1, 1)

    def __post_init__(self) -> None:
        formats: object = self.formats
        if not (_is_tuple(formats, FloatFormat) and len(self.formats) == 2):
            raise ValueError(
                f"formats is {shown(formats)}; accepted: a tuple of two formats, of a and of b"
            )
        if not isinstance(self.core, TensorCore):
            raise ValueError(
                f"core is {self.core!r}; accepted: HOPPER_FP8 and the others of"
                " fp8lab.emulation.matmul"
            )
        sizes: object = self.multiple_of
        if not (_is_tuple(sizes, int) and len(self.multiple_of) == 3 and min(self.multiple_of) > 0):
            raise ValueError(
                f"multiple_of is {sizes!r}; accepted: a tuple of three integers from 1 (M, N, K)"
            )
        a, b = (np.zeros((1, 1), fmt.dtype) for fmt in self.formats)
        matmul(a, b, core=self.core, promote_every=self.promote_every)

    def fixed(self, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
        seed = 0
        for kinds in _KINDS:
            for sizes in ((17, 12, 300), (5, 7, 1030)):
                seed += 2
                yield self._inputs(seed, sizes, kinds, (1.0, 1.0))
        for pair in SCALE_PAIRS:
            seed += 2
            yield self._inputs(seed, (9, 10, 64), ("ordinary", "ordinary"), pair)
        for sizes in SIZES + WIDE_SIZES if profile.wide else SIZES:
            seed += 2
            yield self._inputs(seed, sizes, ("ordinary", "ordinary"), (0.5, 2.0))
        if not self.exact_sums:
            for sizes in ((12, 11, 100), (3, 2, 40)):
                seed += 2
                yield self._inputs(seed, sizes, ("sparse", "ordinary"), (1.0, 1.0), special=True)

    def drawn(self, profile: Profile, traits: frozenset[str]) -> st.SearchStrategy[Arrays]:
        most = max(40, min(160, int(profile.largest**0.5)))
        return st.builds(
            self._inputs,
            st.integers(0, 2**32 - 1),
            st.tuples(st.integers(0, most), st.integers(0, most), st.integers(0, 7 * most)),
            st.tuples(*[st.sampled_from(OPERAND_KINDS)] * 2),
            st.tuples(strategies.scales(), strategies.scales()),
            special=st.integers(0, 4).map(lambda draw: draw == 0),
        )

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        product = matmul(
            inputs["a"],
            inputs["b"],
            core=self.core,
            promote_every=self.promote_every,
            inverse_scale_a=inputs["inverse_scale_a"],
            inverse_scale_b=inputs["inverse_scale_b"],
        )
        return {"product": product}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        names = ("a", "b", "inverse_scale_a", "inverse_scale_b")
        return one(kernel(*(given[name] for name in names)), "product")

    def axes(self, inputs: Mapping[str, Array]) -> list[list[tuple[str, int]]]:
        return [[("a", 0)], [("b", 1)], [("a", 1), ("b", 0)]]

    def output_axis(self, group: int) -> int | None:
        return group if group < 2 else None

    def multiples(self, group: int) -> int:
        return self.multiple_of[group]

    def simpler(self, inputs: Mapping[str, Array]) -> Iterator[Arrays]:
        for names in (("inverse_scale_a", "inverse_scale_b"), ("inverse_scale_a",)):
            if any(inputs[name] != 1 for name in names):
                yield {**inputs, **{name: np.ones((), np.float32) for name in names}}
        for name, axis in (("a", 1), ("b", 0)):
            used = np.flatnonzero(inputs[name].astype(np.float32).any(axis=1 - axis))
            for parts in (1, 2, 4, 8, 16, 32):
                for part in np.array_split(used, parts) if parts <= used.size else ():
                    changed = inputs[name].copy(order="K")
                    changed[(slice(None), part) if axis else part] = 0
                    yield {**inputs, name: changed}
            if used.size > 1:
                ones = np.ones(inputs[name].shape, inputs[name].dtype)
                yield {**inputs, name: np.asfortranarray(ones) if name == "b" else ones}

    def _inputs(
        self,
        seed: int,
        sizes: Sizes,
        kinds: tuple[str, str],
        scales: tuple[float, float],
        *,
        special: bool = False,
    ) -> Arrays:
        m, n, k = (
            -(-size // step) * step for size, step in zip(sizes, self.multiple_of, strict=True)
        )
        sides = []
        for side, shape in enumerate(((m, k), (n, k))):
            fmt = self.formats[side]
            if self.exact_sums:
                sides.append(small_integers(seed + side, shape, fmt, k, zeros=False))
            else:
                sides.append(
                    operand_values(seed + side, shape, fmt.dtype_name, kinds[side], special=special)
                )
        if self.exact_sums:
            # Powers of two, so that no product with them rounds.
            exponents = random_words(seed, 1)[0] % np.uint64(9)
            scales = (2.0 ** (int(exponents[0]) - 4), 2.0 ** (int(exponents[1]) - 4))
        with np.errstate(all="ignore"):
            inverse = [np.asarray(scale, dtype=np.float32) for scale in scales]
        return {
            "a": sides[0],
            "b": sides[1].T,
            "inverse_scale_a": inverse[0],
            "inverse_scale_b": inverse[1],
        }


def _is_tuple(value: object, kind: type) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, kind) for part in value)


_KINDS = (
    *(("ordinary", "ordinary"), ("exponents", "exponents"), ("patterns", "patterns")),
    *(("opposed", "ordinary"), ("sparse", "exponents"), ("opposed", "opposed")),
)
