"""Scaling policies: how an operand's scale is found, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fp8lab.errors import UserError


class RecipeError(UserError, ValueError):
    """A recipe, policy or setting that cannot be; the message says what is accepted."""


CURRENT_PRESETS = ("fp8lab", "transformer_engine", "torchao")
MX_ROUNDINGS = ("floor", "up", "nearest")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(ok: bool, kind: str, key: str, value: Any, accepted: str) -> None:
    if not ok:
        shown = shortened(value) if isinstance(value, str) else value
        raise RecipeError(f"{kind} scaling: {key} is {shown!r}; accepted: {accepted}")


def shortened(text: str) -> str:
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
        preset: Whose rule makes the scale: "fp8lab", "transformer_engine" (the same numbers) or
            "torchao" (divided in float64; an amax of at least 1e-12).
    """

    kind: ClassVar[str] = "current"
    margin: int = 0
    power_of_two: bool = False
    preset: str = "fp8lab"

    def __post_init__(self) -> None:
        _check_margin(self.kind, self.margin)
        _check_bool(self.kind, "power_of_two", self.power_of_two)
        known = self.preset in CURRENT_PRESETS
        _require(known, self.kind, "preset", self.preset, ", ".join(CURRENT_PRESETS))
        if self.margin and self.preset != "fp8lab":
            raise RecipeError(
                f"{self.kind} scaling: margin is {self.margin} with preset {self.preset!r};"
                " accepted: 0 (only fp8lab's own rule has a margin)"
            )


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
class RowScaling:
    """One current scale for each row of the matrix that a product sums along.

    A row of the input is a token, one of the weight an output feature; an operand that enters two
    products is cast twice from high precision, once along each dimension.

    Attributes:
        power_of_two: Round scales down to powers of two.
    """

    kind: ClassVar[str] = "row"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        _check_bool(self.kind, "power_of_two", self.power_of_two)


@dataclass(frozen=True)
class BlockScaling:
    """One current scale for each run of elements along the dimension that a product sums over.

    An operand that enters two products is cast twice from high precision, once along each
    dimension; square blocks hold the same elements either way, and so give the same codes.

    Attributes:
        length: Elements a block: blocks are 1 x length. The FP8 products take 128.
        power_of_two: Round scales down to powers of two.
        square: Blocks are length x length, as for weights.
    """

    kind: ClassVar[str] = "block"
    length: int = 128
    power_of_two: bool = True
    square: bool = False

    def __post_init__(self) -> None:
        ok = _is_integer(self.length) and 1 <= self.length <= 65536
        _require(ok, self.kind, "length", self.length, "an integer, 1 to 65536")
        _check_bool(self.kind, "power_of_two", self.power_of_two)
        _check_bool(self.kind, "square", self.square)


@dataclass(frozen=True)
class MxScaling:
    """Microscaling: one E8M0 scale for each 32 elements along the dimension that is summed over.

    Attributes:
        rounding: Of the scale: "floor" (the OCP standard), "up" (TransformerEngine) or "nearest".
    """

    kind: ClassVar[str] = "mx"
    rounding: str = "up"

    def __post_init__(self) -> None:
        known = self.rounding in MX_ROUNDINGS
        _require(known, self.kind, "rounding", self.rounding, ", ".join(MX_ROUNDINGS))


Scaling = (
    NoScaling
    | StaticScaling
    | CurrentScaling
    | DelayedScaling
    | RowScaling
    | BlockScaling
    | MxScaling
)
SCALINGS: dict[str, type[Scaling]] = {
    cls.kind: cls
    for cls in (
        NoScaling,
        StaticScaling,
        CurrentScaling,
        DelayedScaling,
        RowScaling,
        BlockScaling,
        MxScaling,
    )
}
