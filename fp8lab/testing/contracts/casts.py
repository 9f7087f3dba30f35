"""Casts to FP8, back, and from one format to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.cast_arguments import check_format, rounding_named
from fp8lab.emulation.casting import dequantize, quantize, requantize
from fp8lab.formats import Float8Format, FloatFormat, OverflowPolicy, overflow_policy
from fp8lab.testing import strategies
from fp8lab.testing.cases import laid_out_as, spaced
from fp8lab.testing.contracts.base import Contract, Kernel, float32, one, register
from fp8lab.testing.contracts.inputs import (
    SHAPES,
    check_dtypes,
    dtype_named,
    every_code,
    every_pattern,
    repeated,
    scales,
    sizes,
    with_plainer_scale,
)
from fp8lab.testing.contracts.random_bits import decisive_words
from fp8lab.testing.profiles import Profile
from fp8lab.testing.values import edge_values, random_words, special_values

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


@register
@dataclass(frozen=True)
class Cast(Contract):
    """`quantize`: kernel(x, scale) -> codes, or kernel(x, scale, random_bits).

    Inputs "x" (any shape), "scale" (0-d) and, for stochastic rounding, "random_bits" (int64 words
    from 0 to 2**32 - 1, of x's shape); output "codes".

    Attributes:
        fmt: The format that is cast to.
        rounding, overflow: As for `quantize`.
        dtypes: The names of the input types that are tried.
        strided: Whether inputs that are not contiguous are tried, too.
    """

    name: ClassVar[str] = "cast"
    scalars: ClassVar[frozenset[str]] = frozenset({"scale"})

    fmt: Float8Format
    rounding: str = "nearest_even"
    overflow: str | OverflowPolicy = "saturate"
    dtypes: tuple[str, ...] = ("float32",)
    strided: bool = False

    def __post_init__(self) -> None:
        check_format(self.fmt)
        rounding_named(self.rounding, self.fmt)
        overflow_policy(self.overflow, self.fmt)
        check_dtypes(self.dtypes)

    @property
    def stochastic(self) -> bool:
        """Whether the kernel is given random words."""
        return self.rounding == "stochastic"

    def fixed(self, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
        for name in self.dtypes:
            dtype = dtype_named(name)
            for scale in scales(traits):
                yield self._inputs(self._hard(scale, dtype), scale)
            if profile.wide:
                yield self._inputs(every_pattern(dtype), 1.0)
            pool = self._hard(1.0, dtype)
            for size in sizes(profile):
                yield self._inputs(repeated(pool, size), 1.0)
            for _ in range(2):  # the same sizes, scale and, most often, memory: other values
                yield self._inputs(pool, 1.0)
                pool = pool[::-1].copy()
            for shape in SHAPES:
                yield self._inputs(repeated(pool, int(np.prod(shape))).reshape(shape), 0.1)
            if self.strided:
                square = repeated(pool, 35).reshape(5, 7)
                yield self._inputs(spaced(repeated(pool, 130)), 1.0)
                yield self._inputs(np.asfortranarray(square), 1.0)
                yield self._inputs(spaced(square), 1.0)

    def drawn(self, profile: Profile, traits: frozenset[str]) -> st.SearchStrategy[Arrays]:
        @st.composite
        def inputs(draw: st.DrawFn) -> Arrays:
            dtype = dtype_named(draw(st.sampled_from(self.dtypes)))
            if "power_of_two_scales" in traits:
                scale = draw(st.integers(-120, 120).map(lambda exponent: 2.0**exponent))
            else:
                scale = draw(strategies.scales())
            sizes = st.one_of(strategies.ragged_sizes(128), st.integers(0, profile.largest))
            x = draw(strategies.cast_inputs(self.fmt, scale=scale, dtype=dtype, sizes=sizes))
            return self._inputs(x, scale, seed=draw(st.integers(0, 2**32 - 1)))

        return inputs()

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        words = inputs["random_bits"].astype(np.uint32) if self.stochastic else None
        codes = quantize(
            inputs["x"],
            self.fmt,
            scale=inputs["scale"],
            rounding=self.rounding,
            overflow=self.overflow,
            random_bits=words,
        )
        return {"codes": codes}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        words = (given["random_bits"],) if self.stochastic else ()
        return one(kernel(given["x"], given["scale"], *words), "codes")

    def axes(self, inputs: Mapping[str, Array]) -> list[list[tuple[str, int]]]:
        names = ["x", "random_bits"] if self.stochastic else ["x"]
        return [[(name, axis) for name in names] for axis in range(inputs["x"].ndim)]

    def simpler(self, inputs: Mapping[str, Array]) -> Iterator[Arrays]:
        x = inputs["x"]
        if x.ndim != 1 or not x.flags.c_contiguous:
            flat = {"x": np.ascontiguousarray(x).reshape(-1)}
            if self.stochastic:
                flat["random_bits"] = inputs["random_bits"].reshape(-1)
            yield {**inputs, **flat}
        yield from with_plainer_scale(inputs, "x", "scale")
        for value in (1.0, -1.0):
            yield {**inputs, "x": laid_out_as(np.full(x.shape, value, x.dtype), x)}

    def _hard(self, scale: float, dtype: np.dtype[Any]) -> Array:
        """Everything that decides under one scale: edges, special values, input subnormals."""
        edges = edge_values(self.fmt, scale=scale, dtype=dtype)
        return np.concatenate([edges, special_values(dtype)])

    def _inputs(self, x: Array, scale: float, *, seed: int | None = None) -> Arrays:
        found = {"x": x, "scale": float32(scale)}
        if self.stochastic and seed is None:
            x, words = decisive_words(x, self.fmt, scale)
            found = {**found, "x": x, "random_bits": words}
        elif self.stochastic and seed is not None:
            words = random_words(seed, x.size)[:, 0] >> np.uint64(32)
            found["random_bits"] = words.astype(np.int64).reshape(x.shape)
        return found


@register
@dataclass(frozen=True)
class Dequantize(Contract):
    """`dequantize`: kernel(codes, inverse_scale) -> float32.

    Inputs "codes" (any shape) and "inverse_scale" (0-d); output "values".

    Attributes:
        fmt: The format of the codes.
    """

    name: ClassVar[str] = "dequantize"
    scalars: ClassVar[frozenset[str]] = frozenset({"inverse_scale"})

    fmt: Float8Format

    def __post_init__(self) -> None:
        check_format(self.fmt)

    def fixed(self, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
        codes = every_code(self.fmt)
        for scale in scales(traits):
            yield _codes(codes, scale)
        for size in sizes(profile):
            yield _codes(repeated(codes, size), 1.0)
        for shape in SHAPES:
            yield _codes(repeated(codes, int(np.prod(shape))).reshape(shape), 0.1)

    def drawn(self, profile: Profile, traits: frozenset[str]) -> st.SearchStrategy[Arrays]:
        @st.composite
        def inputs(draw: st.DrawFn) -> Arrays:
            return _codes(_drawn_codes(draw, self.fmt, profile), draw(strategies.scales()))

        return inputs()

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        return {"values": dequantize(inputs["codes"], inverse_scale=inputs["inverse_scale"])}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        return one(kernel(given["codes"], given["inverse_scale"]), "values")

    def simpler(self, inputs: Mapping[str, Array]) -> Iterator[Arrays]:
        if inputs["codes"].ndim != 1:
            yield {**inputs, "codes": inputs["codes"].reshape(-1)}
        if inputs["inverse_scale"] != 1:
            yield {**inputs, "inverse_scale": np.ones_like(inputs["inverse_scale"])}


@register
@dataclass(frozen=True)
class Requantize(Contract):
    """`requantize`: kernel(codes, inverse_scale, scale) -> codes of another format.

    Each code's value times inverse_scale times scale, exact (52 bits at most, in float64), is
    rounded once, to nearest even. Inputs "codes", "inverse_scale", "scale"; output "codes".

    Attributes:
        source, target: The two formats.
        overflow: As for `quantize`.
    """

    name: ClassVar[str] = "requantize"
    scalars: ClassVar[frozenset[str]] = frozenset({"inverse_scale", "scale"})

    source: Float8Format
    target: Float8Format
    overflow: str | OverflowPolicy = "saturate"

    def __post_init__(self) -> None:
        check_format(self.source)
        check_format(self.target)
        overflow_policy(self.overflow, self.target)

    def fixed(self, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
        codes = every_code(self.source)
        for inverse in (1.0, 2.0, 1 / 3, 2.0**-7, 1000.0, 1e-20, 3e20, 2.0**-140):
            for scale in scales(traits):
                yield {**_codes(codes, inverse), "scale": float32(scale)}
        for size in sizes(profile):
            yield {**_codes(repeated(codes, size), 1.0), "scale": float32(1.0)}

    def drawn(self, profile: Profile, traits: frozenset[str]) -> st.SearchStrategy[Arrays]:
        @st.composite
        def inputs(draw: st.DrawFn) -> Arrays:
            found = _codes(_drawn_codes(draw, self.source, profile), draw(strategies.scales()))
            return {**found, "scale": float32(draw(strategies.scales()))}

        return inputs()

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        codes = requantize(
            inputs["codes"],
            self.target,
            inverse_scale=inputs["inverse_scale"],
            scale=inputs["scale"],
            overflow=self.overflow,
        )
        return {"codes": codes}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        return one(kernel(given["codes"], given["inverse_scale"], given["scale"]), "codes")

    def simpler(self, inputs: Mapping[str, Array]) -> Iterator[Arrays]:
        for name in ("inverse_scale", "scale"):
            if inputs[name] != 1:
                yield {**inputs, name: np.ones_like(inputs[name])}


def _codes(codes: Array, inverse_scale: float) -> Arrays:
    return {"codes": codes, "inverse_scale": float32(inverse_scale)}


def _drawn_codes(draw: st.DrawFn, fmt: FloatFormat, profile: Profile) -> Array:
    size = draw(st.one_of(strategies.ragged_sizes(128), st.integers(0, profile.largest)))
    words = random_words(draw(st.integers(0, 2**32 - 1)), size)[:, 0]
    return words.astype(np.uint8).view(fmt.dtype)
