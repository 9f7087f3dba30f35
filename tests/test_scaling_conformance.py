"""Scales, blocks and MX against torchao, on the CPU: bit for bit where the rule is the same.

Where it is not, the tests say what torchao answers, and so keep the table in `docs/numerics.md`
true.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.emulation.scaling import (
    DelayedScalingState,
    amax,
    current_scale,
    mx_scale,
    quantize_blocks,
    quantize_mx,
    step_delayed,
)
from fp8lab.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Float8Format
from fp8lab.testing import assert_bits_equal, to_numpy, to_torch

pytest.importorskip("torchao", reason="torchao is not installed (it is in the dev extra)")

from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import amax_to_scale, tensor_to_scale
from torchao.prototype.blockwise_fp8_training.kernels import (
    torch_blockwise_scale_act_quant_lhs,
    torch_blockwise_scale_weight_quant,
)
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

Array = np.ndarray[Any, Any]

DTYPES = {
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    E4M3FNUZ: torch.float8_e4m3fnuz,
    E5M2FNUZ: torch.float8_e5m2fnuz,
}
MODES = {"floor": ScaleCalculationMode.FLOOR, "up": ScaleCalculationMode.RCEIL}
by_format = pytest.mark.parametrize("fmt", DTYPES, ids=lambda fmt: fmt.name)
by_mx_format = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def magnitudes() -> Array:
    """A hundred thousand bit patterns of magnitudes, and every place where a rule turns."""
    words = np.random.default_rng(0).integers(0, 0x7F800000, 100_000, dtype=np.uint32)
    exponents = np.arange(255, dtype=np.uint32)[:, None] << np.uint32(23)
    turns = np.array([0, 1, 0x3FFFFF, 0x400000, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], np.uint32)
    special = np.array([0x7F800000, 0x7FC00000], np.uint32)
    return np.concatenate([words, (exponents | turns).reshape(-1), special]).view(np.float32)


@by_format
def test_tensorwise_scales(fmt: Float8Format) -> None:
    largest = magnitudes()
    theirs = to_numpy(amax_to_scale(to_torch(largest), DTYPES[fmt]))
    assert_bits_equal(current_scale(largest, fmt, preset="torchao"), theirs, inputs=largest)


@by_format
def test_rowwise_scales(fmt: Float8Format) -> None:
    x = np.random.default_rng(1).standard_normal((64, 300)).astype(np.float32)
    x *= np.exp(np.linspace(-90, 80, 64, dtype=np.float32))[:, None]
    x[3], x[4, 7], x[5, 8] = 0, np.inf, np.nan
    for dimension, block in ((-1, (1, None)), (0, (None, 1))):
        theirs = tensor_to_scale(
            to_torch(x),
            DTYPES[fmt],
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=dimension,
        )
        ours = current_scale(amax(x, block=block), fmt, preset="torchao")
        assert_bits_equal(ours, to_numpy(theirs))


@by_format
def test_power_of_two_scales_differ_where_a_logarithm_rounds_up(fmt: Float8Format) -> None:
    largest = magnitudes()
    ours = current_scale(largest, fmt, preset="torchao", power_of_two=True)
    plain = current_scale(largest, fmt, preset="torchao")
    theirs = to_numpy(amax_to_scale(to_torch(largest), DTYPES[fmt], True))
    # How near depends on the exponent: its logarithm has fewer bits left the larger it is.
    beside = plain >= 2 * ours * np.float32(1 - 64 * 2.0**-24)
    assert_bits_equal(theirs[~beside], ours[~beside], inputs=largest[~beside])


def test_the_power_of_two_that_is_twice_too_large() -> None:
    """The document's row: an amax whose scale is the float32 just below 2**20."""
    below = np.nextafter(np.float32(2.0**20), np.float32(0))
    largest = np.array(448 / float(below))
    assert_bits_equal(current_scale(largest, E4M3, preset="torchao"), np.asarray(below))
    theirs = amax_to_scale(torch.from_numpy(largest), torch.float8_e4m3fn, True)
    assert float(theirs) == 2.0**20
    assert float(current_scale(largest, E4M3, preset="torchao", power_of_two=True)) == 2.0**19


@pytest.mark.parametrize(
    ("block", "theirs"),
    [
        ((1, 128), torch_blockwise_scale_act_quant_lhs),
        ((128, 128), torch_blockwise_scale_weight_quant),
    ],
)
def test_float8_blocks(block: tuple[int, int], theirs: Any) -> None:
    x = np.random.default_rng(2).standard_normal((256, 512)).astype(np.float32)
    x *= np.exp(np.random.default_rng(3).standard_normal((256, 1)) * 12).astype(np.float32)
    x[3] = 0
    x[128:, :128] = 0
    codes, inverse = quantize_blocks(x, E4M3, block=block, preset="torchao", power_of_two=False)
    their_codes, their_inverse = theirs(to_torch(x))
    assert_bits_equal(codes, to_numpy(their_codes))
    assert_bits_equal(inverse, to_numpy(their_inverse).reshape(inverse.shape))


def mx_blocks(largest: Array) -> Array:
    """A block of 32 for each amax, with smaller elements of both signs beside it."""
    x = np.zeros((largest.size, 32), np.float32)
    with np.errstate(all="ignore"):
        x[:, :5] = largest[:, None] * np.array([0.3, 1, -0.7, -1e-3, 2.0**-12], np.float32)
    return x


def their_mx(x: Array, fmt: Float8Format, rounding: str) -> tuple[Array, Array]:
    scale, codes = to_mx(to_torch(x), DTYPES[fmt], 32, MODES[rounding])
    return to_numpy(codes).view(np.uint8), to_numpy(scale.view(torch.uint8))[:, 0]


@by_mx_format
def test_mx_floor(fmt: Float8Format) -> None:
    largest = magnitudes()
    x = mx_blocks(largest[~np.isinf(largest)])
    codes, scale = (found.view(np.uint8) for found in quantize_mx(x, fmt))
    their_codes, their_scale = their_mx(x, fmt, "floor")
    assert_bits_equal(their_scale, scale[:, 0], inputs=amax(x, block=(1, None))[:, 0])
    same = (scale[:, 0] != 0) & (scale[:, 0] != 255)
    assert_bits_equal(their_codes[same], codes[same])


@by_mx_format
def test_mx_up(fmt: Float8Format) -> None:
    largest = magnitudes()
    # Beside a power of two theirs depends on how a division and a logarithm round: see below.
    fraction = np.frexp(largest / np.float32(fmt.max_finite))[0]
    clear = ~((fraction >= 0.5) & (fraction < 0.5 * (1 + 128 * 2.0**-23)))
    exact = (largest.view(np.uint32) & np.uint32(0x7FFFFF)) == 0x600000
    x = mx_blocks(largest[clear | exact])
    codes, scale = (found.view(np.uint8) for found in quantize_mx(x, fmt, scale_rounding="up"))
    their_codes, their_scale = their_mx(x, fmt, "up")
    assert_bits_equal(their_scale, scale[:, 0], inputs=amax(x, block=(1, None))[:, 0])
    same = (scale[:, 0] != 0) & (scale[:, 0] != 255)
    assert_bits_equal(their_codes[same], codes[same])


def test_mx_up_just_above_a_power_of_two() -> None:
    """The document's row: amax one ulp above 448 * 2**20 does not fit a scale of 2**20."""
    above = np.nextafter(np.float32(448 * 2.0**20), np.float32(2.0**30))
    x = mx_blocks(above.reshape(1))
    codes, scale = quantize_mx(x, E4M3, scale_rounding="up")
    their_codes, their_scale = their_mx(x, E4M3, "up")
    assert int(scale.view(np.uint8)[0, 0]) == 148
    assert their_scale.tolist() == [147]
    assert their_codes[0, 1] == 0x7E
    assert codes.view(np.uint8)[0, 1] == 0x76


@pytest.mark.parametrize(
    ("name", "largest", "rounding", "their_answer", "our_answer"),
    [
        # name: (E8M0, codes of 0.3, 1 and -0.7 times amax)
        ("tiny, floor", 1e-37, "floor", (0, [0x42, 0x51, 0xCC]), (0, [0x4A, 0x59, 0xD4])),
        ("tiny, up", 1e-37, "up", (0, [0x00, 0x00, 0x80]), (0, [0x4A, 0x59, 0xD4])),
        ("Inf, floor", np.inf, "floor", (247, [0x7E, 0x7E, 0xFE]), (254, [0x7E, 0x7E, 0xFE])),
        ("NaN, floor", np.nan, "floor", (255, [0x7F, 0x7F, 0x7F]), (255, [0x7F, 0x7F, 0x7F])),
    ],
)
def test_mx_special_blocks(
    name: str,
    largest: float,
    rounding: str,
    their_answer: tuple[int, list[int]],
    our_answer: tuple[int, list[int]],
) -> None:
    """The document's rows on MX blocks, in E4M3."""
    x = mx_blocks(np.array([largest], np.float32))
    codes, scale = quantize_mx(x, E4M3, scale_rounding=rounding)
    their_codes, their_scale = their_mx(x, E4M3, rounding)
    assert (int(scale.view(np.uint8)[0, 0]), codes.view(np.uint8)[0, :3].tolist()) == our_answer
    assert (int(their_scale[0]), their_codes[0, :3].tolist()) == their_answer


def test_mx_finite_elements_beside_a_nan() -> None:
    """The document's row: theirs keep codes of zero, ours are NaN like the scale."""
    x = np.zeros((1, 32), np.float32)
    x[0, :2] = np.nan, 1
    codes, _ = quantize_mx(x, E4M3)
    their_codes, their_scale = their_mx(x, E4M3, "floor")
    assert their_scale.tolist() == [255]
    assert their_codes[0, :3].tolist() == [0x7F, 0, 0]
    assert codes.view(np.uint8)[0, :3].tolist() == [0x7F, 0x7F, 0x7F]


@pytest.mark.parametrize(
    ("largest", "even", "ours"),
    [(450.0, 127, 128), (383.0, 127, 127), (384.0, 127, 128), (495.9, 127, 128), (496.0, 128, 128)],
)
def test_mx_nearest_is_not_torchaos_even(largest: float, even: int, ours: int) -> None:
    """The document's rows: EVEN rounds amax to the element's mantissa, then takes the floor."""
    x = mx_blocks(np.array([largest], np.float32))
    scale, _ = to_mx(to_torch(x), torch.float8_e4m3fn, 32, ScaleCalculationMode.EVEN)
    assert int(scale.view(torch.uint8)[0, 0]) == even
    assert int(mx_scale(np.float32(largest), E4M3, rounding="nearest").view(np.uint8)) == ours


def test_delayed_preset_has_todays_scale_rule() -> None:
    """The old delayed variant is gone from torchao; its scale is still what current scaling has."""
    largest = magnitudes()[:1000]
    fresh = DelayedScalingState.fresh(16, largest.shape)
    _, state = step_delayed(fresh, largest, E4M3, preset="torchao")
    assert_bits_equal(state.scale, to_numpy(amax_to_scale(to_torch(largest), DTYPES[E4M3])))
