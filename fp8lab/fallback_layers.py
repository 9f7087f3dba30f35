"""Which roles of which layers a fallback watches, and whether its rule can work there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fp8lab.conversion_names import check_fp8_patterns, is_matched
from fp8lab.errors import UserError
from fp8lab.fallback import FallbackRule, most_sqnr_db
from fp8lab.linear import Fp8Linear, OperandCast
from fp8lab.recipes import OPERANDS, PRODUCT_OPERANDS

Watched = Mapping[str, tuple[Fp8Linear, tuple[str, ...]]]  # by name: the layer, roles in FP8


def watched_layers(model: nn.Module, patterns: Sequence[str], roles: Sequence[str]) -> Watched:
    """The FP8 layers that patterns choose, each with those of the roles that are in FP8.

    Raises:
        UserError: A pattern that matches no FP8 layer, or nothing that is in FP8.
    """
    check_fp8_patterns(_fp8_layers(model), patterns, "fallback")
    found = fp8_roles(model, patterns, roles)
    if not found:
        raise UserError(
            f"fallback: none of the roles {', '.join(roles)} of the chosen layers is in FP8, so the"
            " rule can never fire; choose another recipe, or other layers"
        )
    return found


def fp8_roles(model: nn.Module, patterns: Sequence[str], roles: Sequence[str]) -> Watched:
    """As `watched_layers`, but empty where nothing is chosen."""
    found = {}
    for name, layer in _fp8_layers(model).items():
        if is_matched(name, patterns):
            own = tuple(role for role in OPERANDS if role in roles and _is_fp8(layer, role))
            if own:
                found[name] = layer, own
    return found


def casts_of(watched: Watched) -> dict[str, OperandCast]:
    """The casts of what is watched, by layer and role."""
    return {
        f"{name}.{role}": layer.cast_of(role)
        for name, (layer, roles) in watched.items()
        for role in roles
    }


def check_reachable(rule: FallbackRule, watched: Watched) -> None:
    """Refuse a rule that can never fire, or never return, for what is watched.

    Raises:
        UserError: Gradient norms alone count, and no layer has one; or a return takes an SQNR that
            a role's format does not give.
    """
    trained = any(layer.weight.requires_grad for layer, _ in watched.values())
    if rule.overflow is None and rule.sqnr_db is None and not trained:
        raise UserError(
            "fallback: a gradient spike is a sign of trained weights, and those of the chosen"
            " layers are frozen (requires_grad), so the rule can never fire; choose other layers,"
            " or set a limit for overflow or sqnr_db"
        )
    for name, cast in casts_of(watched).items():
        fmt = cast.operand.float8
        most = most_sqnr_db(fmt.mantissa_bits)
        if rule.sqnr_to_return > most:
            raise UserError(
                f"fallback: sqnr_db {rule.sqnr_db:g} with margin {rule.margin:g} asks for"
                f" {rule.sqnr_to_return:.1f} dB before a return, and {fmt.name}, which {name} is"
                f" cast to, gives at most {most:.1f}: the role could never return; lower the limit"
                " or the margin, or leave the role out"
            )


def _fp8_layers(model: nn.Module) -> dict[str, Fp8Linear]:
    return {name: own for name, own in model.named_modules() if isinstance(own, Fp8Linear)}


def _is_fp8(layer: Fp8Linear, role: str) -> bool:
    return any(
        layer.recipe.in_fp8(name) and role in (own for own, _ in operands)
        for name, operands in PRODUCT_OPERANDS.items()
    )
