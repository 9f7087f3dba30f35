"""A whole training step as a CUDA graph: the host issues two launches in place of thousands.

    step = GraphedStep(loss, UpdateStep(model, optimizer), microbatches=2)
    for inputs, targets in batches:
        before, summary = step(inputs, targets)

The first calls are steps like any other, on a stream of their own. A later one captures forward and
backward passes, gradient norm, clip, optimizer, scale update and loss scale; from then on a call
copies its inputs and the learning rates, and replays. Every call is one step, with the bits of a
loop without graphs.

A step is two graphs, which share their memory: one ends with the gradients, so that the tables in
which the norm and the optimizer find them are made before the other is captured. Steps that
telemetry watches are graphs of their own in the same memory, but for the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8lab.errors import UserError
from fp8lab.gradients import GradientSummary, UpdateStep
from fp8lab.graphs_captured import MODE, Bound, CapturedStep, beside, side_stream
from fp8lab.linear import operand_casts
from fp8lab.linear_casts import one_capture
from fp8lab.observe import is_watched
from fp8lab.optimizer import AdamW
from fp8lab.telemetry_meter import CastMeter

__all__ = ["GraphedStep", "captured_call", "one_capture"]

WARM_UP = 3  # as many as torch advises before a capture
Meters = tuple[CastMeter, ...]  # those of all casts that are watched: which kind of step it is


class GraphedStep:
    """Takes training steps; after a few, by replaying CUDA graphs.

    Args:
        loss: The loss of a microbatch, a scalar, from as many tensors as a call is given. It must
            not read a value on the host, nor copy from the host.
        update: The rest of the step; its optimizer is `AdamW(capturable=True)`.
        microbatches: How many parts a batch is cut into; `loss` is a mean over its part.
        warm_up: How many steps come before the first capture, 1 and up.
        pool: A `torch.cuda.graph_pool_handle()` that other graphs use as well, none of which runs
            at the same time; None for memory of its own.

    Steps that a `Telemetry` watches are captured apart from the others: the first one is taken
    without a graph, the second one captured. (Of several telemetries, that of the last one.)

    A step is taken without a graph, as a loop would take it, and the graphs stay, where a call says
    `eager`; inputs have other shapes or dtypes than the captured ones; a cast observes for anyone
    but a telemetry; an audit is open. Where tensors were replaced (`optimizer.load_state_dict`,
    `model.to`), a module changed its mode, a layer its roles in BF16, or a parameter its
    `requires_grad`, one step of each kind is taken so and the next one captures anew. What else
    Python does in a step (hooks, branches, counters) is not done again: after such a change call
    `forget`.

    Attributes:
        captures: How often a step was captured.
        replays: How many steps were replayed.

    Raises:
        UserError: The model is not on a CUDA device, the optimizer counts its steps on the host, or
            a count is out of range.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        update: UpdateStep,
        *,
        microbatches: int = 1,
        warm_up: int = WARM_UP,
        pool: Any = None,
    ) -> None:
        for name, value in (("microbatches", microbatches), ("warm_up", warm_up)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} is {value!r}; accepted: an integer, 1 and up")
        optimizer = update.optimizer
        if not (isinstance(optimizer, AdamW) and optimizer.capturable):
            raise UserError(
                f"the optimizer is {type(optimizer).__name__}, which counts steps on the host;"
                " a CUDA graph takes fp8lab.optimizer.AdamW(..., capturable=True)"
            )
        self.loss, self.update, self.microbatches = loss, update, microbatches
        self.captures = self.replays = 0
        self._device = update.scaler.scale.device
        self._stream = side_stream(self._device)
        self._pool = pool
        self._captured: dict[Meters, CapturedStep] = {}
        # Kinds of steps that were taken without a graph, and what they were bound to then.
        self._taken: dict[Meters, Bound] = {}
        self._casts = [cast for _, cast in operand_casts(update.model)]
        self._left = warm_up

    def __call__(self, *inputs: Tensor, eager: bool = False) -> tuple[Tensor, GradientSummary]:
        """Take a step.

        Args:
            inputs: What `loss` takes, of a whole batch: tensors of any device (from pinned memory
                they are copied without waiting) whose first dimension `microbatches` divides.
            eager: Whether to take it without the graph: for what Python must see.

        Returns:
            The loss of the batch before the step, 0-d, and the summary of its gradients. After a
            replay they are the graph's own tensors, which the next call overwrites.

        Raises:
            UserError: The inputs cannot be cut; or the step does something that a graph cannot
                hold, in which case it was not taken.
        """
        self._check(inputs)
        meters = self._meters()
        if eager or meters is None or is_watched():
            return self._eagerly(inputs)
        captured = self._captured.get(meters)
        if captured is not None and not captured.holds():
            self.forget()
            captured = None
        if captured is None:
            if self._left or not self._may_capture(meters):
                found = self._eagerly(inputs)
                self._left = max(self._left - 1, 0)
                self._taken = {**_of_kind(self._taken, meters), meters: Bound(self.update)}
                return found
            captured = self._capture(meters, inputs)
        if not captured.takes(inputs):
            return self._eagerly(inputs)
        self.replays += 1
        return captured.replay(inputs)

    def forget(self) -> None:
        """Drop the graphs: the next step is taken without one, and the one after it captures."""
        self._captured, self._taken = {}, {}

    def _meters(self) -> Meters | None:
        """Who counts the casts of this step; None where one is observed in another way."""
        watching = [cast.meter for cast in self._casts if cast.observe]
        known = tuple(meter for meter in watching if isinstance(meter, CastMeter))
        return known if len(known) == len(watching) else None

    def _may_capture(self, meters: Meters) -> bool:
        """Whether a step like this was taken without a graph, and nothing was replaced since."""
        bound = self._taken.get(meters)
        return bound is not None and bound.holds()

    def _capture(self, meters: Meters, inputs: Sequence[Tensor]) -> CapturedStep:
        self._captured = _of_kind(self._captured, meters)
        pool = self._pool
        # One is replayed at a time, and nothing of it is read once another one was: they may have
        # the same memory.
        for other in self._captured.values():
            pool = other.pool
        captured = CapturedStep(
            self.loss, self.update, self.microbatches, self._placed(inputs), self._stream, pool
        )
        self._captured[meters] = captured
        self.captures += 1
        return captured

    def _eagerly(self, inputs: Sequence[Tensor]) -> tuple[Tensor, GradientSummary]:
        with beside(self._stream):
            loss = self.update.accumulate(self.loss, self._placed(inputs), self.microbatches)
            return loss, self.update()

    def _placed(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(own.to(self._device, non_blocking=True) for own in inputs)

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if not inputs:
            raise UserError("no inputs given; accepted: the tensors that the loss takes")
        sizes = [own.shape[0] if own.dim() else 0 for own in inputs]
        if len(set(sizes)) > 1 or sizes[0] == 0 or sizes[0] % self.microbatches:
            raise UserError(
                f"the inputs' first dimensions are {', '.join(map(str, sizes))}; accepted: one for"
                f" all that {self.microbatches} microbatches divide"
            )


def captured_call(call: Callable[[], Any], *, warm_up: int = WARM_UP, pool: Any = None) -> Any:
    """Any step of fixed tensors as one CUDA graph: call what is returned to replay it.

    For measurements: nothing is checked, and nobody is told of what a replay changed. What `call`
    returns in the capture is returned by each replay. `call`, and with it every tensor that it
    refers to, lives as long as what is returned: the graph knows their addresses alone.

    Args:
        call: The step.
        warm_up, pool: As for `GraphedStep`.
    """
    stream = side_stream(torch.device("cuda", torch.cuda.current_device()))
    with beside(stream):
        for _ in range(warm_up):
            call()
    graph = torch.cuda.CUDAGraph()
    with (
        one_capture(),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=MODE),
    ):
        result = call()
    return partial(_replay, graph, result, call)


def _replay(graph: Any, result: Any, call: Callable[[], Any]) -> Any:
    """Replay a graph of `call`, whose tensors must not be freed before."""
    graph.replay()
    return result


def _of_kind(graphs: dict[Meters, Any], meters: Meters) -> dict[Meters, Any]:
    """What stays when one of these meters comes: plain steps, and those of one telemetry."""
    return {own: found for own, found in graphs.items() if own in ((), meters) or not meters}
