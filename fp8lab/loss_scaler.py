"""The factor on the loss; `fp8lab.gradients` has the step that takes it off again."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor, nn

from fp8lab.errors import UserError


class LossScaler(nn.Module):
    """A factor on the loss that keeps small gradients above a narrow format's smallest value.

    Its state is buffers: `state_dict` carries it, `.to(device)` moves it.

    Args:
        scale: The first factor; also the only one unless `dynamic`. A power of two loses no bit.
        dynamic: Whether it adapts: times `backoff` after a step whose gradients are not finite,
            times `growth` after `interval` steps in a row whose gradients are.
        growth, backoff, interval: See there. As torch's GradScaler has them.
        smallest, largest: What the scale stays within.

    Attributes:
        scale: float32, 0-d.
        good_steps: int32, 0-d: steps since the scale last moved.
        skipped_steps: int64, 0-d: steps that were skipped.

    Raises:
        UserError: A number outside its range.
    """

    scale: Tensor
    good_steps: Tensor
    skipped_steps: Tensor

    def __init__(
        self,
        scale: float = 65536.0,
        *,
        dynamic: bool = False,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        smallest: float = 2.0**-14,
        largest: float = 2.0**60,
    ) -> None:
        super().__init__()
        for name, value in (("scale", scale), ("growth", growth), ("backoff", backoff)):
            if not isinstance(value, Real):
                raise UserError(f"loss scaler: {name} is {value!r}; accepted: a number")
        for name, value, accepted, ok in (
            ("smallest", smallest, "2**-60 and up", smallest >= 2.0**-60),
            ("largest", largest, f"{smallest} to 2**120", smallest <= largest <= 2.0**120),
            ("scale", scale, f"{smallest} to {largest}", smallest <= scale <= largest),
            ("growth", growth, "above 1, up to 2**20", 1 < growth <= 2.0**20),
            ("backoff", backoff, "above 0 and below 1", 0 < backoff < 1),
            ("interval", interval, "an integer, 1 and up", interval >= 1 and interval % 1 == 0),
        ):
            if not ok:
                raise UserError(f"loss scaler: {name} is {value}; accepted: {accepted}")
        self.dynamic = dynamic
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.smallest, self.largest = smallest, largest
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float32))
        self.register_buffer("good_steps", torch.zeros((), dtype=torch.int32))
        self.register_buffer("skipped_steps", torch.zeros((), dtype=torch.int64))

    def forward(self, loss: Tensor) -> Tensor:
        """The scaled loss, in the loss' dtype."""
        return loss * self.scale.to(loss.dtype)

    @property
    def inverse_scale(self) -> Tensor:
        """What unscales: 1 / scale, float32, one element."""
        return (1.0 / self.scale).reshape(1)

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Move on by one step.

        Args:
            skip: One int32: not 0 where the step was skipped.
        """
        skipped = skip.reshape(()) != 0
        self.skipped_steps += skipped
        if not self.dynamic:
            return
        good = (self.good_steps + 1).masked_fill(skipped, 0)
        full = good == self.interval
        factor = torch.ones_like(self.scale).masked_fill(full, self.growth)
        factor = factor.masked_fill(skipped, self.backoff)
        self.scale.copy_((self.scale * factor).clamp(self.smallest, self.largest))
        self.good_steps.copy_(good.masked_fill(full, 0))
