"""AdamW on stored states, as torch tensors: what is kept, and who takes a step where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fp8lab.bridge import to_torch
from fp8lab.emulation.moments import zero_moment
from fp8lab.formats import E4M3, E5M2, Float8Format
from fp8lab.optimizer_formats import AdamOrder, MomentFormat, moment_format_named, order_named

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


@dataclass(frozen=True)
class WeightCopies:
    """What a step writes beside a parameter, for the next forward pass.

    Attributes:
        weight: bfloat16, of the parameter's shape: a float32 parameter rounded to nearest even.
        codes: float8_e4m3fn or float8_e5m2, of that shape: the FP8 codes of the bfloat16 weight, or
            of the float32 parameter where no weight is written, as `quantize` with overflow
            "saturate" gives them.
        scale: One float32: multiplies what is cast.
        amax: One float32: takes the larger bit pattern of itself and the amax of what is cast.
    """

    weight: Tensor | None = None
    codes: Tensor | None = None
    scale: Tensor | None = None
    amax: Tensor | None = None

    @property
    def code_format(self) -> Float8Format | None:
        """The format of the codes."""
        if self.codes is None:
            return None
        return E4M3 if self.codes.dtype == torch.float8_e4m3fn else E5M2

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the tensors lie, 0 for one that is not there."""
        parts = (self.weight, self.codes, self.scale, self.amax)
        return tuple(0 if part is None else part.data_ptr() for part in parts)

    def check(self, param: Tensor) -> None:
        """Refuse what does not fit a parameter.

        Raises:
            TypeError: A tensor of another dtype.
            ValueError: A shape or device differs, a tensor is not contiguous, or codes come without
                a scale and an amax; or a weight beside a parameter that is one itself.
        """
        if self.weight is not None and param.dtype != torch.float32:
            raise ValueError(
                f"the parameter is {param.dtype}: a weight goes with float32 parameters"
            )
        if len({part is None for part in (self.codes, self.scale, self.amax)}) > 1:
            raise ValueError("codes come with a scale and an amax, all three or none")
        float8 = (torch.float8_e4m3fn, torch.float8_e5m2)
        for name, tensor, dtypes, shape in (
            ("weight", self.weight, (torch.bfloat16,), param.shape),
            ("codes", self.codes, float8, param.shape),
            ("scale", self.scale, (torch.float32,), None),
            ("amax", self.amax, (torch.float32,), None),
        ):
            if tensor is None:
                continue
            if tensor.dtype not in dtypes:
                accepted = ", ".join(map(str, dtypes))
                raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {accepted}")
            if tensor.numel() != 1 if shape is None else tensor.shape != shape:
                accepted = "one element" if shape is None else f"the parameter's {tuple(shape)}"
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: {accepted}")
            if tensor.device != param.device or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} is on {tensor.device} with strides {tensor.stride()}; accepted:"
                    f" contiguous, on the parameter's {param.device}"
                )


class Stepper(Protocol):
    """Takes steps of a list of parameters, in place."""

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
        """One step whose numbers and count lie on the device; nothing waits for it.

        Args:
            grads, factor: As for `step`.
            numbers: float64, one row a parameter: lr, beta1, beta2, eps, weight_decay.
            counts: int64, steps taken, one a parameter; each grows by one.
            skip: One int32: nothing at all changes, no count either, unless it is 0.
            seed: Added to the largest count, it is the seed of the random words.
        """

    def place(self, grads: Sequence[Tensor]) -> None:
        """Lay out these gradients for a `counted_step` that a CUDA graph will capture."""


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
