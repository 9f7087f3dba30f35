"""What the fallback is told of a step: signs by layer and role, and the worst of a window.

A `SignSource` gives the signs of casts; `CountedCasts` is the one that `Fallback` takes unless it
is given another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8lab.emulation.telemetry import CastCounts
from fp8lab.errors import UserError
from fp8lab.fallback import SIGNS, WindowSigns
from fp8lab.linear import Fp8Linear, OperandCast
from fp8lab.linear_casts import Meter
from fp8lab.ops_operands import Codes
from fp8lab.ops_telemetry import CastTable, to_host

Place = tuple[str, str]  # a layer's name and a role

NORMS_KEPT = 32  # gradient norms of a layer that the usual one is the median of
NORMS_NEEDED = 8  # fewer say nothing yet


class SignSource(Protocol):
    """Where the signs of casts come from."""

    def start(self) -> None:
        """Called before the forward pass of a watched step."""

    def signs(self) -> Mapping[Place, WindowSigns]:
        """Called after its backward pass: the signs of what was cast, of a role in BF16 as FP8
        would have cast it.
        """


class CountedCasts:
    """Signs from what casts did, counted as `fp8lab.emulation.telemetry.count_cast` does.

    Counting waits for nothing; a GPU is waited for once, when a watched step is over.

    Args:
        layers: The layers by name, and which roles of each are watched.
        sums: Whether the SQNR is wanted.
    """

    def __init__(
        self, layers: Mapping[str, tuple[Fp8Linear, tuple[str, ...]]], *, sums: bool
    ) -> None:
        self._casts = {
            (name, role): layer.cast_of(role)
            for name, (layer, roles) in layers.items()
            for role in roles
        }
        self._sums = sums
        self._table = CastTable(len(self._casts))
        self._before: list[tuple[bool, Meter | None]] = []

    def start(self) -> None:
        """Have every cast counted; who observes them too goes on doing so."""
        self._table.clear()
        self._before = [(cast.observe, cast.meter) for cast in self._casts.values()]
        for row, cast in enumerate(self._casts.values()):
            cast.observe, cast.meter = True, self._meter(row, cast, cast.observe, cast.meter)

    def signs(self) -> dict[Place, WindowSigns]:
        """Of each cast that ran since `start`, all microbatches together."""
        for cast, before in zip(self._casts.values(), self._before, strict=True):
            cast.observe, cast.meter = before
        counts = self._table.counts(to_host(self._table.tensors()))
        return {
            place: signs_of(own, sums=self._sums)
            for place, own in zip(self._casts, counts, strict=True)
            if own.elements
        }

    def _meter(self, row: int, cast: OperandCast, observe: bool, before: Meter | None) -> Meter:
        def meter(x: Tensor, codes: Codes | None) -> None:
            self._table.add(row, x, codes, sums=self._sums)
            if observe:
                cast.meter = before
                cast.note(x, codes)
                cast.meter = meter

        return meter


def signs_of(counts: CastCounts, *, sums: bool = True) -> WindowSigns:
    """The signs of casts. A tensor that holds NaN or Inf has overflow 1 and SQNR -Inf."""
    if counts.nonfinite:
        return WindowSigns(overflow=1.0, sqnr_db=-math.inf if sums else None)
    sqnr = counts.sqnr_db if sums else None
    lost = sqnr is not None and math.isnan(sqnr)
    return WindowSigns(overflow=counts.share("overflow"), sqnr_db=-math.inf if lost else sqnr)


def worst(one: WindowSigns, other: WindowSigns) -> WindowSigns:
    """The worse of each sign."""
    chosen: dict[str, float | None] = {}
    for name in SIGNS:
        pair = [v for v in (getattr(one, name), getattr(other, name)) if v is not None]
        pick = min if name == "sqnr_db" else max
        chosen[name] = pick(pair) if pair else None
    return WindowSigns(**chosen)


def signs_from_dict(table: Mapping[str, Any]) -> WindowSigns:
    """What `asdict` made of them, for a checkpoint.

    Raises:
        UserError: It is no table, a name is unknown, or a value is no number.
    """
    if not isinstance(table, Mapping):
        raise UserError(f"a window's signs are {table!r}; accepted: {', '.join(SIGNS)}")
    for name, value in table.items():
        if name not in SIGNS or not (value is None or isinstance(value, int | float)):
            raise UserError(
                f"a window's sign {name!r} is {value!r}; accepted: numbers or None, for"
                f" {', '.join(SIGNS)}"
            )
    return WindowSigns(**table)


class GradientSpikes:
    """How far the norm of a layer's weight gradient is above its usual one.

    Attributes:
        norms: The last finite norms of each layer, oldest first.
    """

    def __init__(self) -> None:
        self.norms: dict[str, list[float]] = {}

    def look(
        self, layers: Mapping[str, Fp8Linear], inverse_scale: Tensor | None
    ) -> dict[str, float]:
        """The norms of a step over the median of those before; one wait for a GPU.

        Args:
            layers: By name; a layer without a gradient is left out.
            inverse_scale: What unscales gradients, one element; None is 1.

        Returns:
            By layer; Inf where the norm is not finite; nothing of a layer seen too seldom.
        """
        grads = {name: _gradient(layer) for name, layer in layers.items()}
        known = {name: grad for name, grad in grads.items() if grad is not None}
        if not known:
            return {}
        norms = torch.stack(
            [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in known.values()]
        )
        if inverse_scale is not None:
            norms = norms * inverse_scale
        spikes = {}
        for name, norm in zip(known, norms.tolist(), strict=True):
            past = self.norms.setdefault(name, [])
            usual = median(past) if len(past) >= NORMS_NEEDED else 0.0
            if not math.isfinite(norm):
                spikes[name] = math.inf
                continue
            if usual > 0:
                spikes[name] = norm / usual
            past.append(norm)
            del past[:-NORMS_KEPT]
        return spikes


def _gradient(layer: Fp8Linear) -> Tensor | None:
    grad: Tensor | None = getattr(layer.weight, "main_grad", None)
    return layer.weight.grad if grad is None else grad
