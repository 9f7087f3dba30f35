"""The largest magnitude, the scale it gives, and delayed scaling's step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.scaling import (
    ALGORITHMS,
    DelayedScalingState,
    amax,
    check_margin,
    scale_from_amax,
    update_delayed,
)
from fp8lab.formats import Float8Format
from fp8lab.testing import strategies
from fp8lab.testing.cases import spaced
from fp8lab.testing.contracts.base import Contract, Kernel, one, register, several
from fp8lab.testing.contracts.inputs import SHAPES, check_dtypes, dtype_named, repeated, sizes
from fp8lab.testing.profiles import Profile
from fp8lab.testing.values import random_words, special_values, wide_floats

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


@register
@dataclass(frozen=True)
class Amax(Contract):
    """`amax`: kernel(x) -> 0-d float32.

    Input "x" (any shape); output "amax". Any NaN stands for any other.

    Attributes:
        dtypes: The names of the input types that are tried.
        strided: Whether inputs that are not contiguous are tried, too.
    """

    name: ClassVar[str] = "amax"

    dtypes: tuple[str, ...] = ("float32",)
    strided: bool = False

    def __post_init__(self) -> None:
        check_dtypes(self.dtypes)

    def fixed(self, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
        for name in self.dtypes:
            dtype = dtype_named(name)
            words = random_words(7, max(sizes(profile)))[:, 1]
            ordinary = wide_floats(words, -12, 2).astype(dtype)
            for size in sizes(profile):
                yield {"x": ordinary[:size]}
                for place in sorted({0, size // 2, size - 1}) if size else ():
                    for value in (-300.0, np.nan, -np.inf):
                        yield {"x": _with(ordinary[:size], place, value)}
            # Where the work is cut: the last place of a part, and the first of the next.
            for power in range(1, 10):
                for place in (2**power - 1, 2**power):
                    yield {"x": _with(ordinary[:1025], place, -300.0)}
            for value in special_values(dtype):
                yield {"x": np.array([0, value, -0.0], dtype)}
                yield {"x": np.array([1, value, 0.5], dtype)}
            # An infinity does not hide a NaN, wherever they stand.
            yield {"x": np.array([np.inf, 1, np.nan, 2], dtype)}
            yield {"x": np.array([-np.nan, 1, -np.inf, 2], dtype)}
            for shape in SHAPES:
                yield {"x": repeated(ordinary, int(np.prod(shape))).reshape(shape)}
            if self.strided:
                yield {"x": spaced(ordinary[:130])}
                yield {"x": np.asfortranarray(ordinary[:35].reshape(5, 7))}

    def drawn(self, profile: Profile, traits: frozenset[str]) -> st.SearchStrategy[Arrays]:
        @st.composite
        def inputs(draw: st.DrawFn) -> Arrays:
            dtype = dtype_named(draw(st.sampled_from(self.dtypes)))
            return {"x": draw(_floats(profile, dtype))}

        return inputs()

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        return {"amax": amax(inputs["x"])}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        return one(kernel(given["x"]), "amax")

    def output_axis(self, group: int) -> int | None:
        return None

    def simpler(self, inputs: Mapping[str, Array]) -> Iterator[Arrays]:
        x = inputs["x"]
        if x.ndim != 1 or not x.flags.c_contiguous:
            yield {"x": np.ascontiguousarray(x).reshape(-1)}
        for value in (0.0, 1.0):
            for place in range(min(x.size, 8)):
                if x.ndim == 1 and x[place] != value and not np.isnan(x[place]):
                    yield {"x": _with(x, place, value)}


@register
@dataclass(frozen=True)
class ScaleFromAmax(Contract):
    """`scale_from_amax`: kernel(amax) -> scale, of the same shape.

    Input "amax" (0-d and (n,) float32, magnitudes, Inf and NaN); output "scale".

    Attributes:
        fmt, margin, power_of_two: As for `scale_from_amax`; what it does with 0, Inf and NaN, too
            (the scale is 1).
    """

    name: ClassVar[str] = "scale_from_amax"

    fmt: Float8Format
    margin: int = 0
    power_of_two: bool = False

    def __post_init__(self) -> None:
        scale_from_amax(1.0, self.fmt, margin=self.margin, power_of_two=self.power_of_two)

    def fixed(self, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
        pool = amaxes(self.fmt)
        yield {"amax": pool}
        for value in (3.0, 0.0, np.inf, np.nan):
            yield {"amax": np.asarray(value, dtype=np.float32)}
        for size in sizes(profile):
            yield {"amax": repeated(pool, size)}

    def drawn(self, profile: Profile, traits: frozenset[str]) -> st.SearchStrategy[Arrays]:
        return _floats(profile, np.dtype(np.float32)).map(lambda x: {"amax": np.abs(x)})

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        scale = scale_from_amax(
            inputs["amax"], self.fmt, margin=self.margin, power_of_two=self.power_of_two
        )
        return {"scale": scale}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        return one(kernel(given["amax"]), "scale")


@register
@dataclass(frozen=True)
class ScaleUpdate(Contract):
    """`update_delayed`: kernel(scale, amax_history) -> (scale, amax_history), or None in place.

    Inputs "scale" (n,) and "amax_history" (L, n), float32, slot 0 holding the present step's amax;
    outputs of the same names.

    Attributes:
        fmt, margin, algorithm, power_of_two: As for `update_delayed`.
    """

    name: ClassVar[str] = "scale_update"

    fmt: Float8Format
    margin: int = 0
    algorithm: str = "max"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        check_margin(self.margin)
        scale_from_amax(1.0, self.fmt)
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"unknown algorithm {self.algorithm!r}; accepted: {', '.join(ALGORITHMS)}"
            )

    def fixed(self, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
        pool = amaxes(self.fmt)
        lengths = (1, 2, 3, 16, 17, 100, 1024) if profile.wide else (1, 2, 3, 16, 17, 100)
        for length in (4, *lengths):
            for tensors in (37, 1, 0):
                yield _history(3 * length + tensors, length, tensors, pool)
        yield _history(5, 2, 1025, pool)
        # Each place of the history holds the largest amax once; and one tensor after another rests.
        history = np.full((5, 6), 2.0, np.float32)
        history[np.arange(5), np.arange(5)] = 7.0
        history[0, 5] = 0
        yield {"scale": np.linspace(1, 6, 6).astype(np.float32), "amax_history": history}
        for special in (np.nan, np.inf):
            history = np.full((4, 5), 2.0, np.float32)
            history[np.arange(4), np.arange(4)] = special
            yield {"scale": np.full(5, 3.0, np.float32), "amax_history": history}

    def drawn(self, profile: Profile, traits: frozenset[str]) -> st.SearchStrategy[Arrays]:
        pool = amaxes(self.fmt)
        return st.builds(
            lambda seed, length, tensors: _history(seed, length, tensors, pool),
            st.integers(0, 2**32 - 1),
            st.integers(1, 40),
            strategies.ragged_sizes(32),
        )

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        state = update_delayed(
            DelayedScalingState(inputs["scale"], inputs["amax_history"]),
            self.fmt,
            margin=self.margin,
            algorithm=self.algorithm,
            power_of_two=self.power_of_two,
        )
        return {"scale": state.scale, "amax_history": state.amax_history}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        names = ("scale", "amax_history")
        result = kernel(*(given[name] for name in names))
        return several([given[name] for name in names] if result is None else result, names)

    def axes(self, inputs: Mapping[str, Array]) -> list[list[tuple[str, int]]]:
        return [[("scale", 0), ("amax_history", 1)], [("amax_history", 0)]]

    def output_axis(self, group: int) -> int | None:
        return 0 if group == 0 else None

    def shortest(self, group: int) -> int:
        return group  # a history has the present step's slot

    def simpler(self, inputs: Mapping[str, Array]) -> Iterator[Arrays]:
        scale, history = inputs["scale"], inputs["amax_history"]
        yield {"scale": np.ones_like(scale), "amax_history": history}
        for value in (0.0, 1.0):
            for slot in range(min(8, len(history))):
                if history.shape[1] == 1 and history[slot, 0] != value:
                    plainer = history.copy()
                    plainer[slot] = value
                    yield {"scale": scale, "amax_history": plainer}


def amaxes(fmt: Float8Format) -> Array:
    """Amaxes that decide a scale: powers of two of all exponents and one ulp to either side, what
    bfloat16 (but no logarithm in float32) rounds to one, what only a coarser one does, the middle
    between two, where
    the quotient is a power of two, where the scale leaves float32, and special values.
    """
    powers = np.exp2(np.arange(-149, 128, dtype=np.float64))
    places = [powers, powers * fmt.max_finite / 2.0 ** np.floor(np.log2(fmt.max_finite)), [3.0, 7]]
    # The scale is FLT_MAX, or 2**-127, here.
    places += [powers * (1 - 2.0**-10), powers * (1 - 2.0**-8), powers * 1.5]
    places.append([fmt.max_finite / float(np.finfo(np.float32).max), fmt.max_finite * 2.0**120])
    with np.errstate(over="ignore"):
        near = np.concatenate(places).astype(np.float32).view(np.uint32).astype(np.int64)
    around = np.unique(near[:, None] + np.array([-1, 0, 1]))
    around = around[(around >= 0) & (around <= 0x7F800000)]
    values = around.astype(np.uint32).view(np.float32)
    mixed = np.abs(wide_floats(random_words(11, 200)[:, 1], -149, 127))
    return np.concatenate([values, mixed, np.array([np.nan, 0.0], np.float32)])


def _history(seed: int, length: int, tensors: int, pool: Array) -> Arrays:
    """A state after many steps: amaxes near each other, rests, spikes, and special ones."""
    words = random_words(seed, (length + 1) * tensors)
    kind = words[:, 0] % np.uint64(16)
    values = np.abs(wide_floats(words[:, 1], -3, 3))
    picked = pool[words[:, 1] % np.uint64(pool.size)]
    values = np.where(kind < 4, picked, np.where(kind < 7, np.float32(0), values))
    values = values.astype(np.float32).reshape(length + 1, tensors)
    scale = np.abs(wide_floats(words[:tensors, 1], -20, 20))
    return {"scale": scale, "amax_history": np.ascontiguousarray(values[1:])}


def _floats(profile: Profile, dtype: np.dtype[Any]) -> st.SearchStrategy[Array]:
    """Flat arrays of all exponents, or of a narrow range; a few hold special values."""

    @st.composite
    def arrays(draw: st.DrawFn) -> Array:
        size = draw(st.one_of(strategies.ragged_sizes(128), st.integers(0, profile.largest)))
        words = random_words(draw(st.integers(0, 2**32 - 1)), size)
        low, high = draw(st.sampled_from([(-149, 127), (-10, 4), (-149, -120)]))
        with np.errstate(over="ignore", under="ignore"):
            values = wide_floats(words[:, 1], low, high).astype(dtype)
        if draw(st.booleans()):
            special = special_values(dtype)
            values = np.where(
                words[:, 0] % np.uint64(64) == 0,
                special[words[:, 1] % np.uint64(special.size)],
                values,
            ).astype(dtype)
        return values

    return arrays()


def _with(values: Array, place: int, value: float) -> Array:
    changed = values.copy()
    changed[place] = value
    return changed
