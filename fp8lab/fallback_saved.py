"""The state of a fallback as a checkpoint keeps it: by layer and role, read back with care."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from fp8lab.errors import UserError
from fp8lab.fallback import FallbackState, WindowSigns
from fp8lab.fallback_signs import NORMS_KEPT, Place, signs_from_dict
from fp8lab.saved_values import list_of, table_of, whole_number

_WHO = "fallback"


@dataclass(frozen=True)
class SavedFallback:
    """What `Fallback.state_dict` holds: decisions, the window so far, gradient norms, events."""

    steps: int
    states: dict[Place, FallbackState]
    window: dict[Place, WindowSigns]
    norms: dict[str, list[float]]
    events: list[dict[str, Any]]


def by_layer(table: Mapping[Place, Any]) -> dict[str, dict[str, Any]]:
    """A table by layer and role as one of tables, whose keys are texts."""
    found: dict[str, dict[str, Any]] = {}
    for (layer, role), own in table.items():
        found.setdefault(layer, {})[role] = own
    return found


def read_saved(saved: object, layers: Container[str]) -> SavedFallback:
    """All of a saved state, checked.

    Args:
        saved: What `Fallback.state_dict` gave.
        layers: The names of those that are watched.

    Raises:
        UserError: It is damaged, or keeps gradient norms or signs of a layer that is not watched.
    """
    states = {p: FallbackState.from_dict(own) for p, own in _by_place(saved, "states").items()}
    window = {p: signs_from_dict(own) for p, own in _by_place(saved, "window").items()}
    for place in window.keys() - states.keys():
        raise UserError(f"the saved fallback's window shows {place[0]}.{place[1]}, which has none")
    events = list_of(saved, "events", _WHO)
    for event in events:
        if not isinstance(event, Mapping):
            raise UserError(f"the saved fallback's events hold {event!r}; accepted: tables")
    return SavedFallback(
        whole_number(saved, "steps", _WHO),
        states,
        window,
        _norms(saved, layers),
        [dict(event) for event in events],
    )


def _by_place(saved: object, key: str) -> dict[Place, Any]:
    table = table_of(saved, key, _WHO)
    return {
        (layer, role): own for layer in table for role, own in table_of(table, layer, _WHO).items()
    }


def _norms(saved: object, layers: Container[str]) -> dict[str, list[float]]:
    table = table_of(saved, "norms", _WHO)
    found = {}
    for layer in table:
        norms = list_of(table, layer, _WHO)
        fine = all(
            isinstance(norm, int | float) and not isinstance(norm, bool) and 0 <= norm < math.inf
            for norm in norms
        )
        if layer not in layers or not fine or len(norms) > NORMS_KEPT:
            raise UserError(
                f"the saved fallback's gradient norms of {layer!r} are {norms!r}; accepted: of a"
                f" layer that is watched here, {NORMS_KEPT} at most, finite and not negative"
            )
        found[layer] = norms
    return found
