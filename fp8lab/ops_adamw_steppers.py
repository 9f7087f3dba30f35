"""The two ways to take a step of AdamW: the oracle, one parameter after the other; the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8lab.bridge import to_numpy, to_torch
from fp8lab.emulation.adamw_states import AdamState, adamw_state
from fp8lab.emulation.amax import amax
from fp8lab.emulation.casting import quantize
from fp8lab.emulation.moments import StoredMoment
from fp8lab.emulation.random import random_words
from fp8lab.formats import BFLOAT16
from fp8lab.observe import observed
from fp8lab.ops_adamw import MOMENTS, PARTS, AdamFormats, StepNumbers, Stepper, WeightCopies

if TYPE_CHECKING:
    from fp8lab.kernels.adamw_plan import AdamPlan


class StepperParts(NamedTuple):
    """The arguments of `make_stepper`."""

    params: Sequence[Tensor]
    states: Sequence[dict[str, Tensor]]
    formats: AdamFormats
    groups: Sequence[int]
    random_offsets: Sequence[int]
    copies: Sequence[WeightCopies]


class _Parameters:
    """What both ways need to know; see `make_stepper`."""

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        formats: AdamFormats,
        groups: Sequence[int],
        random_offsets: Sequence[int],
        copies: Sequence[WeightCopies],
    ) -> None:
        self._params = [param.detach() for param in params]
        self._states = list(states)
        self._formats = formats
        self._groups = list(groups)
        self._offsets = list(random_offsets)
        self._copies = list(copies)
        found = {own.code_format for own in copies if own.codes is not None}
        if len(found) > 1:
            names = " and ".join(sorted(fmt.name for fmt in found if fmt is not None))
            raise ValueError(f"codes of one optimizer have one format; given: {names}")
        self._code_format = next(iter(found), None)
        self._draws = formats.master == "bfloat16_stochastic"

    @property
    def parts(self) -> StepperParts:
        """What a step reads and writes, as `make_stepper` was given it."""
        return StepperParts(
            self._params, self._states, self._formats, self._groups, self._offsets, self._copies
        )


class OracleStepper(_Parameters):
    """A `Stepper` on the CPU."""

    @observed("optimizer")
    def step(
        self,
        grads: Sequence[Tensor],
        numbers: Sequence[StepNumbers],
        *,
        factor: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """See `Stepper.step`."""
        for place, grad in enumerate(grads):
            self._take(place, grad, numbers[self._groups[place]], factor, seed)

    @observed("counted_optimizer")
    def counted_step(
        self,
        grads: Sequence[Tensor],
        numbers: Tensor,
        counts: Tensor,
        *,
        factor: Tensor | None = None,
        skip: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """See `Stepper.counted_step`."""
        if skip is not None and skip.item():
            return
        counts += 1
        longest = int(counts.max())
        for place, grad in enumerate(grads):
            lr, beta1, beta2, eps, decay = numbers[place].tolist()
            own = StepNumbers(int(counts[place]), lr, (beta1, beta2), eps, decay)
            self._take(place, grad, own, factor, seed + longest)

    def place(self, grads: Sequence[Tensor]) -> None:
        """See `Stepper.place`: nothing is laid out here."""

    def _take(
        self, place: int, grad: Tensor, own: StepNumbers, factor: Tensor | None, seed: int
    ) -> None:
        param, state = self._params[place], self._states[place]
        words = None
        if self._draws:
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
        _write_copies(new.param, self._copies[place])


class KernelStepper(_Parameters):
    """A `Stepper` on the GPU: one launch for all parameters."""

    _plan: AdamPlan | None = None
    _constants: Tensor | None = None  # of counted steps: a CUDA graph reads them where they lie

    @observed("optimizer")
    def step(
        self,
        grads: Sequence[Tensor],
        numbers: Sequence[StepNumbers],
        *,
        factor: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """See `Stepper.step`."""
        from fp8lab.kernels.adamw import step_constants

        plan = self._plan_for(grads, self._groups)
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
        if self._draws:
            words = torch.tensor([seed], dtype=torch.int64, device=device)
        plan.launch(constants.to(device, non_blocking=True), factor=factor, seed=words)
        self._changed()

    @observed("counted_optimizer")
    def counted_step(
        self,
        grads: Sequence[Tensor],
        numbers: Tensor,
        counts: Tensor,
        *,
        factor: Tensor | None = None,
        skip: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """See `Stepper.counted_step`."""
        plan, constants = self._counted_plan(grads)
        plan.advance(numbers, counts, constants, skip=skip)
        words = (counts.amax() + seed).reshape(1) if self._draws else None
        plan.launch(constants, factor=factor, skip=skip, seed=words)
        self._changed()

    def place(self, grads: Sequence[Tensor]) -> None:
        """See `Stepper.place`."""
        self._counted_plan(grads)

    def _counted_plan(self, grads: Sequence[Tensor]) -> tuple[AdamPlan, Tensor]:
        plan = self._plan_for(grads, range(len(self._params)))
        if self._constants is None:
            shape = (len(self._params), plan.constants_per_group)
            device = self._params[0].device
            self._constants = torch.zeros(shape, dtype=torch.float32, device=device)
        return plan, self._constants

    def _changed(self) -> None:
        written = [own.weight for own in self._copies] + [own.codes for own in self._copies]
        torch.autograd.graph.increment_version(
            self._params + [tensor for tensor in written if tensor is not None]
        )

    def _plan_for(self, grads: Sequence[Tensor], groups: Sequence[int]) -> AdamPlan:
        if self._plan is None:
            self._plan = self._make_plan(grads, groups)
        else:
            self._plan.set_grads(grads)
        return self._plan

    def _make_plan(self, grads: Sequence[Tensor], groups: Sequence[int]) -> AdamPlan:
        from fp8lab.kernels.adamw_plan import AdamPlan
        from fp8lab.kernels.adamw_tensors import AdamTensors, MomentTensors

        tensors = []
        for place, (param, state, copies) in enumerate(
            zip(self._params, self._states, self._copies, strict=True)
        ):
            exp_avg, exp_avg_sq = (
                MomentTensors(state[name], state.get(f"{name}_scale"), state.get(f"{name}_power"))
                for name in MOMENTS
            )
            tensors.append(
                AdamTensors(
                    param,
                    grads[place],
                    exp_avg,
                    exp_avg_sq,
                    state.get("remainder"),
                    weight=copies.weight,
                    codes=copies.codes,
                    codes_scale=copies.scale,
                    codes_amax=copies.amax,
                    group=groups[place],
                    random_offset=self._offsets[place],
                )
            )
        f = self._formats
        return AdamPlan(
            tensors, f.order, f.decoupled, f.exp_avg, f.exp_avg_sq, f.master, self._code_format
        )


def make_stepper(
    params: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    formats: AdamFormats,
    groups: Sequence[int],
    random_offsets: Sequence[int],
    copies: Sequence[WeightCopies],
    *,
    kernel: bool | None = None,
) -> Stepper:
    """Who takes the steps of a list of parameters.

    Args:
        params: float32, or bfloat16 with another master; contiguous, of one device.
        states: What `fresh_state` made for each.
        formats: What is computed and kept.
        groups: For each parameter, which of the numbers given to `step` are its own.
        random_offsets: For each, where its random words begin.
        copies: For each, what is written beside it.
        kernel: Whether the kernel does it; by default it does on a GPU, and the oracle on a CPU.
    """
    chosen = KernelStepper if kernel or (kernel is None and params[0].is_cuda) else OracleStepper
    return chosen(params, states, formats, groups, random_offsets, copies)


def _write_copies(param: Any, copies: WeightCopies) -> None:
    visible = param
    if copies.weight is not None:
        visible = quantize(param, BFLOAT16, overflow="ieee")
        copies.weight.copy_(to_torch(visible))
    if copies.codes is None:
        return
    assert copies.scale is not None
    assert copies.amax is not None
    assert copies.code_format is not None
    codes = quantize(visible, copies.code_format, scale=float(copies.scale))
    copies.codes.copy_(to_torch(codes))
    # Magnitudes are ordered as their bits are.
    words = [np.asarray(v, np.float32).reshape(1).view(np.uint32) for v in (amax(visible),)]
    words.append(to_numpy(copies.amax).reshape(1).view(np.uint32))
    copies.amax.copy_(to_torch(np.maximum(*words).view(np.float32)).reshape(copies.amax.shape))


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
