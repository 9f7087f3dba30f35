"""A trained model for inference: weights kept as codes, scales as training left them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8lab.errors import UserError
from fp8lab.linear import Fp8Linear, OperandCast
from fp8lab.linear_casts import RawBuffers
from fp8lab.linear_checks import check_dtype
from fp8lab.linear_products import Side, computing, product, sides
from fp8lab.observe import at
from fp8lab.ops_operands import Block, Codes
from fp8lab.recipes import Recipe


class FrozenFp8Linear(RawBuffers):
    """The forward product of an `Fp8Linear` whose weight is codes and whose scales do not move.

    For the same scales it has the bits of the layer it was made from. Made by `freeze` alone.

    Attributes:
        weight_codes: FP8 codes (N, K), or the weight in BF16 where the product is not FP8.
        weight_inverse: float32 inverse scales or E8M0 scales of the codes; None for BF16.
    """

    in_features: int
    out_features: int
    recipe: Recipe
    products: str
    weight_codes: Tensor
    weight_inverse: Tensor | None
    bias: Tensor | None
    casts: nn.ModuleDict
    weight_block: Block | None
    raw = ("weight_codes", "weight_inverse")

    @torch.compiler.disable(  # type: ignore[untyped-decorator,no-untyped-call]
        reason="a frozen FP8 layer breaks the graph; compile without fullgraph"
    )
    def forward(self, x: Tensor) -> Tensor:
        """x is (..., K), of a type that `Fp8Linear` takes; the result is (..., N), of x's dtype."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        check_dtype(x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}; accepted: (..., {self.in_features})")
        rows = x.reshape(-1, self.in_features)
        cast = self.casts["input"]
        assert isinstance(cast, OperandCast)
        with computing(self.products), at(self):
            found, _ = sides(
                cast, rows, self.recipe, "input", {"forward": True}, self.products, record=False
            )
            y = product(
                self.recipe,
                "forward",
                found["forward"],
                self._weight_side(),
                bias=self.bias,
                out_dtype=x.dtype,
            )
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        return f"{self.in_features}, {self.out_features}, recipe={self.recipe.name}"

    def _weight_side(self) -> Side:
        if self.weight_inverse is None:
            return Side(self.weight_codes)
        codes = Codes(self.weight_codes, self.weight_inverse, self.weight_block)
        if self.products == "decoded":
            return Side(codes.decoded())
        return Side(codes.codes, codes.inverse, codes.block)


@torch.no_grad()
def freeze(model: nn.Module) -> nn.Module:
    """Make every FP8 layer of a model an inference layer, in place, and set the model to `eval`.

    A delayed policy keeps its last scale, which from now on stays; current, row and block policies
    find the scale of an input as in training. Weights become codes, a quarter of float32's bytes;
    the high-precision ones are gone, so the model cannot be trained on or restored.

    Returns:
        The model. Its FP8 layers have the keys `weight_codes` and `weight_inverse` in place of
        `weight` in its `state_dict`; the other parameters are untouched.

    Raises:
        UserError: There is no FP8 layer.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, Fp8Linear)]
    if not layers:
        raise UserError(
            "the model has no FP8 layer to freeze; call fp8lab.convert(model, recipe) first"
        )
    model.eval()
    for layer in layers:
        _freeze(layer)
    return model


def _freeze(layer: Fp8Linear) -> None:
    with computing(layer.products):
        side, codes = layer.weight_codes(layer.weight)
    values = side.values if codes is None else codes.codes
    inverse = None if codes is None else codes.inverse
    block = None if codes is None else codes.block
    bias = layer.bias
    del layer.weight, layer.bias
    del layer.casts["weight"], layer.casts["grad_output"]
    layer.recipe = layer.active_recipe  # roles in BF16 stay there
    for name in ("_cached", "_handle", "bf16_roles", "active_recipe"):
        delattr(layer, name)
    layer.__class__ = FrozenFp8Linear  # type: ignore[assignment]
    layer.register_buffer("weight_codes", values.clone())
    layer.register_buffer("weight_inverse", None if inverse is None else inverse.clone())
    layer.register_buffer("bias", None if bias is None else bias.detach())
    layer.weight_block = block  # type: ignore[assignment]
