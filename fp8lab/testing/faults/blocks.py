"""Hypotheses of block scales: 1x128, 128x128 and MX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.amax import amax
from fp8lab.emulation.blocks import expand_blocks
from fp8lab.emulation.casting import dequantize
from fp8lab.emulation.mx import MX_BLOCK, mx_scale
from fp8lab.emulation.scale_rules import FLT_MAX, inverse_scale
from fp8lab.emulation.tiling import Block
from fp8lab.formats import E8M0
from fp8lab.testing.faults.chosen import block_of, format_of, policy_of
from fp8lab.testing.faults.elements import ElementCast, element_faults
from fp8lab.testing.faults.extents import wrong_amaxes
from fp8lab.testing.faults.hypothesis import (
    NARROW,
    Arrays,
    Hypothesis,
    Settings,
    float32,
    flushed,
    through_bfloat16,
)
from fp8lab.testing.faults.mx_codes import mx_code_faults
from fp8lab.testing.faults.scales import rule_faults, rule_of

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Blocks:
    """The right way to quantise in blocks, by its steps.

    Attributes:
        block: What shares a scale.
        cast: From scaled elements to codes.
        scale_of: From the blocks' amax to what multiplies the elements.
        kept_of: From the amax to what is stored for each block.
        output: The name of what is stored.
    """

    block: Block
    cast: ElementCast
    scale_of: Callable[[Array], Array]
    kept_of: Callable[[Array], Array]
    output: str

    def of_amax(self, x: Array, largest: Array) -> Arrays:
        """The outputs where that is the blocks' amax."""
        return self.of_scale(x, self.scale_of(largest), self.kept_of(largest))

    def of_scale(self, x: Array, scale: Array, kept: Array) -> Arrays:
        """The outputs where that is the blocks' scale, and what is stored for it."""
        factor = self.factors(scale, x)
        return self.of_scaled(float32(x * factor), factor, kept)

    def factors(self, scale: Array, x: Array) -> Array:
        """One scale an element."""
        return expand_blocks(np.asarray(scale), self.block, x.shape)

    def of_scaled(self, y: Array, factor: Array, kept: Array) -> Arrays:
        """The outputs where those are the scaled elements."""
        return self.of_codes(self.cast(y), factor, kept)

    def of_codes(self, codes: Array, factor: Array, kept: Array) -> Arrays:
        """The outputs where those are the codes; a block whose scale is NaN has NaN codes."""
        nan = self.cast(np.full(1, np.nan, np.float32))[0]
        poisoned = np.where(np.isnan(factor), nan, codes)
        return {"codes": poisoned.astype(np.uint8), self.output: np.asarray(kept)}


def of_block_quantize(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_block_quantize`."""
    rule = rule_of(settings, power_of_two=True)
    right = _Blocks(
        block_of(settings, (1, 128)),
        ElementCast(rule.fmt, policy_of(settings)),
        rule,
        lambda largest: inverse_scale(rule(largest)),
        _stored(expected),
    )
    x = float32(inputs["x"])
    largest = amax(x, block=right.block)
    scale = rule(largest)
    kept = inverse_scale(scale)
    usable = np.isfinite(largest) & (largest > 0)
    from_amax = float32(np.where(usable, largest / rule.top, kept))
    yield "inverse-from-amax", right.of_scale(x, scale, from_amax)
    yield "scale-kept-for-inverse", right.of_scale(x, scale, scale)
    factor = right.factors(scale, x)
    yield "scale-inverted-twice", right.of_scaled(x / right.factors(kept, x), factor, kept)
    yield from _common(right, x, largest)
    for fault, other in rule_faults(rule, largest):
        yield fault, right.of_scale(x, other, inverse_scale(other))
    yield "scale-in-16-bits", right.of_scaled(x * through_bfloat16(factor), factor, kept)


def of_mx_quantize(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_mx_quantize`."""
    fmt, rounding = format_of(settings), str(settings.get("scale_rounding", "floor"))

    def code_of(largest: Array) -> Array:
        return mx_scale(largest, fmt, rounding=rounding).view(np.uint8)

    def scale_of(codes: Array) -> Array:
        return inverse_scale(dequantize(codes.view(E8M0.dtype)))

    right = _Blocks(
        block_of(settings, MX_BLOCK),
        ElementCast(fmt, policy_of(settings)),
        lambda largest: scale_of(code_of(largest)),
        code_of,
        _stored(expected),
    )
    x = float32(inputs["x"])
    largest = amax(x, block=right.block)
    codes = code_of(largest)
    for fault, other in mx_code_faults(fmt, rounding, largest):
        yield fault, right.of_scale(x, scale_of(other), other)
        yield fault, right.of_scale(x, scale_of(codes), other)
    yield from _common(right, x, largest)
    turned = np.uint8(254) - codes
    yield "scale-kept-for-inverse", right.of_scale(x, scale_of(codes), turned)


def _common(right: _Blocks, x: Array, largest: Array) -> Iterator[Hypothesis]:
    """What both kinds of blocks can get wrong: places, extents, the amax, elements."""
    outputs = right.of_amax(x, largest)
    kept = outputs[right.output]
    transposed = np.ascontiguousarray(kept.T).reshape(kept.shape)
    yield "scales-transposed", {**outputs, right.output: transposed}
    for fault, other in wrong_amaxes(x, right.block, largest):
        yield fault, right.of_amax(x, other)
    scale = right.scale_of(largest)
    factor = right.factors(scale, x)
    for fault, seen in _misread(x):
        yield fault, right.of_amax(x, amax(seen, block=right.block))
    for fault, codes in element_faults(right.cast, float32(x * factor)):
        yield fault, right.of_codes(codes, factor, kept)
    for fault, read in (
        *(("input-in-16-bits", narrow(x)) for narrow in NARROW),
        ("subnormal-inputs-flushed", flushed(x)),
    ):
        yield fault, right.of_amax(read, amax(read, block=right.block))
        yield fault, right.of_scale(read, scale, kept)
    yield "scale-divides", right.of_scaled(x / factor, factor, kept)
    yield "scale-ignored", right.of_scaled(x, factor, kept)


def _misread(x: Array) -> Iterator[tuple[str, Array]]:
    """What a wrong reduction sees of the elements."""
    yield "nan-lost", np.where(np.isnan(x), np.float32(0), x)
    yield "infinity-lost", np.where(np.isfinite(x), x, np.float32(0))
    yield "infinity-lost", np.where(np.isinf(x), np.copysign(FLT_MAX, x), x)
    yield "subnormal-inputs-flushed", flushed(x)
    for narrow in NARROW:
        yield "amax-in-16-bits", narrow(x)
    yield "magnitude-forgotten", np.where(x < 0, np.float32(0), x)


def _stored(expected: Arrays) -> str:
    """The name of what is stored for each block: the output that is not the codes."""
    return next((name for name in expected if name != "codes"), "inverse_scales")
