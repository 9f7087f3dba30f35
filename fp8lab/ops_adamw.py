"""AdamW on stored states, as torch tensors: the oracle for the CPU, the kernels for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fp8lab.bridge import to_numpy, to_torch
from fp8lab.emulation.adamw_states import AdamState, adamw_state
from fp8lab.emulation.moments import StoredMoment, zero_moment
from fp8lab.emulation.random import random_words
from fp8lab.optimizer_formats import AdamOrder, MomentFormat, moment_format_named, order_named

if TYPE_CHECKING:
    from fp8lab.kernels.adamw_plan import AdamPlan

MOMENTS = ("exp_avg", "exp_avg_sq")
PARTS = ("", "_scale", "_power")  # of a stored moment: codes, scale, power


@dataclass(frozen=True)
class AdamFormats:
    """What a step computes and keeps; the fields are those of the oracle and the kernel.

    Attributes:
        order: Of the operations.
        decoupled: False for Adam with L2 regularisation.
        exp_avg, exp_avg_sq: Formats of the moments.
        master: One of `fp8lab.optimizer_formats.MASTER_FORMATS`.
    """

    order: AdamOrder
    decoupled: bool
    exp_avg: MomentFormat
    exp_avg_sq: MomentFormat
    master: str

    @classmethod
    def named(
        cls, order: str, decoupled: bool, exp_avg: str, exp_avg_sq: str, master: str
    ) -> AdamFormats:
        """From names; a ValueError lists those there are."""
        moments = moment_format_named(exp_avg), moment_format_named(exp_avg_sq)
        return cls(order_named(order), decoupled, *moments, master)


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step of a group of parameters."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def fresh_state(param: Tensor, formats: AdamFormats) -> dict[str, Tensor]:
    """The moments of a new parameter, and the remainder of its master, by name.

    Names: exp_avg, exp_avg_sq; with suffixes _scale and _power where a format has them; remainder.
    """
    state = {}
    for name in MOMENTS:
        stored = zero_moment(tuple(param.shape), getattr(formats, name))
        for part, array in zip(PARTS, (stored.codes, stored.scale, stored.power), strict=True):
            if array is not None:
                state[name + part] = to_torch(array, device=param.device)
    if formats.master == "bfloat16_remainder":
        state["remainder"] = torch.zeros_like(param, dtype=torch.int16)
    return state


class AdamStepper:
    """Takes steps of a list of parameters, in place.

    Args:
        params: float32, or bfloat16 with another master; contiguous, of one device.
        states: What `fresh_state` made for each.
        formats: What is computed and kept.
        groups: For each parameter, which of the numbers given to `step` are its own.
        random_offsets: For each, where its random words begin.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        formats: AdamFormats,
        groups: Sequence[int],
        random_offsets: Sequence[int],
    ) -> None:
        self._params = [param.detach() for param in params]
        self._states = list(states)
        self._formats = formats
        self._groups = list(groups)
        self._offsets = list(random_offsets)
        self._plan: AdamPlan | None = None

    def step(
        self,
        grads: Sequence[Tensor],
        numbers: Sequence[StepNumbers],
        *,
        factor: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """One step; see `fp8lab.emulation.adamw_states.adamw_state`.

        Args:
            grads: One for each parameter, contiguous.
            numbers: One for each group.
            factor: One float32: multiplies the gradients.
            seed: Of the random words of the master "bfloat16_stochastic".
        """
        if self._params[0].is_cuda:
            self._step_by_kernel(grads, numbers, factor, seed)
        else:
            self._step_by_oracle(grads, numbers, factor, seed)

    def _step_by_oracle(
        self,
        grads: Sequence[Tensor],
        numbers: Sequence[StepNumbers],
        factor: Tensor | None,
        seed: int,
    ) -> None:
        for place, (param, state, grad) in enumerate(
            zip(self._params, self._states, grads, strict=True)
        ):
            own = numbers[self._groups[place]]
            words = None
            if self._formats.master == "bfloat16_stochastic":
                words = random_words(seed, tuple(param.shape), offset=self._offsets[place])
            new = adamw_state(
                _as_arrays(param, state, self._formats),
                to_numpy(grad),
                step=own.step,
                lr=own.lr,
                betas=own.betas,
                eps=own.eps,
                weight_decay=own.weight_decay,
                order=self._formats.order,
                decoupled=self._formats.decoupled,
                grad_factor=None if factor is None else np.float32(factor.item()),
                random_words=words,
            )
            param.copy_(to_torch(new.param))
            for name, array in _named(new).items():
                state[name].copy_(to_torch(array))

    def _step_by_kernel(
        self,
        grads: Sequence[Tensor],
        numbers: Sequence[StepNumbers],
        factor: Tensor | None,
        seed: int,
    ) -> None:
        from fp8lab.kernels.adamw import step_constants

        if self._plan is None:
            self._plan = self._make_plan(grads)
        else:
            self._plan.set_grads(grads)
        constants = torch.cat(
            [
                step_constants(
                    self._formats.order,
                    step=own.step,
                    lr=own.lr,
                    betas=own.betas,
                    eps=own.eps,
                    weight_decay=own.weight_decay,
                    decoupled=self._formats.decoupled,
                )
                for own in numbers
            ]
        )
        device = self._params[0].device
        words = None
        if self._formats.master == "bfloat16_stochastic":
            words = torch.tensor([seed], dtype=torch.int64, device=device)
        self._plan.launch(constants.to(device, non_blocking=True), factor=factor, seed=words)
        torch.autograd.graph.increment_version(self._params)

    def _make_plan(self, grads: Sequence[Tensor]) -> AdamPlan:
        from fp8lab.kernels.adamw_plan import AdamPlan, AdamTensors, MomentTensors

        tensors = []
        for place, (param, state, grad) in enumerate(
            zip(self._params, self._states, grads, strict=True)
        ):
            exp_avg, exp_avg_sq = (
                MomentTensors(state[name], state.get(f"{name}_scale"), state.get(f"{name}_power"))
                for name in MOMENTS
            )
            tensors.append(
                AdamTensors(
                    param,
                    grad,
                    exp_avg,
                    exp_avg_sq,
                    state.get("remainder"),
                    group=self._groups[place],
                    random_offset=self._offsets[place],
                )
            )
        f = self._formats
        return AdamPlan(tensors, f.order, f.decoupled, f.exp_avg, f.exp_avg_sq, f.master)


def _as_arrays(param: Tensor, state: dict[str, Tensor], formats: AdamFormats) -> AdamState:
    def moment(name: str) -> StoredMoment:
        parts = [state.get(name + part) for part in PARTS]
        arrays: list[Any] = [None if part is None else to_numpy(part) for part in parts]
        return StoredMoment(getattr(formats, name), *arrays)

    remainder: Any = to_numpy(state["remainder"]) if "remainder" in state else None
    return AdamState(to_numpy(param), moment("exp_avg"), moment("exp_avg_sq"), remainder)


def _named(state: AdamState) -> dict[str, Any]:
    named: dict[str, Any] = {"remainder": state.remainder}
    for name in MOMENTS:
        stored = getattr(state, name)
        for part, array in zip(PARTS, (stored.codes, stored.scale, stored.power), strict=True):
            named[name + part] = array
    return {name: array for name, array in named.items() if array is not None}
