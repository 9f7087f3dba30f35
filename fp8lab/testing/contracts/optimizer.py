"""AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.adamw import adamw
from fp8lab.optimizer_formats import AdamOrder, order_named
from fp8lab.testing import strategies
from fp8lab.testing.contracts.base import Contract, Kernel, register, several
from fp8lab.testing.contracts.inputs import sizes
from fp8lab.testing.profiles import Profile
from fp8lab.testing.strategies import AdamWCase
from fp8lab.testing.values import random_words, special_values, wide_floats

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

TENSORS = ("param", "grad", "exp_avg", "exp_avg_sq")
NUMBERS = ("step", "lr", "betas", "eps", "weight_decay")
OUTPUTS = ("param", "exp_avg", "exp_avg_sq")
_USUAL: dict[str, Any] = {"step": 1, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
_USUAL["weight_decay"] = 0.01
# What each slip shows up in: late steps, no decay, much decay, a large eps, betas whose float32
# complements differ from 1 - float32(beta), beta 0, a step size of 0 and one that is subnormal.
_HYPERPARAMETERS: tuple[dict[str, Any], ...] = (
    _USUAL,
    {**_USUAL, "step": 2},
    {**_USUAL, "step": 1000, "betas": (0.9, 0.95), "weight_decay": 0.1},
    {**_USUAL, "weight_decay": 0.0},
    {**_USUAL, "eps": 1.0, "step": 10, "lr": 0.1},
    {**_USUAL, "eps": 1e-15, "step": 7, "betas": (0.99, 0.9999)},
    {**_USUAL, "betas": (0.0, 0.0), "weight_decay": 1.0, "lr": 1.0},
    {**_USUAL, "lr": 0.0, "step": 3},
    {**_USUAL, "lr": 1e-40, "eps": 0.0},
    {**_USUAL, "step": 123457, "lr": 3e-4},
    # lr*wd rounded once is not float32(lr)*float32(wd).
    {**_USUAL, "lr": 0.7, "weight_decay": 0.7, "step": 5},
)


@register
@dataclass(frozen=True)
class AdamW(Contract):
    """`adamw`: kernel(param, grad, exp_avg, exp_avg_sq, *, step, lr, betas, eps, weight_decay).

    It returns the new (param, exp_avg, exp_avg_sq), or None when it works in place. Inputs by these
    names; outputs "param", "exp_avg", "exp_avg_sq". Tensors are float32 of one shape, (n,).

    Attributes:
        order: The order of operations, as for `adamw`.
    """

    name: ClassVar[str] = "adamw"
    scalars: ClassVar[frozenset[str]] = frozenset(NUMBERS)

    order: str | AdamOrder = "plain"

    def __post_init__(self) -> None:
        order_named(self.order)

    def fixed(self, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
        for index, numbers in enumerate(_HYPERPARAMETERS):
            yield _inputs(trained_state(index, 1000), numbers)
        for numbers in _HYPERPARAMETERS[:4]:
            yield _inputs(_special_state(), numbers)
            yield _inputs(_wide_state(), numbers)
        for size in sizes(profile):
            yield _inputs(trained_state(size, size), _HYPERPARAMETERS[2])

    def drawn(self, profile: Profile, traits: frozenset[str]) -> st.SearchStrategy[Arrays]:
        sizes = st.one_of(strategies.ragged_sizes(128), st.integers(0, profile.largest))
        return strategies.adamw_states(sizes=sizes).map(_from_case)

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        found = adamw(*(inputs[name] for name in TENSORS), order=self.order, **_numbers(inputs))
        return dict(zip(OUTPUTS, found, strict=True))

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        numbers = {name: given[name] for name in NUMBERS}
        result = kernel(*(given[name] for name in TENSORS), **numbers)
        return several([given[name] for name in OUTPUTS] if result is None else result, OUTPUTS)

    def axes(self, inputs: Mapping[str, Array]) -> list[list[tuple[str, int]]]:
        return [[(name, 0) for name in TENSORS]]

    def simpler(self, inputs: Mapping[str, Array]) -> Iterator[Arrays]:
        plain = _inputs({}, _USUAL)
        for numbers in (plain, *({name: plain[name]} for name in plain)):
            if any((inputs[name] != value).any() for name, value in numbers.items()):
                yield {**inputs, **numbers}
        for name in TENSORS:
            for value in (0.0, 1.0):
                if (inputs[name] != value).any():
                    yield {**inputs, name: np.full_like(inputs[name], value)}


def trained_state(seed: int, size: int) -> Arrays:
    """Tensors as after some steps of training, one element in eight zero."""
    exponents = ((-10, 1), (-20, -4), (-22, -6), (-44, -12))
    tensors = {}
    for column, (name, (low, high)) in enumerate(zip(TENSORS, exponents, strict=True)):
        words = random_words(seed * 8 + column, size)
        tensors[name] = wide_floats(words[:, 1], low, high)
        tensors[name][words[:, 0] % np.uint64(8) == 0] = 0
    tensors["exp_avg_sq"] = np.abs(tensors["exp_avg_sq"])
    return tensors


def _special_state() -> Arrays:
    """NaN, infinities, zeros of both signs and subnormals, in each tensor."""
    special = special_values()
    state = trained_state(99, 4 * special.size)
    for place, name in enumerate(TENSORS):
        part = slice(place * special.size, (place + 1) * special.size)
        state[name][part] = special
    state["exp_avg_sq"] = np.where(state["exp_avg_sq"] < 0, 0, state["exp_avg_sq"])
    return state


def _wide_state() -> Arrays:
    """All exponents of float32, in each tensor."""
    state = {
        name: wide_floats(random_words(200 + index, 600)[:, 1], -149, 127)
        for index, name in enumerate(TENSORS)
    }
    state["exp_avg_sq"] = np.abs(state["exp_avg_sq"])
    return state


def _inputs(tensors: Mapping[str, Array], numbers: Mapping[str, Any]) -> Arrays:
    return {**tensors, **{name: np.asarray(numbers[name]) for name in NUMBERS}}


def _from_case(case: AdamWCase) -> Arrays:
    return _inputs(dict(zip(TENSORS, case.tensors, strict=True)), case.options)


def _numbers(inputs: Mapping[str, Array]) -> dict[str, Any]:
    numbers = {name: inputs[name].tolist() for name in NUMBERS}
    return {**numbers, "betas": tuple(numbers["betas"])}
