"""The layer under `torch.compile`: two operators that the compiler takes as they are.

What a layer does (cached codes, scales that move, kernels of its own) is nothing to trace. Inside a
compiled graph it is one operator forward and one backward, so that the graph does not break and
everything around them is fused. A layer is found by a handle: a CPU tensor that holds its number,
so that one compiled graph serves every layer of a shape; and the weight as the forward pass cast it
by a ticket (`fp8lab.linear_tickets`).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8lab.errors import UserError
from fp8lab.linear_products import Side, backward_products, forward_products
from fp8lab.linear_tickets import fake_ticket, redeemed, ticket_for
from fp8lab.observe import refuse_compiled
from fp8lab.recipes import BlockScaling, MxScaling, RowScaling, Scaling

if TYPE_CHECKING:
    from fp8lab.linear import Fp8Linear

_LAYERS: WeakValueDictionary[int, Fp8Linear] = WeakValueDictionary()
_NUMBERS = itertools.count()
_PITCH = 16  # of the rows of transposed codes that kernels write


def register(layer: Fp8Linear) -> Tensor:
    """A handle for a layer: int64, 0-d, on the CPU. The layer is not kept alive by it."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(number, device="cpu")


def layer_of(handle: Tensor) -> Fp8Linear:
    """The layer of a handle."""
    return _LAYERS[int(handle)]


def compiled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: Fp8Linear, handle: Tensor
) -> Tensor:
    """y = x w^T + bias, with gradients, as one operator; x is (rows, K)."""
    kept = torch.is_grad_enabled() and weight.requires_grad
    block, bfloat16 = kept_as(layer) if kept else (0, False)
    amax = _amax(x) if layer.cast_of("input").wants_amax else None
    amax_dy = layer.cast_of("grad_output").wants_amax
    y: Tensor = _forward(
        x, weight, bias, handle, amax, amax_dy, kept, block, bfloat16, layer.products
    )[0]
    return y


def _amax(x: Tensor) -> Tensor | None:
    """The amax as part of the graph, where the compiler joins it to what makes x.

    Magnitudes and their maximum are exact in x's type, and NaN is kept: `ops.amax`, bit for bit but
    for the payload of NaN, which no scale depends on.
    """
    return x.detach().abs().amax().float() if x.numel() else None


@torch.library.custom_op("fp8lab::linear_forward", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    amax: Tensor | None,
    amax_dy: bool,
    keep: bool,
    block: int,
    bfloat16: bool,
    products: str,
) -> list[Tensor]:
    """y; of x for the weight gradient: values as rows of memory, inverse scales; a ticket."""
    refuse_compiled()
    layer = layer_of(handle)
    wanted = {"forward": True, "data_grad": True, "weight_grad": keep}
    y, kept, recipe = forward_products(x, weight, bias, layer, wanted, amax)
    ticket = ticket_for(kept["data_grad"], recipe, weight)
    return [y, *packed(layer, kept.get("weight_grad"), x, block, bfloat16), ticket]


def packed(
    layer: Fp8Linear, side: Side | None, x: Tensor, block: int, bfloat16: bool
) -> tuple[Tensor, Tensor]:
    """What the weight gradient takes of a layer's input: values as rows of memory, inverse scales.

    Args:
        layer: The layer.
        side: What the forward pass kept of the input; None for nothing.
        x: A tensor of its rows, on its device.
        block, bfloat16: As `kept_as` foretold.
    """
    if side is None:
        return x.new_empty(0), x.new_empty(0)
    check_form(layer, side.values, bfloat16)
    if side.values.dtype == torch.bfloat16:
        return side.values.t().clone(memory_format=torch.contiguous_format), x.new_empty(0)
    if side.inverse is None:
        return side.values.contiguous().clone(), x.new_empty(0)
    pitch = _pitch(x.shape[0], x.is_cuda or layer.products == "kernels")
    values = side.values.view(torch.uint8)
    whole = values.as_strided((values.shape[0], pitch), (pitch, 1))
    inverse = side.inverse
    if inverse.dtype == torch.float8_e8m0fnu:
        inverse = inverse.view(torch.uint8)
    if block == 0:
        # What a layer keeps must not be what a graph may overwrite.
        inverse = inverse.reshape(1) if layer.makes_scales else inverse.reshape(1).clone()
    return whole, inverse.contiguous()


@_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    amax: Tensor | None,
    amax_dy: bool,
    keep: bool,
    block: int,
    bfloat16: bool,
    products: str,
) -> list[Tensor]:
    y = x.new_empty(x.shape[0], weight.shape[0])
    return [y, *packed_fake(x, x.shape[1], keep, block, bfloat16, products), fake_ticket()]


def packed_fake(
    x: Tensor, columns: Any, keep: bool, block: int, bfloat16: bool, products: str
) -> tuple[Tensor, Tensor]:
    """Shapes and types of `packed`, for an input of `columns` columns and x's rows."""
    rows = x.shape[0]
    if not keep:
        return x.new_empty(0), x.new_empty(0)
    if bfloat16:
        return x.new_empty(rows, columns, dtype=torch.bfloat16), x.new_empty(0)
    if products == "decoded":
        return x.new_empty(columns, rows, dtype=torch.float32), x.new_empty(0)
    whole = x.new_empty(
        columns, _pitch(rows, x.is_cuda or products == "kernels"), dtype=torch.uint8
    )
    if block == 0:
        return whole, x.new_empty(1, dtype=torch.float32)
    across = 1 if block < 0 else (rows + block - 1) // block
    dtype = torch.uint8 if block == 32 else torch.float32
    return whole, x.new_empty(columns, across, dtype=dtype)


@torch.library.custom_op("fp8lab::linear_backward", mutates_args=())
def _backward(
    dy: Tensor,
    values: Tensor,
    inverse: Tensor,
    ticket: Tensor,
    handle: Tensor,
    amax: Tensor | None,
    columns: int,
    weight_dtype: torch.dtype,
    need_x: bool,
    need_weight: bool,
) -> list[Tensor]:
    """dx and dw, (rows, columns) and (N, columns); empty where not needed."""
    refuse_compiled()
    layer = layer_of(handle)
    refuse_main_grad(layer)
    recipe, w_side = redeemed(ticket, layer.label)
    kept = {"data_grad": w_side} if need_x else {}
    if need_weight:
        kept["weight_grad"] = side_of(layer, values, inverse, dy.shape[0])
    dtypes = dy.dtype, weight_dtype, None
    dx, dw = backward_products(dy, kept, None, layer, dtypes, recipe, amax)
    return [dy.new_empty(0) if grad is None else grad for grad in (dx, dw)]


@_backward.register_fake
def _(
    dy: Tensor,
    values: Tensor,
    inverse: Tensor,
    ticket: Tensor,
    handle: Tensor,
    amax: Tensor | None,
    columns: int,
    weight_dtype: torch.dtype,
    need_x: bool,
    need_weight: bool,
) -> list[Tensor]:
    dx, dw = dy.new_empty(0), dy.new_empty(0)
    if need_x:
        dx = dy.new_empty(dy.shape[0], columns)
    if need_weight:
        dw = dy.new_empty(dy.shape[1], columns, dtype=weight_dtype)
    return [dx, dw]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, weight, bias, handle = inputs[:4]
    # Not the weight: its codes of this pass are what the gradients take, and it may change.
    ctx.save_for_backward(*output[1:], handle)
    ctx.columns, ctx.weight_dtype = weight.shape[1], weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.amax_dy, ctx.keep = inputs[5:7]


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    *kept, handle = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    need_weight = need_weight and ctx.keep
    dy = grads[0]
    assert dy is not None
    dx = dw = db = None
    if need_x or need_weight:
        amax = _amax(dy) if ctx.amax_dy else None
        first, second = _backward(
            dy.contiguous(),
            *kept,
            handle,
            amax,
            ctx.columns,
            ctx.weight_dtype,
            need_x,
            need_weight,
        )
        dx, dw = first if need_x else None, second if need_weight else None
    if need_bias:
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return (dx, dw, db, *[None] * 7)


_forward.register_autograd(_gradients, setup_context=_set_up)


def kept_as(layer: Fp8Linear) -> tuple[int, bool]:
    """Of x in the weight gradient: its blocks' length (0: one scale, -1: one a row); if BF16."""
    if not layer.active_recipe.in_fp8("weight_grad"):
        return 0, True
    policy: Scaling = layer.recipe.operand("input").policy(True)
    if isinstance(policy, RowScaling):
        return -1, False
    if isinstance(policy, MxScaling):
        return 32, False
    if isinstance(policy, BlockScaling):
        return (policy.length if not policy.square else 0), False
    return 0, False


def refuse_main_grad(layer: Fp8Linear) -> None:
    """Refuse a gradient that a compiled graph does not see.

    Raises:
        RuntimeError: The layer's weight has a `main_grad`.
    """
    if hasattr(layer._parameters.get("weight"), "main_grad"):
        raise RuntimeError(
            "the weight has a main_grad, which torch.compile does not see; compile without it, or"
            " let gradients accumulate in .grad"
        )


def check_form(layer: Fp8Linear, values: Tensor, bfloat16: bool) -> None:
    """Refuse a switch of roles that a compiled graph has not seen.

    Raises:
        UserError: What is kept of x is in BF16 where the graph has FP8, or the other way round.
    """
    if (values.dtype == torch.bfloat16) != bfloat16:
        raise UserError(
            f"layer {layer.label!r}: its roles in BF16 are not those that this graph was made for;"
            " change them before the model is exported"
        )


def side_of(layer: Fp8Linear, values: Tensor, inverse: Tensor, rows: int) -> Side:
    """What `_forward` kept, as the weight gradient takes it."""
    if values.dtype == torch.bfloat16:
        return Side(values.t())
    if values.dtype == torch.float32:
        return Side(values)
    operand = layer.recipe.operand("input")
    codes = values[:, :rows].view(getattr(torch, operand.float8.dtype_name))
    if inverse.dtype == torch.uint8:
        inverse = inverse.view(torch.float8_e8m0fnu)
    return Side(codes, inverse)


def _pitch(rows: Any, by_kernel: bool) -> Any:
    """Bytes from one row of transposed codes to the next; the oracle's lie side by side."""
    if not by_kernel:
        return rows
    return (rows + _PITCH - 1) // _PITCH * _PITCH
