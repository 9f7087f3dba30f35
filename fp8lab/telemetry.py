"""Telemetry: what every cast of a model did and how its parameters moved, each N steps.

    step = UpdateStep(model, optimizer, scaler=scaler)
    telemetry = Telemetry(model, step, every=100, sinks=[JsonLines("telemetry.jsonl")])
    for batch in batches:
        with telemetry.step():
            step.zero_grad()
            step.backward(loss_of(batch))
            step()

On a watched step each cast has one launch more, which counts into a table on the device, and all
numbers come to the host in one copy when the step ends. On the other steps nothing is launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fp8lab.conversion_names import check_fp8_patterns, is_matched, patterns_of
from fp8lab.emulation.telemetry import CastCounts
from fp8lab.errors import UserError
from fp8lab.gradients import LossScaler, UpdateStep
from fp8lab.linear import OperandCast, operand_casts
from fp8lab.ops_telemetry import CastTable, to_host
from fp8lab.records import Row, short_float32
from fp8lab.saved_values import table_of, whole_number
from fp8lab.telemetry_meter import CastMeter
from fp8lab.telemetry_parameters import ParameterWatch
from fp8lab.telemetry_scales import GradientScales
from fp8lab.watched_casts import WatchedCasts

COUNTED = ("elements", "zeros", "nonfinite", "overflow", "underflow")
Sink = Callable[[Row], None]


class Telemetry:
    """Watches a model's casts and parameters at a rate.

    Counts of several microbatches of a step add up, and the amax is the largest. A weight counts
    once a step, however often it is used, and what activation checkpointing computes again does not
    count again.

    A step of a telemetry goes around one that a `fp8lab.fallback_run.Fallback` watches, never
    inside of it.

    Args:
        model: What holds the FP8 layers; converted before, and not again.
        optimizer: For moments; None for none. Or the `UpdateStep`, which knows its optimizer. Norms
            of gradients are unscaled by the `UpdateStep` that is used in the watched step, and left
            out where none of a parameter's is; see `fp8lab.telemetry_scales`.
        every: Steps between watched ones. The first step is watched, too.
        include: Patterns of `fnmatch`, one of which a layer's name must match.
        sqnr: Whether SQNR, zeros and values that are not finite are shown, too.
        parameters: Whether parameters are watched.
        scaler: The loss scaler, where the lab's AdamW is given and no `UpdateStep` has it: without
            it norms of gradients are those of scaled ones.
        sinks: What each row is handed to.

    Attributes:
        steps: Steps begun.
        watched: How many of them were watched.
        counts: Of the last watched step, by cast, exactly; casts that did not run are left out.
        totals: Of all watched steps so far, by cast: elements, zeros, nonfinite, overflow,
            underflow.

    Raises:
        UserError: A rate that is not a whole number from 1, a pattern that matches no layer, an
            argument of another type or of another model, or another scaler than that of the step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | UpdateStep | None = None,
        every: int = 100,
        *,
        include: str | Sequence[str] = "*",
        sqnr: bool = True,
        parameters: bool = True,
        scaler: LossScaler | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UserError(f"telemetry: every is {every!r}; accepted: a whole number, 1 and up")
        scales = GradientScales(model, optimizer, scaler)
        patterns = patterns_of(include, "telemetry: include")
        self.every, self.sqnr, self.sinks = every, sqnr, tuple(sinks)
        layers = dict.fromkeys(name.rpartition(".")[0] for name, _ in operand_casts(model))
        check_fp8_patterns(layers, patterns or ("",), "telemetry")
        self._watched_casts = WatchedCasts("telemetry", model, lambda: _matching(model, patterns))
        self._casts = self._watched_casts.by_name
        self._table = CastTable(len(self._casts))
        # The same ones in every step: a CUDA graph is captured for them.
        self._meters = [
            CastMeter(self._table, row, name.rpartition(".")[2], sums=sqnr)
            for row, name in enumerate(self._casts)
        ]
        self._parameters = ParameterWatch(model, scales, patterns) if parameters else None
        self._watching = False
        self._before: list[bool] = []  # what `observe` was
        self.steps = self.watched = 0
        self.counts: dict[str, CastCounts] = {}
        self.totals: dict[str, dict[str, int]] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step, from before its forward pass until after the optimizer's update."""
        self.begin_step()
        try:
            yield
        except BaseException:
            self._leave()
            if self._parameters is not None:
                self._parameters.forget()
            raise
        self.end_step()

    def begin_step(self, watch: bool | None = None) -> bool:
        """Call it before the forward pass.

        Args:
            watch: Whether this step is watched; None goes by the rate.

        Returns:
            Whether it is.

        Raises:
            UserError: Someone else watches a cast, or the model was converted since; the step does
                not count then.
        """
        self._leave()
        number = self.steps + 1
        if watch is None:
            watch = number == 1 or number % self.every == 0
        if watch:
            self._check_casts()
        self.steps = number
        if not watch:
            return False
        self._table.clear()
        self._before = [cast.observe for cast in self._casts.values()]
        for cast, meter in zip(self._casts.values(), self._meters, strict=True):
            meter.begin()
            cast.observe, cast.meter = True, meter
        if self._parameters is not None:
            self._parameters.begin()
        self._watching = True
        return True

    def end_step(self) -> Row | None:
        """Call it after the update, before gradients are forgotten.

        Returns:
            Of a watched step its row: `step`; `casts` by name, see `cast_entry`; `parameters` by
            name, see `fp8lab.telemetry_parameters`. Otherwise None.

        Raises:
            UserError: By what the gradients are scaled is ambiguous: several UpdateSteps were used,
                or another one than the one given. The step counts as one that was not watched.
        """
        if not self._watching:
            return None
        self._leave()
        tables = self._table.tensors()
        watch = self._parameters
        words = to_host([*tables, *([] if watch is None else watch.tensors())])
        found = self._table.counts(words[: len(tables)])
        self.counts = {
            name: own for name, own in zip(self._casts, found, strict=True) if own.elements
        }
        self.watched += 1
        for name, own in self.counts.items():
            total = self.totals.setdefault(name, dict.fromkeys(COUNTED, 0))
            for key in COUNTED:
                total[key] += getattr(own, key)
        casts = {name: cast_entry(own, full=self.sqnr) for name, own in self.counts.items()}
        row: Row = {"step": self.steps, "casts": casts}
        if watch is not None:
            row["parameters"] = watch.entries(words[len(tables) :])
        for sink in self.sinks:
            sink(row)
        return row

    def state_dict(self) -> dict[str, Any]:
        """What must survive: steps, watched steps, totals."""
        totals = {name: dict(own) for name, own in self.totals.items()}
        return {"steps": self.steps, "watched": self.watched, "totals": totals}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a state over.

        Raises:
            UserError: It is of casts that are not watched here, or damaged. Nothing is changed
                then.
        """
        steps = whole_number(state_dict, "steps", "telemetry")
        watched = whole_number(state_dict, "watched", "telemetry", most=steps)
        totals = table_of(state_dict, "totals", "telemetry")
        for name, own in totals.items():
            if name not in self._casts:
                raise UserError(f"the saved telemetry watches {name!r}, which is not watched here")
            counts = table_of(totals, name, "telemetry")
            if set(counts) != set(COUNTED):
                raise UserError(
                    f"the saved telemetry counts {', '.join(map(str, counts)) or 'nothing'} of"
                    f" {name!r}; accepted: {', '.join(COUNTED)}"
                )
            for key in COUNTED:
                whole_number(own, key, "telemetry")
        self.steps, self.watched = steps, watched
        self.totals = {name: dict(own) for name, own in totals.items()}

    def _check_casts(self) -> None:
        self._watched_casts.check()
        for name, cast in self._casts.items():
            if cast.meter is not None:
                raise UserError(
                    f"telemetry: {name} is watched already, by a fallback or another telemetry; end"
                    " that step first (a fallback's goes inside: with telemetry.step():"
                    " with fallback.watching(): ...)"
                )

    def _leave(self) -> None:
        if self._watching:
            for cast, observe in zip(self._casts.values(), self._before, strict=True):
                cast.observe, cast.meter = observe, None
        self._watching = False


def cast_entry(counts: CastCounts, *, full: bool = True) -> dict[str, float]:
    """What a row says of a cast.

    Args:
        counts: What it did.
        full: Whether SQNR, zeros and values that are not finite are among it.

    Returns:
        amax; scale (the smallest); overflow, underflow, and of a full entry zeros: shares, to nine
        digits after the point; sqnr_db, to four; nonfinite: a count.
    """
    entry = {
        "amax": short_float32(counts.amax),
        "scale": short_float32(counts.scale),
        "overflow": round(counts.share("overflow"), 9),
        "underflow": round(counts.share("underflow"), 9),
    }
    if full:
        sqnr = counts.sqnr_db
        entry["sqnr_db"] = round(sqnr, 4) if math.isfinite(sqnr) else sqnr
        entry["zeros"] = round(counts.share("zeros"), 9)
        entry["nonfinite"] = counts.nonfinite
    return entry


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, OperandCast]:
    """The casts of the layers that patterns choose, by name."""
    return {
        name: cast
        for name, cast in operand_casts(model)
        if is_matched(name.rpartition(".")[0], patterns)
    }
