"""Whether a saved value can stand where a live one is: its kind, and a tensor's dtype and shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8lab.checkpoint_tree import dtype_name, spelled

_KINDS = ((bool, "true or false"), ((int, float), "a number"), (str, "a text"))


def name_problems(live: Mapping[Any, Any], saved: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """(name, problem) for each name that only one of two tables has; as paths spell it."""
    missing = [(spelled(name), "missing") for name in live if name not in saved]
    return missing + [(spelled(name), "unknown") for name in saved if name not in live]


def kind_of_value(value: Any) -> str:
    """What a value is, for people: "float32 (3,)", "a number", "a list of 2"."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    for kind, name in _KINDS:
        if isinstance(value, kind):  # NumPy's float64 is a float, a member of an IntEnum an int
            return name
    return "nothing" if value is None else type(value).__name__


def misfit(live: Any, saved: Any) -> str | None:
    """In which way a saved value is none for a live one's place, where the place is known.

    Returns:
        The problem; None where the two are of one kind, tensors of one dtype and shape, lists of
        one length with items that fit. Where no number and no tensor stands there may be None.
    """
    own, other = kind_of_value(live), kind_of_value(saved)
    problem = f"it was saved as {other}, this run keeps {own}"
    if isinstance(live, list | tuple) and isinstance(saved, list | tuple):
        fit = own == other and all(misfit(*pair) is None for pair in zip(live, saved, strict=True))
        return None if fit else f"{problem}, or with other items"
    kinds = {_rough(live), _rough(saved)}
    if own == other or ("nothing" in kinds and not kinds & {"a tensor", "a number"}):
        return None
    return problem


def rough_misfit(live: Any, saved: Any) -> str | None:
    """The same where the live value only shows what may stand there, as what an object keeps that
    the lab does not know: tensors of other sizes and longer lists may be what it has seen by now, a
    number may have become a tensor, and anything may be unset yet.
    """
    one, other = _rough(live), _rough(saved)
    scalars = {"a tensor", "a number", "true or false"}
    if one == other or "nothing" in (one, other) or {one, other} <= scalars:
        return None
    return f"it was saved as {kind_of_value(saved)}, this run keeps {kind_of_value(live)}"


def _rough(value: Any) -> str:
    """A value's kind without sizes."""
    if isinstance(value, Tensor):
        return "a tensor"
    return "a list" if isinstance(value, list | tuple) else kind_of_value(value)
