"""One scale a block: float32 scales, and the E8M0 scales of MX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.scaling import MX_BLOCK, MX_ROUNDINGS, quantize_blocks, quantize_mx
from fp8lab.emulation.tiling import layout_of
from fp8lab.formats import E8M0, Float8Format
from fp8lab.testing.cases import spaced
from fp8lab.testing.contracts.base import Contract, Kernel, register, several
from fp8lab.testing.contracts.inputs import check_dtypes, dtype_named
from fp8lab.testing.contracts.scales import amaxes
from fp8lab.testing.profiles import Profile
from fp8lab.testing.values import edge_values, random_words, wide_floats

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Block = tuple[int | None, int | None]


class _Blocks(Contract):
    """What both kinds of blocks share: matrices whose blocks are hard."""

    fmt: Float8Format
    dtypes: tuple[str, ...]
    ragged: bool
    strided: bool

    def block_of(self) -> Block:
        """The block's sizes."""
        raise NotImplementedError

    def fixed(self, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
        block = self.block_of()
        for name in self.dtypes:
            dtype = dtype_named(name)
            for rows, columns in self._shapes(profile):
                yield {
                    "x": hard_blocks(rows * 1000 + columns, (rows, columns), self.fmt, block, dtype)
                }
            yield {"x": decisive_blocks(self.fmt, block, dtype)}
            if self.strided:
                x = hard_blocks(5, self._whole((3, 2)), self.fmt, block, dtype)
                yield {"x": np.asfortranarray(x)}
                yield {"x": spaced(x)}

    def drawn(self, profile: Profile, traits: frozenset[str]) -> st.SearchStrategy[Arrays]:
        down, across = (40 if size is None else size for size in self.block_of())

        @st.composite
        def inputs(draw: st.DrawFn) -> Arrays:
            shape = (draw(st.integers(0, 2 * min(down, 8) + 1)), draw(st.integers(0, 2 * across)))
            if not self.ragged:
                shape = self._whole((draw(st.integers(0, 3)), draw(st.integers(0, 3))))
            dtype = dtype_named(draw(st.sampled_from(self.dtypes)))
            seed = draw(st.integers(0, 2**32 - 1))
            return {"x": hard_blocks(seed, shape, self.fmt, self.block_of(), dtype)}

        return inputs()

    def simpler(self, inputs: Mapping[str, Array]) -> Iterator[Arrays]:
        x = inputs["x"]
        if not x.flags.c_contiguous:
            yield {"x": np.ascontiguousarray(x)}
        for value in (0.0, 1.0):
            places = np.flatnonzero(x.reshape(-1) != value)
            for part in (places, *np.array_split(places, 2), *np.array_split(places, 8)):
                if part.size and not np.isnan(x.reshape(-1)[part]).any():
                    plainer = np.ascontiguousarray(x).reshape(-1).copy()
                    plainer[part] = value
                    yield {"x": plainer.reshape(x.shape)}

    def _shapes(self, profile: Profile) -> list[tuple[int, int]]:
        rows, columns = (3 if size is None else size for size in self.block_of())
        if not self.ragged:
            many = ((-(-130 // rows), 1), (1, 17))
            return [
                self._whole(blocks) for blocks in ((2, 3), (1, 1), (3, 1), (5, 2), (0, 1), *many)
            ]
        across = {
            1,
            columns - 1,
            columns,
            columns + 1,
            2 * columns,
            2 * columns + 1,
            3 * columns + 5,
        }
        down = {1, rows - 1, rows, rows + 1, 3}
        shapes = [(5, 3 * columns + 5)]
        shapes += [(3, width) for width in sorted(across)]
        shapes += [(height, columns + 1) for height in sorted(down)]
        shapes += [(0, columns), (3, 0), (1, 1)]
        # More rows, and more blocks in a row, than one program of a kernel may take.
        shapes += [(130, 2), (2, 17 * columns + 3)]
        if profile.wide:
            shapes += [(2 * rows + 7, 5 * columns + 3), (257, 129)]
        return [shape for shape in shapes if min(shape) >= 0]

    def _whole(self, blocks: tuple[int, int]) -> tuple[int, int]:
        rows, columns = (4 if size is None else size for size in self.block_of())
        return blocks[0] * rows, blocks[1] * columns


@register
@dataclass(frozen=True)
class BlockQuantize(_Blocks):
    """`quantize_blocks`: kernel(x) -> (codes, inverse_scales).

    Input "x" (M, N); outputs "codes" (M, N) and "inverse_scales", float32
    (ceil(M / rows), ceil(N / columns)).

    Attributes:
        fmt, block, power_of_two: As for `quantize_blocks`.
        dtypes: The names of the input types that are tried.
        ragged: Whether sizes that are no multiple of the block are tried.
        strided: Whether inputs that are not contiguous are tried, too.
    """

    name: ClassVar[str] = "block_quantize"

    fmt: Float8Format
    block: Block = (1, 128)
    power_of_two: bool = True
    dtypes: tuple[str, ...] = ("float32",)
    ragged: bool = True
    strided: bool = False

    def __post_init__(self) -> None:
        check_dtypes(self.dtypes)
        quantize_blocks(np.zeros((1, 1), np.float32), self.fmt, block=self.block)

    def block_of(self) -> Block:
        return self.block

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        codes, inverse = quantize_blocks(
            inputs["x"], self.fmt, block=self.block, power_of_two=self.power_of_two
        )
        return {"codes": codes, "inverse_scales": inverse}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        return several(kernel(given["x"]), ("codes", "inverse_scales"))


@register
@dataclass(frozen=True)
class MxQuantize(_Blocks):
    """`quantize_mx`: kernel(x) -> (codes, scales).

    Input "x" (M, N); outputs "codes" (M, N) and "scales", E8M0 codes (M, ceil(N / 32)).

    Attributes:
        fmt, scale_rounding: As for `quantize_mx`.
        dtypes, ragged, strided: As for `BlockQuantize`.
    """

    name: ClassVar[str] = "mx_quantize"

    fmt: Float8Format
    scale_rounding: str = "floor"
    dtypes: tuple[str, ...] = ("float32",)
    ragged: bool = True
    strided: bool = False

    def __post_init__(self) -> None:
        if self.scale_rounding not in MX_ROUNDINGS:
            raise ValueError(
                f"unknown scale_rounding {self.scale_rounding!r};"
                f" accepted: {', '.join(MX_ROUNDINGS)}"
            )
        check_dtypes(self.dtypes)
        quantize_mx(np.zeros((1, 1), np.float32), self.fmt)

    def block_of(self) -> Block:
        return MX_BLOCK

    def expected(self, inputs: Mapping[str, Array]) -> Arrays:
        codes, scales = quantize_mx(inputs["x"], self.fmt, scale_rounding=self.scale_rounding)
        assert scales.dtype == E8M0.dtype
        return {"codes": codes, "scales": scales}

    def call(self, kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
        return several(kernel(given["x"]), ("codes", "scales"))


def hard_blocks(
    seed: int, shape: tuple[int, int], fmt: Float8Format, block: Block, dtype: np.dtype[Any]
) -> Array:
    """A matrix whose blocks are of all kinds: ordinary, constant, zero, with an outlier, huge,
    subnormal, around a power of two, and with NaN or Inf.

    Args:
        seed: Of the random words.
        shape: Rows and columns, any.
        fmt: The format of the elements.
        block: The blocks' sizes.
        dtype: float32, float16, bfloat16 or float64.
    """
    layout = layout_of(shape, block)
    rows, columns = layout.block
    words = random_words(seed, shape[0] * shape[1])
    values = wide_floats(words[:, 1], -6, 2).reshape(shape)
    sign = np.where(words[:, 0] % np.uint64(2), 1.0, -1.0).reshape(shape).astype(np.float32)
    decisive = amaxes(fmt)
    chosen = random_words(seed + 1, (-(-shape[0] // rows)) * (-(-shape[1] // columns)) + 1)
    index = 0
    with np.errstate(all="ignore"):
        for top in range(0, shape[0], rows):
            for left in range(0, shape[1], columns):
                part = (slice(top, top + rows), slice(left, left + columns))
                kind, word = (int(w) for w in chosen[index])
                values[part] = _block(
                    kind % 10, values[part], sign[part], decisive[word % decisive.size], word
                )
                index += 1
        return values.astype(dtype)


def decisive_blocks(fmt: Float8Format, block: Block, dtype: np.dtype[Any]) -> Array:
    """Rows of blocks with every decisive amax once each, the other elements on the format's edges
    for the scale that follows.
    """
    rows, columns = (1 if size is None else size for size in block)
    pool = amaxes(fmt)
    most = min(160, max(8, (1 << 18) // (rows * columns)))
    pool = pool[np.isfinite(pool)][:: max(1, pool.size // most)]
    edges = np.abs(edge_values(fmt)) / fmt.max_finite
    across = 8 if block[1] is not None else 1
    down = -(-pool.size // across)
    x = np.zeros((down * rows, across * columns), np.float32)
    with np.errstate(all="ignore"):
        for index, amax in enumerate(pool):
            place = index // across * rows, index % across * columns
            size = rows * columns
            step = np.arange(index * 7, index * 7 + size) % edges.size
            part = np.minimum(edges[step], 1).astype(np.float32) * amax
            part[size // 2] = amax
            part[::3] *= -1
            x[place[0] : place[0] + rows, place[1] : place[1] + columns] = part.reshape(
                rows, columns
            )
        return x.astype(dtype)


def _block(kind: int, ordinary: Array, sign: Array, amax: np.float32, word: int) -> Array:
    """One block of a kind; `amax` is a decisive one."""
    if kind == 0:
        return np.zeros_like(ordinary) * sign  # zeros of both signs
    if kind == 1:
        return np.full_like(ordinary, amax)
    if kind == 2:
        return ordinary * np.float32(2.0**-145)  # subnormals
    if kind == 3:
        return ordinary * np.float32(2.0**120)
    block = ordinary.copy()
    flat = block.reshape(-1)
    place = word % flat.size
    if kind == 4:
        flat[place] = 1e4  # an outlier
    elif kind == 5:
        flat[place] = (np.nan, np.inf, -np.inf)[word // 7 % 3]
    elif kind in (6, 7) and np.isfinite(amax):
        largest = np.abs(flat).max()
        flat *= amax / largest / 2
        flat[place] = amax if kind == 6 else -amax
    return flat.reshape(ordinary.shape)
