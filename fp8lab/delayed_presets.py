"""How other stacks do delayed scaling, by name: a declaration that oracle and kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DelayedPreset:
    """How a stack does delayed scaling.

    Attributes:
        name: The preset's name.
        history: The length that the stack uses by default.
        rule: How a step goes; `fp8lab.emulation.delayed_presets.step_delayed` says it.
        algorithm: Which amax of the history is chosen.
    """

    name: str
    history: int
    rule: Literal["transformer_engine", "torchao", "ms_amp"]
    algorithm: Literal["max", "most_recent"]


DELAYED_PRESETS: dict[str, DelayedPreset] = {
    preset.name: preset
    for preset in (
        DelayedPreset("transformer_engine", 1024, "transformer_engine", "max"),
        DelayedPreset("megatron", 1, "transformer_engine", "most_recent"),
        DelayedPreset("torchao", 16, "torchao", "max"),
        DelayedPreset("ms_amp", 16, "ms_amp", "max"),
    )
}
