"""Tickets: how a compiled backward pass gets the weight as its own forward pass cast it.

What the data gradient takes of a weight is kept by the layer, for as long as the weight stays as it
is. An operator must not return such memory, and a copy would cost a pass over all codes in each
forward pass, and their memory. So a forward operator returns a ticket: a tensor that holds a number
and whose memory keeps what the number stands for. It lives as long as autograd keeps the ticket, as
the codes do that an uncompiled layer saves, whatever becomes of the layer meanwhile.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from fp8lab.errors import UserError
from fp8lab.linear_products import Side
from fp8lab.recipes import Recipe


class _Known(NamedTuple):
    """What there is to know of a side besides itself.

    Attributes:
        number: On its tickets.
        recipe: In force when it was made.
        weight: Where the side is the weight's own memory, not cast.
        version: Of that weight, as torch counts changes.
    """

    number: int
    recipe: Recipe
    weight: Tensor | None
    version: int


_SIDES: WeakValueDictionary[int, Side] = WeakValueDictionary()
_KNOWN: WeakKeyDictionary[Side, _Known] = WeakKeyDictionary()
_NUMBERS = itertools.count()


class _Memory(np.ndarray[tuple[()], np.dtype[np.int64]]):
    """A number, and what it keeps alive."""

    side: Side


def ticket_for(side: Side, recipe: Recipe, weight: Tensor) -> Tensor:
    """A ticket: int64, 0-d, on the CPU.

    Args:
        side: The weight as the data gradient takes it.
        recipe: The one in force in this forward pass.
        weight: The weight itself.
    """
    known = _KNOWN.get(side)
    if known is None:
        own = side.values.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        counted = weight if own and not weight.is_inference() else None
        version = 0 if counted is None else counted._version
        known = _KNOWN[side] = _Known(next(_NUMBERS), recipe, counted, version)
        _SIDES[known.number] = side
    memory = np.array(known.number).view(_Memory)
    memory.side = side
    return torch.from_numpy(memory)


def fake_ticket() -> Tensor:
    """What stands for a ticket while a graph is traced."""
    return torch.empty((), dtype=torch.int64, device="cpu")


def redeemed(ticket: Tensor, label: str) -> tuple[Recipe, Side]:
    """The recipe that was in force in a forward pass, and the weight for its data gradient.

    Args:
        ticket: What the forward pass returned, or a copy of it.
        label: The layer's, for the message.

    Raises:
        UserError: The ticket is a copy (saved-tensor hooks make them), which keeps nothing alive,
            and the layer has cast its weight anew since. Or what was kept is the weight itself, as
            it is where a bfloat16 weight enters a product in BF16, and it was changed since.
    """
    side = _SIDES.get(int(ticket))
    if side is None:
        raise UserError(
            f"layer {label!r}: the weight codes of a compiled forward pass are gone: saved-tensor"
            " hooks kept a copy of what it saved, and its weight, scale or roles in BF16 changed"
            " before the backward pass; change them after it, or leave out the hooks"
        )
    known = _KNOWN[side]
    if known.weight is not None and known.weight._version != known.version:
        raise UserError(
            f"layer {label!r}: its weight, which this data gradient takes as it is (bfloat16, not"
            " cast), was changed in place after the forward pass; change it after the backward pass"
        )
    return known.recipe, side
