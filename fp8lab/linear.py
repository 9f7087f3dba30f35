"""A linear layer whose three products take FP8 operands.

x is (rows, K), w is (N, K), dy is (rows, N). Each operand is cast by the recipe; the products take
its codes, as it is and transposed. Policies with one scale cast an operand once for both of its
products. Rows and blocks cast it twice from high precision, once along each dimension, since a
block must lie along the summed dimension; square blocks hold the same elements either way.

When what happens (`docs/training.md` tells why):

- The weight is cast when it is first used after it (or its delayed scale) changed, and its codes
  serve every product until then. A change is a step of any optimizer, or what torch counts
  (`Tensor._version`): an edit in place, a loaded state. Edits through `weight.data` outside an
  optimizer are not seen, and `forget_weights` tells the layers of them.
- Delayed scaling records an amax in training mode alone, and never inside a backward pass but that
  of the output gradient. `advance_scaling` moves the scales on, once an optimizer step.
- A backward pass uses the codes and scales of its own forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8lab.errors import UserError
from fp8lab.linear_casts import CastStatistics, OperandCast, version_of
from fp8lab.linear_checks import check_dtype, check_kernels, check_products
from fp8lab.linear_compiled import compiled_linear, register
from fp8lab.linear_products import (
    MODES,
    LinearFunction,
    Side,
    forward_products,
    merge_amax,
    note_as_fp8,
    sides,
    with_bf16_roles,
)
from fp8lab.linear_replay import in_backward, recompute_contexts, recorder, replayed
from fp8lab.linear_state import (
    DelayedGroup,
    advance_scaling,
    amax_is_finite,
    delayed_groups,
    operand_casts,
)
from fp8lab.ops_operands import Codes
from fp8lab.recipes import (
    OPERANDS,
    DelayedScaling,
    Recipe,
    StaticScaling,
)

__all__ = [
    "MODES",
    "CastStatistics",
    "DelayedGroup",
    "Fp8Linear",
    "OperandCast",
    "advance_scaling",
    "amax_is_finite",
    "delayed_groups",
    "forget_weights",
    "operand_casts",
    "recompute_contexts",
]


class Fp8Linear(nn.Linear):
    """`y = x w^T + bias` with each operand cast as a recipe says.

    Args:
        in_features, out_features: K and N.
        recipe: How input, weight and output gradient are cast, and the products computed.
        bias: Whether there is a bias.
        products: One of `MODES`: "codes" multiplies FP8 codes with the card's arithmetic (the
            oracle on the CPU, the kernels on a GPU; the same bits), "kernels" is the same but
            refuses a CPU outside the interpreter, "decoded" multiplies the decoded operands in
            float32 with torch (fast on a CPU; not the card's bits).
        device, dtype: Of weight and bias: float32 (master weights), bfloat16 or float16.

    A new layer's weight and bias are zeros; `fp8lab.convert` keeps those of the layer it changes.

    Attributes:
        recipe, products: As given.
        bf16_roles: The operands that are in BF16 for now, see `set_bf16_roles`.
        active_recipe: The recipe in force: `recipe` but for the products that these enter.
        casts: The three `OperandCast`s, by role.
        label: Its name in the model that `fp8lab.convert` was given, for reports.

    Raises:
        UserError: Products of codes that the tensor core does not have: another format, or blocks
            of other lengths.
    """

    recipe: Recipe
    products: str
    casts: nn.ModuleDict
    label: str
    bf16_roles: frozenset[str]
    active_recipe: Recipe

    def __init__(
        self,
        in_features: int,
        out_features: int,
        recipe: Recipe,
        *,
        bias: bool = True,
        products: str = "codes",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, **where))
        self.bias = nn.Parameter(torch.zeros(out_features, **where)) if bias else None  # type: ignore[assignment]
        self.prepare(recipe, products)

    def prepare(self, recipe: Recipe, products: str) -> None:
        """Take a recipe: what makes a `torch.nn.Linear` whose class was changed a whole layer."""
        check_products(recipe, products)
        self.recipe, self.products = recipe, products
        self.label = ""
        self.bf16_roles, self.active_recipe = frozenset(), recipe
        device = self.weight.device
        self.casts = nn.ModuleDict(
            {role: OperandCast(recipe.operand(role), device=device) for role in OPERANDS}
        )
        self.casts.train(self.training)
        self._cached: WeightCodes | None = None
        self._handle = register(self)

    def forward(self, x: Tensor) -> Tensor:
        """x is (..., K), float32, bfloat16 or float16; the result is (..., N), of x's dtype.

        Under autocast x is cast to autocast's dtype first, as torch's own layer does.

        Raises:
            TypeError: x has another dtype.
            ValueError: Its last dimension is not K.
            UserError: Kernels are asked for, but x is where they do not run.
        """
        rows = self.checked_rows(x)
        if torch.compiler.is_compiling():
            y = compiled_linear(rows, self.weight, self.bias, self, self._handle)
        elif torch.is_grad_enabled() and (
            x.requires_grad or self.weight.requires_grad or self._bias_needs_grad
        ):
            y = LinearFunction.apply(rows, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        else:
            y = forward_products(rows, self.weight, self.bias, self, {"forward": True})[0]
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """What is shown of it: sizes, recipe, and how its products are computed."""
        shown = f"{super().extra_repr()}, recipe={self.recipe.name}, products={self.products}"
        roles = [role for role in OPERANDS if role in self.bf16_roles]
        return f"{shown}, in BF16: {', '.join(roles)}" if roles else shown

    def set_bf16_roles(self, roles: Iterable[str]) -> None:
        """Move operands to BF16, and those that are not named back, between two steps.

        Every product that an operand in BF16 enters takes both of its operands in BF16; the others
        stay in FP8. Delayed scaling goes on recording the amax of an operand in BF16, so that its
        scale is the present one when it returns, and an observed cast of it shows what FP8 would
        have done. A forward pass keeps its form for its backward pass. Under torch.compile the
        layer is compiled anew.

        Raises:
            UserError: A role that there is not, or no list of them.
        """
        if isinstance(roles, str) or not isinstance(roles, Iterable):
            raise UserError(f"roles is {roles!r}; accepted: a list of {', '.join(OPERANDS)}")
        given = tuple(roles)
        for role in given:
            if role not in OPERANDS:
                raise UserError(f"role {role!r}: accepted: {', '.join(OPERANDS)}")
        chosen = frozenset(given)
        if chosen != self.bf16_roles:
            self.bf16_roles = chosen
            self.active_recipe = with_bf16_roles(self.recipe, chosen)
            self._cached = None

    def cast_of(self, role: str) -> OperandCast:
        """The cast of "input", "weight" or "grad_output"."""
        found = self.casts[role]
        assert isinstance(found, OperandCast)
        return found

    @property
    def records(self) -> bool:
        """Whether a forward pass now notes amaxes: in training, and not when it is done again."""
        return self.training and not in_backward()

    @property
    def makes_scales(self) -> bool:
        """Whether every cast of the input makes scales of its own, which nothing else keeps."""
        return not isinstance(self.recipe.input.policy(True), StaticScaling | DelayedScaling)

    def forget_weight(self) -> None:
        """Cast the weight again at its next use, whatever torch knows of it."""
        self._cached = None

    def weight_sides(self, weight: Tensor) -> tuple[Recipe, dict[str, Side]]:
        """The recipe in force, and the weight as its products take it, cast when it changed.

        All layouts are made at once, so that its codes do not depend on who asks first.
        """
        kept = replayed(self)
        if kept is not None:
            again: tuple[Recipe, dict[str, Side]] = kept
            return again
        record = self.records
        cached = self._weight_codes(weight, record)
        if record:
            cached.record(self.cast_of("weight"))
        found = self.active_recipe, cached.sides
        keep = recorder()
        if keep is not None:
            keep(self, found)
        return found

    def weight_codes(self, weight: Tensor) -> tuple[Side, Codes | None]:
        """The weight as the forward product takes it, and its codes where it is FP8 there."""
        cached = self._weight_codes(weight, False)
        fp8 = self.active_recipe.in_fp8("forward")
        return cached.sides["forward"], cached.plain if fp8 else None

    def _weight_codes(self, weight: Tensor, record: bool) -> WeightCodes:
        cast = self.cast_of("weight")
        cached = self._cached
        state = _state_of(weight, cast)
        if cached is None or state is None or cached.state != state:
            cached = self._cached = self._cast_weight(cast, weight, state, record)
        elif cast.observe and cached.plain is not None:
            cast.note(weight, cached.plain)
        elif cast.observe:
            fp8 = [name for name in ("forward", "data_grad") if self.recipe.in_fp8(name)]
            note_as_fp8(cast, weight, "weight", fp8)
        return cached

    def _cast_weight(
        self, cast: OperandCast, weight: Tensor, state: tuple[int, ...] | None, record: bool
    ) -> WeightCodes:
        amax = None
        if cast.delayed is not None and not record:
            amax = torch.zeros(1, dtype=torch.float32, device=weight.device)
        found, plain = sides(
            cast,
            weight,
            self.active_recipe,
            "weight",
            {"forward": True, "data_grad": True},
            self.products,
            record=record,
            amax_out=amax,
            configured=self.recipe,
        )
        return WeightCodes(state, found, plain, amax)

    @property
    def _bias_needs_grad(self) -> bool:
        return self.bias is not None and self.bias.requires_grad

    def checked_rows(self, x: Tensor) -> Tensor:
        """x as (rows, K), under autocast in its dtype; or an error that says what x should be."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        check_dtype(x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}; accepted: (..., {self.in_features})")
        if self.products == "kernels" and not torch.compiler.is_compiling():
            check_kernels(x.device)
        return x if x.dim() == 2 else x.reshape(-1, self.in_features)

    def __getstate__(self) -> dict[str, Any]:
        # A copy casts its own weight.
        return self.__dict__ | {"_cached": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = register(self)


@dataclass
class WeightCodes:
    """A weight's codes, and when they were made.

    Attributes:
        state: What torch knew of the weight and its scale then; None where it counts no changes.
        sides: What the products take.
        plain: The codes of the weight as it is.
        amax: Its amax, for a delayed policy whose history does not have it yet.
    """

    state: tuple[int, ...] | None
    sides: dict[str, Side]
    plain: Codes | None
    amax: Tensor | None

    def record(self, cast: OperandCast) -> None:
        """Merge the amax into slot 0 of the history, once for each cast of the weight."""
        if self.amax is not None:
            merge_amax(cast.amax_history[:1], self.amax)
            self.amax = None


def forget_weights(model: nn.Module) -> None:
    """Tell the layers of a model that weights changed where torch does not see it (`.data`)."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.forget_weight()


def _state_of(weight: Tensor, cast: OperandCast) -> tuple[int, ...] | None:
    """What changes when the weight or its scale does; None for a tensor that counts no changes.

    Codes are a function of both, so that a model that was loaded makes the same ones.
    """
    state = version_of(weight)
    if state is None:
        return None
    if cast.delayed is None:
        return (*state, _optimizer_steps)
    scale = version_of(cast.scale)
    return None if scale is None else (*state, _optimizer_steps, *scale)


# Steps of any optimizer of this process. One may write a weight so that torch does not count it
# (through `.data`; a sharded one whose whole is gathered into the same memory).
_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)
