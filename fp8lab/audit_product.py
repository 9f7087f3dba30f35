"""The audit's check of a product of codes: some rows of both operands, over all of K."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fp8lab import audit_slow as slow
from fp8lab.audit_checks import Array, Compared, Look, Outputs, picked
from fp8lab.audit_sampling import Draw, Places
from fp8lab.bridge import to_numpy
from fp8lab.emulation.matmul import matmul_picked
from fp8lab.ops_linear import computed_by_kernel


def product(look: Look) -> Callable[[Any], Outputs]:
    """`ops_linear.matmul`: elements where some rows of a and some of b meet, over all of K."""
    given = look.given
    a, b, promote = (given[name] for name in ("a", "b", "promote_every"))
    shape, k = (int(a.codes.shape[0]), int(b.codes.shape[0])), int(a.codes.shape[1])
    draw = look.sampler.grid(look.name, shape, _sides(shape, look.sample))
    # Which of the chosen rows and columns meet, and where that is in the whole.
    pairs = np.divmod(np.arange(len(draw.rows) * len(draw.columns)), len(draw.columns))
    rows, columns = draw.rows[pairs[0]], draw.columns[pairs[1]]
    added: Array | None = None
    if given["accumulate"] is not None:
        added = np.array(picked(given["accumulate"], rows, columns))
    elif given["bias"] is not None:
        added = np.array(to_numpy(given["bias"].detach().float()))[columns]

    def finish(found: Tensor) -> Outputs:
        left, right = _rows(a.codes, draw.rows), _rows(b.codes, draw.columns)
        actual = picked(found, rows, columns)
        tables = to_numpy(a.inverse), to_numpy(b.inverse)
        sure = np.arange(len(rows))
        if computed_by_kernel(a.codes) and not a.codes.is_cuda:
            sure = sure[in_any_order(left[pairs[0]], right[pairs[1]])]
        if look.slow:
            scales = slow.Scales(tables[0], shape[0], k), slow.Scales(tables[1], shape[1], k)
            expected = by_elements(left, right, scales, draw, promote, added, actual.dtype)
        else:
            expected = by_oracle(left, right, tables, shape, draw, promote, added, actual.dtype)

        def inputs(i: int) -> dict[str, Any]:
            row, column = (own[sure[i]] for own in pairs)
            seen = {"a": left[row], "b": right[column]}
            seen |= {"inverse_scale_a": tables[0], "inverse_scale_b": tables[1]}
            return seen if added is None else seen | {"added": added[sure[i]]}

        def element(i: int) -> tuple[int, ...]:
            return int(rows[sure[i]]), int(columns[sure[i]])

        left_out = len(rows) - len(sure), "elements of products in an interpreter without the core"
        yield Compared(
            "product",
            actual[sure],
            expected[sure],
            element,
            inputs,
            draw.period,
            left_out=left_out,
        )

    return finish


def _rows(codes: Tensor, rows: Places) -> Array:
    """Some rows of a matrix of codes: on a GPU the others stay there."""
    bits = codes.detach().view(torch.uint8)[torch.from_numpy(rows).to(codes.device)]
    return to_numpy(bits.view(codes.dtype))


def _sides(shape: tuple[int, int], sample: int) -> tuple[int, int]:
    """How many rows and columns meet in that many elements: as many of both where they can."""
    rows = min(shape[0], math.isqrt(sample))
    columns = min(shape[1], sample // max(rows, 1))
    return max(1, min(shape[0], sample // max(columns, 1))), max(columns, 1)


def in_any_order(left: Array, right: Array) -> npt.NDArray[np.bool_]:
    """For pairs of rows: whether every order and precision of accumulation gives one sum.

    It does where all products are multiples of one quantum that is at least 2**-13 of the sum of
    their magnitudes: then the tensor core, which keeps 13 fraction bits, cuts nothing, and no sum
    rounds.
    """
    with np.errstate(all="ignore"):
        products = np.abs(left.astype(np.float64) * right.astype(np.float64))
        fractions, exponents = np.frexp(products)
        significands = (fractions * 2**8).astype(np.int64)  # products have 8 bits at most
        lowest = (significands & -significands) * 2.0 ** (exponents - 8)
        quantum = np.where(products > 0, lowest, np.inf).min(axis=1, initial=np.inf)
        total = products.sum(axis=1)
        return np.asarray((total == 0) | (total <= quantum * 2**13))


def by_oracle(
    left: Array,
    right: Array,
    tables: tuple[Array, Array],
    shape: tuple[int, int],
    draw: Draw,
    promote: int | None,
    added: Array | None,
    dtype: Any,
) -> Array:
    """The elements of a product of that shape by `emulation.matmul.matmul_picked`.

    Args:
        left, right: The drawn rows of both operands.
        tables: All inverse scales.
        shape, draw: Of the product, and which of it is wanted.
        promote: As for `ops_linear.matmul`.
        added: What is added to each element.
        dtype: Of the result.
    """
    narrow = dtype if dtype == ml_dtypes.bfloat16 else np.dtype(np.float32)
    found = matmul_picked(
        left,
        right.T,
        draw.rows,
        draw.columns,
        shape,
        promote_every=promote,
        inverse_scale_a=tables[0],
        inverse_scale_b=tables[1].T if tables[1].ndim == 2 else tables[1],
        bias=None if added is None else added.reshape(len(draw.rows), len(draw.columns)),
        out_dtype=narrow,
    )
    with np.errstate(all="ignore"):
        return found.reshape(-1).astype(dtype)


def by_elements(
    left: Array,
    right: Array,
    scales: tuple[slow.Scales, slow.Scales],
    draw: Draw,
    promote: int | None,
    added: Array | None,
    dtype: Any,
) -> Array:
    """The same by the slow form."""
    found: list[Any] = []
    for i, row in enumerate(draw.rows.tolist()):
        for j, column in enumerate(draw.columns.tolist()):
            at = (scales[0], row), (scales[1], column)
            total = slow.product_element(left[i], right[j], *at, promote)
            if added is not None:
                total = slow.plus(total, float(added[len(found)]))
            found.append(slow.narrowed(total, dtype))
    return np.array(found, dtype)
