"""Matrix products, bit for bit as a tensor core and cuBLASLt's epilogues give them.

    a is (M, K), b is (K, N); the result is (M, N)

The core's arithmetic is data (`fp8lab.emulation.tensorcore`); the sum over K comes in a fast form
(`fp8lab.emulation.accumulation`) and a slow one (`fp8lab.emulation.dot`). Here is what lies around
it: scales, bias, the output type; checks are in `fp8lab.emulation.matmul_arguments`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.accumulation import accumulate
from fp8lab.emulation.matmul_arguments import (
    BFLOAT16,
    Product,
    checked,
    checked_indices,
    checked_shape,
)
from fp8lab.emulation.tensorcore import (
    ADA_FP8,
    BLACKWELL_FP8,
    HOPPER_BF16,
    HOPPER_F16,
    HOPPER_FP8,
    HOPPER_FP8_F16,
    HOPPER_FP8_VIA_F16,
    IEEE_FLOAT32,
    TENSOR_CORES,
    Lowering,
    TensorCore,
    lowering,
)

__all__ = [
    "ADA_FP8",
    "BLACKWELL_FP8",
    "HOPPER_BF16",
    "HOPPER_F16",
    "HOPPER_FP8",
    "HOPPER_FP8_F16",
    "HOPPER_FP8_VIA_F16",
    "IEEE_FLOAT32",
    "TENSOR_CORES",
    "Lowering",
    "TensorCore",
    "lowering",
    "matmul",
    "matmul_at",
    "matmul_picked",
]

Array = npt.NDArray[Any]

_NAN = np.array(0x7FFFFFFF, dtype=np.uint32).view(np.float32)
_NAN_BFLOAT16 = np.array(0x7FFF, dtype=np.uint16).view(BFLOAT16)


def matmul(
    a: Array,
    b: Array,
    *,
    core: TensorCore = HOPPER_FP8,
    accumulator: npt.ArrayLike | None = None,
    promote_every: int | None = None,
    inverse_scale_a: npt.ArrayLike | None = None,
    inverse_scale_b: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    out_dtype: npt.DTypeLike = np.float32,
    threads: int = 1,
) -> Array:
    """The product of two matrices of codes, as the card gives it.

    Order. Without promotion, one chain of the core's steps over all of K, started from the
    accumulator (or zero). With `promote_every` = P, a chain from zero for each P of k; each partial
    is added to a float32 total, rounded to nearest even, which starts from the accumulator. Then,
    in float32, each operation rounded to nearest even:

    - scales of one element each: result * (scale_a * scale_b);
    - scales of one a row and one a column: (result * scale_b) * scale_a;
    - scales of blocks along K: inside the sum, total = fma(partial, scale_a * scale_b, total) where
      128 rows of a or 128 columns of b share a scale, else fma(partial * scale_a, scale_b, total);
    - result + bias;
    - the cast to `out_dtype`.

    Args:
        a: (M, K), of a dtype that the core takes (ml_dtypes' types for FP8 and bfloat16).
        b: (K, N), likewise; the two may differ.
        core: The arithmetic of a step.
        accumulator: (M, N) in the core's accumulator type (a float32 array of float16 values will
            do for float16). What the chain, or the total, starts from.
        promote_every: A multiple of the core's block of k. None is one chain; with scales of blocks
            it is the length of a block.
        inverse_scale_a: One value, (M, 1), or a value a block of K: (M, K/128), (M, K/32), or
            (M/128, K/128), rounded up. float32, or E8M0 codes.
        inverse_scale_b: One value, (1, N), or (K/128, N), (K/32, N), or (K/128, N/128), rounded up.
        bias: float32 or bfloat16, (N,), or (M, N): a gradient that the product is added to.
        out_dtype: float32 or bfloat16.
        threads: How many threads work; each element's bits are the same for any number.

    Returns:
        (M, N) of `out_dtype`. Any NaN operand, Inf times 0, or Inf minus Inf gives NaN (0x7FFFFFFF,
        in bfloat16 0x7FFF); other infinities follow IEEE 754. A sum that is zero is +0, whatever
        the signs of its terms. With K = 0 there is no step: the accumulator stays, or zeros. K
        that is not a multiple of a step is padded with zeros, which changes no bit.

    Raises:
        TypeError: Operands of a dtype that the core does not take, or another `out_dtype`.
        ValueError: Shapes that do not fit, or a `promote_every` that is not a multiple of the
            core's block of k or differs from the length of the scales' blocks.

    Source: measured on an H200 (wgmma, and cuBLASLt through torch._scaled_mm).

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> a = np.array([[448, 1]], np.float32).astype(E4M3.dtype)
    >>> b = np.array([[448], [0.875]], np.float32).astype(E4M3.dtype)
    >>> matmul(a, b).item()  # 200704 + 0.875, cut to 14 bits
    200704.0
    """
    given = checked(
        a,
        b,
        core=core,
        accumulator=accumulator,
        promote_every=promote_every,
        inverse_scale_a=inverse_scale_a,
        inverse_scale_b=inverse_scale_b,
        bias=bias,
        out_dtype=out_dtype,
        threads=threads,
    )
    return _product(given)


def matmul_at(
    a: Array, b: Array, rows: npt.ArrayLike, columns: npt.ArrayLike, **options: Any
) -> Array:
    """Some elements of `matmul(a, b, ...)`: those where the chosen rows and columns cross.

    Each element depends on its row of A and its column of B alone, so a product too large to
    compute is checked by a sample.

    Args:
        a, b: As for `matmul`.
        rows, columns: Indices, from 0.
        options: The keyword arguments of `matmul`, of the whole product's shapes.

    Returns:
        (len(rows), len(columns)).

    Raises:
        TypeError, ValueError: As for `matmul`; an option that it does not have; or indices that are
            no integers or not there.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> a = np.eye(300, dtype=np.float32).astype(E4M3.dtype)
    >>> matmul_at(a, a, [7, 299], [299]).tolist()
    [[0.0], [1.0]]
    """
    whole = checked(a, b, **_known(options))
    rows = checked_indices("rows", rows, a.shape[0])
    columns = checked_indices("columns", columns, b.shape[1])
    part = np.ix_(rows, columns)
    bias = whole.bias
    if bias is not None:
        bias = bias[columns] if bias.ndim == 1 else bias[part]
    return _product(
        replace(
            whole,
            a=a[rows],
            b=b[:, columns],
            start=whole.start[part],
            factors=whole.factors.at(rows, columns),
            bias=bias,
        )
    )


def matmul_picked(
    a: Array,
    b: Array,
    rows: npt.ArrayLike,
    columns: npt.ArrayLike,
    shape: tuple[int, int],
    **options: Any,
) -> Array:
    """`matmul_at` where nothing but the chosen rows and columns is at hand.

    Args:
        a, b: (len(rows), K) and (K, len(columns)): the chosen rows of A and columns of B.
        rows, columns: Which they are of the whole, from 0.
        shape: (M, N) of the whole product.
        options: The keyword arguments of `matmul`. Inverse scales are the whole product's, since
            their shapes tell what they are for; accumulator and bias are those of the result.

    Returns:
        (len(rows), len(columns)).

    Raises:
        TypeError, ValueError: As for `matmul_at`; a shape that is no pair of integers; or operands
            that do not have as many rows and columns as were chosen.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> a = np.eye(300, dtype=np.float32).astype(E4M3.dtype)
    >>> scale = np.arange(300)[:, None]  # one a row
    >>> matmul_picked(a[[7]], a[:, [7]], [7], [7], (300, 300), inverse_scale_a=scale).tolist()
    [[7.0]]
    """
    whole = checked_shape(shape)
    given = checked(a, b, whole, **_known(options))
    rows = checked_indices("rows", rows, whole[0])
    columns = checked_indices("columns", columns, whole[1])
    if (a.shape[0], b.shape[1]) != (len(rows), len(columns)):
        raise ValueError(
            f"a has {a.shape[0]} rows and b {b.shape[1]} columns; accepted: the {len(rows)} and"
            f" {len(columns)} that were chosen"
        )
    return _product(replace(given, factors=given.factors.at(rows, columns)))


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Options, all of which `matmul` has."""
    accepted = matmul.__kwdefaults__ or {}
    for name in options:
        if name not in accepted:
            raise TypeError(f"unknown option {name!r}; accepted: {', '.join(accepted)}")
    return options


def _product(given: Product) -> Array:
    with np.errstate(all="ignore"):
        total = accumulate(
            given.a,
            given.b,
            given.core,
            start=given.start,
            promote=given.promote,
            factors=given.factors,
            threads=given.threads,
        )
        if given.factors.given and given.factors.block_k is None:
            total = given.factors.applied(total)
        if given.bias is not None:
            total = total + given.bias
        nan = np.isnan(total)
        if given.out_dtype == BFLOAT16:
            return np.where(nan, _NAN_BFLOAT16, total.astype(BFLOAT16))
        return np.where(nan, _NAN, total)
