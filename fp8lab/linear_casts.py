"""The casts of a linear layer: policy, state, and what a cast did.

Each operand of a layer has one `OperandCast`. Its delayed state (`scale`, `amax_history`) are
buffers, so that `state_dict` carries them; `fp8lab.linear_state` keeps those of a whole model side
by side and moves them on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8lab import ops
from fp8lab.linear_replay import recorder, replayed
from fp8lab.ops_linear import block_codes, tensor_codes
from fp8lab.ops_operands import Codes, Layouts
from fp8lab.ops_telemetry import count_cast
from fp8lab.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MxScaling,
    NoScaling,
    Operand,
    RowScaling,
    Scaling,
    StaticScaling,
)

Meter = Callable[[Tensor, Codes | None], None]  # what was cast, and its codes; None for BF16


@dataclass(frozen=True)
class CastStatistics:
    """What one cast of one tensor did.

    Attributes:
        amax: The largest magnitude of the tensor (NaN and Inf are shown when present).
        scale: The scale it was multiplied by; for blocks, the smallest of them.
        overflow: Share of all elements that are finite, but whose scaled value rounds past the
            largest finite code (so that it was clipped).
        underflow: Share of the elements that are not zero whose code is a zero.
    """

    amax: float
    scale: float
    overflow: float
    underflow: float


class RawBuffers(nn.Module):
    """A module some of whose buffers move with it, but keep their dtype and bits for good.

    `model.to(torch.bfloat16)` is meant for parameters: a scale rounded to bfloat16 is another
    scale, and codes that became numbers are no codes.
    """

    raw: ClassVar[tuple[str, ...]]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RawBuffers:
        kept = {name: self._buffers.get(name) for name in self.raw}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers.get(name)
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self


class OperandCast(RawBuffers):
    """How one operand of one layer is cast, with the state that this needs.

    Attributes:
        observe: Whether the next casts are noted.
        meter: Who is told of them (`fp8lab.telemetry` sets it); None fills `statistics`, which
            waits for a GPU.
        statistics: Of the last observed cast without a meter.
    """

    scale: Tensor
    amax_history: Tensor
    raw = ("scale", "amax_history")

    def __init__(self, operand: Operand, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.operand = operand
        self.observe = False
        self.meter: Meter | None = None
        self.statistics: CastStatistics | None = None
        self._inverse: tuple[tuple[int, ...] | None, Tensor] | None = None
        scaling = operand.scaling
        if isinstance(scaling, StaticScaling):
            scale = torch.tensor(scaling.scale, dtype=torch.float32, device=device)
            self.register_buffer("scale", scale)
        elif isinstance(scaling, DelayedScaling):
            self.register_buffer("scale", torch.ones((), dtype=torch.float32, device=device))
            history = torch.zeros(scaling.history, dtype=torch.float32, device=device)
            self.register_buffer("amax_history", history)

    @property
    def delayed(self) -> DelayedScaling | None:
        """Its delayed policy, if that is what it has."""
        scaling = self.operand.scaling
        return scaling if isinstance(scaling, DelayedScaling) else None

    def cast(
        self,
        x: Tensor,
        *,
        plain: bool = True,
        transposed: bool = True,
        record: bool = False,
        amax_out: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> Layouts:
        """Codes of a matrix in the layouts that are wanted.

        Args:
            x: (rows, columns), float32, bfloat16 or float16.
            plain, transposed: Which layouts are wanted. Both policies must be FP8 for those.
            record: Whether delayed scaling notes the amax in slot 0 of its history.
            amax_out: Where the amax goes in place of slot 0: one float32 element.
            amax: x's amax where it is known already, 0-d float32: current scaling need not look.
        """
        x = x.detach()
        if x.shape[1] > 1 and x.stride(1) != 1:
            x = x.contiguous()
        second = self.operand.transposed
        if second is None:
            return self._cast(
                x,
                self.operand.scaling,
                plain,
                transposed,
                record=record,
                amax_out=amax_out,
                amax=amax,
            )
        first = Layouts(None, None)
        if plain:
            first = self._cast(x, self.operand.scaling, True, False, record=record)
        other = Layouts(None, None)
        if transposed:
            other = self._cast(x, second, False, True)
        return Layouts(first.plain, other.transposed)

    def forward(self, x: Tensor, *, both: bool = True) -> tuple[Tensor, Tensor]:
        """Cast a matrix and decode it again, as a forward pass would.

        Args:
            x: (rows, columns), float32, bfloat16 or float16.
            both: Whether the second result is needed.

        Returns:
            float32: the operand for a product that sums over its columns, and the one for a product
            that sums over its rows, untransposed (the same tensor where the codes are the same, and
            where `both` is False).
        """
        if isinstance(self.operand.scaling, NoScaling):
            rounded = x.detach().to(torch.bfloat16).to(torch.float32)
            self.note(x, None)
            return rounded, rounded
        found = self.cast(x, transposed=both and not self.one_code, record=self.training)
        assert found.plain is not None
        self.note(x, found.plain)
        decoded = found.plain.decoded()
        return decoded, decoded if found.transposed is None else found.transposed.decoded().t()

    @property
    def wants_amax(self) -> bool:
        """Whether a cast needs the tensor's amax first, and nothing else of it."""
        return self.operand.transposed is None and isinstance(self.operand.scaling, CurrentScaling)

    @property
    def one_code(self) -> bool:
        """Whether both layouts hold the same codes."""
        policy = self.operand.scaling
        if self.operand.transposed is not None:
            return False
        squares = isinstance(policy, BlockScaling) and policy.square
        return squares or isinstance(policy, StaticScaling | CurrentScaling | DelayedScaling)

    def note(self, x: Tensor, codes: Codes | None) -> None:
        """Tell `meter` what a cast did, or fill `statistics`, where `observe` asks for it.

        Args:
            x: What was cast.
            codes: What became of it; None for BF16.
        """
        if not self.observe:
            return
        if self.meter is not None:
            self.meter(x, codes)
            return
        seen = count_cast(x, codes, sums=False)
        self.statistics = CastStatistics(
            seen.amax, seen.scale, seen.share("overflow"), seen.share("underflow")
        )

    def _cast(
        self,
        x: Tensor,
        policy: Scaling,
        plain: bool,
        transposed: bool,
        *,
        record: bool = False,
        amax_out: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> Layouts:
        fmt = self.operand.float8
        if isinstance(policy, RowScaling | BlockScaling | MxScaling):
            return block_codes(x, fmt, policy, plain=plain, transposed=transposed)
        assert not isinstance(policy, NoScaling)
        if isinstance(policy, CurrentScaling):
            scale, inverse = ops.current_scale(
                ops.amax(x.contiguous()) if amax is None else amax,
                fmt,
                margin=policy.margin,
                power_of_two=policy.power_of_two,
                preset=policy.preset,
            )
        else:
            scale, inverse = self._state_scale(policy, x.device)
            if record and amax_out is None and isinstance(policy, DelayedScaling):
                amax_out = self.amax_history[:1]
        return tensor_codes(
            x, fmt, scale, inverse, plain=plain, transposed=transposed, amax_out=amax_out
        )

    def _state_scale(
        self, policy: StaticScaling | DelayedScaling, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The scale of now, or in a recomputation the one of its first forward, and its inverse."""
        if isinstance(policy, StaticScaling) and policy is self.operand.transposed:
            scale = torch.full((), policy.scale, dtype=torch.float32, device=device)
            return scale, 1.0 / scale
        kept = replayed(self)
        if kept is not None:
            pair: tuple[Tensor, Tensor] = kept
            return pair
        key = version_of(self.scale)
        if self._inverse is None or key is None or self._inverse[0] != key:
            self._inverse = (key, self.scale.reciprocal())
        inverse = self._inverse[1]
        keep = recorder()
        if keep is not None:
            # A copy: the state may have moved on when the forward pass is done again.
            keep(self, (self.scale.clone(), inverse))
        return self.scale, inverse

    def keep_inverse(self, inverse: Tensor) -> None:
        """Take 1 / scale from whoever made it for the scale of now."""
        self._inverse = (version_of(self.scale), inverse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Copies, not views of the model's flat state: what is kept stays as it is."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("scale", "amax_history"):
            if prefix + name in destination and not keep_vars:
                destination[prefix + name] = destination[prefix + name].clone()

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not watched.
        return self.__dict__ | {"_inverse": None, "meter": None}


def version_of(tensor: Tensor) -> tuple[int, ...] | None:
    """What changes when a tensor does; None where that cannot be known.

    So for an inference tensor, which counts no changes; and while a CUDA graph is captured: what is
    derived from the tensor must be part of the graph, or a replay would use what was derived once.
    Inside `one_capture` the capture's number is part of it: what was derived in this capture serves
    all of it, and nothing else.
    """
    if tensor.is_inference():
        return None
    if not captured(tensor):
        return tensor.data_ptr(), tensor._version
    return (_capture, tensor.data_ptr(), tensor._version) if _capture else None


# The number of the capture that runs inside `one_capture`; 0 for none. For all threads: a backward
# pass is captured from a thread of autograd's.
_capture = 0
_captures = itertools.count(1)


@contextmanager
def one_capture() -> Iterator[None]:
    """Inside, what is captured is one step: weights and inverse scales are made once for it.

    The captured work must begin with what it derives, as a step from its first forward pass on
    does, and be replayed as a whole.
    """
    global _capture
    before, _capture = _capture, next(_captures)
    try:
        yield
    finally:
        _capture = before


def captured(tensor: Tensor) -> bool:
    """Whether what is computed from a tensor now goes into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
