"""What a contract is: a frozen description of an operation that a kernel can be held to.

A contract has a name and settings (JSON values, so that a case can be saved); it makes inputs,
knows the oracle's answer, and knows how a kernel is called. Inputs and outputs are NumPy arrays by
name; how they become tensors is the runner's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.tensorcore import TENSOR_CORES, TensorCore
from fp8lab.formats import TARGETS, FloatFormat, OverflowPolicy
from fp8lab.optimizer_formats import AdamOrder
from fp8lab.testing.profiles import Profile

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Kernel = Callable[..., Any]
Axis = tuple[str, int]  # an input's name and one of its axes


class WrongResult(Exception):
    """A kernel returned what the contract does not know how to read."""


class Contract(ABC):
    """An operation with all its choices made. Subclasses are frozen dataclasses.

    Attributes:
        name: What reports and saved cases call it.
        scalars: The inputs that a kernel is given as Python numbers.
    """

    name: ClassVar[str]
    scalars: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def fixed(self, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
        """The inputs that decide most, in the order in which they are tried."""

    @abstractmethod
    def drawn(self, profile: Profile, traits: frozenset[str]) -> st.SearchStrategy[Arrays]:
        """Inputs for Hypothesis to draw."""

    @abstractmethod
    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        """The oracle's answer."""

    @abstractmethod
    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        """Call a kernel on tensors and numbers; what it gave, by the names of the outputs.

        An output that is one of the given tensors says that the kernel works in place.

        Raises:
            WrongResult: It returned something else.
        """

    def accepted(self, output: str, expected: Array) -> tuple[str, ...]:
        """The dtypes, by name, in which an output may come."""
        name = expected.dtype.name
        return (name, "uint8") if name.startswith("float8") else (name,)

    def read(self, output: str, actual: Array, expected: Array) -> Array:
        """An output in the oracle's dtype; its dtype is one of `accepted`."""
        return actual if actual.dtype == expected.dtype else actual.view(expected.dtype)

    def axes(self, inputs: Mapping[str, Array]) -> list[list[Axis]]:
        """The axes along which inputs can be cut, those that must be cut together in one list."""
        return [
            [(name, axis)]
            for name, array in inputs.items()
            if name not in self.scalars
            for axis in range(array.ndim)
        ]

    def output_axis(self, group: int) -> int | None:
        """The axis of the first output along which a group of `axes` runs, or None."""
        return group

    def multiples(self, group: int) -> int:
        """What the length of a group of `axes` is a multiple of."""
        return 1

    def shortest(self, group: int) -> int:
        """The least length that a group of `axes` can be cut to."""
        return 0

    def droppable(self, inputs: Mapping[str, Array]) -> list[str]:
        """The inputs that can be left out."""
        return []

    def simpler(self, inputs: Mapping[str, Array]) -> Iterator[Arrays]:
        """Inputs of the same sizes with plainer values, the plainest first."""
        return iter(())

    @property
    def choices(self) -> dict[str, Any]:
        """The choices made, by the names that the check's function gives them."""
        return {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}

    @property
    def settings(self) -> dict[str, Any]:
        """The choices as JSON values."""
        return {name: _plain(value) for name, value in self.choices.items()}

    def __str__(self) -> str:
        usual: dict[str, Any] = (
            {f.name: f.default for f in fields(self)} if is_dataclass(self) else {}
        )
        chosen = ", ".join(
            f"{name}={_short(value)}"
            for name, value in self.settings.items()
            if name not in _RANGES or getattr(self, name) != usual[name]
        )
        return f"{self.name}({chosen})"


CONTRACTS: dict[str, type[Contract]] = {}

# Settings that widen or narrow what is tried; reports leave them out where they are the usual ones.
_RANGES = frozenset({"dtypes", "strided", "ragged", "multiple_of", "exact_sums"})


def register(contract: type[Contract]) -> type[Contract]:
    """Make a contract known by its name, so that its saved cases can be replayed."""
    CONTRACTS[contract.name] = contract
    return contract


def contract_from(name: object, settings: Mapping[str, Any]) -> Contract:
    """The contract of that name with settings as `Contract.settings` gives them, or as the check's
    function takes them.

    Raises:
        ValueError: An unknown name, or settings that the contract does not have.
    """
    accepted = ", ".join(CONTRACTS)
    if not isinstance(name, str):
        raise ValueError(f'a contract is given by its name, as in ("cast", ...): {accepted}')
    if name not in CONTRACTS:
        raise ValueError(f"unknown contract {name!r}; accepted: {accepted}")
    kind = CONTRACTS[name]
    try:
        return kind(**{key: _restored(key, value) for key, value in settings.items()})
    except TypeError as error:
        known: list[str] = [f.name for f in fields(kind)] if is_dataclass(kind) else []
        accepted = ", ".join(known) or "none"
        raise ValueError(f"{name}: {error}; settings it has: {accepted}") from None


def one(result: Any, name: str) -> dict[str, Any]:
    """The one output of a kernel."""
    if result is None:
        raise WrongResult(f"it returned None; accepted: {name}, a tensor")
    return {name: result}


def several(result: Any, names: Sequence[str]) -> dict[str, Any]:
    """The outputs of a kernel that returns a tuple or list."""
    wanted = f"a tuple of {len(names)}: {', '.join(names)}"
    if not isinstance(result, tuple | list):
        kind = "None" if result is None else type(result).__name__
        raise WrongResult(f"it returned {kind}; accepted: {wanted}")
    if len(result) != len(names):
        raise WrongResult(f"it returned {len(result)} values; accepted: {wanted}")
    return dict(zip(names, result, strict=True))


def shown(choice: object) -> str:
    """A choice as reports show it: formats, cores and policies by their names."""
    return _short(_plain(choice))


def float32(value: float) -> Array:
    """A Python float that float32 holds, as the 0-d float64 array that a case keeps."""
    with np.errstate(all="ignore"):
        return np.asarray(np.float32(value), dtype=np.float64)


def _plain(value: Any) -> Any:
    if isinstance(value, FloatFormat | TensorCore):
        return value.name
    if isinstance(value, OverflowPolicy | AdamOrder):
        return asdict(value)
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("name", "..."))
    if isinstance(value, list):
        return f"({', '.join(_short(part) for part in value)})"
    return str(value)


def _restored(key: str, value: Any) -> Any:
    if isinstance(value, str):
        if key in ("fmt", "formats", "source", "target"):
            if value not in TARGETS:
                raise ValueError(f"unknown format {value!r}; accepted: {', '.join(TARGETS)}")
            return TARGETS[value]
        if key == "core":
            if value not in TENSOR_CORES:
                raise ValueError(f"unknown core {value!r}; accepted: {', '.join(TENSOR_CORES)}")
            return TENSOR_CORES[value]
    if isinstance(value, list | tuple):
        return tuple(_restored(key, part) for part in value)
    if isinstance(value, dict):
        return OverflowPolicy(**value) if key == "overflow" else AdamOrder(**value)
    return value
