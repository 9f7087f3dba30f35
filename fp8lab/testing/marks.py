"""The mark that says which contract a function is to hold: what `fp8lab verify FILE` looks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fp8lab.testing.contracts.base import Contract, Kernel, contract_from

if TYPE_CHECKING:
    from fp8lab.testing.bounds import Bound

K = TypeVar("K", bound=Callable[..., Any])
_ATTRIBUTE = "fp8lab_marks"


@dataclass(frozen=True)
class Mark:
    """A contract that a function says it holds, and the bound where it promises no equality."""

    contract: Contract
    bound: Bound | None = None


def contract(name: str, *, bound: Bound | str | None = None, **settings: Any) -> Callable[[K], K]:
    """Mark a function as a kernel that holds a contract. Several marks may be stacked.

    Args:
        name: The contract: "cast", "matmul", ...: what follows `check_` in the function's name.
        bound: For a kernel that promises less than equality: one of `fp8lab.testing.bounds`, or its
            name.
        settings: The contract's choices, as the check's function takes them (fmt, rounding, ...);
            formats and cores may be given by name.

    Raises:
        ValueError: An unknown contract, bound or setting.

    >>> @contract("cast", fmt="E4M3")
    ... def my_cast(x, scale): ...
    >>> [str(mark.contract) for mark in marks_of(my_cast)]
    ['cast(fmt=E4M3, rounding=nearest_even, overflow=saturate)']
    """
    mark = Mark(contract_from(name, settings), bound_named(bound))

    def marked(kernel: K) -> K:
        setattr(kernel, _ATTRIBUTE, [mark, *marks_of(kernel)])
        return kernel

    return marked


def marks_of(kernel: Kernel) -> list[Mark]:
    """The marks of a function, the outermost first; none where it has none."""
    return list(getattr(kernel, _ATTRIBUTE, ()))


def bound_named(bound: Bound | str | None) -> Bound | None:
    """The bound of that name; a bound, or None, is returned as it is.

    Raises:
        ValueError: It is no bound, or the name is unknown.
    """
    if bound is None:
        return None
    from fp8lab.testing.bounds import BOUNDS, Bound

    if isinstance(bound, Bound):
        return bound
    if not isinstance(bound, str) or bound not in BOUNDS:
        raise ValueError(f"unknown bound {bound!r}; accepted: {', '.join(BOUNDS)}")
    return BOUNDS[bound]
