"""The fallback at work: a model's layers are watched, and their roles moved to BF16 and back.

    fallback = Fallback(model, FallbackRule(overflow=1e-3, after=2), window=5)
    for batch in batches:
        with fallback.watching(step.scaler):
            step.zero_grad()
            step.backward(loss(model, batch))
        step()
        events = fallback.advance()

Decisions are made between steps. A switch changes what the next forward pass computes, so a CUDA
graph that was captured before it must be captured anew: `fallback.switches` has grown then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fp8lab.errors import UserError
from fp8lab.fallback import FallbackRule, FallbackState, Switch, WindowSigns, advance
from fp8lab.fallback_config import FallbackConfig, fallback_from_dict, fallback_from_text
from fp8lab.fallback_signs import (
    CountedCasts,
    GradientSpikes,
    Place,
    SignSource,
    signs_from_dict,
    worst,
)
from fp8lab.gradients import LossScaler
from fp8lab.linear import Fp8Linear
from fp8lab.recipes import OPERANDS, PRODUCT_OPERANDS

__all__ = [
    "Event",
    "Fallback",
    "FallbackConfig",
    "fallback_from_dict",
    "fallback_from_text",
    "watched_layers",
]

Event = dict[str, Any]


class Fallback:
    """Watches a model's FP8 layers and moves their roles.

    Args:
        model: Converted; its FP8 layers stay what they are. Roles that were in BF16 by hand go by
            the rule from now on.
        config: A rule, or a whole `FallbackConfig`.
        source: Where the signs of casts come from; None counts them (`CountedCasts`).
        settings: Of `FallbackConfig`, in place of those in `config`.

    Attributes:
        config: What it is.
        events: Every switch so far, as rows: event ("fallback"), layer, role, to ("bf16", "fp8"),
            why (a sign's name, or "recovered"), step, and of a fall `wait`, windows.

    Raises:
        UserError: A pattern that matches no FP8 layer, or no chosen role that is in FP8.
    """

    def __init__(
        self,
        model: nn.Module,
        config: FallbackRule | FallbackConfig | None = None,
        *,
        source: SignSource | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(config, FallbackConfig):
            config = FallbackConfig(config or FallbackRule())
        for name in ("layers", "roles"):
            if name in settings:
                given = settings[name]
                settings[name] = (given,) if isinstance(given, str) else tuple(given)
        self.config = replace(config, **settings)
        self._watched = watched_layers(model, self.config.layers, self.config.roles)
        self._layers = {name: layer for name, (layer, _) in self._watched.items()}
        sums = self.config.rule.sqnr_db is not None
        self._source = CountedCasts(self._watched, sums=sums) if source is None else source
        self._states: dict[Place, FallbackState] = dict.fromkeys(self._places(), FallbackState())
        self._window: dict[Place, WindowSigns] = {}
        self._spikes = GradientSpikes()
        self._steps = 0
        self.events: list[Event] = []
        self._apply()

    @property
    def switches(self) -> int:
        """How many there were: what was compiled or captured at another number is out of date."""
        return len(self.events)

    @property
    def in_bf16(self) -> list[Place]:
        """Layer and role of what is in BF16 now."""
        return [place for place, state in self._states.items() if state.fallen]

    @property
    def watches_next(self) -> bool:
        """Whether the next step is a watched one."""
        return (self._steps + 1) % self.config.every == 0

    @contextmanager
    def watching(self, scaler: LossScaler | None = None) -> Iterator[None]:
        """Forward and backward passes of a step, before gradients are used.

        Args:
            scaler: What the loss was scaled by, so that gradients can be compared.
        """
        if not self.watches_next:
            yield
            return
        self._source.start()
        try:
            yield
        finally:
            signs = self._source.signs()
        self._take(signs)
        if self.config.rule.gradient_spike is not None:
            inverse = None if scaler is None else scaler.inverse_scale
            spikes = self._spikes.look(self._layers, inverse)
            self._take(
                {(name, "grad_output"): WindowSigns(gradient_spike=s) for name, s in spikes.items()}
            )

    def advance(self, step: int | None = None) -> list[Event]:
        """The end of a step, after the optimizer: at the end of a window, decide.

        Args:
            step: Its number, for the events; None counts the calls.

        Returns:
            The switches that were made, as rows.
        """
        self._steps += 1
        if self._steps % self.config.window:
            return []
        events = []
        for place, state in self._states.items():
            signs = self._window.get(place, WindowSigns())
            self._states[place], switch = advance(self.config.rule, state, signs)
            if switch is not None:
                events.append(_event(place, switch, self._steps if step is None else step))
        self._window = {}
        self.events += events
        if events:
            self._apply()
        return events

    def state_dict(self) -> dict[str, Any]:
        """Decisions, the window so far, gradient norms and events, as plain values."""
        return {
            "steps": self._steps,
            "states": _by_layer({place: own.to_dict() for place, own in self._states.items()}),
            "window": _by_layer({place: asdict(own) for place, own in self._window.items()}),
            "norms": {name: list(norms) for name, norms in self._spikes.norms.items()},
            "events": [dict(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a state over, and move the roles to where they were.

        Raises:
            UserError: It is of other layers or roles, or damaged. Nothing is changed then.
        """
        states = {
            place: FallbackState.from_dict(own) for place, own in _places_of(state_dict["states"])
        }
        if states.keys() != self._states.keys():
            unlike = sorted(states.keys() ^ self._states.keys())[0]
            raise UserError(
                f"the saved fallback and this one do not watch the same: {'.'.join(unlike)} is in"
                " one of them alone"
            )
        window = {place: signs_from_dict(own) for place, own in _places_of(state_dict["window"])}
        self._states = {place: states[place] for place in self._states}
        self._window = window
        self._spikes.norms = {name: list(own) for name, own in state_dict["norms"].items()}
        self._steps = state_dict["steps"]
        self.events = [dict(event) for event in state_dict["events"]]
        self._apply()

    def _places(self) -> Iterator[Place]:
        for name, (_, roles) in self._watched.items():
            for role in roles:
                yield name, role

    def _take(self, signs: Mapping[Place, WindowSigns]) -> None:
        for place, own in signs.items():
            if place in self._states:
                self._window[place] = worst(self._window.get(place, WindowSigns()), own)

    def _apply(self) -> None:
        fallen = self.in_bf16
        for name, layer in self._layers.items():
            layer.set_bf16_roles(role for own, role in fallen if own == name)


def watched_layers(
    model: nn.Module, patterns: Sequence[str], roles: Sequence[str]
) -> dict[str, tuple[Fp8Linear, tuple[str, ...]]]:
    """The FP8 layers that patterns choose, each with those of the roles that are in FP8.

    Raises:
        UserError: A pattern that matches no FP8 layer, or nothing that is in FP8.
    """
    layers = {name: own for name, own in model.named_modules() if isinstance(own, Fp8Linear)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            shown = ", ".join(list(layers)[:8]) + (", ..." if len(layers) > 8 else "")
            raise UserError(
                f"fallback: pattern {pattern!r} matches no FP8 layer; there are: {shown or 'none'}"
            )
    found = {}
    for name, layer in layers.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            own = tuple(role for role in OPERANDS if role in roles and _is_fp8(layer, role))
            if own:
                found[name] = layer, own
    if not found:
        raise UserError(
            f"fallback: none of the roles {', '.join(roles)} of the chosen layers is in FP8, so the"
            " rule can never fire; choose another recipe, or other layers"
        )
    return found


def _is_fp8(layer: Fp8Linear, role: str) -> bool:
    return any(
        layer.recipe.in_fp8(name) and role in (own for own, _ in operands)
        for name, operands in PRODUCT_OPERANDS.items()
    )


def _event(place: Place, switch: Switch, step: int) -> Event:
    layer, role = place
    event: Event = {"event": "fallback", "layer": layer, "role": role, "to": switch.to}
    event |= {"why": switch.reason, "step": step}
    return event | ({"wait": switch.wait} if switch.wait else {})


def _by_layer(table: Mapping[Place, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (layer, role), own in table.items():
        found.setdefault(layer, {})[role] = own
    return found


def _places_of(table: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Place, Any]]:
    for layer, roles in table.items():
        for role, own in roles.items():
            yield (layer, role), own
