"""The audit's check of casts with one scale a row or block, each layout from high precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8lab import audit_slow as slow
from fp8lab.audit_checks import Array, Axis, Compared, Look, Outputs, at, picked
from fp8lab.audit_sampling import Places
from fp8lab.bridge import to_numpy
from fp8lab.emulation import scaling
from fp8lab.formats import E8M0, Float8Format
from fp8lab.ops_linear import Codes
from fp8lab.recipes import BlockScaling, MxScaling, RowScaling

Policy = RowScaling | BlockScaling | MxScaling


def block_cast(look: Look) -> Callable[[Any], Outputs]:
    """`ops_linear.block_codes`: codes and scales, in both layouts."""
    x = look.given["x"].detach()

    def finish(layouts: Any) -> Outputs:
        for name, matrix, found in (
            ("", x, layouts.plain),
            ("transposed ", x.t(), layouts.transposed),
        ):
            if found is not None and matrix.numel():
                check = _by_elements if look.slow else _by_bands
                yield from check(look, name, matrix, found)

    return finish


def _by_bands(look: Look, name: str, matrix: Tensor, found: Codes) -> Outputs:
    """Whole bands of blocks, by the oracle."""
    policy, fmt = look.given["policy"], look.given["fmt"]
    tall, wide = _sizes(found, matrix)
    bands, period = look.sampler.elements(
        f"{look.name} {name}",
        -(-matrix.shape[0] // tall),
        max(1, look.elements // (tall * wide[1])),
    )
    rows = (bands[:, None] * tall + np.arange(tall)).reshape(-1)
    rows = rows[rows < matrix.shape[0]]  # the last band may be lower, and comes last
    values = np.ascontiguousarray(to_numpy(matrix[torch.from_numpy(rows).to(matrix.device)]))
    if isinstance(policy, MxScaling):
        codes, scales = scaling.quantize_mx(values, fmt, scale_rounding=policy.rounding)
    else:
        codes, scales = scaling.quantize_blocks(
            values, fmt, block=found.block or (1, None), power_of_two=policy.power_of_two
        )
    places = _pairs(rows, matrix.shape[1], period)
    down = _pairs(bands, scales.shape[1], period)
    yield from _outputs(name, found, places, codes.reshape(-1), down, scales.reshape(-1), matrix)


def _by_elements(look: Look, name: str, matrix: Tensor, found: Codes) -> Outputs:
    """Some elements of one band, and the scales of their blocks, by the slow form."""
    policy, fmt = look.given["policy"], look.given["fmt"]
    tall, (across, width) = _sizes(found, matrix)
    shape = (-(-matrix.shape[0] // tall), tall * width)
    draw = look.sampler.grid(f"{look.name} {name}", shape, (1, look.elements))
    rows, columns = np.divmod(draw.columns, width)
    rows = rows + draw.rows[0] * tall
    inside = rows < matrix.shape[0]  # the last band may be lower
    rows, columns = rows[inside], columns[inside]
    band = to_numpy(matrix[int(draw.rows[0]) * tall : (int(draw.rows[0]) + 1) * tall].contiguous())
    blocks = np.unique(columns // across)
    table = {
        int(block): _scale(band[:, block * across : (block + 1) * across], fmt, policy)
        for block in blocks
    }
    values = picked(matrix, rows, columns)
    factors = [table[int(column // across)][1] for column in columns]
    codes = slow.codes(values, fmt, factors)
    kept = np.array([table[int(block)][0] for block in blocks], np.float32)
    if isinstance(policy, MxScaling):
        kept = np.array([table[int(block)][0] for block in blocks], np.uint8).view(E8M0.dtype)
    places = Axis(rows, draw.period), Axis(columns, draw.period)
    own = np.full(len(blocks), draw.rows[0], np.int64)
    down = Axis(own, draw.period), Axis(blocks, draw.period)
    yield from _outputs(name, found, places, codes, down, kept, matrix)


def _scale(block: Array, fmt: Float8Format, policy: Policy) -> tuple[float, float]:
    """What is kept for a block, and what multiplies its elements."""
    largest = slow.amax(block)
    if isinstance(policy, MxScaling):
        code = slow.mx_code(largest, fmt, policy.rounding)
        value = slow.mx_value(code)
        return code, value if code == 255 else 1 / value
    scale = slow.scale_from(largest, fmt, margin=0, power_of_two=policy.power_of_two)
    return slow.inverse(scale), scale


def _sizes(found: Codes, matrix: Tensor) -> tuple[int, tuple[int, int]]:
    """Rows of a block; its columns and the matrix's."""
    down, across = found.block or (None, None)
    width = int(matrix.shape[1])
    return down or matrix.shape[0], (across or width, width)


def _pairs(rows: Places, width: int, period: int) -> tuple[Axis, Axis]:
    columns = np.tile(np.arange(width, dtype=np.int64), len(rows))
    return Axis(np.repeat(rows, width), period), Axis(columns, period)


def _outputs(
    name: str,
    found: Codes,
    places: tuple[Axis, Axis],
    codes: Array,
    blocks: tuple[Axis, Axis],
    scales: Array,
    matrix: Tensor,
) -> Outputs:
    rows, columns = places
    tall, (across, _) = _sizes(found, matrix)
    values = picked(matrix, rows.places, columns.places)

    def inputs(i: int) -> dict[str, Any]:
        table = to_numpy(found.inverse)
        scale = table[int(rows.places[i]) // tall, int(columns.places[i]) // across]
        return {"x": values[i], "scale of its block": scale}

    def block(i: int) -> dict[str, Any]:
        top, left = int(blocks[0].places[i]) * tall, int(blocks[1].places[i]) * across
        own = matrix[top : top + tall, left : left + across].contiguous()
        return {"x": to_numpy(own).reshape(-1)}

    actual = picked(found.codes, rows.places, columns.places)
    yield Compared(f"{name}codes", actual, codes, at(rows, columns), inputs, rows.period)
    actual = picked(found.inverse, blocks[0].places, blocks[1].places)
    yield Compared(f"{name}scales", actual, scales, at(*blocks), block, blocks[0].period)
