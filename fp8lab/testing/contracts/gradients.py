"""All gradients together: their norm, clipping by it, unscaling with a search for overflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.gradients import clip_coefficient, gradient_norm
from fp8lab.testing import strategies
from fp8lab.testing.contracts.base import (
    Contract,
    Kernel,
    WrongResult,
    float32,
    one,
    register,
    several,
)
from fp8lab.testing.profiles import Profile
from fp8lab.testing.values import random_words, wide_floats

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


class _Gradients(Contract):
    """What the three share: lists of float32 gradients of any shapes.

    Inputs "gradients[0]", "gradients[1]", ...
    """

    def numbers(self) -> tuple[Arrays, ...]:
        """The numbers to try beside the gradients; the first is the usual one."""
        return ({},)

    def fixed(self, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
        for index, shapes in enumerate(_SHAPES):
            for numbers in self.numbers() if index == 0 else self.numbers()[:1]:
                yield {**gradients(index, shapes), **numbers}
        for value in (np.nan, np.inf, -np.inf, 3e38, 1e-40):
            for place in (0, 1, 2):
                found = gradients(50, ((7,), (3, 5), (4,)))
                found[f"gradients[{place}]"].reshape(-1)[-1] = value
                yield {**found, **self.numbers()[0]}
        # Small ones that are lost where a sum is kept in float32, and squares that leave float32.
        yield {"gradients[0]": _one_large(4096), **self.numbers()[0]}
        # A sum of squares at a tie of the norm, broken by terms that another order loses; and
        # elements that are finite while their sum is not.
        for values in (_tie(), _tie_in_a_lane()):
            yield {"gradients[0]": values, **self.numbers()[0]}
        yield {"gradients[0]": np.full(3, 3e38, np.float32), **self.numbers()[:2][-1]}
        for exponents in ((-149, -100), (70, 127)):
            yield {**gradients(60, ((300,), (5, 4)), exponents), **self.numbers()[0]}
        yield {f"gradients[{i}]": np.zeros(3, np.float32) for i in range(2)} | self.numbers()[0]
        if profile.wide:
            yield {**gradients(70, ((16385,), (1024,), (3, 16384))), **self.numbers()[0]}

    def drawn(self, profile: Profile, traits: frozenset[str]) -> st.SearchStrategy[Arrays]:
        sizes = st.one_of(strategies.ragged_sizes(64), st.integers(0, profile.largest))

        @st.composite
        def inputs(draw: st.DrawFn) -> Arrays:
            shapes = tuple((size,) for size in draw(st.lists(sizes, max_size=5)))
            exponents = draw(st.sampled_from([(-20, -4), (-10, 4), (-149, 127)]))
            found = gradients(draw(st.integers(0, 2**32 - 1)), shapes, exponents)
            return {**found, **draw(st.sampled_from(self.numbers()))}

        return inputs()

    def axes(self, inputs: Mapping[str, Array]) -> list[list[tuple[str, int]]]:
        return [[(name, axis)] for name in _names(inputs) for axis in range(inputs[name].ndim)]

    def output_axis(self, group: int) -> int | None:
        return None

    def droppable(self, inputs: Mapping[str, Array]) -> list[str]:
        return _names(inputs)

    def simpler(self, inputs: Mapping[str, Array]) -> Iterator[Arrays]:
        for name in _names(inputs):
            if inputs[name].ndim != 1:
                yield {**inputs, name: inputs[name].reshape(-1)}
            for value in (0.0, 1.0):
                if (inputs[name] != value).any():
                    yield {**inputs, name: np.full_like(inputs[name], value)}


@register
@dataclass(frozen=True)
class Norm(_Gradients):
    """`gradient_norm`: kernel(gradients) -> 0-d float32; gradients is a list of tensors.

    Inputs "gradients[0]", ...; output "norm": by the oracle's fixed tree. Of nothing it is 0.
    """

    name: ClassVar[str] = "norm"

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        return {"norm": np.asarray(gradient_norm(_listed(inputs)).norm)}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        return one(kernel([given[name] for name in _names(given)]), "norm")


@register
@dataclass(frozen=True)
class Clip(_Gradients):
    """Clipping by the global norm: kernel(gradients, max_norm) -> gradients, or None in place.

    coefficient = min((1 / (norm + 1e-6)) * max_norm, 1), each operation rounded to float32, NaN
    stays; each element is multiplied by it. Inputs "gradients[0]", ..., "max_norm"; outputs
    "gradients[0]", ...
    """

    name: ClassVar[str] = "clip"
    scalars: ClassVar[frozenset[str]] = frozenset({"max_norm"})

    def numbers(self) -> tuple[Arrays, ...]:
        return tuple({"max_norm": np.asarray(value)} for value in (1.0, 0.1, 1e-3, 1e6, 0.0))

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        norm = gradient_norm(_listed(inputs)).norm
        coefficient = clip_coefficient(norm, float(inputs["max_norm"]))
        with np.errstate(all="ignore"):
            return {name: inputs[name] * coefficient for name in _names(inputs)}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        names = _names(given)
        own = [given[name] for name in names]
        result = kernel(list(own), given["max_norm"])
        return several(own if result is None else result, names)


@register
@dataclass(frozen=True)
class Unscale(_Gradients):
    """Unscaling: kernel(gradients, inverse_loss_scale) -> (gradients, found_inf).

    Each element is multiplied by inverse_loss_scale (rounded to float32) and rounded to nearest
    even; found_inf says whether any product is Inf or NaN, as a bool or a number that is 0 or 1.
    Gradients may be None when it works in place. Inputs "gradients[0]", ..., "inverse_loss_scale";
    outputs "gradients[0]", ..., "found_inf".
    """

    name: ClassVar[str] = "unscale"
    scalars: ClassVar[frozenset[str]] = frozenset({"inverse_loss_scale"})

    def numbers(self) -> tuple[Arrays, ...]:
        values = (2.0**-16, 1.0, 1 / 3, 2.0**-24, 1e-30, 2.0**20)
        return tuple({"inverse_loss_scale": float32(value)} for value in values)

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        with np.errstate(all="ignore"):
            inverse = np.float32(inputs["inverse_loss_scale"])
            found = {name: inputs[name] * inverse for name in _names(inputs)}
        finite = all(np.isfinite(values).all() for values in found.values())
        return {**found, "found_inf": np.asarray(not finite)}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        names = _names(given)
        own = [given[name] for name in names]
        pair = several(kernel(list(own), given["inverse_loss_scale"]), ("gradients", "found_inf"))
        result = own if pair["gradients"] is None else pair["gradients"]
        if not isinstance(result, list | tuple):
            raise WrongResult(f"its gradients are {type(result).__name__}; accepted: a list")
        return {**several(result, names), "found_inf": pair["found_inf"]}

    def accepted(self, output: str, expected: Array) -> tuple[str, ...]:
        if output != "found_inf":
            return super().accepted(output, expected)
        return ("bool", "float32", "int32", "int64", "uint8", "float64")

    def read(self, output: str, actual: Array, expected: Array) -> Array:
        if output != "found_inf":
            return super().read(output, actual, expected)
        return np.asarray(actual.reshape(expected.shape) != 0)


def gradients(
    seed: int, shapes: tuple[tuple[int, ...], ...], exponents: tuple[int, int] = (-12, 2)
) -> Arrays:
    """Gradients of those shapes, with exponents evenly between two."""
    found = {}
    for index, shape in enumerate(shapes):
        words = random_words(seed * 64 + index, int(np.prod(shape)))[:, 1]
        found[f"gradients[{index}]"] = wide_floats(words, *exponents).reshape(shape)
    return found


# Sizes of one, around powers of two, of several leaves of the norm's tree; empty ones; none.
_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((300,), (17, 33), (1,), (0,), (1025,)),
    ((1,),),
    ((127,), (128,), (129,)),
    ((4, 0), (3,)),
    ((),),
    ((20000,), (3,)),
    (),
    tuple((size,) for size in range(40)),
    tuple((1 + index % 3,) for index in range(130)),  # more than one launch of torch's takes
)


def _one_large(size: int) -> Array:
    values = np.full(size, 2.0**-13, np.float32)
    values[0] = 1.0
    return values


def _tie() -> Array:
    """Squares that add up to (2**24 + 1)**2, and 256 more of 2**-8 each.

    2**24 + 1 lies in the middle of two float32. The small squares are below half an ulp of the
    float64 sum of the large ones, so a sum that begins with those loses every one of them.
    """
    values = np.full(260, 2.0**-4, np.float32)
    values[:4] = 2.0**24, 2.0**12, 2.0**12, 1
    return values


def _tie_in_a_lane() -> Array:
    """The same tie, and small squares in the lane of the largest, where the tree loses them."""
    values = np.zeros(16 * 1024, np.float32)
    values[:4] = 2.0**24, 2.0**12, 2.0**12, 1
    values[1024::1024] = 2.0**-3
    return values


def _names(inputs: Mapping[str, Any]) -> list[str]:
    names = [name for name in inputs if name.startswith("gradients[")]
    return sorted(names, key=lambda name: int(name[len("gradients[") : -1]))


def _listed(inputs: Mapping[str, Array]) -> list[Array]:
    return [inputs[name] for name in _names(inputs)]
