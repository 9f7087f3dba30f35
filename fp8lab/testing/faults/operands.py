"""Wrong operands of a matrix product: edges, orders of k, codes that are read wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import dequantize
from fp8lab.emulation.tensorcore import TensorCore
from fp8lab.formats import FORMATS

Array = npt.NDArray[Any]
Product = Callable[[Array, Array], Array]  # the right sum over k of two matrices of codes
Wrong = tuple[str, Array]

_TILES = (16, 32, 64, 128)


def left_out_tiles(result: Array) -> Iterator[Wrong]:
    """Results without the rows or columns behind the last whole tile."""
    for size in _TILES:
        for rows, columns in ((size, size), (size, 1), (1, size)):
            yield "edge-tile-left-out", _whole_tiles_only(result, rows, columns)


def edge_faults(a: Array, b: Array, product: Product) -> Iterator[Wrong]:
    """What happens at the end of K where tiles do not fit."""
    k = a.shape[1]
    for size in _TILES:
        whole, more = k // size * size, -k % size
        yield "k-tail-left-out", product(a[:, :whole], b[:whole])
        # What lies behind a row in memory, or its last element again.
        edge_a = np.pad(a, ((0, 0), (0, more)), mode="edge") if k else a
        edge_b = np.pad(b, ((0, more), (0, 0)), mode="edge") if k else b
        on_a, on_b = (_read_on(a, more), _read_on(b.T, more).T) if k else (a, b)
        for x, y in ((on_a, on_b), (on_a, edge_b), (edge_a, on_b), (edge_a, edge_b)):
            yield "k-tail-unmasked", product(x, y)
    yield "last-k-left-out", product(a[:, :-1], b[:-1])


def _read_on(rows: Array, more: int) -> Array:
    """Rows with what lies behind each of them in memory: the rows that follow, then zeros."""
    m, k = rows.shape
    words = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
    behind = np.concatenate([words, np.zeros(k + more, np.uint8)])
    index = np.arange(m)[:, None] * k + np.arange(k + more)
    return np.ascontiguousarray(behind[index]).view(rows.dtype)


def _whole_tiles_only(result: Array, rows: int, columns: int) -> Array:
    kept = np.zeros_like(result)
    part = tuple(
        slice(n // size * size) for n, size in zip(result.shape, (rows, columns), strict=True)
    )
    kept[part] = result[part]
    return kept


def operand_faults(a: Array, b: Array, core: TensorCore, product: Product) -> Iterator[Wrong]:
    """Codes that are read as other values, or in another order of rows and columns."""
    for fault, lost in (("nan-lost", np.isnan), ("infinity-lost", np.isinf)):
        yield fault, product(_without(lost, a), _without(lost, b))
    small_a, small_b = _without_subnormals(a), _without_subnormals(b)
    for x, y in ((small_a, small_b), (small_a, b), (a, small_b)):
        yield "subnormals-flushed", product(x, y)
    yield "operand-transposed", product(a, np.ascontiguousarray(b.T).reshape(b.shape))
    yield "operand-transposed", product(np.ascontiguousarray(a.T).reshape(a.shape), b)
    # The bytes of one format read as the other's; views need dense memory.
    dense_a, dense_b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    for first in core.operands:
        for second in core.operands:
            types = _DTYPES[first], _DTYPES[second]
            if types != (a.dtype, b.dtype):
                yield "wrong-format", product(dense_a.view(types[0]), dense_b.view(types[1]))


_DTYPES = {fmt.dtype_name: fmt.dtype for fmt in FORMATS.values()}


def _without_subnormals(codes: Array) -> Array:
    fmt = next(fmt for fmt in FORMATS.values() if fmt.dtype == codes.dtype)
    small = np.abs(dequantize(codes)) < np.float32(fmt.min_normal)
    return np.where(small, np.zeros_like(codes), codes)


def _without(lost: Callable[[Array], Array], codes: Array) -> Array:
    """Codes with zeros for the values that `lost` tells."""
    return np.where(lost(dequantize(codes)), np.zeros_like(codes), codes)


def orders_of_k(k: int, step: int) -> Iterator[Array]:
    """Other orders of k: backward, and steps, or the elements inside them, moved about."""
    places = np.arange(k)
    yield places[::-1]
    padded = np.concatenate([places, np.full(-k % step, -1)]).reshape(-1, step)
    half = len(padded) // 2
    orders = [padded[::-1], padded.T, np.concatenate([padded[1:], padded[:1]])]
    orders += [np.concatenate([padded[half:], padded[:half]])]
    orders += [np.concatenate([padded[0::2], padded[1::2]])]
    woven = np.empty_like(padded)
    woven[0::2], woven[1::2] = padded[: len(padded) - half], padded[len(padded) - half :]
    orders.append(woven)
    for order in orders:
        flat = order.reshape(-1)
        yield flat[flat >= 0]
