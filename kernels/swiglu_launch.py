"""Launching the SwiGLU kernels: what they read, what they fill, and which of the two it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from fp8lab.formats import BFLOAT16, FLOAT16
from fp8lab.kernels.casting_matrix import check_matrix, empty_transposed
from fp8lab.kernels.casting_pairs import pairs_for
from fp8lab.kernels.casting_rules import CastRule
from fp8lab.kernels.float_device import ElementCode
from fp8lab.kernels.launch import PairSettings, TileSettings, cdiv, interpreted, launch
from fp8lab.kernels.scaling_rules import ScaleRule
from fp8lab.kernels.swiglu_device import swiglu_tiles_kernel

# How a result is rounded to the type of gate and up.
_NARROW = {
    torch.float32: None,
    torch.bfloat16: ElementCode.of(BFLOAT16, saturate=False),
    torch.float16: ElementCode.of(FLOAT16, saturate=False),
}


@dataclass(frozen=True)
class Work:
    """Checked operands.

    Attributes:
        gate_up: (height, 2 * width).
        dh: (height, width), or None.
    """

    gate_up: torch.Tensor
    dh: torch.Tensor | None

    @property
    def height(self) -> int:
        """Rows."""
        return self.gate_up.shape[0]

    @property
    def width(self) -> int:
        """Columns of gate, and of up."""
        return self.gate_up.shape[1] // 2

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result."""
        return self.height, self.width if self.dh is None else 2 * self.width

    def empty_values(self) -> torch.Tensor:
        """Room for the result."""
        return torch.empty(self.shape, dtype=self.gate_up.dtype, device=self.gate_up.device)

    def empty_codes(self, transposed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Room for its codes, and for the transposed ones."""
        codes = torch.empty(self.shape, dtype=torch.uint8, device=self.gate_up.device)
        return codes, empty_transposed(codes) if transposed else None

    def check_values(self, values: torch.Tensor | None) -> None:
        """Refuse a place for the result that does not fit."""
        if values is None:
            return
        check_matrix("values_out", values, (self.gate_up.dtype,))
        fits = values.shape == self.shape and values.device == self.gate_up.device
        if not fits or not values.is_contiguous():
            raise ValueError(
                f"values_out has shape {tuple(values.shape)} and strides {values.stride()} on"
                f" {values.device}; accepted: {self.shape}, contiguous, on {self.gate_up.device}"
            )

    def pairs(
        self, rule: CastRule, scaling: ScaleRule | None, length: int, settings: TileSettings
    ) -> PairSettings | None:
        """Settings of the kernel that takes bfloat16 by pairs, where it takes these operands."""
        block = (1, length)
        found = pairs_for(self.gate_up[:, : self.width], rule, scaling, block, settings.pairs)
        if found is None or self.dh is None:
            return found
        return pairs_for(self.dh, rule, scaling, block, (found,))


def checked(gate_up: torch.Tensor, dh: torch.Tensor | None) -> Work:
    """Refuse operands that the kernels cannot read.

    Raises:
        TypeError: Another dtype. ValueError: Another device, or shapes that do not fit.
    """
    check_matrix("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(
            f"gate_up has shape {tuple(gate_up.shape)}; accepted: an even number of columns, gate"
            " and up side by side"
        )
    work = Work(gate_up, dh)
    if dh is not None:
        check_matrix("dh", dh, (gate_up.dtype,))
        if dh.shape != (work.height, work.width) or dh.device != gate_up.device:
            raise ValueError(
                f"dh has shape {tuple(dh.shape)} on {dh.device}; accepted:"
                f" {(work.height, work.width)} on {gate_up.device}"
            )
    return work


def launch_swiglu(
    work: Work,
    *,
    rule: CastRule | None = None,
    codes: torch.Tensor | None = None,
    codes_t: torch.Tensor | None = None,
    scaling: ScaleRule | None = None,
    length: int = 1,
    kept: torch.Tensor | None = None,
    kept_t: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    settings: TileSettings,
) -> None:
    """Fill codes, what is kept of blocks, and values. Everything is checked already.

    Args:
        work: What is read.
        rule: How a value becomes a code; None where there are no codes.
        codes, codes_t, scaling, kept, kept_t, scale, amax_out: As for
            `casting_matrix.quantize_tiles`: one scale, or with `scaling` blocks of one row.
        length: Elements of a block.
        values: Where the result itself goes; or None.
        settings: How it is launched.
    """
    gate_up, dh, height, width = work.gate_up, work.dh, work.height, work.width
    places = (
        gate_up,
        dh,
        values,
        codes,
        codes_t,
        kept,
        kept_t,
        height,
        width,
        gate_up.stride(0) if height > 1 else 2 * width,
        0 if dh is None else (dh.stride(0) if height > 1 else width),
        0 if codes_t is None else codes_t.stride(0),
    )
    if rule is not None and codes_t is not None:
        pairs = work.pairs(rule, scaling, length, settings)
        if pairs is not None:
            launch(
                _by_pairs().swiglu_pairs_kernel,
                (height // pairs.rows * (width // pairs.columns),),
                *places,
                0 if kept is None else kept.stride(1),
                0 if kept_t is None else kept_t.stride(1),
                # Times 1.0 nothing changes.
                (1.0 if scale is None else scale) if scaling is None else None,
                amax_out,
                SCALING=scaling,
                BLOCK=length,
                FLOAT8=rule.float8,
                ROWS=pairs.rows,
                COLUMNS=pairs.columns,
                **pairs.options,
            )
            return
    down, across = (0, 0) if kept is None else kept.stride()
    across_t, down_t = (0, 0) if kept_t is None else kept_t.stride()
    launch(
        swiglu_tiles_kernel,
        (cdiv(height, settings.rows) * cdiv(width, settings.columns),),
        *places,
        down,
        across,
        down_t,
        across_t,
        scale,
        amax_out,
        SCALES="one" if scaling is None else "blocks",
        SCALING=scaling,
        BLOCK_ROWS=1,
        BLOCK_COLUMNS=length,
        RULE=rule,
        NARROW=_NARROW[gate_up.dtype],
        HARDWARE=not interpreted(),
        ROWS=settings.rows,
        COLUMNS=settings.columns,
        BAND=settings.band,
        EVEN=height % settings.rows == 0 and width % settings.columns == 0,
        **settings.options,
    )


@cache
def _by_pairs() -> Any:
    """The kernel's module: loaded on a card only, where it can run."""
    return import_module("fp8lab.kernels.swiglu_pairs_device")
