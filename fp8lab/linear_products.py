"""The three products of a layer, and the autograd function that ties them together.

    forward          y  = x w^T     sums over K
    data gradient    dx = dy w      sums over N
    weight gradient  dw = dy^T x    sums over the rows (tokens)

Both operands of a product are summed along their rows: a is (M, K), b is (N, K). So x and dy enter
the weight gradient transposed, and w the data gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8lab import ops
from fp8lab.linear_casts import OperandCast
from fp8lab.observe import at
from fp8lab.ops_linear import bfloat16_product, float32_product, matmul, through_kernels
from fp8lab.ops_operands import Block, Codes
from fp8lab.recipes import PRODUCT_OPERANDS, NoScaling, Recipe

if TYPE_CHECKING:
    from fp8lab.linear import Fp8Linear

# How products are computed: "codes" multiplies FP8 codes as the card does (the oracle on the CPU,
# the kernels on a GPU), "kernels" demands the kernels, "decoded" multiplies decoded operands in
# float32.
MODES = ("codes", "kernels", "decoded")


@dataclass(frozen=True, eq=False)
class Side:
    """One operand of a product: rows along what is summed. Equal to itself alone.

    Attributes:
        values: FP8 codes, decoded float32 values, or BF16 ones.
        inverse: What decodes codes; None for values.
        block: The blocks of `inverse`.
    """

    values: Tensor
    inverse: Tensor | None = None
    block: Block | None = None


@cache
def with_bf16_roles(recipe: Recipe, roles: frozenset[str]) -> Recipe:
    """The recipe in force while some operands are in BF16.

    Every product that one of them enters multiplies BF16 operands, both of them; the other products
    stay as they are. Formats and policies stay too: scaling state goes on.
    """
    left = {
        name: replace(recipe.product(name), fp8=False)
        for name, operands in PRODUCT_OPERANDS.items()
        if any(role in roles for role, _ in operands)
    }
    return replace(recipe, **left) if left else recipe  # type: ignore[arg-type]


def sides(
    cast: OperandCast,
    x: Tensor,
    recipe: Recipe,
    role: str,
    wanted: Mapping[str, bool],
    mode: str,
    *,
    record: bool,
    amax_out: Tensor | None = None,
    amax: Tensor | None = None,
    configured: Recipe | None = None,
) -> tuple[dict[str, Side], Codes | None]:
    """An operand as each of its wanted products takes it, each cast made once.

    Args:
        cast: The operand's cast.
        x: (rows, columns), of any of the input types.
        recipe: The one in force.
        role: What the operand is.
        wanted: Which products will be computed.
        mode: One of `MODES`.
        record, amax_out, amax: As for `OperandCast.cast`.
        configured: The layer's own recipe, where that is another: what it has in FP8 and `recipe`
            has not is recorded and observed as if it were.

    Returns:
        By product; and the codes of x as it is, if they were made.
    """
    places = _places(role)
    fp8 = {name for name in places if wanted.get(name) and recipe.in_fp8(name)}
    would = {name for name in places if wanted.get(name) and (configured or recipe).in_fp8(name)}
    found: dict[str, Side] = {}
    for name, transposed in places.items():
        if wanted.get(name) and name not in fp8:
            rounded = x.detach().to(torch.bfloat16)
            found[name] = Side(rounded.t() if transposed else rounded)
    if not fp8:
        if cast.observe:
            note_as_fp8(cast, x, role, would, record=record, amax_out=amax_out, amax=amax)
        elif _records(cast, places, would):
            _record_amax(cast, x, role, record, amax_out)
        return found, None
    if _records(cast, places, would - fp8) and not (_records(cast, places, fp8) or cast.observe):
        _record_amax(cast, x, role, record, amax_out)
    need_plain = any(not places[name] for name in fp8)
    need_other = any(places[name] for name in fp8)
    decode = mode == "decoded"
    with at(role):
        layouts = cast.cast(
            x,
            # What is observed is the plain layout.
            plain=need_plain or cast.observe or (decode and cast.one_code),
            transposed=need_other and not (decode and cast.one_code),
            record=record,
            amax_out=amax_out,
            amax=amax,
        )
    if cast.observe:
        cast.note(x, layouts.plain)
    plain, other = layouts.plain, layouts.transposed
    if decode:
        values = plain.decoded() if plain is not None else None
        values_t = other.decoded() if other is not None else None
        if values_t is None and values is not None:
            values_t = values.t()
        for name in fp8:
            side = values_t if places[name] else values
            assert side is not None
            found[name] = Side(side)
        return found, plain
    for name in fp8:
        codes = other if places[name] else plain
        assert codes is not None
        found[name] = Side(codes.codes, codes.inverse, codes.block)
    return found, plain


def note_as_fp8(
    cast: OperandCast,
    x: Tensor,
    role: str,
    would: Collection[str],
    *,
    record: bool = False,
    amax_out: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    """Observe an operand that is in BF16 now, as the FP8 of its recipe would cast it.

    Args:
        cast, x, role: As for `sides`.
        would: The products that it would enter in FP8; of none, it is observed as BF16.
        record, amax_out, amax: As for `OperandCast.cast`.
    """
    codes = None
    if would and not isinstance(cast.operand.scaling, NoScaling):
        with at(role):
            codes = cast.cast(
                x, transposed=False, record=record, amax_out=amax_out, amax=amax
            ).plain
    cast.note(x, codes)


def merge_amax(slot: Tensor, amax: Tensor) -> None:
    """The larger of two amaxes by their bits, in place, as casts merge them: NaN and Inf stay."""
    words = slot.view(torch.int32)
    torch.maximum(words, amax.view(torch.int32).reshape(words.shape), out=words)


def _records(cast: OperandCast, places: Mapping[str, bool], names: set[str]) -> bool:
    """Whether a cast for these products is one whose amax delayed scaling records."""
    if cast.delayed is None:
        return False
    return any(cast.operand.transposed is None or not places[name] for name in names)


def _record_amax(
    cast: OperandCast, x: Tensor, role: str, record: bool, amax_out: Tensor | None
) -> None:
    """Record the amax of an operand that is not cast, so that its scale is right on its return."""
    if amax_out is None and not record:
        return
    with at(role):
        amax = ops.amax(x.detach().contiguous())
    merge_amax(cast.amax_history[:1] if amax_out is None else amax_out, amax)


@cache
def _places(role: str) -> dict[str, bool]:
    """The products that an operand enters, and whether transposed."""
    return {
        name: transposed
        for name, operands in PRODUCT_OPERANDS.items()
        for operand, transposed in operands
        if operand == role
    }


def product(
    recipe: Recipe,
    name: str,
    a: Side,
    b: Side,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    accumulate: Tensor | None = None,
) -> Tensor:
    """One of the three products: a b^T, plus the bias, in `out_dtype`; see `ops_linear.matmul`."""
    options: dict[str, Any] = {"bias": bias, "out_dtype": out_dtype, "accumulate": accumulate}
    if a.values.dtype == torch.bfloat16:
        return bfloat16_product(a.values, b.values, **options)
    if a.inverse is None or b.inverse is None:
        return float32_product(a.values, b.values, **options)
    with at(name):
        return matmul(
            Codes(a.values, a.inverse, a.block),
            Codes(b.values, b.inverse, b.block),
            promote_every=recipe.promote_every(name),
            **options,
        )


class LinearFunction(torch.autograd.Function):
    """y = x w^T + bias. Backward uses the operands as their own forward cast them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Fp8Linear) -> Any:
        need_x, need_weight, ctx.need_bias = ctx.needs_input_grad[:3]
        wanted = {"forward": True, "data_grad": need_x, "weight_grad": need_weight}
        y, kept, ctx.recipe = forward_products(x, weight, bias, layer, wanted)
        data, other = kept.get("data_grad"), kept.get("weight_grad")
        ctx.save_for_backward(*_tensors(data), *_tensors(other))
        ctx.blocks = (data.block if data else None, other.block if other else None)
        ctx.layer, ctx.wanted = layer, wanted
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        # Not a saved tensor: what is accumulated into may change between forward and backward.
        ctx.weight = weight if need_weight else None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        saved = ctx.saved_tensors
        kept = {}
        for place, name in enumerate(("data_grad", "weight_grad")):
            values, inverse = saved[2 * place : 2 * place + 2]
            if values is not None:
                kept[name] = Side(values, inverse, ctx.blocks[place])
        dx, dw = backward_products(grad_output, kept, ctx.weight, ctx.layer, ctx.dtypes, ctx.recipe)
        db = None
        if ctx.need_bias:
            db = grad_output.sum(0, dtype=torch.float32).to(ctx.dtypes[2])
        return dx, dw, db, None


def forward_products(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: Fp8Linear,
    wanted: Mapping[str, bool],
    amax: Tensor | None = None,
) -> tuple[Tensor, dict[str, Side], Recipe]:
    """y; what the backward pass takes of x and w, by product; and the recipe in force.

    Args:
        x: (rows, K). weight: (N, K). bias: (N,) or None.
        layer: The layer, with its recipe and casts.
        wanted: Which products will be computed.
        amax: x's, where it is known already.
    """
    with computing(layer.products), at(layer):
        recipe, w_sides = layer.weight_sides(weight)
        x_sides, _ = sides(
            layer.cast_of("input"),
            x,
            recipe,
            "input",
            wanted,
            layer.products,
            record=layer.records,
            amax=amax,
            configured=layer.recipe,
        )
        y = product(
            recipe, "forward", x_sides["forward"], w_sides["forward"], bias=bias, out_dtype=x.dtype
        )
    kept = {}
    if wanted.get("data_grad"):
        kept["data_grad"] = w_sides["data_grad"]
    if wanted.get("weight_grad"):
        kept["weight_grad"] = x_sides["weight_grad"]
    return y, kept, recipe


def backward_products(
    dy: Tensor,
    kept: Mapping[str, Side],
    weight: Tensor | None,
    layer: Fp8Linear,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    recipe: Recipe,
    amax: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dw; dw is None where it was added to the weight's `main_grad`.

    Args:
        dy: (rows, N).
        kept: What the forward pass left: w for the data gradient, x for the weight gradient.
        weight: The parameter, for its `main_grad`.
        layer: The layer.
        dtypes: Of x, weight and bias.
        recipe: The one that was in force in the forward pass.
        amax: dy's, where it is known already.
    """
    wanted = {name: name in kept for name in ("data_grad", "weight_grad")}
    dx = dw = None
    with computing(layer.products), at(layer):
        dy_sides, _ = sides(
            layer.cast_of("grad_output"),
            dy,
            recipe,
            "grad_output",
            wanted,
            layer.products,
            record=layer.training,
            amax=amax,
            configured=layer.recipe,
        )
        if wanted["data_grad"]:
            dx = product(
                recipe, "data_grad", dy_sides["data_grad"], kept["data_grad"], out_dtype=dtypes[0]
            )
        if wanted["weight_grad"]:
            main_grad = getattr(weight, "main_grad", None)
            dw = product(
                recipe,
                "weight_grad",
                dy_sides["weight_grad"],
                kept["weight_grad"],
                out_dtype=dtypes[1],
                accumulate=main_grad,
            )
            if main_grad is not None:
                dw = None
    return dx, dw


def computing(mode: str) -> Any:
    """Where products are computed in that mode of `MODES`: a context."""
    return through_kernels() if mode == "kernels" else nullcontext()


def _tensors(side: Side | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if side is None else (side.values, side.inverse)
