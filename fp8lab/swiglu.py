"""The feed-forward part of a Llama block in FP8: y = down(silu(gate) * up), gate and up one layer.

    y = swiglu_linear(gate_up, down, x)

is `down(swiglu(gate_up(x)))`, bit for bit: results, gradients, amax histories. Where the recipe
allows it, what SwiGLU gives goes straight into FP8 codes for `down`, and its gradient straight into
codes for `gate_up` (`fp8lab.swiglu_products`): neither is written in high precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8lab import ops_swiglu
from fp8lab.errors import UserError
from fp8lab.linear import Fp8Linear
from fp8lab.linear_products import Side
from fp8lab.swiglu_compiled import compiled_swiglu, compiled_swiglu_linear, joins_compiled
from fp8lab.swiglu_products import Kept, backward_both, forward_both

__all__ = ["SwiGlu", "swiglu", "swiglu_linear"]


# Of a module; those of all modules are called `_global...`.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class SwiGlu(nn.Module):
    """y = down(silu(gate) * up), where `gate_up` gives gate and up side by side.

    Args:
        gate_up: A linear layer to 2F features: gate first, then up.
        down: A linear layer from F features.

    Any `torch.nn.Linear` will do, and `fp8lab.convert` changes them as it does elsewhere; two
    `Fp8Linear` are joined.

    Raises:
        UserError: Other modules, or sizes that do not fit.
    """

    def __init__(self, gate_up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        for name, layer in (("gate_up", gate_up), ("down", down)):
            if not isinstance(layer, nn.Linear):
                raise UserError(
                    f"{name} is {type(layer).__name__}; accepted: torch.nn.Linear"
                    " (swiglu_linear takes any module)"
                )
        check_sizes(gate_up, down)
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        """x is (..., K), the result (..., N), of x's dtype."""
        return swiglu_linear(self.gate_up, self.down, x)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up with its gradients, by the contract of `fp8lab.emulation.swiglu`.

    Args:
        gate_up: (..., 2F) float32, bfloat16 or float16: gate in the first F columns.

    Returns:
        (..., F) of its type.

    Raises:
        UserError: No last dimension that is even.
    """
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise UserError(
            f"gate_up has shape {tuple(gate_up.shape)}; accepted: (..., 2F), gate and up side by"
            " side, of F columns each"
        )
    rows = gate_up.flatten(0, -2) if gate_up.dim() > 1 else gate_up[None]
    apply: Any = compiled_swiglu if torch.compiler.is_compiling() else _Activation.apply
    h: Tensor = apply(rows)
    return h.reshape(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def swiglu_linear(gate_up: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
    """down(swiglu(gate_up(x))), joined where both are `Fp8Linear`.

    Args:
        gate_up: A layer from (..., K) to (..., 2F).
        down: A layer from (..., F) to (..., N).
        x: (..., K), of a type that the layers take.

    Raises:
        UserError: Two linear layers whose sizes do not fit; and what the layers raise.
    """
    if isinstance(gate_up, nn.Linear) and isinstance(down, nn.Linear):
        check_sizes(gate_up, down)
    if isinstance(gate_up, Fp8Linear) and isinstance(down, Fp8Linear) and _join(gate_up, down):
        return _joined(gate_up, down, x)
    y: Tensor = down(swiglu(gate_up(x)))
    return y


def _join(gate_up: Fp8Linear, down: Fp8Linear) -> bool:
    """Whether one function stands for both layers."""
    if gate_up.products != down.products or any(_is_called(layer) for layer in (gate_up, down)):
        return False
    return not torch.compiler.is_compiling() or joins_compiled(gate_up, down)


def _is_called(layer: Fp8Linear) -> bool:
    """Whether somebody (FSDP, say) waits for the layer to be called, or it has another forward."""
    return bool(
        any(getattr(layer, name) for name in HOOKS)
        or any(getattr(nn.modules.module, f"_global{name}") for name in HOOKS)
        or "forward" in layer.__dict__
        or type(layer).forward is not Fp8Linear.forward
    )


def _joined(gate_up: Fp8Linear, down: Fp8Linear, x: Tensor) -> Tensor:
    rows = gate_up.checked_rows(x)
    layers = gate_up, down
    first, second = ((layer.weight, layer.bias) for layer in layers)
    y: Tensor
    if torch.compiler.is_compiling():
        y = compiled_swiglu_linear(rows, *first, *second, layers)
    elif torch.is_grad_enabled() and any(
        given is not None and given.requires_grad for given in (rows, *first, *second)
    ):
        y = _Joined.apply(rows, *first, *second, layers)  # type: ignore[no-untyped-call]
    else:
        only = {"forward": True}
        y, _ = forward_both(rows, first, second, layers, (only, only))
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], down.out_features)


def check_sizes(gate_up: nn.Linear, down: nn.Linear) -> None:
    """Refuse layers that do not follow each other.

    Raises:
        UserError: With their sizes, and the first one's name where it has one.
    """
    if gate_up.out_features != 2 * down.in_features:
        label = getattr(gate_up, "label", "")
        name = f"gate_up (layer {label!r})" if label else "gate_up"
        raise UserError(
            f"{name} has {gate_up.out_features} output features; accepted: {2 * down.in_features},"
            f" twice the {down.in_features} input features of down"
        )


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return ops_swiglu.swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return ops_swiglu.swiglu_grad(dh.contiguous(), gate_up)


class _Joined(torch.autograd.Function):
    """Both layers and what is between them. Backward uses the operands as forward cast them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        layers: tuple[Fp8Linear, Fp8Linear],
    ) -> Any:
        need_x, need_w1, ctx.need_b1, need_w2, ctx.need_b2 = ctx.needs_input_grad[:5]
        through = need_x or need_w1 or ctx.need_b1
        wanted = (
            {"forward": True, "data_grad": need_x, "weight_grad": need_w1},
            {"forward": True, "data_grad": through, "weight_grad": need_w2},
        )
        y, kept = forward_both(x, (w1, b1), (w2, b2), layers, wanted)
        tensors: list[Tensor | None] = [kept.gate_up if through else None]
        ctx.places = []
        for layer, sides in enumerate(kept.sides):
            for name, side in sides.items():
                ctx.places.append((layer, name, side.block))
                tensors += (side.values, side.inverse)
        ctx.save_for_backward(*tensors)
        ctx.layers, ctx.recipes, ctx.dtype = layers, kept.recipes, x.dtype
        ctx.dtypes = tuple(None if given is None else given.dtype for given in (w1, b1, w2, b2))
        # Not saved tensors: what is accumulated into may change between forward and backward.
        ctx.weights = w1 if need_w1 else None, w2 if need_w2 else None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate_up, *saved = ctx.saved_tensors
        sides: tuple[dict[str, Side], dict[str, Side]] = ({}, {})
        for place, (layer, name, block) in enumerate(ctx.places):
            sides[layer][name] = Side(saved[2 * place], saved[2 * place + 1], block)
        w1, b1, w2, b2 = ctx.dtypes
        if gate_up is None:
            gate_up = dy  # only its type counts: nothing flows through
        kept = Kept(gate_up, sides, ctx.recipes)
        dx, dw1, dw2, db1 = backward_both(
            dy, kept, ctx.weights, ctx.layers, (w1, w2), b1 if ctx.need_b1 else None
        )
        db2 = dy.sum(0, dtype=torch.float32).to(b2) if ctx.need_b2 else None
        return dx, dw1, db1, dw2, db2, None
