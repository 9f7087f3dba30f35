"""The scan of `layer_tolerance`: one layer at a time in FP8, the rest in BF16, and what that does.

Everything is measured against the same model with every chosen layer in BF16, on the same batches.
A layer takes a whole recipe, or one operand of it alone: that operand is then decoded from its FP8
codes again and enters its products as BF16 values, because a product is in FP8 only where both of
its operands are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8lab.conversion import conversion_report, convert
from fp8lab.conversion_names import is_matched
from fp8lab.errors import UserError
from fp8lab.linear import Fp8Linear, OperandCast, advance_scaling
from fp8lab.recipes import OPERANDS, PRODUCTS, Recipe, recipe_named
from fp8lab.records import Row, short_float32

ALL = "all"  # the role of a layer that takes the whole recipe
BF16 = recipe_named("bf16")

Place = tuple[str, str, str]  # recipe, layer, role: what a row is of


def roles_of(alone: bool) -> tuple[str, ...]:
    """Each layer with the whole recipe, and with `alone` with each operand by itself, too."""
    return (ALL, *OPERANDS) if alone else (ALL,)


def chosen_layers(model: nn.Module, patterns: str | Sequence[str], products: str) -> list[str]:
    """Names of the layers that the patterns choose and FP8 fits, which are put in BF16.

    Raises:
        UserError: A pattern matches no linear layer, or FP8 fits none.
    """
    convert(model, BF16, include=patterns, products=products)
    report = conversion_report(model)
    wanted = (patterns,) if isinstance(patterns, str) else patterns
    chosen = [n for n in report.converted if is_matched(n, wanted)]
    if not chosen:
        name, why = next(iter(report.left.items()))
        raise UserError(f"FP8 fits none of the chosen layers; {name!r}: {why}")
    return chosen


@dataclass
class Scan:
    """A model whose chosen layers are in BF16, and what its batches give there.

    Attributes:
        model: What is scanned.
        gradients: Of a batch, by its place: leaves its gradients in the parameters' `grad` and
            returns its loss, 0-d. The same place must give the same every time.
        batches: How many there are.
        products: How FP8 layers compute; see `fp8lab.convert`.
        layers: Names of the layers to scan.
        loss: The mean loss of the batches, all in BF16.
        norm: The norm of the gradients of all batches side by side.
    """

    model: nn.Module
    gradients: Callable[[int], Tensor]
    batches: int
    products: str
    layers: list[str]
    loss: float = 0.0
    norm: float = 0.0
    _base: list[list[Tensor]] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        model: nn.Module,
        gradients: Callable[[int], Tensor],
        batches: int,
        *,
        patterns: str | Sequence[str] = "*",
        products: str = "codes",
    ) -> Scan:
        """Put the layers in BF16 and measure; layers that FP8 does not fit stay out.

        Raises:
            UserError: A pattern matches no linear layer, FP8 fits none, or the model has no
                gradient to compare.
        """
        if batches < 1:
            raise UserError(f"batches is {batches}; accepted: 1 and up")
        chosen = chosen_layers(model, patterns, products)
        scan = cls(model, gradients, batches, products, chosen)
        for place in range(batches):
            scan._losses.append(float(gradients(place)))
            scan._base.append([grad.clone() for grad in scan._grads()])
        scan.loss = sum(scan._losses) / batches
        scan.norm = _norm([grad for own in scan._base for grad in own])
        if not 0 < scan.norm < math.inf:
            raise UserError(f"in BF16 the gradients' norm is {scan.norm}; nothing to compare with")
        return scan

    def rows(
        self, recipe: Recipe, *, roles: bool = False, done: Collection[Place] = ()
    ) -> Iterator[Row]:
        """A row a layer, and with `roles` one for each of its operands alone; not those in `done`.

        A row has layer, recipe, role, `loss` (mean over the batches), `loss_difference` (from all
        in BF16), `gradient_error` (norm of the difference of all gradients over their norm in
        BF16), `own_gradient_error` (the same of the layer's weight).
        """
        check_recipe(recipe)
        for name in self.layers:
            for role in roles_of(roles):
                if (recipe.name, name, role) in done:
                    continue
                with self._alone(name, recipe, role):
                    measures = self._measures(name)
                yield {"layer": name, "recipe": recipe.name, "role": role, **measures}

    def _grads(self) -> list[Tensor]:
        return [p.grad.detach() for p in self.model.parameters() if p.grad is not None]

    def _measures(self, name: str) -> Row:
        weight = self.model.get_submodule(name).weight
        owners = [p for p in self.model.parameters() if p.grad is not None]
        own = next(place for place, p in enumerate(owners) if p is weight)
        losses, differences, own_differences, own_base = [], [], [], []
        for place, base in enumerate(self._base):
            losses.append(float(self.gradients(place)))
            found = torch._foreach_sub(self._grads(), base)
            differences.append(_norm(list(found)))
            own_differences.append(_norm([found[own]]))
            own_base.append(_norm([base[own]]))
        gaps = [loss - was for loss, was in zip(losses, self._losses, strict=True)]
        return {
            "loss": short_float32(sum(losses) / self.batches),
            "loss_difference": short_float32(sum(gaps) / self.batches),
            "gradient_error": short_float32(math.hypot(*differences) / self.norm),
            "own_gradient_error": short_float32(
                math.hypot(*own_differences) / max(math.hypot(*own_base), 1e-45)
            ),
        }

    @contextmanager
    def _alone(self, name: str, recipe: Recipe, role: str) -> Iterator[None]:
        """That layer, or one operand of it, in FP8; delayed scales are from one pass before."""
        layer = self.model.get_submodule(name)
        assert isinstance(layer, Fp8Linear)
        if role != ALL:
            with operand_alone(layer, recipe, role, self._calibrate):
                yield
            return
        convert(self.model, recipe, include=name, products=self.products)
        try:
            self._calibrate(layer)
            yield
        finally:
            convert(self.model, BF16, include=name, products=self.products)

    def _calibrate(self, casts: nn.Module) -> None:
        """Where scaling is delayed: the scales come from the amaxes of all batches."""
        if any(isinstance(m, OperandCast) and m.delayed for m in casts.modules()):
            for place in range(self.batches):
                self.gradients(place)
            advance_scaling(casts)


@contextmanager
def operand_alone(
    layer: Fp8Linear, recipe: Recipe, role: str, calibrate: Callable[[nn.Module], None]
) -> Iterator[None]:
    """One operand of a BF16 layer decoded from FP8 codes, in every product that it enters.

    Both products get the layout as it is, also where the policy (rows, blocks) casts the operand
    anew along the other dimension.

    Args:
        layer: Is in BF16.
        recipe: Says how the operand is cast.
        role: Which operand.
        calibrate: Called inside with what holds the cast, before anything is measured.
    """
    cast = OperandCast(recipe.operand(role), device=layer.weight.device)
    holder = nn.ModuleList([cast])
    weight = layer.weight.detach().clone()

    def put_weight() -> None:
        with torch.no_grad():
            layer.weight.copy_(decoded(weight, cast))

    if role == "weight":
        undo = put_weight
        put_weight()
    elif role == "input":
        handle = layer.register_forward_pre_hook(
            lambda _, args: (_DecodedForward.apply(args[0], cast),)  # type: ignore[no-untyped-call]
        )
    else:
        handle = layer.register_forward_hook(
            lambda _, __, y: _DecodedBackward.apply(y, cast)  # type: ignore[no-untyped-call]
        )
    try:
        calibrate(holder)
        if role == "weight":
            undo()  # with the scale that is there now
        yield
    finally:
        if role == "weight":
            with torch.no_grad():
                layer.weight.copy_(weight)
        else:
            handle.remove()


def decoded(x: Tensor, cast: OperandCast) -> Tensor:
    """x of any number of dimensions, cast and decoded, in its own dtype."""
    rows = x.detach().reshape(-1, x.shape[-1])
    return cast(rows, both=False)[0].reshape(x.shape).to(x.dtype)  # type: ignore[no-any-return]


class _DecodedForward(torch.autograd.Function):
    """x decoded from its codes; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: OperandCast) -> Tensor:
        return decoded(x, cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _DecodedBackward(torch.autograd.Function):
    """y as it is; its gradient decoded from its codes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, cast: OperandCast) -> Tensor:
        ctx.cast = cast
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return decoded(grad, ctx.cast), None


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe under which no product is in FP8.

    Raises:
        UserError: With what to take.
    """
    if not any(recipe.in_fp8(name) for name in PRODUCTS):
        raise UserError(
            f"recipe {recipe.name!r} has no product in FP8, and BF16 is what the scan compares"
            " with; name others: tensorwise, rowwise, blockwise, ..."
        )


def _norm(tensors: list[Tensor]) -> float:
    """The norm of tensors side by side; float32 norms, their squares summed in float64."""
    norms = torch.stack([own.float() for own in torch._foreach_norm(tensors)])
    return float(norms.double().square().sum().sqrt())
