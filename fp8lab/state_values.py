"""Whether a saved value can stand where a live one is: its kind, and a tensor's dtype and shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8lab.checkpoint_tree import dtype_name


def kind_of_value(value: Any) -> str:
    """What a value is, for people: "float32 (3,)", "a number", "a list of 2"."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text"}
    return "nothing" if value is None else kinds.get(type(value), type(value).__name__)


def misfit(live: Any, saved: Any, *, sizes: bool = True) -> str | None:
    """In which way a saved value is none for the live one's place; None where it may be.

    Args:
        live, saved: The two.
        sizes: Whether lists must be of the same length and their items fit, tensors be of the same
            dtype and shape, and numbers be there.

    Returns:
        The problem. Where a text or a table stands on one side there may be None on the other, for
        numbers too without `sizes`: some are unset at first.
    """
    own, other = kind_of_value(live), kind_of_value(saved)
    problem = f"it was saved as {other}, this run keeps {own}"
    if isinstance(live, list | tuple) and isinstance(saved, list | tuple) and sizes:
        fit = own == other and all(misfit(*pair) is None for pair in zip(live, saved, strict=True))
        return None if fit else f"{problem}, or with other items"
    kinds = {_rough(live), _rough(saved)}
    if own == other or (not sizes and len(kinds) == 1):
        return None
    unset = "nothing" in kinds and not kinds & ({"tensor", "a number"} if sizes else {"tensor"})
    return None if unset else problem


def _rough(value: Any) -> str:
    """A value's kind without sizes."""
    if isinstance(value, Tensor):
        return "tensor"
    return "list" if isinstance(value, list | tuple) else kind_of_value(value)
