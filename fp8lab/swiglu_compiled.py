"""`fp8lab.swiglu` under `torch.compile`: operators that the compiler takes as they are.

Two for SwiGLU alone, and two for both layers with SwiGLU between them; as `fp8lab.linear_compiled`
has them for one layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8lab import ops_swiglu
from fp8lab.linear_compiled import (
    kept_as,
    layer_of,
    packed,
    packed_fake,
    refuse_main_grad,
    side_of,
)
from fp8lab.linear_tickets import fake_ticket, redeemed, ticket_for
from fp8lab.observe import refuse_compiled
from fp8lab.swiglu_products import Kept, backward_both, can_join, forward_both

if TYPE_CHECKING:
    from fp8lab.linear import Fp8Linear


def joins_compiled(gate_up: Fp8Linear, down: Fp8Linear) -> bool:
    """Whether a compiled graph has both layers as one operator.

    Not where a cast wants an amax first: the compiler joins that to what makes the tensor.
    """
    ends = gate_up.cast_of("input"), down.cast_of("grad_output")
    return (
        can_join(down, "input", down.active_recipe)
        and can_join(gate_up, "grad_output", gate_up.active_recipe)
        and not any(cast.wants_amax for cast in ends)
    )


def compiled_swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with gradients, as one operator; gate_up is (rows, 2F)."""
    h: Tensor = _activation(gate_up)
    return h


def compiled_swiglu_linear(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    layers: tuple[Fp8Linear, Fp8Linear],
) -> Tensor:
    """Both layers as one operator; x is (rows, K)."""
    keep = [torch.is_grad_enabled() and weight.requires_grad for weight in (w1, w2)]
    forms = [
        kept_as(layer) if kept else (0, False) for layer, kept in zip(layers, keep, strict=True)
    ]
    y: Tensor = _forward(
        x,
        w1,
        b1,
        w2,
        b2,
        layers[0]._handle,
        layers[1]._handle,
        keep,
        [block for block, _ in forms],
        [bfloat16 for _, bfloat16 in forms],
        layers[0].products,
    )[0]
    return y


@torch.library.custom_op("fp8lab::swiglu", mutates_args=())
def _activation(gate_up: Tensor) -> Tensor:
    return ops_swiglu.swiglu(gate_up)


@_activation.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("fp8lab::swiglu_grad", mutates_args=())
def _activation_grad(dh: Tensor, gate_up: Tensor) -> Tensor:
    return ops_swiglu.swiglu_grad(dh, gate_up)


@_activation_grad.register_fake
def _(dh: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _keep_gate_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _activation_gradients(ctx: Any, dh: Tensor) -> Tensor:
    (gate_up,) = ctx.saved_tensors
    grad: Tensor = _activation_grad(dh.contiguous(), gate_up)
    return grad


_activation.register_autograd(_activation_gradients, setup_context=_keep_gate_up)


@torch.library.custom_op("fp8lab::swiglu_forward", mutates_args=())
def _forward(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    handle1: Tensor,
    handle2: Tensor,
    keep: list[bool],
    block: list[int],
    bfloat16: list[bool],
    products: str,
) -> list[Tensor]:
    """y; gate and up; of each layer what the weight gradient takes of its input, and a ticket."""
    refuse_compiled()
    layers = layer_of(handle1), layer_of(handle2)
    wanted = [{"forward": True, "data_grad": True, "weight_grad": kept} for kept in keep]
    y, kept = forward_both(x, (w1, b1), (w2, b2), layers, (wanted[0], wanted[1]))
    result = [y, kept.gate_up]
    for place, (layer, weight) in enumerate(zip(layers, (w1, w2), strict=True)):
        sides = kept.sides[place]
        result += packed(layer, sides.get("weight_grad"), x, block[place], bfloat16[place])
        result.append(ticket_for(sides["data_grad"], kept.recipes[place], weight))
    return result


@_forward.register_fake
def _(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    handle1: Tensor,
    handle2: Tensor,
    keep: list[bool],
    block: list[int],
    bfloat16: list[bool],
    products: str,
) -> list[Tensor]:
    result = [x.new_empty(x.shape[0], w2.shape[0]), x.new_empty(x.shape[0], w1.shape[0])]
    for weight, kept, length, wide in zip((w1, w2), keep, block, bfloat16, strict=True):
        result += packed_fake(x, weight.shape[1], kept, length, wide, products)
        result.append(fake_ticket())
    return result


@torch.library.custom_op("fp8lab::swiglu_backward", mutates_args=())
def _backward(
    dy: Tensor,
    gate_up: Tensor,
    kept: list[Tensor],
    handle1: Tensor,
    handle2: Tensor,
    columns: int,
    dtype1: torch.dtype,
    dtype2: torch.dtype,
    need: list[bool],
    bias_dtype: torch.dtype | None,
) -> list[Tensor]:
    """dx, dw of both layers, and db of the first; empty where not needed (x, w1, w2, through)."""
    refuse_compiled()
    layers = layer_of(handle1), layer_of(handle2)
    need_x, need_w1, need_w2, through = need
    sides: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    recipes = []
    wants = (need_x, need_w1), (through, need_w2)
    for place, (layer, (data, weight_grad)) in enumerate(zip(layers, wants, strict=True)):
        refuse_main_grad(layer)
        values, inverse, ticket = kept[3 * place : 3 * place + 3]
        recipe, w_side = redeemed(ticket, layer.label)
        recipes.append(recipe)
        if data:
            sides[place]["data_grad"] = w_side
        if weight_grad:
            sides[place]["weight_grad"] = side_of(layer, values, inverse, dy.shape[0])
    found = backward_both(
        dy,
        Kept(gate_up, sides, (recipes[0], recipes[1])),
        (None, None),
        layers,
        (dtype1, dtype2),
        bias_dtype,
    )
    return [dy.new_empty(0) if grad is None else grad for grad in found]


@_backward.register_fake
def _(
    dy: Tensor,
    gate_up: Tensor,
    kept: list[Tensor],
    handle1: Tensor,
    handle2: Tensor,
    columns: int,
    dtype1: torch.dtype,
    dtype2: torch.dtype,
    need: list[bool],
    bias_dtype: torch.dtype | None,
) -> list[Tensor]:
    need_x, need_w1, need_w2, _ = need
    both = gate_up.shape[1]
    dx, dw1, dw2, db1 = (dy.new_empty(0) for _ in range(4))
    if need_x:
        dx = dy.new_empty(dy.shape[0], columns)
    if need_w1:
        dw1 = dy.new_empty(both, columns, dtype=dtype1)
    if need_w2:
        dw2 = dy.new_empty(dy.shape[1], both // 2, dtype=dtype2)
    if bias_dtype is not None:
        db1 = dy.new_empty(both, dtype=bias_dtype)
    return [dx, dw1, dw2, db1]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, w1, b1, w2, b2, handle1, handle2, keep = inputs[:8]
    # Not the weights: as for one layer.
    ctx.save_for_backward(*output[1:], handle1, handle2)
    ctx.columns, ctx.dtypes = w1.shape[1], (w1.dtype, w2.dtype)
    ctx.bias_dtypes = tuple(None if bias is None else bias.dtype for bias in (b1, b2))
    ctx.keep = keep


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    gate_up, *kept, handle1, handle2 = ctx.saved_tensors
    need_x, need_w1, need_b1, need_w2, need_b2 = ctx.needs_input_grad[:5]
    need_w1, need_w2 = need_w1 and ctx.keep[0], need_w2 and ctx.keep[1]
    dy = grads[0]
    assert dy is not None
    need = [need_x, need_w1, need_w2, need_x or need_w1 or need_b1]
    found: list[Tensor | None] = [None] * 4
    if any(need):
        made = _backward(
            dy.contiguous(),
            gate_up,
            kept,
            handle1,
            handle2,
            ctx.columns,
            *ctx.dtypes,
            need,
            ctx.bias_dtypes[0] if need_b1 else None,
        )
        wanted = (need_x, need_w1, need_w2, need_b1)
        found = [grad if want else None for grad, want in zip(made, wanted, strict=True)]
    dx, dw1, dw2, db1 = found
    db2 = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtypes[1]) if need_b2 else None
    return (dx, dw1, db1, dw2, db2, *[None] * 6)


_forward.register_autograd(_gradients, setup_context=_set_up)
