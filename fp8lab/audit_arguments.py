"""The arguments of `fp8lab.audit`, checked: each refusal says what was given and accepted."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from fp8lab.emulation.integers import as_integer
from fp8lab.errors import UserError

ACTIONS = ("raise", "count")  # at a difference


def check_choices(on_difference: Any, slow: Any, model: Any) -> None:
    """The arguments that are no numbers."""
    if on_difference not in ACTIONS:
        accepted = ", ".join(ACTIONS)
        raise UserError(f"audit: on_difference is {on_difference!r}; accepted: {accepted}")
    if not isinstance(slow, bool):
        raise UserError(f"audit: slow is {slow!r}; accepted: True, False")
    if model is not None and not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UserError(f"audit: model is of {kind}; accepted: a torch.nn.Module, or None")


def integer(name: str, value: Any, least: int, accepted: str, most: float = math.inf) -> int:
    """An integer of any kind as Python's, in its range."""
    found = as_integer(value)
    if found is None or not least <= found <= most:
        raise UserError(f"audit: {name} is {value!r}; accepted: an integer, {accepted}")
    return found
