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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from fp8lab.errors import UserError
from fp8lab.fallback import FallbackRule, FallbackState, Switch, WindowSigns, advance
from fp8lab.fallback_config import FallbackConfig, fallback_from_dict, fallback_from_text
from fp8lab.fallback_layers import casts_of, check_reachable, fp8_roles, watched_layers
from fp8lab.fallback_saved import by_layer, read_saved
from fp8lab.fallback_signs import CountedCasts, GradientSpikes, Place, SignSource, worst
from fp8lab.gradients import LossScaler
from fp8lab.watched_casts import WatchedCasts

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
        model: Converted before, and not again. Roles that were in BF16 by hand go by the rule from
            now on.
        config: A rule, or a whole `FallbackConfig`.
        source: Where the signs of casts come from; None counts them (`CountedCasts`).
        settings: Of `FallbackConfig`, in place of those in `config`.

    Attributes:
        config: What it is.
        events: Every switch so far, as rows: event ("fallback"), layer, role, to ("bf16", "fp8"),
            why (a sign's name, or "recovered"), step, and of a fall `wait`, windows.

    Raises:
        UserError: A pattern that matches no FP8 layer, no chosen role that is in FP8, or a rule
            that can never fire or never return for them.
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
            config = FallbackConfig(FallbackRule() if config is None else config)
        self.config = replace(config, **settings)
        self._watched = watched_layers(model, self.config.layers, self.config.roles)
        check_reachable(self.config.rule, self._watched)
        layers, roles = self.config.layers, self.config.roles
        self._casts = WatchedCasts(
            "fallback", model, lambda: casts_of(fp8_roles(model, layers, roles))
        )
        self._layers = {name: layer for name, (layer, _) in self._watched.items()}
        sums = self.config.rule.sqnr_db is not None
        self._source = CountedCasts(self._watched, sums=sums) if source is None else source
        self._states: dict[Place, FallbackState] = dict.fromkeys(self._places(), FallbackState())
        self._window: dict[Place, WindowSigns] = {}
        self._spikes = GradientSpikes()
        self._steps = 0
        self._open = False
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

        Raises:
            UserError: The step is watched by this fallback already, or the model was converted
                since.
        """
        if self._open:
            raise UserError("fallback: this step is watched already; call watching once a step")
        self._open = True
        try:
            with self._counting(scaler) if self.watches_next else nullcontext():
                yield
        finally:
            self._open = False

    @contextmanager
    def _counting(self, scaler: LossScaler | None) -> Iterator[None]:
        self._casts.check()
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
            "states": by_layer({place: own.to_dict() for place, own in self._states.items()}),
            "window": by_layer({place: asdict(own) for place, own in self._window.items()}),
            "norms": {name: list(norms) for name, norms in self._spikes.norms.items()},
            "events": [dict(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a state over, and move the roles to where they were.

        Raises:
            UserError: It is of other layers or roles, or damaged; or the model was converted since.
                Nothing is changed then.
        """
        self._casts.check()
        saved = read_saved(state_dict, self._layers)
        if saved.states.keys() != self._states.keys():
            unlike = min(saved.states.keys() ^ self._states.keys())
            raise UserError(
                f"the saved fallback and this one do not watch the same: {'.'.join(unlike)} is in"
                " one of them alone"
            )
        self._states = {place: saved.states[place] for place in self._states}
        self._window = saved.window
        self._spikes.norms = saved.norms
        self._steps, self.events = saved.steps, saved.events
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


def _event(place: Place, switch: Switch, step: int) -> Event:
    layer, role = place
    event: Event = {"event": "fallback", "layer": layer, "role": role, "to": switch.to}
    event |= {"why": switch.reason, "step": step}
    return event | ({"wait": switch.wait} if switch.wait else {})
