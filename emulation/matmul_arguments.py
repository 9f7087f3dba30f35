"""The arguments of a matrix product, checked: each refusal says what was given and accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.integers import as_integer
from fp8lab.emulation.matmul_scales import Factors, factors_from
from fp8lab.emulation.tensorcore import HOPPER_FP8, TENSOR_CORES, TensorCore

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Product:
    """The arguments of a product, checked; see `fp8lab.emulation.matmul.matmul`."""

    a: Array
    b: Array
    core: TensorCore
    start: Float32Array
    promote: int | None
    factors: Factors
    bias: Float32Array | None
    out_dtype: np.dtype[Any]
    threads: int


def checked(
    a: Array,
    b: Array,
    whole: tuple[int, int] | None = None,
    /,
    *,
    core: TensorCore = HOPPER_FP8,
    accumulator: npt.ArrayLike | None = None,
    promote_every: int | None = None,
    inverse_scale_a: npt.ArrayLike | None = None,
    inverse_scale_b: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    out_dtype: npt.DTypeLike = np.float32,
    threads: int = 1,
) -> Product:
    """The arguments of `matmul`; inverse scales are those of the whole (M, N), if that is given."""
    _check_operands(a, b, core)
    (m, k), n = a.shape, b.shape[1]
    out = np.dtype(out_dtype)
    if out not in (_FLOAT32, BFLOAT16):
        raise TypeError(f"out_dtype is {out}; accepted: float32, bfloat16")
    if threads < 1:
        raise ValueError(f"threads is {threads}; accepted: 1 and up")
    rows, columns = (m, n) if whole is None else whole
    factors = factors_from(inverse_scale_a, inverse_scale_b, rows, k, columns)
    return Product(
        a,
        b,
        core,
        _checked_accumulator(accumulator, core, (m, n)),
        _checked_promotion(promote_every, factors, core, k),
        factors,
        _checked_bias(bias, m, n),
        out,
        threads,
    )


def checked_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(M, N) of a product, as Python's integers."""
    try:
        sizes = [as_integer(size) for size in shape]
    except TypeError:
        sizes = []
    known = [size for size in sizes if size is not None and size >= 0]
    if len(known) != 2 or len(sizes) != 2:
        raise ValueError(f"shape is {shape!r}; accepted: two integers, (M, N), each 0 or more")
    return known[0], known[1]


def checked_indices(name: str, indices: npt.ArrayLike, size: int) -> Array:
    """Indices of some rows or columns, of `size` that there are."""
    given = np.asarray(indices)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TypeError(
            f"{name} is {given.dtype} of shape {given.shape}; accepted: a list of integers"
        )
    if given.size and not (given.min() >= 0 and given.max() < size):
        raise ValueError(
            f"{name} goes from {given.min()} to {given.max()}; accepted: from 0 to {size - 1}"
        )
    return given.astype(np.intp)


def _check_operands(a: Array, b: Array, core: TensorCore) -> None:
    if not isinstance(core, TensorCore):
        accepted = ", ".join(TENSOR_CORES)
        raise TypeError(f"core is {core!r}; accepted: a TensorCore (TENSOR_CORES has: {accepted})")
    for name, matrix in (("a", a), ("b", b)):
        if not isinstance(matrix, np.ndarray) or matrix.dtype.name not in core.operands:
            kind = matrix.dtype if isinstance(matrix, np.ndarray) else type(matrix).__name__
            raise TypeError(
                f"{name} is of {kind}; {core.name} takes: {', '.join(core.operands)}"
                " (view raw bytes as fmt.dtype)"
            )
        if matrix.ndim != 2:
            raise ValueError(f"{name} has shape {matrix.shape}; accepted: two dimensions")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a has shape {a.shape} and b {b.shape}; accepted: (M, K) and (K, N) of one K"
        )


def _checked_accumulator(
    accumulator: npt.ArrayLike | None, core: TensorCore, shape: tuple[int, int]
) -> Float32Array:
    if accumulator is None:
        return np.zeros(shape, dtype=np.float32)
    given = np.asarray(accumulator)
    if given.dtype not in (_FLOAT32, np.dtype(core.accumulator)):
        raise TypeError(f"accumulator has dtype {given.dtype}; accepted: {core.accumulator}")
    if given.shape != shape:
        raise ValueError(f"accumulator has shape {given.shape}; accepted: {shape}")
    with np.errstate(invalid="ignore", over="ignore"):
        start = given.astype(np.float32)
        if core.accumulator == "float16" and not np.array_equal(
            start.astype(np.float16).astype(np.float32), start, equal_nan=True
        ):
            raise ValueError("accumulator holds values that float16 does not")
    return start


def _checked_promotion(
    promote_every: int | None, factors: Factors, core: TensorCore, k: int
) -> int | None:
    given = factors.block_k if promote_every is None else promote_every
    if given is None:
        return None
    promote = as_integer(given)
    # With K = 0 no shape tells how long blocks are, of which there are none.
    if k and factors.block_k not in (None, promote):
        raise ValueError(
            f"promote_every is {given!r}, but the scales have blocks of {factors.block_k} along"
            " K; accepted: that number, or None"
        )
    if promote is None or promote < 1 or promote % core.block_k:
        raise ValueError(
            f"promote_every is {given!r}; accepted: a multiple of {core.block_k}, the block of k"
            f" of {core.name}"
        )
    return promote


def _checked_bias(bias: npt.ArrayLike | None, m: int, n: int) -> Float32Array | None:
    if bias is None:
        return None
    given = np.asarray(bias)
    if given.dtype not in (_FLOAT32, BFLOAT16):
        raise TypeError(f"bias has dtype {given.dtype}; accepted: float32, bfloat16")
    if given.shape not in ((n,), (m, n)):
        raise ValueError(f"bias has shape {given.shape}; accepted: {(n,)} or {(m, n)}")
    return given.astype(np.float32)
