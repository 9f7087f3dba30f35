"""The delayed state of all casts of a model, side by side: one launch moves it on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8lab import ops
from fp8lab.linear_casts import OperandCast
from fp8lab.observe import at, end_step, note_model
from fp8lab.recipes import DelayedScaling

_ATTRIBUTE = "_fp8lab_delayed_groups"


@dataclass(frozen=True)
class DelayedGroup:
    """The casts of a model that have one delayed policy, format and device.

    Attributes:
        policy: Their policy.
        casts: In the order of the model's modules.
        scale: float32 (n,). A cast's own `scale` is a view of its element.
        amax_history: float32 (L, n). A cast's own is a view of its column, so that slot 0 of all of
            them is one contiguous vector: what a MAX over ranks takes in one call.
    """

    policy: DelayedScaling
    casts: tuple[OperandCast, ...]
    scale: Tensor
    amax_history: Tensor

    def holds(self, casts: tuple[OperandCast, ...]) -> bool:
        """Whether the casts are these, and their buffers still views of this state.

        A copied or unpickled model has the same layout, but its tensors are views no more: they
        share memory and count their changes apart, so that nobody would see a scale move.
        """
        if casts != self.casts:
            return False
        scale, history = self.scale.data_ptr(), self.amax_history.data_ptr()
        for place, cast in enumerate(casts):
            # Past nn.Module's way to find an attribute: a step looks at every cast of a model.
            own_scale, own_history = cast._buffers["scale"], cast._buffers["amax_history"]
            if (
                own_scale is None
                or own_history is None
                or own_scale._base is not self.scale
                or own_history._base is not self.amax_history
                or own_scale.data_ptr() != scale + 4 * place
                or own_history.data_ptr() != history + 4 * place
            ):
                return False
        return True

    def advance(self, *, group_amax: Tensor | None = None) -> None:
        """One step of every cast; see `fp8lab.emulation.scaling.update_delayed`."""
        with at(self):
            ops.update_delayed_(
                self.scale,
                self.amax_history,
                self.casts[0].operand.float8,
                margin=self.policy.margin,
                algorithm=self.policy.algorithm,
                power_of_two=self.policy.power_of_two,
                group_amax=group_amax,
            )
        self.make_inverses()

    def make_inverses(self) -> None:
        """Make 1 / scale of every cast at once, for the casts that come."""
        # Beside each other as the scales are, but each where a kernel likes it, at 16 bytes.
        inverses = self.scale.new_empty((len(self.casts), 4))
        torch.reciprocal(self.scale, out=inverses[:, 0])
        for cast, inverse in zip(self.casts, inverses[:, 0].unbind(), strict=True):
            cast.keep_inverse(inverse)


def operand_casts(model: nn.Module) -> Iterator[tuple[str, OperandCast]]:
    """Every cast of a model with its name: `blocks.0.qkv.input` and so on."""
    for name, module in model.named_modules():
        if isinstance(module, OperandCast):
            yield name.replace(".casts.", ".").removeprefix("casts."), module


def _casts(model: nn.Module) -> list[OperandCast]:
    """Those of `operand_casts`, without their names, which take most of the time."""
    found: list[OperandCast] = []
    seen: set[nn.Module] = set()
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        if isinstance(module, OperandCast):
            found.append(module)
        left.extend(reversed(module._modules.values()))
    return found


def delayed_groups(model: nn.Module) -> list[DelayedGroup]:
    """The delayed state of a model, laid out flat; made anew when its buffers were replaced."""
    members: dict[tuple[DelayedScaling, str, torch.device], list[OperandCast]] = {}
    for cast in _casts(model):
        if cast.delayed is not None:
            key = (cast.delayed, cast.operand.format, cast.scale.device)
            members.setdefault(key, []).append(cast)
    known: list[DelayedGroup] = getattr(model, _ATTRIBUTE, [])
    groups = []
    for (policy, _, _), casts in members.items():
        chosen = tuple(casts)
        found = next((group for group in known if group.holds(chosen)), None)
        groups.append(found or _laid_out(policy, chosen))
    # Not a submodule, a parameter or a buffer: nothing that a copy or a state_dict should have.
    object.__setattr__(model, _ATTRIBUTE, groups)
    return groups


@torch.compiler.disable  # type: ignore[untyped-decorator]
def advance_scaling(model: nn.Module, *, skip: Tensor | None = None) -> None:
    """Move the delayed scales of a model on: once an optimizer step, after it.

    The amax of a step is the largest of its microbatches. Nothing waits for the device.

    Args:
        model: What holds the layers.
        skip: One int32 element: where it is not 0 the step was skipped, and its amaxes are dropped,
            so that scales and histories stay as they are.
    """
    note_model(model)
    for group in delayed_groups(model):
        if skip is not None:
            group.amax_history[0].masked_fill_(skip.reshape(()) != 0, 0.0)
        group.advance()
    end_step()


def amax_is_finite(model: nn.Module) -> Tensor | None:
    """Whether every amax of the present step is finite: one bool on the device; None of none."""
    flags = [group.amax_history[0].isfinite().all() for group in delayed_groups(model)]
    return torch.stack(flags).all() if flags else None


def _laid_out(policy: DelayedScaling, casts: tuple[OperandCast, ...]) -> DelayedGroup:
    scale = torch.stack([cast.scale for cast in casts])
    history = torch.stack([cast.amax_history for cast in casts], dim=1).contiguous()
    for place, cast in enumerate(casts):
        cast.scale = scale[place]
        cast.amax_history = history[:, place]
    return DelayedGroup(policy, casts, scale, history)
