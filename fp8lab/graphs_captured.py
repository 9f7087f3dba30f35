"""A training step as two CUDA graphs, and what they are bound to; see `fp8lab.graphs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fp8lab.errors import UserError
from fp8lab.gradients import GradientSummary, UpdateStep
from fp8lab.linear import Fp8Linear, delayed_groups, forget_weights
from fp8lab.linear_casts import one_capture
from fp8lab.optimizer import AdamW

# Other threads may use the device during a capture: one that writes a checkpoint.
MODE = "thread_local"


class CapturedStep:
    """A step as two graphs, and what they are bound to.

    Args:
        loss, update, microbatches: As for `GraphedStep`.
        inputs: On the device: what the graphs' own inputs are like.
        stream: Where the steps before ran, and where it is captured.
        pool: As for `GraphedStep`.

    Raises:
        UserError: It does something that a graph cannot hold.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        update: UpdateStep,
        microbatches: int,
        inputs: Sequence[Tensor],
        stream: Any,
        pool: Any,
    ) -> None:
        self._inputs = tuple(own.clone() for own in inputs)
        self._step = update
        assert isinstance(update.optimizer, AdamW)
        self._optimizer = update.optimizer
        self._graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        update.zero_grad()
        first, second = self._graphs
        current = torch.cuda.current_stream(stream.device)
        try:
            with one_capture():
                with torch.cuda.graph(first, pool=pool, stream=stream, capture_error_mode=MODE):
                    for group in delayed_groups(update.model):
                        group.make_inverses()
                    self._loss = update.accumulate(loss, self._inputs, microbatches)
                self._params = [
                    p for group in self._optimizer.param_groups for p in group["params"]
                ]
                self._grads = [param.grad for param in self._params]
                kept = update.place_gradients()
                with torch.cuda.graph(
                    second, pool=first.pool(), stream=stream, capture_error_mode=MODE
                ):
                    self._summary = update()
        except RuntimeError as error:
            update.zero_grad()
            # What broke the capture, rather than that its end found it broken.
            reason = str(error.__context__ or error).partition("\n")[0]
            raise UserError(
                f"the step cannot be captured in a CUDA graph ({reason}); take it without one"
                " (eager=True), or remove what waits for the device"
            ) from error
        finally:
            torch.cuda.set_stream(current)  # torch leaves that of a capture that broke
            # What layers keep was derived inside the capture: it serves nothing else.
            forget_weights(update.model)
        # The graphs read these: they must not be freed.
        self._layout: tuple[object, object] = self._optimizer.layout
        self._kept = kept
        self._bound = Bound(update)
        self._written = _written(update)

    @property
    def pool(self) -> Any:
        """Where its memory is from: other graphs may use it that run at other times."""
        return self._graphs[0].pool()

    def takes(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the inputs are like those that it was captured with."""
        return len(inputs) == len(self._inputs) and all(
            own.shape == given.shape and own.dtype == given.dtype
            for own, given in zip(self._inputs, inputs, strict=True)
        )

    def holds(self) -> bool:
        """Whether everything lies where the graphs read it; gradients are put back there."""
        if not self._bound.holds():
            return False
        if any(p.grad is not grad for p, grad in zip(self._params, self._grads, strict=True)):
            # A step was taken without the graphs: the optimizer's table holds other gradients.
            for param, grad in zip(self._params, self._grads, strict=True):
                param.grad = grad
            self._step.place_optimizer()
        now = self._optimizer.layout
        return all(one is other for one, other in zip(self._layout, now, strict=True))

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, GradientSummary]:
        """Take the step with these inputs, which `takes` accepts, where it `holds`."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        gradients, update = self._graphs
        self._step.note_use()
        gradients.replay()
        self._optimizer.update_numbers()  # while the device is at work
        update.replay()
        # Whoever derived something from weights and scales sees that they changed.
        torch.autograd.graph.increment_version(self._written)
        return self._loss, self._summary


class Bound:
    """Where the tensors of a model and its optimizer lie, and how its modules are set."""

    def __init__(self, update: UpdateStep) -> None:
        self._groups = len(update.optimizer.param_groups)
        self._update = update
        modules = [*update.model.modules(), *update.scaler.modules()]
        self._modes = [(module, module.training) for module in modules]
        self._recipes = [(m, m.active_recipe) for m in modules if isinstance(m, Fp8Linear)]
        params = [param for group in update.optimizer.param_groups for param in group["params"]]
        self._trained = [(param, param.requires_grad) for param in params]
        owners: list[dict[str, Any]] = [vars(param) for param in params]
        owners += [module._parameters for module in modules]
        owners += [module._buffers for module in modules]
        owners += [update.optimizer.state.get(param, {}) for param in params]
        self._places = [
            (owner, name, value.data_ptr())
            for owner in owners
            for name, value in owner.items()
            if isinstance(value, Tensor)
        ]

    def holds(self) -> bool:
        """Whether all are as they were."""
        return (
            len(self._update.optimizer.param_groups) == self._groups
            and all(module.training == mode for module, mode in self._modes)
            and all(layer.active_recipe is recipe for layer, recipe in self._recipes)
            and all(param.requires_grad == trained for param, trained in self._trained)
            and self._lie_still()
        )

    def _lie_still(self) -> bool:
        # At every step, of a thousand tensors: as little as possible for each.
        try:
            for owner, name, place in self._places:
                if owner[name].data_ptr() != place:
                    return False
        except (KeyError, AttributeError):  # it is gone, or no tensor any more
            return False
        return True


def _written(update: UpdateStep) -> list[Tensor]:
    """What a replay changes and others derive something from: weights, scales, histories."""
    groups = update.optimizer.param_groups
    found = [param.detach() for group in groups for param in group["params"]]
    for own in delayed_groups(update.model):
        found += [own.scale, own.amax_history]
    return found


def side_stream(device: torch.device) -> Any:
    """A stream to capture on; the default stream cannot be.

    Raises:
        UserError: The device has none.
    """
    if device.type != "cuda":
        raise UserError(
            f"the model is on {device}; a CUDA graph needs a CUDA device: move the model there, or"
            " take steps without a graph"
        )
    stream: Any = torch.cuda.Stream
    return stream(device)


@contextmanager
def beside(stream: Any) -> Iterator[None]:
    """Work on another stream, in order with the current one on both sides."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
