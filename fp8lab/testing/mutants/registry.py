"""What a planted fault is, and the list of all of them.

A correct kernel is a class whose steps are methods; a planted fault is a subclass that overrides
one of them. An instance is the kernel. Its first argument, `Choices`, holds the contract's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fp8lab.formats import E4M3, Float8Format

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Choices:
    """A contract's choices, as far as the kernels here have them; see the contracts."""

    fmt: Float8Format = E4M3
    rounding: str = "nearest_even"
    overflow: str = "saturate"
    block: tuple[int, int] = (1, 128)
    power_of_two: bool = False
    scale_rounding: str = "floor"
    margin: int = 0
    algorithm: str = "max"
    promote_every: int | None = None
    formats: tuple[Float8Format, Float8Format] = (E4M3, E4M3)
    source: Float8Format = E4M3
    target: Float8Format = E4M3


class MakesKernel(Protocol):
    """A class whose instances are kernels."""

    __name__: str
    __doc__: str | None

    def __call__(self, choices: Choices) -> Kernel:
        """A kernel with its choices made."""
        ...


K = TypeVar("K", bound=MakesKernel)


@dataclass(frozen=True)
class Mutant:
    """A kernel with one fault planted.

    Attributes:
        name: Unique; words joined by hyphens.
        description: What is wrong with it, in one line.
        contract: The contract that must catch it.
        settings: That contract's choices.
        fault: The name that the guess must give.
        make: Makes the kernel.
        equivalent: Where it gives the right bits nevertheless: the proof. Empty otherwise.
    """

    name: str
    description: str
    contract: str
    settings: Mapping[str, Any]
    fault: str
    make: MakesKernel
    equivalent: str = ""

    def kernel(self) -> Kernel:
        """The kernel."""
        return self.make(Choices(**self.settings))


RIGHT: dict[str, MakesKernel] = {}
MUTANTS: dict[str, Mutant] = {}


def right(contract: str) -> Callable[[K], K]:
    """Register the correct kernel of a contract."""

    def register(make: K) -> K:
        RIGHT[contract] = make
        return make

    return register


def mutant(contract: str, fault: str, *, equivalent: str = "", **settings: Any) -> Callable[[K], K]:
    """Register a kernel with a fault; its name and text become the mutant's.

    Args:
        contract: The contract that must catch it.
        fault: What the guess must say.
        equivalent: The proof that no input can show the fault, if there is one.
        settings: The contract's choices.
    """

    def register(make: K) -> K:
        words = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
        name = re.sub(words, "-", make.__name__).lower()
        if name in MUTANTS:
            raise ValueError(f"two mutants are called {name}")
        text = " ".join((make.__doc__ or "").split())
        MUTANTS[name] = Mutant(name, text, contract, settings, fault, make, equivalent)
        return make

    return register
