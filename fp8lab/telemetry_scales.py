"""By what the gradients of a watched step were scaled: asked of the `UpdateStep` that was used.

One is used when it makes gradients (`backward`, `accumulate`) or takes its step, in a loop or in a
replayed CUDA graph. Several may live on one optimizer, and a copy is a step of its own: what counts
is which of them was used between the beginning and the end of the watched step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8lab.errors import UserError
from fp8lab.gradients import LossScaler, UpdateStep, live_steps
from fp8lab.optimizer import AdamW

Unscale = Tensor | None  # what a norm is multiplied by, float64, 0-d; None for nothing


@dataclass(frozen=True)
class _Before:
    """A step as it was when the watched one began."""

    step: UpdateStep
    uses: int
    inverse: Tensor


class GradientScales:
    """The scale of each parameter's gradient in a watched step.

    A parameter is unscaled by the step that was used and whose optimizer has it. One that no step
    has is unscaled by the given scaler, or is as it lies where this model has no step at all. In
    all other cases nobody knows, and the parameter is left out.

    Args:
        model: Whose parameters.
        given: An optimizer, an `UpdateStep`, or None.
        scaler: The loss scaler, for an optimizer without an `UpdateStep`.

    Attributes:
        optimizer: The optimizer that was given, or that of the step.

    Raises:
        UserError: An argument of another type, or of another model; a scaler beside a step that has
            another one, or beside another optimizer than the lab's.
    """

    def __init__(
        self, model: nn.Module, given: Optimizer | UpdateStep | None, scaler: LossScaler | None
    ) -> None:
        step = given if isinstance(given, UpdateStep) else None
        self.optimizer: Any = given if step is None else step.optimizer
        for name, value, accepted, ok in (
            ("model", model, "a torch.nn.Module", isinstance(model, nn.Module)),
            (
                "optimizer",
                given,
                "a torch optimizer, an UpdateStep, or None",
                given is None or hasattr(self.optimizer, "param_groups"),
            ),
            ("scaler", scaler, "a LossScaler, or None", isinstance(scaler, LossScaler | None)),
        ):
            if not ok:
                raise UserError(
                    f"telemetry: {name} is of type {type(value).__name__}; accepted: {accepted}"
                )
        self._model = model
        if given is not None and not self._concerns(self.optimizer):
            raise UserError(
                f"telemetry: the {type(given).__name__} has no parameter of this model; give the"
                " one that was made for it"
            )
        steps = [own for own in live_steps() if own.optimizer is self.optimizer]
        if scaler is not None:
            _check_scaler(scaler, self.optimizer, steps if step is None else [step])
        self._scaler = scaler if step is None else step.scaler
        self._before: list[_Before] = []
        self._inverse: Unscale = None

    def begin(self) -> None:
        """Remember the scales: a step moves its own on."""
        self._before = [
            _Before(own, own.uses, _inverse(own.scaler))
            for own in live_steps()
            if self._concerns(own.optimizer)
        ]
        self._inverse = None if self._scaler is None else _inverse(self._scaler)

    def forget(self) -> None:
        """The watched step is over: keep no `UpdateStep` alive."""
        self._before, self._inverse = [], None

    def of(self, params: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Unscale]]:
        """Of each parameter whose gradient's scale is known, what its norm is multiplied by.

        Raises:
            UserError: Steps with several scales were used on one optimizer, another one than the
                given one, or one that was made since the watched step began.
        """
        self._check_none_is_new()
        known: dict[int, Unscale] = {}
        idle: set[int] = set()
        for own in self._before:
            places = {id(param) for param in _parameters(own.step.optimizer)}
            if own.step.uses == own.uses:
                idle |= places
                continue
            self._check_given(own.step)
            unscale = own.inverse if own.step.left_scaled else None
            if any(_differ(known.get(place, unscale), unscale) for place in places):
                raise UserError(
                    "telemetry: UpdateSteps with several loss scales were used on one optimizer in"
                    " the watched step; use one"
                )
            known |= dict.fromkeys(places, unscale)
        given = {id(param) for param in _parameters(self.optimizer)}
        for param in params:
            place = id(param)
            if place in known:
                yield param, known[place]
            elif place in given and place not in idle and self._inverse is not None:
                yield param, self._inverse
            elif not self._before and self._inverse is None:
                yield param, None

    def _concerns(self, optimizer: Any) -> bool:
        """Whether an optimizer has parameters of the model."""
        own = {id(param) for param in self._model.parameters()}
        return any(id(param) in own for param in _parameters(optimizer))

    def _check_none_is_new(self) -> None:
        there = {id(own.step) for own in self._before}
        for step in live_steps():
            if step.uses and id(step) not in there and self._concerns(step.optimizer):
                raise UserError(
                    "telemetry: an UpdateStep was made and used inside the watched step, so that"
                    " its loss scale was not seen; make it before"
                )

    def _check_given(self, used: UpdateStep) -> None:
        if (
            used.optimizer is self.optimizer
            and self._scaler is not None
            and used.scaler is not self._scaler
        ):
            raise UserError(
                "telemetry: the UpdateStep that was used in the watched step has another loss"
                " scaler than the one given; give Telemetry the step that is used"
            )


def _check_scaler(scaler: LossScaler, optimizer: Any, steps: list[UpdateStep]) -> None:
    if not steps and not isinstance(optimizer, AdamW):
        raise UserError(
            "telemetry: scaler is for fp8lab.optimizer.AdamW; in place of another optimizer give"
            " its UpdateStep, which knows when gradients are unscaled"
        )
    if steps and all(own.scaler is not scaler for own in steps):
        raise UserError(
            "telemetry: the step has another loss scaler than the one given; leave scaler out"
        )


def _inverse(scaler: LossScaler) -> Tensor:
    return scaler.inverse_scale.reshape(()).double()


def _parameters(optimizer: Any) -> Iterable[Tensor]:
    groups = [] if optimizer is None else optimizer.param_groups
    return (param for group in groups for param in group["params"])


def _differ(one: Unscale, other: Unscale) -> bool:
    if one is other:
        return False
    return one is None or other is None or not torch.equal(one, other)
