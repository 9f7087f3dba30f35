"""Between backward and optimizer: loss scale, norm, clip, and the step that is skipped as a whole.

    step = UpdateStep(model, optimizer, scaler=LossScaler(dynamic=True), clip_norm=1.0)
    step.zero_grad()
    for microbatch in microbatches:
        step.backward(loss(model, microbatch) / len(microbatches))
    step()

With the lab's AdamW(capturable=True) nothing here reads a value on the host, so that a GPU is never
waited for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fp8lab.errors import UserError
from fp8lab.linear import Fp8Linear, advance_scaling, amax_is_finite
from fp8lab.loss_scaler import LossScaler
from fp8lab.observe import note_model
from fp8lab.ops_gradients import GradientNorm, GradientSummary, gradient_norm

__all__ = [
    "GradientNorm",
    "GradientSummary",
    "LossScaler",
    "UpdateStep",
    "accumulate_in_float32",
    "gradient_norm",
]


class UpdateStep:
    """One optimizer step of an FP8 model: unscale, check, clip, update, move the scales on.

    In this order, all on the device:

    1. `gradient_norm` of all gradients: norm, factor (unscale times clip) and the skip flag.
    2. The flag is also raised where an amax that delayed scaling recorded in this step is not
       finite: FP8 saturates an Inf, so that a gradient behind it can look finite.
    3. The optimizer updates every parameter, or, where the flag is raised, none.
    4. `advance_scaling`: a skipped step's amaxes are dropped, scales and histories stay.
    5. The loss scale and the count of skipped steps.

    Args:
        model: What holds the FP8 layers.
        optimizer: `fp8lab.optimizer.AdamW`; with `capturable=True` it skips a step on the device,
            otherwise the flag is read on the host. Or any torch optimizer: then gradients are
            unscaled and clipped in place before its step, too.
        scaler: The loss scale; None is a constant 1.
        clip_norm: What the norm is clipped to; None for no clipping.

    Attributes:
        scaler: As given, or the constant one: `scaler.skipped_steps` counts in both cases.
        uses: How often it made gradients or took a step: who watches sees that it did.
        left_scaled: Whether the gradients that lie there are those of the scaled loss.

    Raises:
        UserError: An argument of another type, or a norm outside its range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: LossScaler | None = None,
        clip_norm: float | None = None,
    ) -> None:
        number = clip_norm is None or isinstance(clip_norm, Real)
        if not number or (clip_norm is not None and not 0 <= clip_norm < float("inf")):
            raise UserError(f"clip_norm is {clip_norm}; accepted: finite, at least 0, or None")
        for name, given, accepted, ok in (
            ("model", model, "a torch.nn.Module", isinstance(model, nn.Module)),
            (
                "optimizer",
                optimizer,
                "a torch optimizer",
                hasattr(optimizer, "step") and hasattr(optimizer, "param_groups"),
            ),
            ("scaler", scaler, "a LossScaler, or None", isinstance(scaler, LossScaler | None)),
        ):
            if not ok:
                raise UserError(
                    f"update step: {name} is of type {type(given).__name__}; accepted: {accepted}"
                )
        self.model, self.optimizer = model, optimizer
        self.uses, self.left_scaled = 0, True
        self._norm = GradientNorm(clip_norm)
        device = next((param.device for param in model.parameters()), torch.device("cpu"))
        self.scaler = (LossScaler(1.0) if scaler is None else scaler).to(device)
        self._takes_factor = "factor" in inspect.signature(type(optimizer).step).parameters
        self._takes_skip = self._takes_factor and getattr(optimizer, "capturable", False)
        _steps.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copied or pickled state over; the copy is the step of its own optimizer."""
        self.__dict__.update(state)
        self.uses = 0
        _steps.add(self)

    def backward(self, loss: Tensor) -> None:
        """Add the scaled gradients of a loss to those that are there."""
        self.note_use()
        self.scaler(loss).backward()

    def note_use(self) -> None:
        """Count a use; for who replays what was captured of it, too."""
        self.uses += 1
        self.left_scaled = True

    def accumulate(
        self, loss: Callable[..., Tensor], inputs: Sequence[Tensor], microbatches: int = 1
    ) -> Tensor:
        """Gradients of a batch, part after part, in place of those that were there.

        Args:
            loss: Of a part of the inputs, a scalar; the mean over parts is that of the batch.
            inputs: Tensors whose first dimension is the batch.
            microbatches: How many parts of one size it is cut into.

        Returns:
            The batch's loss: 0-d, without a gradient.
        """
        self.zero_grad()
        losses = []
        size = len(inputs[0]) // microbatches
        for start in range(0, size * microbatches, size):
            part = loss(*(own[start : start + size] for own in inputs))
            self.backward(part / microbatches)
            losses.append(part.detach())
        return torch.stack(losses).mean()

    def place_gradients(self) -> Any:
        """Make ready what a CUDA graph of a call reads of the gradients that are there now.

        Returns:
            What must live as long as the graph.

        Raises:
            UserError: No parameter has a gradient.
        """
        kept = self._norm.place(self._all_gradients())
        self.place_optimizer()
        return kept

    def place_optimizer(self) -> None:
        """The optimizer's part of `place_gradients`; `layout` tells whether it is the last one."""
        optimizer: Any = self.optimizer
        with self._lent():
            optimizer.place_gradients()

    @torch.no_grad()
    def __call__(self) -> GradientSummary:
        """Take the step; gradients stay as they are, or None.

        Returns:
            Norm, flag and factor, on the device; `skip` tells whether the step was skipped.

        Raises:
            UserError: No parameter has a gradient.
        """
        grads = self._all_gradients()
        self.note_use()
        note_model(self.model)
        summary = self._norm(grads, inverse_scale=self.scaler.inverse_scale)
        finite = amax_is_finite(self.model)
        if finite is not None:
            summary = GradientSummary(
                summary.norm, summary.skip | (~finite).to(torch.int32), summary.factor
            )
        with self._lent():
            self._step(summary)
        advance_scaling(self.model, skip=summary.skip)
        self.scaler.update(summary.skip)
        return summary

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Inside, a parameter's `main_grad` is its gradient, too: what the optimizer looks at."""
        lent = [param for param in self._parameters() if hasattr(param, "main_grad")]
        for param in lent:
            param.grad = param.main_grad
        try:
            yield
        finally:
            for param in lent:
                param.grad = None

    def _step(self, summary: GradientSummary) -> None:
        step: Any = self.optimizer.step
        if self._takes_skip:
            step(factor=summary.factor, skip=summary.skip)
        elif int(summary.skip) == 0:
            if self._takes_factor:
                step(factor=summary.factor)
                return
            for grad in self._gradients():
                grad.mul_(summary.factor.to(grad.dtype))
            self.left_scaled = False
            step()

    def zero_grad(self) -> None:
        """Forget all gradients: `grad` becomes None, `main_grad` zeros."""
        self.optimizer.zero_grad(set_to_none=True)
        for param in self._parameters():
            if hasattr(param, "main_grad"):
                param.main_grad.zero_()

    def _parameters(self) -> Iterator[Any]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _all_gradients(self) -> list[Tensor]:
        grads = list(self._gradients())
        if not grads:
            raise UserError("no parameter has a gradient; call `backward` with a loss first")
        return grads

    def _gradients(self) -> Iterator[Tensor]:
        """Of each parameter its `main_grad` where it has one, else its gradient if it has that."""
        for param in self._parameters():
            grad = getattr(param, "main_grad", None)
            grad = param.grad if grad is None else grad
            if grad is not None:
                yield grad


# All that live, copies too. Weak: a step that is gone scales nothing.
_steps: WeakSet[UpdateStep] = WeakSet()


def live_steps() -> list[UpdateStep]:
    """Every `UpdateStep` that there is now."""
    return [step for step in list(_steps) if hasattr(step, "optimizer")]


def accumulate_in_float32(model: nn.Module) -> None:
    """Have all gradients of a model add up in float32, whatever its parameters are.

    The weight of every FP8 layer gets a `main_grad`: float32 zeros. The weight gradient's product
    adds into it as it ends (one rounding), and `grad` stays None, as in Megatron. `UpdateStep`
    reads it and hands it to the optimizer; `UpdateStep.zero_grad` clears it. The `grad` of every
    other parameter is float32 from now on.
    """
    for param in model.parameters():
        if param.dtype != torch.float32:
            anything: Any = param
            anything.grad_dtype = torch.float32
    for layer in model.modules():
        if isinstance(layer, Fp8Linear) and layer.weight.requires_grad:
            weight: Any = layer.weight
            weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
