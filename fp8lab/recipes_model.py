"""What a recipe is: three operands, three products, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8lab.formats import E4M3, E5M2, FORMATS, Float8Format, format_named
from fp8lab.recipes_policies import (
    SCALINGS,
    BlockScaling,
    CurrentScaling,
    MxScaling,
    NoScaling,
    RecipeError,
    Scaling,
)

OPERANDS = ("input", "weight", "grad_output")
PRODUCTS = ("forward", "data_grad", "weight_grad")
ACCUMULATIONS = ("native", "promoted")
# Of each product: the operand on the left and the one on the right, and whether each lies
# transposed there: a is (M, K), b is (N, K), both summed along their rows.
PRODUCT_OPERANDS: dict[str, tuple[tuple[str, bool], tuple[str, bool]]] = {
    "forward": (("input", False), ("weight", False)),
    "data_grad": (("grad_output", False), ("weight", True)),
    "weight_grad": (("grad_output", True), ("input", True)),
}
PROMOTE_EVERY = 128


@dataclass(frozen=True)
class Operand:
    """How one operand is cast.

    Attributes:
        format: The name of its FP8 format (without effect when scaling is `NoScaling`).
        scaling: Its scaling policy.
        transposed: Another policy for the product that takes it transposed (the input and the
            output gradient in the weight gradient, the weight in the data gradient); None is the
            same policy.
    """

    format: str = E4M3.name
    scaling: Scaling = field(default_factory=CurrentScaling)
    transposed: Scaling | None = None

    def __post_init__(self) -> None:
        formats = [name for name, fmt in FORMATS.items() if fmt.has_subnormals]
        if self.format not in formats:
            raise RecipeError(f"format is {self.format!r}; accepted: {', '.join(formats)}")
        accepted = ", ".join(c.__name__ for c in SCALINGS.values())
        for name, scaling in (("scaling", self.scaling), ("transposed", self.transposed)):
            missing = scaling is None and name == "transposed"
            if not missing and not isinstance(scaling, tuple(SCALINGS.values())):
                raise RecipeError(f"{name} is {scaling!r}; accepted: {accepted}")
        if self.transposed is not None and self.transposed.kind == "delayed":
            raise RecipeError("transposed is delayed scaling; accepted: policies without a history")

    @property
    def float8(self) -> Float8Format:
        """The format itself."""
        return format_named(self.format)

    def policy(self, transposed: bool) -> Scaling:
        """The policy of one of its two layouts."""
        if transposed and self.transposed is not None:
            return self.transposed
        return self.scaling


@dataclass(frozen=True)
class Product:
    """How one of the three products is computed.

    Attributes:
        fp8: Whether it multiplies FP8 codes; otherwise its operands are rounded to BF16.
        accumulation: Of FP8 codes: "native" is the tensor core's chain over all of the summed
            dimension, "promoted" adds the chain of each 128 of it to a float32 total. Scales of
            blocks are part of that total, so where an operand has blocks, every block is promoted
            whatever stands here.
    """

    fp8: bool = True
    accumulation: str = "promoted"

    def __post_init__(self) -> None:
        if not isinstance(self.fp8, bool):
            raise RecipeError(f"fp8 is {self.fp8!r}; accepted: true, false")
        if self.accumulation not in ACCUMULATIONS:
            accepted = ", ".join(ACCUMULATIONS)
            raise RecipeError(f"accumulation is {self.accumulation!r}; accepted: {accepted}")


@dataclass(frozen=True)
class Recipe:
    """A name, the three operands and the three products of every layer it is applied to."""

    name: str
    input: Operand = Operand()
    weight: Operand = Operand()
    grad_output: Operand = Operand(E5M2.name)
    forward: Product = Product()
    data_grad: Product = Product()
    weight_grad: Product = Product()
    # A layer asks in every pass, and torch.compile as it traces, so the answers are there at once.
    _in_fp8: dict[str, bool] = field(init=False, repr=False, compare=False)
    _promote_every: dict[str, int | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        in_fp8: dict[str, bool] = {}
        promote_every: dict[str, int | None] = {}
        for name in PRODUCTS:
            product, policies = self.product(name), self._policies(name)
            in_fp8[name] = product.fp8 and not any(isinstance(p, NoScaling) for p in policies)
            blocks = any(isinstance(p, BlockScaling | MxScaling) for p in policies)
            promoted = product.accumulation == "promoted" and not blocks
            promote_every[name] = PROMOTE_EVERY if promoted else None
        object.__setattr__(self, "_in_fp8", in_fp8)
        object.__setattr__(self, "_promote_every", promote_every)

    def operand(self, role: str) -> Operand:
        """The operand of that role: "input", "weight" or "grad_output"."""
        if role not in OPERANDS:
            raise RecipeError(f"unknown operand {role!r}; accepted: {', '.join(OPERANDS)}")
        found: Operand = getattr(self, role)
        return found

    def product(self, name: str) -> Product:
        """The product of that name: "forward", "data_grad" or "weight_grad"."""
        if name not in PRODUCTS:
            raise RecipeError(f"unknown product {name!r}; accepted: {', '.join(PRODUCTS)}")
        found: Product = getattr(self, name)
        return found

    def in_fp8(self, name: str) -> bool:
        """Whether that product multiplies FP8 codes: it may, and both of its operands are FP8."""
        return self._in_fp8[name]

    def promote_every(self, name: str) -> int | None:
        """After how much of the summed dimension that product is promoted; None is never.

        Blocks are promoted one by one, whatever the recipe says: None, too.
        """
        return self._promote_every[name]

    def block_lengths(self, name: str) -> set[int]:
        """The lengths of the blocks along the summed dimension of that product's operands."""
        lengths = set()
        for policy in self._policies(name):
            if isinstance(policy, BlockScaling):
                lengths.add(policy.length)
            elif isinstance(policy, MxScaling):
                lengths.add(32)
        return lengths

    def _policies(self, name: str) -> list[Scaling]:
        """Of the two operands of a product."""
        return [self.operand(role).policy(t) for role, t in PRODUCT_OPERANDS[name]]

    def to_dict(self) -> dict[str, object]:
        """Plain data: what `recipe_from_dict` takes."""
        from fp8lab.recipes_text import recipe_dict

        return recipe_dict(self)

    def to_json(self) -> str:
        """The recipe as a JSON text."""
        from fp8lab.recipes_text import recipe_json

        return recipe_json(self)

    def to_toml(self) -> str:
        """The recipe as a TOML text."""
        from fp8lab.recipes_text import recipe_toml

        return recipe_toml(self)
