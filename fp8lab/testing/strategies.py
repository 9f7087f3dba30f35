"""Hypothesis strategies for what breaks casts and optimizers.

Arrays are made by NumPy from a seed, so that an example of thousands of elements costs a few draws,
and they still shrink: an element depends on the seed and its own position alone, so Hypothesis can
cut an array down to the one element that fails, and drop the kinds of values that do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from fp8lab.formats import Float8Format
from fp8lab.testing.values import CAST_KINDS, cast_values, random_words, wide_floats

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

_LONGEST_SKIP = 1024


def ragged_sizes(block: int) -> st.SearchStrategy[int]:
    """Element counts around the edges of blocks: 0, 1, one to either side of one, two and three
    blocks, and anything up to two blocks.

    Args:
        block: Elements in a block of the kernel, at least 1.
    """
    edges = {0, 1, *(max(0, count * block + off) for count in (1, 2, 3) for off in (-1, 0, 1))}
    return st.one_of(st.integers(0, 2 * block + 1), st.sampled_from(sorted(edges)))


@st.composite
def cast_inputs(
    draw: st.DrawFn,
    fmt: Float8Format,
    *,
    scale: float | None = None,
    dtype: npt.DTypeLike = np.float32,
    sizes: st.SearchStrategy[int] | None = None,
) -> Array:
    """Flat arrays that are hard to cast to a format.

    Each array mixes one to three of the kinds in `CAST_KINDS`: the format's edges (ties between
    neighbouring codes and one ulp to either side, overflow, underflow), special values (zeros,
    infinities, NaN with payloads, extreme magnitudes), ordinary numbers, numbers spread over all
    exponents that matter, subnormals of the input type, and arbitrary bit patterns.

    Args:
        fmt: The format the array will be cast to.
        scale: What the cast multiplies by: the inputs are such that x * scale falls on the edges.
        dtype: float32, float16 or ml_dtypes.bfloat16.
        sizes: How many elements; 0 to 300 by default.
    """
    size = draw(st.integers(0, 300) if sizes is None else sizes)
    skip = draw(st.integers(0, _LONGEST_SKIP))
    kinds = draw(st.lists(st.sampled_from(CAST_KINDS), min_size=1, max_size=3, unique=True))
    words = random_words(draw(st.integers(0, 2**32 - 1)), size, skip=skip)
    return cast_values(words, kinds, fmt, scale=scale, dtype=np.dtype(dtype))


def scales() -> st.SearchStrategy[float]:
    """Scales a cast takes: finite, above zero, each a Python float that float32 holds exactly.

    1, powers of two, numbers just beside them, numbers of all magnitudes, and the extremes of
    float32, subnormals included.
    """
    smallest, largest = 2.0**-149, float(np.finfo(np.float32).max)
    beside = [float(np.nextafter(np.float32(1), np.float32(side))) for side in (0, 2)]
    third = float(np.float32(1) / np.float32(3))
    return st.one_of(
        st.sampled_from([1.0, *beside, third, 2.0**-126, smallest, largest]),
        st.integers(-149, 127).map(lambda exponent: 2.0**exponent),
        st.floats(min_value=2.0**-20, max_value=2.0**20, width=32),
        st.floats(min_value=smallest, max_value=largest, width=32, allow_subnormal=True),
    )


@dataclass(frozen=True, eq=False)
class AdamWCase:
    """The arguments of one AdamW step: four float32 arrays of one shape, and the numbers."""

    param: Float32Array
    grad: Float32Array
    exp_avg: Float32Array
    exp_avg_sq: Float32Array
    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @property
    def tensors(self) -> tuple[Float32Array, Float32Array, Float32Array, Float32Array]:
        """The positional arguments, in order."""
        return self.param, self.grad, self.exp_avg, self.exp_avg_sq

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments."""
        names = ("step", "lr", "betas", "eps", "weight_decay")
        return {name: getattr(self, name) for name in names}


@st.composite
def adamw_states(
    draw: st.DrawFn, *, sizes: st.SearchStrategy[int] | None = None, special: bool = True
) -> AdamWCase:
    """Steps of AdamW, from those of a training run to those at the edges of float32.

    Each tensor is ordinary, spread over all exponents (subnormals and overflows included), or zero;
    exp_avg_sq is never negative. Hyperparameters include 0 where the contract allows it.

    Args:
        sizes: How many elements; 0 to 300 by default.
        special: Whether gradients may hold NaN and infinities.
    """
    size = draw(st.integers(0, 300) if sizes is None else sizes)
    skip = draw(st.integers(0, _LONGEST_SKIP))
    seed = draw(st.integers(0, 2**32 - 1))
    kinds = draw(st.lists(st.sampled_from(_SPREADS), min_size=4, max_size=4))
    tensors = []
    for column, (kind, ordinary) in enumerate(zip(kinds, _ORDINARY_EXPONENTS, strict=True)):
        words = random_words(seed + (column << 32), size, skip=skip)
        low, high = ordinary if kind == "ordinary" else (-149, 127)
        tensor = wide_floats(words[:, 1], low, high)
        tensor[(words[:, 0] % 8 == 0) | (kind == "zero")] = 0
        tensors.append(tensor)
    param, grad, exp_avg, exp_avg_sq = tensors
    if special and draw(st.booleans()):
        for value in (np.nan, np.inf, -np.inf)[:size]:
            grad[draw(st.integers(0, size - 1))] = value
    return AdamWCase(
        param,
        grad,
        exp_avg,
        np.abs(exp_avg_sq),
        step=draw(st.one_of(st.sampled_from([1, 2, 10, 1000]), st.integers(1, 10**6))),
        lr=draw(st.one_of(st.sampled_from([1e-3, 3e-4, 1.0, 1e-40, 0.0]), st.floats(0, 1))),
        betas=draw(
            st.one_of(
                st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.0), (0.99, 0.9999)]),
                st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
            )
        ),
        eps=draw(st.sampled_from([1e-8, 1e-6, 1e-15, 1e-40, 1.0, 0.0])),
        weight_decay=draw(st.one_of(st.sampled_from([0.0, 0.01, 0.1, 1.0]), st.floats(0, 1))),
    )


_SPREADS = ("ordinary", "wide", "zero")
# Powers of two between which a training run's param, grad, exp_avg and exp_avg_sq mostly lie.
_ORDINARY_EXPONENTS = ((-10, 1), (-20, -4), (-22, -6), (-44, -12))
