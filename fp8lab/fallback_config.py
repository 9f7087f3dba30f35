"""What a run's fallback is, as plain data: in Python, in a run's config.json, on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fp8lab.conversion_names import patterns_of
from fp8lab.errors import UserError
from fp8lab.fallback import FallbackRule
from fp8lab.recipes import OPERANDS


@dataclass(frozen=True)
class FallbackConfig:
    """What a run's fallback is, as plain data.

    Attributes:
        rule: When a role falls back and returns.
        window: Steps a window, 1 and up.
        every: Of the steps, each so many-th is watched, 1 to `window`.
        layers: Patterns of `fnmatch` on the names of FP8 layers, or one; the others stay in FP8.
        roles: Which operands may leave FP8.
    """

    rule: FallbackRule = field(default_factory=FallbackRule)
    window: int = 10
    every: int = 1
    layers: tuple[str, ...] = ("*",)
    roles: tuple[str, ...] = OPERANDS

    def __post_init__(self) -> None:
        if not isinstance(self.rule, FallbackRule):
            raise UserError(f"fallback: rule is {self.rule!r}; accepted: a FallbackRule")
        for name, accepted, largest in (
            ("window", "an integer, 1 and up", 10**9),
            ("every", f"an integer, 1 to the window, {self.window}", self.window),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
                raise UserError(f"fallback: {name} is {value!r}; accepted: {accepted}")
        for name in ("layers", "roles"):
            given = patterns_of(getattr(self, name), f"fallback: {name}")
            object.__setattr__(self, name, given)
            if not given:
                raise UserError(f"fallback: {name} is empty, so that the rule can never fire")
        for role in self.roles:
            if role not in OPERANDS:
                raise UserError(f"fallback: role {role!r}; accepted: {', '.join(OPERANDS)}")
        rule = self.rule
        if rule.overflow is None and rule.sqnr_db is None and "grad_output" not in self.roles:
            raise UserError(
                "fallback: a gradient spike is a sign of grad_output alone, which is not among the"
                " roles, so the rule can never fire; add the role, or a limit for overflow or"
                " sqnr_db"
            )


def fallback_from_dict(table: Mapping[str, Any]) -> FallbackConfig:
    """What `asdict` made of a `FallbackConfig`.

    Raises:
        UserError: A value that cannot be.
        TypeError: A name that there is not.
    """
    return FallbackConfig(**{**table, "rule": FallbackRule(**table.get("rule", {}))})


def fallback_from_text(text: str) -> FallbackConfig:
    """Read the settings of a command line: "overflow=0.001:after=2:window=5".

    The names are those of `FallbackRule` and `FallbackConfig`; "none" is no limit; patterns and
    roles are joined by "+". An empty text is the defaults.

    Raises:
        UserError: A name that there is not or that comes twice, or a value that cannot be.
    """
    of_rule = [own.name for own in fields(FallbackRule)]
    others = [own.name for own in fields(FallbackConfig) if own.name != "rule"]
    rule: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for setting in filter(None, text.split(":")):
        name, equals, value = setting.partition("=")
        if not equals or name not in (*of_rule, *others):
            raise UserError(
                f"fallback: setting {setting!r}; accepted: NAME=VALUE, joined by colons, with the"
                f" names {', '.join((*of_rule, *others))}"
            )
        if name in rule or name in found:
            raise UserError(f"fallback: {name} is given twice; give it once")
        if name in ("layers", "roles"):
            found[name] = tuple(value.split("+"))
        else:
            (rule if name in of_rule else found)[name] = _number(value)
    return FallbackConfig(FallbackRule(**rule), **found)


def _number(text: str) -> Any:
    """None, an integer or a float; another text stays, for the message that refuses it."""
    if text == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
