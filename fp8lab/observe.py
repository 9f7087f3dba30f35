"""Who is told of FP8 operations as they happen: an audit that is open, and otherwise nobody.

`ops` and what stands beside it mark their operations with `observed`, layers say where they are
with `at`. While no audit is open, both cost one look at a number.

An audit sees what runs in its own context (`contextvars`). A backward pass on a GPU runs in a
thread of autograd's own, which no context reaches: it is seen by every audit that is open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, Protocol, TypeVar

from fp8lab.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

Arguments = dict[str, Any]
Where = tuple[Any, ...]  # a layer, then the role or the product; () outside of layers
Finish = Callable[[Any], None]  # is given what the operation returned


class Observer(Protocol):
    """What an audit is to the operations."""

    def before(self, operation: str, given: Arguments, where: Where) -> Finish | None:
        """Called before an operation computes, with its arguments by name.

        Returns:
            What is called after it; None where the result is of no interest.
        """

    def note_model(self, model: Any) -> None:
        """Called with a model that is about to be stepped: it knows the names of its parts."""

    def end_step(self) -> None:
        """Called when the scales of a model were moved on."""


_open: tuple[Observer, ...] = ()  # those of all contexts, in the order in which they were opened
_LOCK = threading.Lock()
_OWN: ContextVar[tuple[Observer, ...]] = ContextVar("own_observers", default=())
_WHERE: ContextVar[Where] = ContextVar("where", default=())
_ANYWHERE: AbstractContextManager[None] = nullcontext()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Inside, the observer is told of every operation of this context."""
    global _open
    token = _OWN.set((*_OWN.get(), observer))
    with _LOCK:
        _open = (*_open, observer)
    try:
        yield
    finally:
        with _LOCK:
            _open = tuple(other for other in _open if other is not observer)
        _OWN.reset(token)


def observed(operation: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function as an operation of that name."""

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        names = signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _open:
                return function(*args, **kwargs)
            bound = names.bind(*args, **kwargs)
            bound.apply_defaults()
            where = _WHERE.get()
            # All look before anything is computed: an operation may change its arguments.
            started = [own.before(operation, bound.arguments, where) for own in _observers()]
            result = function(*args, **kwargs)
            for finish in started:
                if finish is not None:
                    finish(result)
            return result

        return call

    return mark


def at(place: Any) -> AbstractContextManager[None]:
    """Inside, operations are those of a layer, or of one of its roles or products."""
    return _within(place) if _open else _ANYWHERE


def note_model(model: Any) -> None:
    """Tell observers the model whose step this is."""
    if _open:
        for own in _observers():
            own.note_model(model)


def end_step() -> None:
    """Tell observers that a step is over."""
    if _open:
        for own in _observers():
            own.end_step()


def reaches(observer: Observer) -> bool:
    """Whether what runs here is seen by an observer."""
    return any(own is observer for own in _observers())


def is_watched() -> bool:
    """Whether an observer sees what runs here."""
    return bool(_open and _observers())


def refuse_compiled() -> None:
    """Called inside a compiled graph, whose fused parts no observer sees.

    Raises:
        UserError: An audit is open.
    """
    if is_watched():
        raise UserError(
            "the audit cannot see into a graph of torch.compile, which fuses parts of the casts;"
            " audit the model as it is, without torch.compile"
        )


@contextmanager
def _within(place: Any) -> Iterator[None]:
    token = _WHERE.set((*_WHERE.get(), place))
    try:
        yield
    finally:
        _WHERE.reset(token)


def _observers() -> tuple[Observer, ...]:
    own = _OWN.get()
    if own or not isinstance(threading.current_thread(), threading._DummyThread):
        return own
    return _open  # a thread that Python did not start: one of autograd's
