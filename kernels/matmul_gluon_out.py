"""How the fast matrix product finishes a tile, in Gluon: scales, the bias, and the way out."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from fp8lab.kernels.matmul_gluon_promotion import BAND_ROWS

# The barrier of one partition's warps has another name from Triton 3.7 on.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

_BUFFERS = gl.constexpr(2)  # pieces of the result that a warpgroup holds


@gluon.jit
def elements(row, column, m, n, COLUMNS: gl.constexpr, L: gl.constexpr, PLAN: gl.constexpr):
    """Offsets of the elements of a part of a tile in the result, and whether they are there."""
    rows = gl.expand_dims(row + gl.arange(0, BAND_ROWS, layout=gl.SliceLayout(1, L)), 1)
    columns = gl.expand_dims(column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L)), 0)
    if PLAN.swap:
        places = rows + columns.to(gl.int64) * n
        inside = (rows < n) & (columns < m)
    else:
        places = rows.to(gl.int64) * n + columns
        inside = (rows < m) & (columns < n)
    return places, inside


@gluon.jit
def write(GROUP: gl.constexpr, total, BAND: gl.constexpr, way_out, PLAN: gl.constexpr):
    """Bands of the result from BAND on, in their parts, out through shared memory, a piece at a
    time: fewer registers are live. Bands take turns, and share what their columns need.
    """
    out_desc, out_tiles, row, column, m, n, extras = way_out
    BANDS: gl.constexpr = len(total) // PLAN.parts
    WIDTH: gl.constexpr = PLAN.out_columns
    COUNT: gl.constexpr = PLAN.columns // PLAN.out_columns
    SPLIT: gl.constexpr = COUNT // PLAN.parts
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32]
    )
    pieces = _split(total, SPLIT)
    for index in gl.static_range(COUNT * BANDS):
        piece = pieces[index % BANDS * COUNT + index // BANDS]
        piece = gl.convert_layout(piece, L, assert_trivial=True)
        band = row + (BAND + index % BANDS) * BAND_ROWS
        first = column + index // BANDS * WIDTH
        result = _finished(piece, band, first, m, n, extras, L, PLAN).to(out_desc.dtype)
        out_tile = out_tiles.index(GROUP * _BUFFERS + index % _BUFFERS)
        # The piece that was there has left.
        tma.store_wait(_BUFFERS - 1 if COUNT * BANDS > 1 else 0)
        _barrier()
        if PLAN.swap:
            out_tile.store(result.permute((1, 0)))
        else:
            out_tile.store(result)
        fence_async_shared()
        if PLAN.swap:
            tma.async_copy_shared_to_global(out_desc, [first, band], out_tile)
        else:
            tma.async_copy_shared_to_global(out_desc, [band, first], out_tile)


@gluon.jit
def _finished(total, row, column, m, n, extras, L: gl.constexpr, PLAN: gl.constexpr):
    """What comes after the sum: scales that are not of blocks, then the bias."""
    WIDTH: gl.constexpr = PLAN.out_columns
    left_scale, left_stride, _, right_scale, right_stride, _, bias, _ = extras
    rows = row + gl.arange(0, BAND_ROWS, layout=gl.SliceLayout(1, L))
    columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    rows_in = rows < (n if PLAN.swap else m)
    columns_in = columns < (m if PLAN.swap else n)
    if PLAN.scaling == "tensor":
        total = total * (gl.load(left_scale) * gl.load(right_scale))
    elif PLAN.scaling == "vectors":
        by_row = gl.load(left_scale + rows * left_stride, mask=rows_in, other=0.0)
        by_column = gl.load(right_scale + columns * right_stride, mask=columns_in, other=0.0)
        # First those of b, whichever side it is on.
        if PLAN.swap:
            total = (total * gl.expand_dims(by_row, 1)) * gl.expand_dims(by_column, 0)
        else:
            total = (total * gl.expand_dims(by_column, 0)) * gl.expand_dims(by_row, 1)
    if PLAN.bias == "vector":
        if PLAN.swap:
            total = total + gl.expand_dims(gl.load(bias + rows, mask=rows_in, other=0.0), 1)
        else:
            added = gl.load(bias + columns, mask=columns_in, other=0.0)
            total = total + gl.expand_dims(added, 0)
    elif PLAN.bias == "matrix":
        places, inside = elements(row, column, m, n, WIDTH, L, PLAN)
        total = total + gl.load(bias + places, mask=inside, other=0.0)
    return total


@gluon.jit
def _split(parts, COUNT: gl.constexpr):
    """Parts in so many pieces of columns each, a power of two; no element leaves its thread."""
    pieces = parts
    for _ in gl.static_range(COUNT.bit_length() - 1):
        halves = ()
        for index in gl.static_range(len(pieces)):
            piece = pieces[index]
            pair = piece.reshape((piece.shape[0], 2, piece.shape[1] // 2)).permute((0, 2, 1))
            halves += pair.split()
        pieces = halves
    return pieces
