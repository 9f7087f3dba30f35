"""Which settings a product takes unless told otherwise, and what its scales are for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8lab.emulation.matmul import lowering
from fp8lab.kernels.matmul_choice import fast_settings, plain_settings
from fp8lab.kernels.matmul_product import Product
from fp8lab.kernels.matmul_scales import scales_from
from fp8lab.kernels.matmul_settings import (
    MatmulSettings,
    fits,
)


def wgmma_tile(settings: MatmulSettings) -> tuple[int, int]:
    """Rows and columns of a tile, as tl.dot is given them."""
    tile = settings.block_m, settings.block_n
    return tile[::-1] if settings.swap else tile


SHAPES = [(m, n) for m in (1, 16, 32, 64, 65, 128, 512, 4096, 16384) for n in (1, 128, 4096, 28672)]


@pytest.mark.parametrize("promoted", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_plain_settings_keep_the_arithmetic_and_fit_the_card(promoted: bool, wide: bool) -> None:
    for m, n in SHAPES:
        chosen = plain_settings(m, n, promoted=promoted, wide=wide, multiprocessors=132)
        steps = [chosen.with_block_k(32, scaled=scaled) for scaled in (False, True)]
        for one in (chosen, *steps, chosen.with_block_k(128)):
            found = lowering(*wgmma_tile(one), one.block_k, one.num_warps)
            assert found.core.name == "hopper_fp8"
            assert fits(one, wide=wide)


@pytest.mark.parametrize(
    ("promote", "blocks", "by_row", "by_column"),
    [
        (None, False, False, False),
        (128, False, False, False),
        (32, False, False, False),
        (128, True, True, False),
        (128, True, False, True),
        (128, True, True, True),
        (32, True, True, True),
    ],
)
@pytest.mark.parametrize("k", [128, 4096, 28672])
@pytest.mark.parametrize("matrices", [0, 1, 2])
def test_fast_settings_waste_few_multiprocessors(
    promote: int | None, blocks: bool, by_row: bool, by_column: bool, k: int, matrices: int
) -> None:
    """Tiles are hardly higher than the rows, and half as many as the smallest would be or more."""
    for m, n in SHAPES:
        chosen = fast_settings(
            m,
            n,
            k,
            promote=promote,
            blocks=blocks,
            by_row=by_row,
            by_column=by_column,
            multiprocessors=132,
            matrices=matrices,
        )
        assert chosen.takes(promote=promote, blocks=blocks, matrices=matrices)
        assert chosen.block_m < 2 * max(m, 16) or chosen.block_m == 64
        tiles = -(-m // chosen.block_m) * -(-n // chosen.block_n)
        smallest = -(-m // 64) * -(-n // 64)
        assert tiles >= min(64, smallest) // 2
        assert chosen.block_k == 128 or promote is None


@pytest.mark.parametrize(
    ("m", "n", "sides", "tile"),
    [
        (28672, 4096, "both", (192, 128)),
        (4096, 4096, "both", (256, 128)),
        (8192, 8192, "both", (192, 128)),
        (4096, 4096, "rows", (256, 128)),
        (8192, 8192, "rows", (256, 128)),
        (4096, 4096, "columns", (128, 128)),
        # Fewer large tiles than multiprocessors.
        (1024, 4096, "both", (128, 128)),
        (128, 28672, "both", (128, 128)),
        (128, 28672, "rows", (128, 128)),
    ],
)
def test_fast_settings_of_blocks(m: int, n: int, sides: str, tile: tuple[int, int]) -> None:
    """Large tiles where each row has its own scales, as measured."""
    rest: dict[str, Any] = {
        "promote": 128,
        "blocks": True,
        "by_row": sides != "columns",
        "by_column": sides != "rows",
        "multiprocessors": 132,
    }
    chosen = fast_settings(m, n, 4096, **rest)
    assert (chosen.block_m, chosen.block_n) == tile
    added = fast_settings(m, n, 4096, matrices=1, **rest)
    wide = sides == "both" and m >= 4096
    assert (added.block_m, added.block_n) == ((128, 256) if wide else (128, 128))


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (4096, 4096, 4096, (256, 128)),
        (8192, 8192, 8192, (192, 128)),
        (4096, 10240, 8192, (128, 256)),
        (16384, 8192, 28672, (192, 128)),
        (16384, 10240, 8192, (256, 128)),
        (16384, 28672, 4096, (256, 128)),  # upright, though it is wide: it has many rows
        (16384, 4096, 4096, (192, 128)),
        (16384, 4096, 14336, (192, 128)),
        (16384, 6144, 4096, (128, 128)),
        # A last wave of square tiles is better filled.
        (4096, 28672, 4096, (128, 128)),
        # Fewer large tiles than multiprocessors.
        (512, 4096, 4096, (128, 128)),
    ],
)
def test_fast_settings_of_promoted_products(m: int, n: int, k: int, tile: tuple[int, int]) -> None:
    """Large tiles in tall groups, along the longer side, where partial sums are of 128 of k."""
    rest: dict[str, Any] = {
        "blocks": False,
        "by_row": False,
        "by_column": False,
        "multiprocessors": 132,
    }
    chosen = fast_settings(m, n, k, promote=128, **rest)
    assert (chosen.block_m, chosen.block_n) == tile
    assert chosen.group == (32 if 192 in tile or 256 in tile else 8)
    for other in (
        fast_settings(m, n, k, promote=128, matrices=1, **rest),
        fast_settings(m, n, k, promote=64, **rest),
    ):
        assert other.block_m <= 128
        assert other.group == 8


def test_which_scales_are_of_each_row_and_column() -> None:
    """Not one that all rows, or 128, share."""
    blocks, square, one = torch.ones(3, 5).t(), torch.ones(3, 1), torch.ones(())
    alike = (5, 384, 6, torch.device("cpu"))
    for a, b, expected in (
        (blocks, torch.ones(3, 6), (True, True)),
        (blocks, square, (True, False)),
        (blocks, one, (True, False)),
        (square.t(), torch.ones(3, 6), (False, True)),
        (one, torch.ones(3, 6), (False, True)),
        (torch.ones(5, 1), torch.ones(3, 6), (True, True)),
        (torch.ones(5, 1), torch.ones(1, 6), (False, False)),  # not of blocks
        (one, one, (False, False)),
    ):
        scales = scales_from(a, b, *alike)
        assert (scales.by_row, scales.by_column) == expected


def test_tuned_products_are_told_apart_by_their_scales() -> None:
    """1x128 by 1x128 is fastest with other settings than 1x128 by 128x128."""
    a, b = torch.empty(5, 384), torch.empty(6, 384)
    sides = torch.ones(3, 6), torch.ones(3, 1)
    keys = {
        Product(a, b, torch.empty(5, 6), None, 128, scales, None).key
        for scales in (scales_from(torch.ones(5, 3), side, 5, 384, 6, a.device) for side in sides)
    }
    assert len(keys) == 2
