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
from fp8lab.ops_operands import Codes
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
    count = -(-matrix.shape[0] // tall)
    # The last band may be lower, so that all may be wanted where not as many whole ones are.
    everything = matrix.numel() <= look.elements
    some = count if everything else max(1, look.elements // (tall * wide[1]))
    bands, period = look.sampler.elements(f"{look.name} {name}", count, some)
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
    """Some elements, and the scales of their whole blocks, by the slow form."""
    policy, fmt = look.given["policy"], look.given["fmt"]
    tall, (across, width) = _sizes(found, matrix)
    places, period = look.sampler.elements(f"{look.name} {name}", matrix.numel(), look.elements)
    rows, columns = np.divmod(places, width)
    blocks_wide = -(-width // across)
    blocks, own = np.unique(rows // tall * blocks_wide + columns // across, return_inverse=True)
    down, right = np.divmod(blocks, blocks_wide)
    made = [
        _scale(_block(matrix, int(i) * tall, tall, int(j) * across, across), fmt, policy)
        for i, j in zip(down, right, strict=True)
    ]
    factors = [made[block][1] for block in own.tolist()]
    codes = slow.codes(picked(matrix, rows, columns), fmt, factors)
    kept = np.array([scale for scale, _ in made], np.float32)
    if isinstance(policy, MxScaling):
        kept = np.array([code for code, _ in made], np.uint8).view(E8M0.dtype)
    elements = Axis(rows, period), Axis(columns, period)
    yield from _outputs(
        name, found, elements, codes, (Axis(down, period), Axis(right, period)), kept, matrix
    )


def _block(matrix: Tensor, top: int, tall: int, left: int, across: int) -> Array:
    return to_numpy(matrix[top : top + tall, left : left + across].contiguous())


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
        return {"x": _block(matrix, top, tall, left, across).reshape(-1)}

    actual = picked(found.codes, rows.places, columns.places)
    yield Compared(f"{name}codes", actual, codes, at(rows, columns), inputs, rows.period)
    actual = picked(found.inverse, blocks[0].places, blocks[1].places)
    yield Compared(f"{name}scales", actual, scales, at(*blocks), block, blocks[0].period)
