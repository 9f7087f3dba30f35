"""Recipes: which operand of a linear layer is cast how, as frozen data.

A linear layer has three operands: `input` x, `weight` w and `grad_output` dy, and three products:
forward y = x w^T, data gradient dx = dy w, weight gradient dw = dy^T x. A recipe gives each operand
a format and a scaling policy. It says nothing about how that is computed.

A recipe travels as JSON or TOML (`to_json`, `to_toml`, `recipe_from_json`, `recipe_from_toml`), or
on a command line as a preset's name with settings: `delayed:history=64:margin=1`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from fp8lab.errors import UserError
from fp8lab.formats import E4M3, E5M2, FORMATS, Float8Format, format_named

OPERANDS = ("input", "weight", "grad_output")


class RecipeError(UserError, ValueError):
    """A recipe, policy or setting that cannot be; the message says what is accepted."""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(ok: bool, kind: str, key: str, value: Any, accepted: str) -> None:
    if not ok:
        shown = _shortened(value) if isinstance(value, str) else value
        raise RecipeError(f"{kind} scaling: {key} is {shown!r}; accepted: {accepted}")


def _shortened(text: str) -> str:
    """At most 80 characters: a message is one line that can be read."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_margin(kind: str, margin: Any) -> None:
    _require(
        _is_integer(margin) and 0 <= margin <= 64, kind, "margin", margin, "an integer, 0 to 64"
    )


def _check_bool(kind: str, key: str, value: Any) -> None:
    _require(isinstance(value, bool), kind, key, value, "true, false")


@dataclass(frozen=True)
class NoScaling:
    """The operand is not FP8: it is rounded to BF16 (nearest even)."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class StaticScaling:
    """One scale for ever.

    Attributes:
        scale: Multiplies when quantising; 2**-126 to 2**127, so that its inverse is a float32 too.
    """

    kind: ClassVar[str] = "static"
    scale: float = 1.0

    def __post_init__(self) -> None:
        _require(
            _is_number(self.scale) and 2.0**-126 <= self.scale <= 2.0**127,
            "static",
            "scale",
            self.scale,
            "a number from 2**-126 to 2**127",
        )


@dataclass(frozen=True)
class CurrentScaling:
    """The scale comes from the very tensor that is cast (two passes over it).

    Attributes:
        margin: Headroom in powers of two, 0 to 64.
        power_of_two: Round the scale down to a power of two.
    """

    kind: ClassVar[str] = "current"
    margin: int = 0
    power_of_two: bool = False

    def __post_init__(self) -> None:
        _check_margin(self.kind, self.margin)
        _check_bool(self.kind, "power_of_two", self.power_of_two)


@dataclass(frozen=True)
class DelayedScaling:
    """The scale comes from the amax of earlier steps (one pass).

    Attributes:
        history: How many steps of amax are kept, 1 to 65536.
        margin: Headroom in powers of two, 0 to 64.
        algorithm: "max" takes the largest amax of the history, "most_recent" the last.
        power_of_two: Round the scale down to a power of two.
    """

    kind: ClassVar[str] = "delayed"
    history: int = 16
    margin: int = 0
    algorithm: str = "max"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        ok = _is_integer(self.history) and 1 <= self.history <= 65536
        _require(ok, self.kind, "history", self.history, "an integer, 1 to 65536")
        _check_margin(self.kind, self.margin)
        known = self.algorithm in ("max", "most_recent")
        _require(known, self.kind, "algorithm", self.algorithm, "max, most_recent")
        _check_bool(self.kind, "power_of_two", self.power_of_two)


@dataclass(frozen=True)
class BlockScaling:
    """One current scale for each run of elements along the dimension that a product sums over.

    An operand that enters two products is cast twice from high precision, once along each
    dimension.

    Attributes:
        length: Elements a block: blocks are 1 x length.
        power_of_two: Round scales down to powers of two.
    """

    kind: ClassVar[str] = "block"
    length: int = 128
    power_of_two: bool = True

    def __post_init__(self) -> None:
        ok = _is_integer(self.length) and 1 <= self.length <= 65536
        _require(ok, self.kind, "length", self.length, "an integer, 1 to 65536")
        _check_bool(self.kind, "power_of_two", self.power_of_two)


Scaling = NoScaling | StaticScaling | CurrentScaling | DelayedScaling | BlockScaling
SCALINGS: dict[str, type[Scaling]] = {
    cls.kind: cls
    for cls in (NoScaling, StaticScaling, CurrentScaling, DelayedScaling, BlockScaling)
}


@dataclass(frozen=True)
class Operand:
    """How one operand is cast.

    Attributes:
        format: The name of its FP8 format (without effect when scaling is `NoScaling`).
        scaling: Its scaling policy.
    """

    format: str = E4M3.name
    scaling: Scaling = field(default_factory=CurrentScaling)

    def __post_init__(self) -> None:
        formats = [name for name, fmt in FORMATS.items() if fmt.has_subnormals]
        if self.format not in formats:
            raise RecipeError(f"format is {self.format!r}; accepted: {', '.join(formats)}")
        if not isinstance(self.scaling, tuple(SCALINGS.values())):
            accepted = ", ".join(c.__name__ for c in SCALINGS.values())
            raise RecipeError(f"scaling is {self.scaling!r}; accepted: {accepted}")

    @property
    def float8(self) -> Float8Format:
        """The format itself."""
        return format_named(self.format)


@dataclass(frozen=True)
class Recipe:
    """A name and the three operands of every linear layer it is applied to."""

    name: str
    input: Operand = Operand()
    weight: Operand = Operand()
    grad_output: Operand = Operand(E5M2.name)

    def operand(self, role: str) -> Operand:
        """The operand of that role: "input", "weight" or "grad_output"."""
        if role not in OPERANDS:
            raise RecipeError(f"unknown operand {role!r}; accepted: {', '.join(OPERANDS)}")
        found: Operand = getattr(self, role)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what `recipe_from_dict` takes."""
        return {"name": self.name} | {role: _operand_dict(self.operand(role)) for role in OPERANDS}

    def to_json(self) -> str:
        """The recipe as a JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_toml(self) -> str:
        """The recipe as a TOML text."""
        lines = [f"name = {_toml_text(self.name)}"]
        for role in OPERANDS:
            operand = self.to_dict()[role]
            lines += ["", f"[{role}]", f"format = {json.dumps(operand['format'])}"]
            lines += ["", f"[{role}.scaling]"]
            # JSON's strings, numbers and booleans are TOML's as well.
            lines += [f"{key} = {json.dumps(value)}" for key, value in operand["scaling"].items()]
        return "\n".join(lines) + "\n"


def _toml_text(text: str) -> str:
    """A TOML basic string: JSON's, but for characters beyond 16 bits and for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def uniform(name: str, scaling: Scaling) -> Recipe:
    """One scaling for all operands: E4M3 for input and weight, E5M2 for the output gradient."""
    return Recipe(
        name, Operand(E4M3.name, scaling), Operand(E4M3.name, scaling), Operand(E5M2.name, scaling)
    )


PRESETS: dict[str, Callable[[], Recipe]] = {
    "bf16": lambda: uniform("bf16", NoScaling()),
    "static": lambda: uniform("static", StaticScaling()),
    "current": lambda: uniform("current", CurrentScaling()),
    "delayed": lambda: uniform("delayed", DelayedScaling()),
    "blockwise": lambda: uniform("blockwise", BlockScaling()),
}


def recipe_named(spec: str) -> Recipe:
    """A preset by name, with settings of its scaling policy after colons.

    `delayed`, `delayed:history=64:margin=1`, `static:scale=0.5`. A setting applies to all three
    operands, or to one with its name before it: `static:scale=1:grad_output.scale=4096`. The recipe
    is named by the whole text.

    Raises:
        RecipeError: No such preset or setting, or a value that cannot be.
    """
    preset, *settings = spec.split(":")
    if preset not in PRESETS:
        raise RecipeError(
            f"unknown policy {_shortened(preset)!r}; accepted: {', '.join(PRESETS)}"
            " (settings follow after colons: delayed:history=64:margin=1)"
        )
    recipe = replace(PRESETS[preset](), name=spec)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise RecipeError(f"setting {setting!r} of policy {preset!r} must be KEY=VALUE")
        role, dot, name = key.rpartition(".")
        if dot:
            recipe.operand(role)  # refuses an unknown one
        if name == "kind":
            raise RecipeError(f"policy {spec!r}: the kind follows from the preset {preset!r}")
        for target in (role,) if dot else OPERANDS:
            operand = recipe.operand(target)
            changed = _operand_dict(operand)
            changed["scaling"][name] = _parsed(text)
            source = f"policy {_shortened(spec)!r}"
            changes: dict[str, Any] = {target: _operand_from(changed, source)}
            recipe = replace(recipe, **changes)
    return recipe


def recipe_from_dict(data: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """Build a recipe from plain data, refusing unknown keys and impossible values.

    Raises:
        RecipeError: With the place, what was given and what is accepted.
    """
    _check_keys(data, ("name", *OPERANDS), source)
    missing = [key for key in ("name", *OPERANDS) if key not in data]
    if missing:
        raise RecipeError(f"{source}: missing {', '.join(missing)}")
    if not isinstance(data["name"], str) or not data["name"]:
        raise RecipeError(f"{source}: name is {data['name']!r}; accepted: a text that is not empty")
    operands = {role: _operand_from(data[role], f"{source}: {role}") for role in OPERANDS}
    return Recipe(data["name"], **operands)


def recipe_from_json(text: str, *, source: str = "recipe") -> Recipe:
    """Read a recipe from JSON."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{source} is not JSON: {error}") from None
    return recipe_from_dict(_as_table(data, source), source=source)


def recipe_from_toml(text: str, *, source: str = "recipe") -> Recipe:
    """Read a recipe from TOML."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{source} is not TOML: {error}") from None
    return recipe_from_dict(data, source=source)


def _operand_dict(operand: Operand) -> dict[str, Any]:
    scaling = operand.scaling
    return {"format": operand.format, "scaling": {"kind": scaling.kind, **asdict(scaling)}}


def _operand_from(data: Any, source: str) -> Operand:
    table = _as_table(data, source)
    _check_keys(table, ("format", "scaling"), source)
    scaling = dict(_as_table(table.get("scaling"), f"{source}: scaling"))
    kind = scaling.pop("kind", None)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise RecipeError(f"{source}: scaling kind is {kind!r}; accepted: {', '.join(SCALINGS)}")
    cls = SCALINGS[kind]
    accepted = tuple(f.name for f in fields(cls))
    _check_keys(scaling, accepted, f"{source}: scaling {kind!r}")
    try:
        return Operand(table.get("format", E4M3.name), cls(**scaling))
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None


def _as_table(data: Any, source: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise RecipeError(f"{source} is {data!r}; accepted: a table of keys and values")
    return data


def _check_keys(data: Mapping[str, Any], accepted: tuple[str, ...], source: str) -> None:
    for key in data:
        if key not in accepted:
            names = ", ".join(accepted) or "none (it has no settings)"
            raise RecipeError(f"{source}: unknown key {key!r}; accepted: {names}")


def _parsed(text: str) -> Any:
    """A command line's value: a JSON number or boolean, otherwise the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # also a number of more digits than Python reads
        return text
    return value if isinstance(value, int | float | bool) else text
