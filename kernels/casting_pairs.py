"""The fast cast of bfloat16 to both layouts: when it applies, and how it is launched."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from fp8lab.kernels.casting_rules import CastRule
from fp8lab.kernels.launch import PairSettings, launch
from fp8lab.kernels.scaling_rules import ScaleRule

# Lengths of the blocks of one row that it can have, and what keeps places in a tile 32 bits wide.
_BLOCKS = (32, 64, 128)
_LONGEST = 1 << 22
_ALIGNMENT = 16  # bytes, of rows


def pairs_for(
    x: torch.Tensor,
    rule: CastRule,
    scaling: ScaleRule | None,
    block: tuple[int, int],
    candidates: tuple[PairSettings, ...],
) -> PairSettings | None:
    """The first of the settings that takes a cast to both layouts; None where none does.

    It takes bfloat16 that the conversion instruction casts; one scale, or blocks of a row of 32,
    64 or 128 whose scales are powers of two; rows that begin at multiples of 16 bytes; and whole
    tiles.
    """
    height, width = x.shape
    if x.dtype != torch.bfloat16 or not rule.hardware or not x.numel():
        return None
    pitch = x.stride(0) if height > 1 else width
    if (x.data_ptr() | 2 * pitch) % _ALIGNMENT or max(height, width, pitch) >= _LONGEST:
        return None
    if scaling is not None and not (block[0] == 1 and block[1] in _BLOCKS and _by_powers(scaling)):
        return None
    for settings in candidates:
        whole = height % settings.rows == 0 and width % settings.columns == 0
        if whole and (scaling is None or block[1] <= min(settings.rows, settings.columns)):
            return settings
    return None


def launch_pairs(
    x: torch.Tensor,
    rule: CastRule,
    codes: torch.Tensor,
    codes_t: torch.Tensor,
    scaling: ScaleRule | None,
    block: tuple[int, int],
    kept: torch.Tensor | None,
    kept_t: torch.Tensor | None,
    scale: float | torch.Tensor | None,
    amax_out: torch.Tensor | None,
    settings: PairSettings,
) -> None:
    """Fill what `casting_matrix.quantize_tiles` fills; `pairs_for` gave the settings."""
    height, width = x.shape
    one = scaling is None
    launch(
        _device().quantize_pairs_kernel,
        (height // settings.rows * (width // settings.columns),),
        x,
        codes,
        codes_t,
        kept,
        kept_t,
        height,
        width,
        x.stride(0) if height > 1 else width,
        codes_t.stride(0),
        0 if kept is None else kept.stride(1),
        0 if kept_t is None else kept_t.stride(1),
        # Times 1.0 nothing changes.
        (1.0 if scale is None else scale) if one else None,
        amax_out,
        SCALING=scaling,
        BLOCK=1 if one else block[1],
        FLOAT8=rule.float8,
        ROWS=settings.rows,
        COLUMNS=settings.columns,
        **settings.options,
    )


@cache
def _device() -> Any:
    """The kernel's module: loaded on a card only, where it can run."""
    return import_module("fp8lab.kernels.casting_pairs_device")


def _by_powers(scaling: ScaleRule) -> bool:
    # Below that, a subnormal amax does not have the largest scale.
    return scaling.is_mx or (scaling.kind == "power_of_two" and scaling.exponent > 1)
