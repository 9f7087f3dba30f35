"""Hypotheses of delayed scaling: which amax is chosen, what becomes of the history."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.delayed import DelayedScalingState, update_delayed
from fp8lab.testing.faults.hypothesis import Arrays, Hypothesis, Settings, float32
from fp8lab.testing.faults.scales import rule_faults, rule_of

Array = npt.NDArray[Any]
_ONE = np.float32(1)


def of_scale_update(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_scale_update`."""
    algorithm = str(settings.get("algorithm", "max"))
    state = DelayedScalingState(float32(inputs["scale"]), float32(inputs["amax_history"]))
    rule = replace(rule_of(settings), previous=state.scale)
    right = update_delayed(
        state,
        rule.fmt,
        margin=rule.margin,
        algorithm=algorithm,
        power_of_two=rule.power_of_two,
    )
    before, idle = state.amax_history, np.asarray(state.amax_history[0] == 0)

    def scaled(fault: str, scale: Array) -> Hypothesis:
        scale = float32(np.where(idle, state.scale, scale))
        return fault, {"scale": scale, "amax_history": right.amax_history}

    yield "state-not-updated", {"scale": state.scale, "amax_history": before}
    for fault, history in _histories(before, right.amax_history, idle):
        yield fault, {"scale": right.scale, "amax_history": history}
    for fault, chosen in _choices_of_amax(before, algorithm):
        yield scaled(fault, rule(chosen))
    used = _chosen(before, algorithm)
    moved = _rolled(before)
    for scale in (rule(used), right.scale, np.where(idle, _ONE, right.scale)):
        for history in (moved, right.amax_history):
            outputs = {"scale": float32(scale), "amax_history": history}
            yield "idle-step-changes-state", outputs
    for fault, scale in rule_faults(rule, used):
        yield scaled(fault, scale)
        if fault == "zero-amax-scale":
            yield "idle-step-changes-state", {"scale": scale, "amax_history": right.amax_history}
            yield "idle-step-changes-state", {"scale": scale, "amax_history": moved}


def _chosen(history: Array, algorithm: str) -> Array:
    if algorithm == "most_recent":
        return np.asarray(history[0])
    words = np.ascontiguousarray(history).view(np.uint32)
    return np.asarray(words.max(axis=0, initial=0)).view(np.float32)


def _rolled(history: Array) -> Array:
    after = np.roll(history, -1, axis=0)
    after[0] = 0
    return after


def _histories(before: Array, right: Array, idle: Array) -> Iterator[tuple[str, Array]]:
    """Wrong histories beside the right scale."""

    def at(slot: int, value: Array) -> Array:
        history = right.copy()
        history[slot] = np.where(idle, before[slot], value)
        return history

    def where_active(history: Array) -> Array:
        return np.where(idle, before, history)

    yield "slot-not-cleared", at(0, before[0])
    yield "slot-not-cleared", at(0, before[min(1, len(before) - 1)])
    cleared = before.copy()
    cleared[0] = 0
    yield "history-not-rolled", cleared
    yield "history-not-rolled", before
    backward = np.roll(before, 1, axis=0)
    yield "history-rolled-backward", where_active(backward)
    backward[0] = 0
    yield "history-rolled-backward", where_active(backward)
    yield "newest-amax-dropped", where_active(np.roll(cleared, -1, axis=0))
    yield "newest-amax-dropped", at(-1, before[-1])
    yield "newest-amax-dropped", at(-1, np.zeros_like(before[-1]))
    shifted = right.copy()
    shifted[:-1] = before[1:]
    yield "newest-amax-dropped", where_active(shifted)


def _choices_of_amax(before: Array, algorithm: str) -> Iterator[tuple[str, Array]]:
    """Wrong choices of the amax that the next scale is made for."""
    older = before[1:]
    if algorithm == "most_recent":
        for slot in (before[-1], before[min(1, len(before) - 1)]):
            yield "wrong-slot", slot
        yield "wrong-amax-algorithm", _chosen(before, "max")
        return
    yield "nan-lost", np.where(np.isnan(before), np.float32(0), before).max(axis=0)
    finite = np.where(np.isfinite(before), before, np.float32(0))
    yield "nonfinite-amax-skipped", finite.max(axis=0)
    yield "newest-amax-left-out", _chosen(older, "max")
    yield "oldest-amax-left-out", _chosen(np.delete(before, min(1, len(older)), axis=0), "max")
    yield "oldest-amax-left-out", _chosen(before[:-1], "max")
    yield "wrong-amax-algorithm", before[0]
    yield "wrong-amax-algorithm", before.mean(axis=0)
