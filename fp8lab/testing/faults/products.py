"""Hypotheses of matrix products: the tensor core's step, promotion, the order of k, scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import dequantize
from fp8lab.emulation.fused import fma
from fp8lab.emulation.matmul import matmul
from fp8lab.emulation.tensorcore import IEEE_FLOAT32, TENSOR_CORES, TensorCore
from fp8lab.testing.faults.chosen import core_of
from fp8lab.testing.faults.hypothesis import NARROW, Arrays, Hypothesis, Settings, float32
from fp8lab.testing.faults.operands import (
    edge_faults,
    left_out_tiles,
    operand_faults,
    orders_of_k,
)
from fp8lab.testing.faults.steps import Step, chain

Array = npt.NDArray[Any]
Wrong = tuple[str, Array]


@dataclass(frozen=True, eq=False)
class _Product:
    """The right product.

    Attributes:
        a, b: Codes, (M, K) and (K, N).
        core, promote: The arithmetic of the sum.
        scale_a, scale_b: float32, 0-d.
    """

    a: Array
    b: Array
    core: TensorCore
    promote: int | None
    scale_a: Array
    scale_b: Array

    def sum(self) -> Array:
        """The sum over k, without scales."""
        return matmul(self.a, self.b, core=self.core, promote_every=self.promote)

    def of(self, a: Array, b: Array) -> Array:
        """The sum of other operands."""
        return replace(self, a=a, b=b).sum()

    def by(self, core: TensorCore, promote: int | None) -> Array:
        """The sum in other arithmetic."""
        return replace(self, core=core, promote=promote).sum()

    def stretches(self, length: int) -> Iterator[_Product]:
        """The product cut along K."""
        for start in range(0, self.a.shape[1], length):
            part = slice(start, start + length)
            yield replace(self, a=self.a[:, part], b=self.b[part])


def of_matmul(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_matmul`."""
    promote: Any = settings.get("promote_every")
    one = np.float32(1)
    right = _Product(
        inputs["a"],
        inputs["b"],
        core_of(settings),
        promote,
        float32(inputs.get("inverse_scale_a", one)),
        float32(inputs.get("inverse_scale_b", one)),
    )
    name = next(iter(expected), "product")
    factor = right.scale_a * right.scale_b
    for fault, result in _scale_faults(right):
        yield fault, {name: float32(result)}
    for fault, total in _sum_faults(right):
        yield fault, {name: float32(total * factor)}


def _sum_faults(right: _Product) -> Iterator[Wrong]:
    yield from edge_faults(right.a, right.b, right.of)
    yield from operand_faults(right.a, right.b, right.core, right.of)
    yield from _accumulation_faults(right)
    if right.core.fraction_bits is not None:
        yield from _step_faults(right)


def _scale_faults(right: _Product) -> Iterator[Wrong]:
    a, b, total = right.scale_a, right.scale_b, right.sum()
    both = a * b
    scaled = total * both
    yield "zero-sign", np.where(total == 0, np.float32(-0.0), scaled)
    yield "nan-lost", np.where(np.isnan(scaled), np.float32(0), scaled)
    yield "scales-one-by-one", (total * a) * b
    yield "scales-one-by-one", (total * b) * a
    yield "product-not-rounded", total * (np.float64(a) * np.float64(b))
    if right.promote is not None:
        for fused in (False, True):
            yield "scale-before-promotion", _scaled_partials(right, right.promote, fused=fused)
    for narrow in NARROW:
        yield "scale-after-narrowing", narrow(total) * both
        yield "result-in-16-bits", narrow(scaled)
        yield "scale-in-16-bits", total * (narrow(a) * narrow(b))
        yield "scale-in-16-bits", total * narrow(both)
    for factor in (np.float32(1), a, b):
        yield "scale-ignored", total * factor
    for factor in (a * a, b * b, both * both):
        yield "scale-twice", total * factor
    yield "scale-divides", total / both
    yield from left_out_tiles(scaled)


def _scaled_partials(right: _Product, promote: int, *, fused: bool) -> Array:
    """total + partial * scale for each stretch that is promoted."""
    factor = right.scale_a * right.scale_b
    total = np.zeros((right.a.shape[0], right.b.shape[1]), np.float32)
    for part in right.stretches(promote):
        partial = part.by(right.core, None)
        total = fma(partial, factor, total) if fused else total + partial * factor
    return total


def _accumulation_faults(right: _Product) -> Iterator[Wrong]:
    core, promote = right.core, right.promote
    for order in orders_of_k(right.a.shape[1], core.step_k):
        yield "k-order", right.of(right.a[:, order], right.b[order])
    if promote is not None:
        yield "promotion-missing", right.by(core, None)
        yield "promotion-cut", _cut_promotion(right, promote)
        whole = right.a.shape[1] // promote * promote
        yield "promotion-tail-lost", right.of(right.a[:, :whole], right.b[:whole])
    if core.fraction_bits is not None:
        yield "accumulator-late", right.by(core, core.block_k)
        if promote is not None:
            yield "accumulator-late", _late_within(right, promote)
    for power in range(1, 5):
        other = core.block_k << power
        if other != promote:
            fault = "promotion-unasked" if promote is None else "promotion-interval"
            yield fault, right.by(core, other)
    yield "wide-accumulation", right.by(IEEE_FLOAT32, None)
    if promote is not None:
        yield "wide-accumulation", right.by(IEEE_FLOAT32, promote)
    x, y = dequantize(right.a), dequantize(right.b)
    yield "wide-accumulation", np.matmul(x, y)
    yield "wide-accumulation", float32(np.matmul(x.astype(np.float64), y.astype(np.float64)))


def _cut_promotion(right: _Product, promote: int) -> Array:
    """Partial sums added to the total at the tensor core's precision, not in float32."""
    total = np.zeros((right.a.shape[0], right.b.shape[1]), np.float32)
    for part in right.stretches(promote):
        total = total + part.by(right.core, None)
        total = (total.view(np.uint32) & np.uint32(0xFFFFFC00)).view(np.float32)
    return total


def _late_within(right: _Product, promote: int) -> Array:
    """Each step from zero, added in float32 to a partial sum that is then promoted."""
    total = np.zeros((right.a.shape[0], right.b.shape[1]), np.float32)
    for part in right.stretches(promote):
        total = total + part.by(right.core, right.core.block_k)
    return total


def _step_faults(right: _Product) -> Iterator[Wrong]:
    core, promote = right.core, right.promote
    down, nearest = replace(core, rounding="toward_zero"), replace(core, rounding="nearest_even")
    yield "step-rounded-otherwise", right.by(nearest if down == core else down, promote)
    assert core.fraction_bits is not None
    for bits in (core.fraction_bits, 10, 11, 12, 13, 14, 15, 16, 20, 23, 24, 25):
        if bits != core.fraction_bits:
            yield "alignment-bits", right.by(replace(core, fraction_bits=bits), promote)
        cut = replace(core, fraction_bits=bits, significand_bits=24, rounding="toward_zero")
        for wide in (cut, replace(cut, rounding="nearest_even")):
            yield "step-result-not-cut", right.by(wide, promote)
    for length in (8, 16, 64, 128):
        if length != core.step_k and not core.order and (promote or length) % length == 0:
            other = replace(core, step_k=length)
            yield "step-length", chain(right.a, right.b, other, Step(), promote)
    if core.accumulator == "float32" and core.rounding == "toward_zero":
        for fault, step in _STEPS:
            yield fault, chain(right.a, right.b, core, step, promote)
    for other in TENSOR_CORES.values():
        if other.operands == core.operands and replace(other, step_k=core.step_k) != replace(
            core, name=other.name, sources=other.sources
        ):
            for interval in (promote, None):
                if (interval or other.block_k) % other.block_k == 0:
                    yield "other-core", right.by(other, interval)


_STEPS = (
    ("product-normalised", Step(normalised=True)),
    ("accumulator-not-aligned", Step(accumulator_in_emax=False)),
    ("accumulator-not-aligned", Step(cuts_accumulator=False)),
    ("products-not-cut", Step(cuts_products=False)),
    ("products-not-cut", Step(cuts_products=False, cuts_accumulator=False)),
    ("alignment-rounds", Step(aligns_to_nearest=True)),
    ("alignment-rounds", Step(aligns_down=True)),
    ("accumulator-late", Step(accumulator_late=True)),
)
