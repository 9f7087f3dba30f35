"""The resume check: one step on a fixed batch, compared in bits with what the saver's gave.

The state is compared with the checkpoint when it is read back; this finds what the state does not
hold: another build or card, a setting of the process, a cache. The saver takes the step right after
it has copied its state, and puts the state back; whoever resumes does the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fp8lab.checkpoint import CheckpointError
from fp8lab.checkpoint_tree import Tree, bytes_of, same_leaf
from fp8lab.linear import operand_casts
from fp8lab.state import TrainingState
from fp8lab.training import TrainingRun


def trial(run: TrainingRun, state: TrainingState, before: Mapping[str, Tree]) -> dict[str, Any]:
    """What a step on the fixed batch gives; afterwards the run is as it was.

    Args:
        run: The run.
        state: Its state.
        before: A copy of what the state is now.

    Returns:
        `amax` of every cast by name, `loss`, `grad_norm`, and `parameters` and `buffers`: of each,
        by name, the SHA-256 of its bits after the step, shortened to 16 digits. The buffers are the
        model's (scales and amax histories: a step alone uses no history) and the loss scaler's.
    """
    casts = dict(operand_casts(run.model))
    for cast in casts.values():
        cast.observe = True
    loss = run.gradients(run.fixed_batch())
    summary = run.update()
    record = {
        "amax": {name: c.statistics.amax for name, c in casts.items() if c.statistics is not None},
        "loss": loss.item(),
        "grad_norm": summary.norm.item(),
        "parameters": _digests(run.model.named_parameters()),
        "buffers": {
            **_digests(run.model.named_buffers()),
            **_digests(run.update.scaler.named_buffers(prefix="scaler")),
        },
    }
    for cast in casts.values():
        cast.observe = False
    run.update.zero_grad()
    state.restore(before, read_back=False)
    return record


def _digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {
        name: hashlib.sha256(bytes_of(tensor).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in tensors
    }


def compare_trials(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, source: str, buffers: bool = True
) -> None:
    """Refuse to go on where a trial does not give the saver's bits.

    Args:
        saved, now: What `trial` gave; with `environment`, plain values.
        source: What the message begins with: the checkpoint.
        buffers: Whether the saver recorded them; those of format version 1 did not.

    Raises:
        CheckpointError: With the first difference in the order in which a step computes.
    """
    try:
        theirs = dict(_in_order(saved, buffers=buffers))
        before = dict(saved["environment"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source} is damaged: what it recorded for the resume check is not whole"
            f" ({type(error).__name__}: {error})"
        ) from None
    for what, value in _in_order(now, buffers=buffers):
        if what not in theirs or not same_leaf(theirs[what], value):
            raise CheckpointError(
                f"{source}: the resume check failed: a step on the fixed batch gives {what}"
                f" {value!r}, the saver's gave {theirs.get(what)!r}; the state itself is what was"
                f" saved, so something else is not: {_unlike(before, now)}"
            )


def _in_order(record: Mapping[str, Any], *, buffers: bool) -> Iterator[tuple[str, Any]]:
    backward = {name for name in record["amax"] if name.endswith("grad_output")}
    for name, amax in record["amax"].items():
        if name not in backward:
            yield f"the amax of {name}", amax
    yield "the loss", record["loss"]
    for name in sorted(backward):
        yield f"the amax of {name}", record["amax"][name]
    yield "the gradient norm", record["grad_norm"]
    for name, bits in record["parameters"].items():
        yield f"the updated parameter {name}", bits
    for name, bits in record["buffers"].items() if buffers else ():
        yield f"the updated {name}", bits


def comparable(environment: Mapping[str, Any]) -> dict[str, str]:
    """Of what `fp8lab.records.environment` says, what may change a step's bits."""
    packages = environment["packages"]
    names = ("fp8lab", "numpy", "torch", "triton")
    versions = {name: str(packages[name]) for name in names}
    return {**versions, **{key: str(environment[key]) for key in ("device", "processor", "git")}}


def _unlike(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In which versions and machines the two differ."""
    shown = [
        f"{key} was {before.get(key)}, is {value}"
        for key, value in now["environment"].items()
        if before.get(key) != value
    ]
    return ", ".join(shown) or "versions, processor and device are the same"
