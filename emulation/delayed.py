"""Delayed scaling: the scale of a step comes from the amaxes of the steps before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.amax import amax as amax_of
from fp8lab.emulation.amax import magnitudes, merge_amax
from fp8lab.emulation.casting import quantize
from fp8lab.emulation.integers import as_integer
from fp8lab.emulation.scale_rules import inverse_scale, scale_from_amax
from fp8lab.emulation.tiling import Float32Array
from fp8lab.formats import Float8Format, OverflowPolicy

Array = npt.NDArray[Any]
# From the history, shape (L, ...), to the amax that the next scale is made for, shape (...).
AmaxAlgorithm = Callable[[Float32Array], Float32Array]

ALGORITHMS = ("max", "most_recent")


@dataclass(frozen=True)
class DelayedScalingState:
    """What delayed scaling must remember, for one tensor or for many at once.

    The inverse scale is no state: it is derived, so that it is right at once after a state is
    loaded. What was quantised keeps the inverse scale it was quantised with.

    Attributes:
        scale: float32, shape (...): the scale that the next cast uses.
        amax_history: float32, shape (L, ...). Slot 0 collects the present step's amax; the slots
            from 1 on hold older ones, the oldest at 1.

    Raises:
        TypeError: Arrays that are not float32.
        ValueError: A history of no slots, or shapes that do not fit each other.
    """

    scale: Float32Array
    amax_history: Float32Array

    def __post_init__(self) -> None:
        for name, array in (("scale", self.scale), ("amax_history", self.amax_history)):
            dtype = getattr(array, "dtype", type(array).__name__)
            if dtype != np.float32:
                raise TypeError(f"{name} is {dtype}; accepted: float32 arrays")
        scale, history = np.shape(self.scale), np.shape(self.amax_history)
        if len(history) != len(scale) + 1 or history[1:] != scale or history[0] < 1:
            raise ValueError(
                f"amax_history has shape {history} and scale {scale}; accepted: (L, ...) and (...),"
                " L at least 1"
            )

    @classmethod
    def fresh(cls, history: int, shape: tuple[int, ...] = ()) -> DelayedScalingState:
        """Scale 1 and a history of zeros, as TransformerEngine starts.

        Args:
            history: L, how many steps the history holds.
            shape: () for one tensor, (n,) for n of them, ...
        """
        slots = check_history(history)
        return cls(np.ones(shape, np.float32), np.zeros((slots, *shape), np.float32))

    @property
    def inverse_scale(self) -> Float32Array:
        """What dequantises the codes of a cast that uses the present scale."""
        return inverse_scale(self.scale)

    def to_arrays(self) -> dict[str, Float32Array]:
        """Copies of the two arrays by name: what a checkpoint keeps. Later steps leave them alone.

        >>> sorted(DelayedScalingState.fresh(2).to_arrays())
        ['amax_history', 'scale']
        """
        return {
            "scale": np.array(self.scale, dtype=np.float32),
            "amax_history": np.array(self.amax_history, dtype=np.float32),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.ArrayLike]) -> DelayedScalingState:
        """The state of those arrays, copied and checked.

        Raises:
            TypeError: An array that is not float32.
            ValueError: A name missing or unknown, shapes that do not fit, a scale that is not
                finite and above zero, or a negative amax.
        """
        if set(arrays) != {"scale", "amax_history"}:
            raise ValueError(f"arrays are {sorted(arrays)}; accepted: amax_history, scale")
        state = cls(np.array(arrays["scale"]), np.array(arrays["amax_history"]))
        if not (np.isfinite(state.scale) & (state.scale > 0)).all():
            raise ValueError("scale holds values that are not finite and above zero")
        return cls(state.scale, magnitudes("amax_history", state.amax_history))


def record_amax(state: DelayedScalingState, amax: npt.ArrayLike) -> DelayedScalingState:
    """Merge a cast's amax into slot 0: the larger magnitude bit pattern stays (NaN is never lost).

    Args:
        state: The state before the cast.
        amax: Not negative, of the shape of state.scale; float64 is rounded to float32.

    Returns:
        A new state; the given one is not changed.

    Raises:
        TypeError: Not numbers. ValueError: A negative amax, or one of another shape.

    >>> record_amax(record_amax(DelayedScalingState.fresh(2), 3.0), 1.0).amax_history.tolist()
    [3.0, 0.0]
    """
    seen = _fitting("amax", amax, state)
    history = state.amax_history.copy()
    history[0] = merge_amax(history[0], seen)
    return DelayedScalingState(state.scale, history)


def quantize_delayed(
    state: DelayedScalingState,
    x: npt.ArrayLike,
    fmt: Float8Format,
    *,
    overflow: str | OverflowPolicy = "saturate",
) -> tuple[Array, Float32Array, DelayedScalingState]:
    """One cast of delayed scaling: by the scale of before, noting the amax of now.

    Order: codes = `quantize`(x, scale=state.scale); inverse_scale = 1 / state.scale to nearest even
    in float32; x's `amax` is merged into slot 0 by `record_amax`.

    Args:
        state: Of one tensor (its scale is 0-d).
        x: float64, float32, float16 or bfloat16, of any shape.
        fmt: The target format.
        overflow: As for `quantize`.

    Returns:
        Codes of x's shape, their inverse scale (0-d float32; it belongs to these codes, whatever
        becomes of the state), and the new state.

    Raises:
        TypeError: x or fmt of a type that is not accepted. ValueError: A state of many tensors, a
            scale that is not finite and above zero, or an unknown policy.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> codes, inverse, state = quantize_delayed(DelayedScalingState.fresh(2), np.ones(3), E4M3)
    >>> float(inverse), state.amax_history.tolist()
    (1.0, [1.0, 0.0])
    """
    if np.shape(state.scale) != ():
        raise ValueError(f"the state has scales of shape {np.shape(state.scale)}; accepted: one")
    codes = quantize(x, fmt, scale=state.scale, overflow=overflow)
    return codes, state.inverse_scale, record_amax(state, amax_of(x))


def update_delayed(
    state: DelayedScalingState,
    fmt: Float8Format,
    *,
    margin: int = 0,
    algorithm: str | AmaxAlgorithm = "max",
    power_of_two: bool = False,
    group_amax: npt.ArrayLike | None = None,
) -> DelayedScalingState:
    """Advance delayed scaling by one step, as TransformerEngine does.

    The last amax is slot 0 (or `group_amax`, the maximum of slot 0 over a group of ranks, which is
    put into slot 0 first). Where it is 0, nothing changes: a layer that did not run, or whose
    weight came from a cache, keeps its state. Elsewhere the amax is chosen ("max": the largest bit
    pattern of all L slots; "most_recent": slot 0; or your function of the history), the scale
    follows by `scale_from_amax` with the present scale as `previous`, and the history rolls: slot
    i + 1 moves to i, slot 0 to the end, and slot 0 becomes 0. So the amax of step t is used from
    step t + 1 on, and the oldest is dropped. An Inf or NaN keeps the scale as it is for as long as
    it is chosen: L steps with "max", one with "most_recent".

    Args:
        state: Of one tensor or of many; all advance together.
        fmt: The target format.
        margin: Unused headroom in powers of two, an integer, 0 or more.
        algorithm: "max", "most_recent", or a function from the (L, ...) history, slot 0 included,
            to the (...) amax.
        power_of_two: Keep sign and exponent of the scale only.
        group_amax: What `merge_amax` gives over the slots 0 of all ranks. It takes the place of
            slot 0 as it is, also where it is smaller: the group's word is the last one, so that
            all ranks go on with one state.

    Returns:
        A new state; the given one is not changed.

    Raises:
        TypeError: fmt is not a format of values.
        ValueError: An unknown algorithm, one whose result has another shape, a negative margin, or
            a group_amax that is negative or of another shape.

    Source: TransformerEngine `delayed_scaling.cu`, but that it drops a NaN (fmaxf), which we keep.

    >>> from fp8lab.formats import E4M3
    >>> state = record_amax(DelayedScalingState.fresh(2), 3.5)
    >>> state = update_delayed(state, E4M3)
    >>> float(state.scale), state.amax_history.tolist()
    (128.0, [0.0, 3.5])
    """
    before = state.amax_history
    last = before[0] if group_amax is None else _fitting("group_amax", group_amax, state)
    chosen = _chosen_amax(before, last, algorithm)
    if chosen.shape != np.shape(state.scale):
        raise ValueError(
            f"the algorithm gave shape {chosen.shape}; accepted: {np.shape(state.scale)}"
        )
    scale = scale_from_amax(
        chosen, fmt, margin=margin, power_of_two=power_of_two, previous=state.scale
    )
    history = np.empty_like(before)
    history[1:-1] = before[2:]
    history[-1] = last
    history[0] = 0
    idle = np.asarray(last == 0)
    if idle.any():
        history[:, idle] = before[:, idle]
    return DelayedScalingState(np.where(idle, state.scale, scale).astype(np.float32), history)


def resize_history(state: DelayedScalingState, history: int) -> DelayedScalingState:
    """The same state with a longer or shorter history, in the layout of `update_delayed`.

    Slot 0 stays. A shorter history keeps the newest of the older slots, which are the last ones (a
    slice `[:history]` would keep the oldest); a longer one gets zeros as the oldest.

    Raises:
        ValueError: A history below 1.

    >>> import numpy as np
    >>> state = DelayedScalingState(np.float32(1).reshape(()), np.float32([0, 5, 6, 7]))
    >>> resize_history(state, 3).amax_history.tolist()
    [0.0, 6.0, 7.0]
    """
    history = check_history(history)
    before = state.amax_history
    resized = np.zeros((history, *before.shape[1:]), np.float32)
    resized[0] = before[0]
    kept = min(history, before.shape[0]) - 1
    if kept:
        resized[-kept:] = before[-kept:]
    return DelayedScalingState(state.scale, resized)


def check_history(history: int) -> int:
    """A length as a Python integer; refuses what is not an integer of at least 1."""
    slots = as_integer(history)
    if slots is None or slots < 1:
        raise ValueError(f"history is {history}; accepted: an integer, 1 and up")
    return slots


def _chosen_amax(
    before: Float32Array, last: Float32Array, algorithm: str | AmaxAlgorithm
) -> Float32Array:
    if callable(algorithm):
        history = before.copy()
        history[0] = last
        return np.asarray(algorithm(history), dtype=np.float32)
    if algorithm == "max":
        # Never negative, so bit patterns are in the order of magnitudes, NaN above all.
        older = before[1:].view(np.uint32).max(axis=0, initial=0)
        return np.asarray(np.maximum(older, last.view(np.uint32))).view(np.float32)
    if algorithm == "most_recent":
        return np.asarray(last)
    raise ValueError(
        f"unknown algorithm {algorithm!r}; accepted: {', '.join(ALGORITHMS)}, or a function of the"
        " history"
    )


def _fitting(name: str, amax: npt.ArrayLike, state: DelayedScalingState) -> Float32Array:
    found = magnitudes(name, amax)
    shape = np.shape(state.scale)
    if np.broadcast_shapes(found.shape, shape) != shape:
        raise ValueError(f"{name} has shape {found.shape}; the state has scales of shape {shape}")
    return np.broadcast_to(found, shape)
