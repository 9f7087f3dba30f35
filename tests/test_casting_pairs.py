"""The kernel that casts bfloat16 by pairs: what it takes, what it compiles to, and its bits on a
card.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.emulation import casting as oracle
from fp8lab.emulation import scaling as oracle_scaling
from fp8lab.experiments.kernel_variants import PAIR_SETTINGS
from fp8lab.formats import E4M3, E5M2, Float8Format
from fp8lab.kernels import scaling
from fp8lab.kernels.casting import quantize_with_transpose
from fp8lab.kernels.casting_pairs import pairs_for
from fp8lab.kernels.casting_rules import CastRule
from fp8lab.kernels.launch import BLOCK_TILES, MX_TILES, TRANSPOSE_TILES, PairSettings, TileSettings
from fp8lab.kernels.scaling_rules import ScaleRule, mx_rule, scale_rule
from fp8lab.testing import assert_bits_equal, compiled_ptx, to_numpy
from fp8lab.testing.ptx import spilled_bytes

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
POWERS = scale_rule(E4M3, power_of_two=True)
FLOOR = mx_rule(E4M3, "floor")
LARGE, SMALL = PairSettings(256, 128), PairSettings(128, 64)
# Every bfloat16 magnitude, from 0 to the last NaN.
MAGNITUDES = 1 << 15


def rule_of(*, hardware: bool) -> CastRule:
    """A cast to E4M3 by the conversion instruction, as on a card, or by integers."""
    return CastRule(
        hardware, "fp8e4nv", 3, -6, 0x7E, 0x7E, 0x7E, 0x7F, False, True, "nearest_even", 32
    )


def taken(x: torch.Tensor, *, block: tuple[int, int] = (1, 1), **options: Any) -> Any:
    rule = rule_of(hardware=True)
    options = {"rule": rule, "scaling": None, "candidates": (LARGE, SMALL), **options}
    return pairs_for(x, options["rule"], options["scaling"], block, options["candidates"])


def test_what_it_takes() -> None:
    x = torch.ones(256, 256, dtype=torch.bfloat16)
    assert taken(x) == LARGE
    assert taken(x[:128]) == taken(x[:, :64]) == SMALL
    assert taken(x[:, :128], block=(1, 128), scaling=POWERS) == LARGE
    assert taken(x, block=(1, 32), scaling=FLOOR) == LARGE
    assert taken(x[::2]) == SMALL  # rows may lie any distance apart
    assert taken(x[:1].expand(256, 256)) == LARGE
    refused: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (x.float(), {}),
        (x.half(), {}),
        (x[:0], {}),
        (x[:100], {}),
        (x[:, :100], {}),
        (torch.ones(256, 260, dtype=torch.bfloat16)[:, :256], {}),  # rows not at 16 bytes
        (torch.ones(65600, dtype=torch.bfloat16)[1:65537].view(256, 256), {}),
        (x, {"rule": rule_of(hardware=False)}),
        (x, {"candidates": ()}),
        (x[:128], {"block": (1, 128), "scaling": POWERS}),  # no block fits in 64 columns
        (x, {"block": (128, 128), "scaling": POWERS}),
        (x, {"block": (1, 16), "scaling": FLOOR}),
        (x, {"block": (1, 128), "scaling": scale_rule(E4M3)}),
        (x, {"block": (1, 128), "scaling": scale_rule(E4M3, margin=8, power_of_two=True)}),
    ]
    for matrix, options in refused:
        assert taken(matrix, **options) is None, (matrix.shape, options)


def test_settings_that_cannot_be_are_refused() -> None:
    for options in ({"rows": 96}, {"rows": 1024}, {"columns": 32}, {"num_warps": 3}):
        with pytest.raises(ValueError, match="accepted: powers of two"):
            PairSettings(**options)


def compiled_pairs(scaling_rule: ScaleRule | None, block: int, chosen: PairSettings) -> str:
    """The PTX of the kernel for sm_90."""
    signature = {"x": "*bf16", "codes": "*u8", "codes_t": "*u8"}
    unused = ["scale", "amax_out"]
    if scaling_rule is None:
        signature |= {"scale": "*fp32", "amax_out": "*fp32"}
        unused = ["kept", "kept_t"]
    else:
        kept = "*u8" if scaling_rule.is_mx else "*fp32"
        signature |= {"kept": kept, "kept_t": kept}
    signature |= dict.fromkeys(("width", "stride", "stride_t", "across", "down_t"), "i32")
    return compiled_ptx(
        "fp8lab.kernels.casting_pairs_device:quantize_pairs_kernel",
        {**signature, "height": "i32"},
        {
            **dict.fromkeys(unused),
            "SCALING": scaling_rule,
            "BLOCK": block,
            "FLOAT8": "fp8e4nv",
            "ROWS": chosen.rows,
            "COLUMNS": chosen.columns,
        },
        aligned=signature,
        num_warps=chosen.num_warps,
        registers=chosen.registers,
    )


@pytest.mark.parametrize(
    ("scaling_rule", "block", "tiles"),
    [(None, 1, TRANSPOSE_TILES), (POWERS, 128, BLOCK_TILES), (FLOOR, 32, MX_TILES)],
    ids=["one scale", "1x128", "MX"],
)
def test_compiled_pairs(
    scaling_rule: ScaleRule | None, block: int, tiles: TileSettings, tmp_path: Path
) -> None:
    """16-bit maxima two at a time, accesses 16 bytes wide, nothing fused; under the limit of 128
    registers ptxas may spill one or two.
    """
    chosen = tiles.pairs[0]
    ptx = compiled_pairs(scaling_rule, block, chosen)
    each = chosen.rows * chosen.columns // (32 * chosen.num_warps)  # elements a thread
    assert ptx.count("ld.global.v4.b32") == each // 8
    assert ptx.count("st.global.v4.b32") == each // 8
    assert "max.u16x2" in ptx
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == each // (2 if scaling_rule is None else 1)
    assert "fma." not in ptx
    assert "st.shared.b8" not in ptx
    assert spilled_bytes(ptx, tmp_path) <= 8


def adversarial(rows: int, columns: int) -> torch.Tensor:
    """bfloat16 on the card: many magnitudes, blocks of zeros, subnormals, Inf and NaN."""
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    x = x * torch.exp2(12 * torch.randn(x.shape, generator=generator, device="cuda"))
    x[:64, :128] = 0
    x[64:128, :256] *= 2.0**-130
    x[128:192, :256] *= 2.0**100
    x[200, 100], x[201, 300], x[300, 33], x[301, 500] = np.inf, -np.inf, np.nan, -np.nan
    x[:, 400] = 0
    x[450] = -0.0
    return x.bfloat16()


def check_pairs(found: Any, expected: Any) -> None:
    for actual, wanted in zip(found, expected, strict=True):
        assert_bits_equal(actual, wanted)


def expected_of(x: torch.Tensor, quantise: Any, fmt: Float8Format, **options: Any) -> list[Any]:
    """What the oracle makes of x and of its transpose."""
    array = to_numpy(x)
    return [
        *quantise(array, fmt, **options),
        *quantise(np.ascontiguousarray(array.T), fmt, **options),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", PAIR_SETTINGS, ids=str)
def test_every_setting_gives_the_oracles_bits(chosen: PairSettings) -> None:
    tiles = TileSettings(pairs=(chosen,))
    how = scaling.BlockSettings(tiles=tiles)
    x = adversarial(512, 768)
    check_one_scale(x, E4M3, torch.full((1,), 0.7, device="cuda"), settings=tiles)
    length = min(128, chosen.columns, chosen.rows)
    found: Any = scaling.quantize_blocks_with_transpose(x, E4M3, block=(1, length), settings=how)
    expected = expected_of(x, oracle_scaling.quantize_blocks, E4M3, block=(1, length))
    check_pairs(found, expected)
    found = scaling.quantize_mx_with_transpose(x, E4M3, settings=how)
    check_pairs(found, expected_of(x, oracle_scaling.quantize_mx, E4M3))


def check_one_scale(x: torch.Tensor, fmt: Float8Format, scale: Any, **options: Any) -> None:
    largest = torch.zeros(1, device="cuda")
    found = quantize_with_transpose(x, fmt, scale=scale, amax_out=largest, **options)
    number = to_numpy(scale) if isinstance(scale, torch.Tensor) else scale
    codes = oracle.quantize(to_numpy(x), fmt, scale=number)
    check_pairs(found, (codes, codes.T))
    assert_bits_equal(largest.reshape(()), oracle_scaling.amax(to_numpy(x)))


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("columns", [768, 1024])
def test_every_kind_of_cast_gives_the_oracles_bits(fmt: Float8Format, columns: int) -> None:
    """By the settings that are used where nothing is said; rows may lie any distance apart."""
    x = adversarial(512, 1024)[:, :columns]
    for scale in (None, 0.7):
        check_one_scale(x, fmt, scale)
    for length, margin in ((32, 0), (64, 3), (128, 0), (128, 3)):
        options: dict[str, Any] = {"block": (1, length), "margin": margin}
        check_pairs(
            scaling.quantize_blocks_with_transpose(x, fmt, **options),
            expected_of(x, oracle_scaling.quantize_blocks, fmt, **options),
        )
    for rounding in scaling.MX_ROUNDINGS:
        check_pairs(
            scaling.quantize_mx_with_transpose(x, fmt, scale_rounding=rounding),
            expected_of(x, oracle_scaling.quantize_mx, fmt, scale_rounding=rounding),
        )


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("length", [32, 128])
def test_every_amax(fmt: Float8Format, length: int) -> None:
    """Each bfloat16 magnitude is the amax of one block along rows, and of one along columns."""
    every = torch.arange(MAGNITUDES, dtype=torch.int32, device="cuda").to(torch.int16)
    blocks = MAGNITUDES // 256
    lines = torch.zeros(256, blocks, length, dtype=torch.int16, device="cuda")
    lines[:, :, 5] = every.view(256, blocks)
    lines[:, :, 7] = every.view(256, blocks) // 2 - 32768  # smaller, negative
    along = lines.view(256, blocks * length).view(torch.bfloat16)
    for x in (along, along.t().contiguous()):
        for margin in (0, 5):
            options: dict[str, Any] = {"block": (1, length), "margin": margin}
            check_pairs(
                scaling.quantize_blocks_with_transpose(x, fmt, **options),
                expected_of(x, oracle_scaling.quantize_blocks, fmt, **options),
            )
        for rounding in scaling.MX_ROUNDINGS if length == 32 else ():
            check_pairs(
                scaling.quantize_mx_with_transpose(x, fmt, scale_rounding=rounding),
                expected_of(x, oracle_scaling.quantize_mx, fmt, scale_rounding=rounding),
            )


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 0.7])
def test_every_pair_of_patterns(scale: float | None) -> None:
    """All 65,536 bfloat16 patterns, each beside others, as the tile kernel casts them."""
    every = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16)
    mixed = torch.stack([every, every.roll(12345)], dim=1).view(256, 512).view(torch.bfloat16)
    for fmt in (E4M3, E5M2):
        found = quantize_with_transpose(mixed, fmt, scale=scale)
        tiles = replace(TRANSPOSE_TILES, pairs=())
        expected = quantize_with_transpose(mixed, fmt, scale=scale, settings=tiles)
        check_pairs(found, [to_numpy(codes) for codes in expected])
        assert_bits_equal(found[0], oracle.quantize(to_numpy(mixed), fmt, scale=scale))
