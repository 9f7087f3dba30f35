"""Reading a contract's settings, as objects or as the JSON values that a saved case keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8lab.emulation.tensorcore import HOPPER_FP8, TENSOR_CORES, TensorCore
from fp8lab.formats import E4M3, Float8Format, OverflowPolicy, format_named, overflow_policy
from fp8lab.optimizer_formats import PLAIN, AdamOrder, order_named
from fp8lab.testing.faults.hypothesis import Settings


def format_of(settings: Settings, name: str = "fmt") -> Float8Format:
    """The format that a setting names, that which is cast to; E4M3 where none is said."""
    fmt = settings.get(name, E4M3)
    return fmt if isinstance(fmt, Float8Format) else format_named(str(fmt))


def policy_of(settings: Settings, name: str = "fmt") -> OverflowPolicy:
    """What becomes of overflow, Inf and NaN in the format of that setting."""
    given: Any = settings.get("overflow", "saturate")
    if isinstance(given, Mapping):
        return OverflowPolicy(**given)
    return overflow_policy(given, format_of(settings, name))


def core_of(settings: Settings) -> TensorCore:
    """The arithmetic of a matrix product."""
    core = settings.get("core", HOPPER_FP8)
    return core if isinstance(core, TensorCore) else TENSOR_CORES[str(core)]


def order_of(settings: Settings) -> AdamOrder:
    """The order of operations of an AdamW step."""
    given: Any = settings.get("order", PLAIN)
    return AdamOrder(**given) if isinstance(given, Mapping) else order_named(given)


def block_of(settings: Settings, default: tuple[int | None, int | None]) -> Any:
    """(rows, columns) of a block; None spans a dimension."""
    given: Any = settings.get("block", default)
    return tuple(given)


def integer(settings: Settings, name: str, default: int = 0) -> int:
    """A setting that is an integer."""
    given: Any = settings.get(name, default)
    return int(given)
