"""Forward and backward of gate and up, SwiGLU, down: six products, and what is cast between them.

The result of SwiGLU is the input of `down`, its gradient the output gradient of `gate_up`. Where a
layer multiplies FP8 codes of it and nothing else asks for it, it is made while it is cast, by one
kernel, and never written. The bits are those of the layers one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from fp8lab.linear_products import Side, backward_products, computing, forward_products
from fp8lab.observe import is_watched
from fp8lab.ops_swiglu import SwiGluOperand
from fp8lab.recipes import (
    PRODUCT_OPERANDS,
    BlockScaling,
    DelayedScaling,
    Recipe,
    StaticScaling,
)

if TYPE_CHECKING:
    from fp8lab.linear import Fp8Linear

Wanted = Mapping[str, bool]
Weight = tuple[Tensor, Tensor | None]  # and bias


class Kept(NamedTuple):
    """What the backward pass takes of a forward pass.

    Attributes:
        gate_up: What the first layer gave, (rows, 2F).
        sides: Of each layer: w for the data gradient, x for the weight gradient.
        recipes: The recipe in force in each layer.
    """

    gate_up: Tensor
    sides: tuple[Mapping[str, Side], Mapping[str, Side]]
    recipes: tuple[Recipe, Recipe]


def can_join(layer: Fp8Linear, role: str, recipe: Recipe) -> bool:
    """Whether a layer's operand may be made while it is cast.

    It must be FP8 in every product that it enters, by one policy whose scales are known before (or
    belong to blocks of a row), and nobody may watch the cast.
    """
    operand = layer.cast_of(role).operand
    policy = operand.scaling
    blocks = isinstance(policy, BlockScaling) and not policy.square
    return (
        layer.products != "decoded"
        and operand.transposed is None
        and (blocks or isinstance(policy, StaticScaling | DelayedScaling))
        and all(
            recipe.in_fp8(name)
            for name, operands in PRODUCT_OPERANDS.items()
            if any(entering == role for entering, _ in operands)
        )
    )


def forward_both(
    x: Tensor,
    first: Weight,
    second: Weight,
    layers: tuple[Fp8Linear, Fp8Linear],
    wanted: tuple[Wanted, Wanted],
) -> tuple[Tensor, Kept]:
    """y = down(swiglu(gate_up(x))), and what the backward pass takes.

    Args:
        x: (rows, K).
        first, second: Weight and bias of each layer.
        layers: gate_up and down.
        wanted: Of each, which products will be computed.
    """
    gate_up, down = layers
    both, kept, recipe = forward_products(x, *first, gate_up, wanted[0])
    made = SwiGluOperand(both)
    h = _as_operand(made, down, "input", down.active_recipe)
    y, kept_down, recipe_down = forward_products(h, *second, down, wanted[1])
    return y, Kept(both, (kept, kept_down), (recipe, recipe_down))


def backward_both(
    dy: Tensor,
    kept: Kept,
    weights: tuple[Tensor | None, Tensor | None],
    layers: tuple[Fp8Linear, Fp8Linear],
    dtypes: tuple[torch.dtype, torch.dtype],
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dx, dw of gate_up, dw of down, and the gradient of gate_up's bias.

    Args:
        dy: (rows, N).
        kept: Of the forward pass.
        weights: As for `backward_products`: of gate_up and of down.
        layers: gate_up and down.
        dtypes: Of the weights.
        bias_dtype: Of gate_up's bias where it needs a gradient, otherwise None.
    """
    gate_up, down = layers
    dtype = kept.gate_up.dtype
    dh, dw_down = backward_products(
        dy, kept.sides[1], weights[1], down, (dtype, dtypes[1], None), kept.recipes[1]
    )
    if dh is None:
        return None, None, dw_down, None
    made = SwiGluOperand(kept.gate_up, dh, keep=bias_dtype is not None)
    grad = _as_operand(made, gate_up, "grad_output", kept.recipes[0])
    dx, dw = backward_products(
        grad, kept.sides[0], weights[0], gate_up, (dtype, dtypes[0], None), kept.recipes[0]
    )
    db = None
    if bias_dtype is not None:
        with computing(gate_up.products):
            db = made.tensor().sum(0, dtype=torch.float32).to(bias_dtype)
    return dx, dw, dw_down, db


def _as_operand(made: SwiGluOperand, layer: Fp8Linear, role: str, recipe: Recipe) -> Tensor:
    """What a layer's products take for a tensor: one that is not written yet, or the tensor."""
    watched = is_watched() or layer.cast_of(role).observe
    if can_join(layer, role, recipe) and not watched:
        return cast(Tensor, made)
    with computing(layer.products):
        return made.tensor()
