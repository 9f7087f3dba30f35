"""What `bench_casting` times: our kernels and their peers, with the bytes each must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fp8lab.experiments.kernel_variants import (
    CAST_SETTINGS,
    DECODE_SETTINGS,
    PAIR_SETTINGS,
    ROW_SETTINGS,
    SMALL_TILE_SETTINGS,
    TILE_SETTINGS,
)
from fp8lab.formats import E4M3
from fp8lab.kernels import casting, scaling
from fp8lab.kernels.launch import (
    BLOCK_TILES,
    CastSettings,
    PairSettings,
    RowSettings,
    TileSettings,
)

COLUMNS = 1 << 14
TENSORS, HISTORY = 1000, 1024


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
        name: The operation; ours and its peers have the same.
        kind: Who does it: "fp8lab", "torch", "torch.compile", or the settings that are compared.
        elements: Of the input.
        bytes: That must be read and written once; 0 where memory is not what limits it.
        call: Does it once.
        graph: Whether it is timed in a CUDA graph.
    """

    name: str
    kind: str
    elements: int
    bytes: int
    call: Callable[[], Any]
    graph: bool = False


@dataclass(frozen=True)
class Inputs:
    """Tensors that the large cases share."""

    x: torch.Tensor  # bfloat16, rows of COLUMNS
    wide: torch.Tensor  # float32, the same values
    codes: torch.Tensor
    inverse: torch.Tensor
    scale: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def of(cls, elements: int) -> Inputs:
        """Normal numbers, never zeros: those can be faster."""
        generator = torch.Generator("cuda").manual_seed(0)
        wide = torch.randn(elements // COLUMNS, COLUMNS, generator=generator, device="cuda")
        codes, inverse = scaling.quantize_blocks(wide, E4M3)
        scale = torch.full((1,), 64.0, device="cuda")
        return cls(wide.bfloat16(), wide, codes, inverse, scale, torch.zeros(1, device="cuda"))

    def copy(self) -> Case:
        """The device copy that everything is compared with."""
        target = torch.empty_like(self.x)
        size = 2 * self.x.numel() * self.x.element_size()
        return Case("copy", "device", self.x.numel(), size, lambda: target.copy_(self.x))


def large_cases(elements: int, *, compiled_peers: bool) -> list[Case]:
    """The device copy first, then every kernel and its peers."""
    have = Inputs.of(elements)
    cases = [have.copy(), *_casts(have), *_blocks(have), *_decoding(have), _update()]
    cases += _torch_peers(have)
    if compiled_peers:
        cases += _compiled_peers(have)
    return cases


def peer_cases(elements: int) -> list[Case]:
    """What torch.compile makes, alone: it is compiled for the very shapes that are timed."""
    return _compiled_peers(Inputs.of(elements))


def _casts(have: Inputs) -> list[Case]:
    x, wide, n = have.x, have.wide, have.x.numel()
    options: dict[str, Any] = {"scale": have.scale, "amax_out": have.largest}
    integer = CastSettings(cast_path="integer")
    odd = x.flatten()[:-1]
    shifted = x.flatten()[1:]

    def current() -> torch.Tensor:
        scale = scaling.scale_from_amax(scaling.amax(x), E4M3)
        return casting.quantize(x, E4M3, scale=scale)

    return [
        _ours("cast with amax", n, 3 * n, lambda: casting.quantize(x, E4M3, **options)),
        _ours("cast with amax, float32", n, 5 * n, lambda: casting.quantize(wide, E4M3, **options)),
        _ours(
            "cast with amax, odd size", n - 1, 3 * n, lambda: casting.quantize(odd, E4M3, **options)
        ),
        _ours(
            "cast with amax, not at 16 bytes",
            n - 1,
            3 * n,
            lambda: casting.quantize(shifted, E4M3, **options),
        ),
        _ours(
            "cast with amax, integer operations",
            n,
            3 * n,
            lambda: casting.quantize(x, E4M3, settings=integer, **options),
        ),
        _ours(
            "cast toward zero",
            n,
            3 * n,
            lambda: casting.quantize(x, E4M3, scale=have.scale, rounding="toward_zero"),
        ),
        _ours(
            "cast stochastic",
            n,
            3 * n,
            lambda: casting.quantize(x, E4M3, scale=have.scale, rounding="stochastic", seed=1),
        ),
        _ours(
            "cast with transpose and amax",
            n,
            4 * n,
            lambda: casting.quantize_with_transpose(x, E4M3, **options),
        ),
        _ours("amax", n, 2 * n, lambda: scaling.amax(x)),
        _ours("current scaling (two reads)", n, 5 * n, current),
    ]


def _blocks(have: Inputs) -> list[Case]:
    x, n = have.x, have.x.numel()
    height, width = x.shape
    both = scaling.quantize_blocks_with_transpose
    odd = x[:-8]  # no whole tiles
    square, lines = (128, 128), (1, None)
    return [
        _ours("blocks 1x128, both", n, 4 * n + 8 * (n // 128), lambda: both(x, E4M3)),
        _ours(
            "blocks 1x128, both, not powers of two",
            n,
            4 * n + 8 * (n // 128),
            lambda: both(x, E4M3, power_of_two=False),
        ),
        _ours(
            "blocks 128x128, both",
            n,
            4 * n + 4 * (n // 16384),
            lambda: both(x, E4M3, block=square),
        ),
        _ours(
            "MX, both",
            n,
            4 * n + 2 * (n // 32),
            lambda: scaling.quantize_mx_with_transpose(x, E4M3),
        ),
        _ours(
            "MX, both, odd size",
            odd.numel(),
            4 * odd.numel() + 2 * (n // 32),
            lambda: scaling.quantize_mx_with_transpose(odd, E4M3),
        ),
        _ours(
            "blocks 1x128, both, odd size",
            odd.numel(),
            4 * odd.numel() + 8 * (n // 128),
            lambda: both(odd, E4M3),
        ),
        _ours(
            "blocks 1x128, one",
            n,
            3 * n + 4 * (n // 128),
            lambda: scaling.quantize_blocks(x, E4M3),
        ),
        _ours(
            "row-wise",
            n,
            3 * n + 4 * height,
            lambda: scaling.quantize_blocks(x, E4M3, block=lines, power_of_two=False),
        ),
        _ours(
            "row-wise, both (two reads)",
            n,
            6 * n + 4 * (height + width),
            lambda: both(x, E4M3, block=lines, power_of_two=False),
        ),
    ]


def _decoding(have: Inputs) -> list[Case]:
    codes, n = have.codes, have.codes.numel()
    return [
        _ours("dequantise", n, 5 * n, lambda: casting.dequantize(codes, inverse_scale=have.scale)),
        _ours(
            "dequantise blocks 1x128",
            n,
            5 * n + 4 * (n // 128),
            lambda: scaling.dequantize_blocks(codes, have.inverse),
        ),
        _ours(
            "requantise",
            n,
            2 * n,
            lambda: casting.requantize(codes, E4M3, inverse_scale=have.scale, scale=have.scale),
        ),
    ]


def _update() -> Case:
    history = torch.rand(HISTORY, TENSORS, device="cuda")
    state = scaling.DelayedScalingState(torch.ones(TENSORS, device="cuda"), history)
    # An amax that is never 0, so that every history rolls.
    seen = torch.rand(TENSORS, device="cuda") + 1
    call = partial(scaling.update_delayed_, state, E4M3, group_amax=seen)
    return Case("scale update", "fp8lab", HISTORY * TENSORS, 0, call, graph=True)


def _torch_peers(have: Inputs) -> list[Case]:
    x, n = have.x, have.x.numel()
    fp8 = torch.float8_e4m3fn

    def cast() -> Any:
        return x.abs().amax(), x.to(fp8)

    def transpose() -> Any:
        codes = x.to(fp8)
        return x.abs().amax(), codes, codes.t().contiguous()

    return [
        Case("cast with amax", "torch", n, 3 * n, cast),
        Case("cast with transpose and amax", "torch", n, 4 * n, transpose),
        Case("amax", "torch", n, 2 * n, lambda: x.abs().amax()),
        Case("dequantise", "torch", n, 5 * n, lambda: have.codes.to(torch.float32)),
    ]


def _compiled_peers(have: Inputs) -> list[Case]:
    """What torch.compile makes of the same recipes, as a library would write them."""
    x, n = have.x, have.x.numel()
    height, width = x.shape
    fp8, top = torch.float8_e4m3fn, E4M3.max_finite

    def scaled(v: torch.Tensor, dim: int | tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        scale = top / v.abs().amax(dim, keepdim=True).float().clamp(min=1e-12)
        return (v.float() * scale).clamp(-top, top).to(fp8), 1.0 / scale

    def cast(v: torch.Tensor) -> Any:
        return v.abs().amax(), (v.float() * have.scale).clamp(-top, top).to(fp8)

    def transpose(v: torch.Tensor) -> Any:
        codes = (v.float() * have.scale).clamp(-top, top).to(fp8)
        return v.abs().amax(), codes, codes.t().contiguous()

    def blocks(v: torch.Tensor) -> Any:
        along = scaled(v.view(height, width // 128, 128), 2)
        down = scaled(v.view(height // 128, 128, width), 1)
        return along, (down[0].view(height, width).t().contiguous(), down[1])

    def rows(v: torch.Tensor) -> Any:
        return scaled(v, 1)

    return [
        Case(name, "torch.compile", n, size, _bound(torch.compile(function), x))
        for name, size, function in (
            ("cast with amax", 3 * n, cast),
            ("cast with transpose and amax", 4 * n, transpose),
            ("blocks 1x128, both", 4 * n + 8 * (n // 128), blocks),
            ("row-wise", 3 * n + 4 * height, rows),
        )
    ]


def small_cases() -> list[Case]:
    """The cast with amax from 2**10 to 2**20 elements, ours and torch's."""
    cases = []
    for power in range(10, 21, 2):
        n = 1 << power
        x = torch.randn(n, device="cuda").bfloat16()
        scale = torch.full((1,), 64.0, device="cuda")
        largest = torch.zeros(1, device="cuda")
        cases.append(_ours("cast with amax", n, 3 * n, _small_cast(x, scale, largest)))
        cases.append(Case("cast with amax", "torch", n, 3 * n, _small_torch(x)))
        cases.append(_ours("dequantise", n, 5 * n, _small_decode(casting.quantize(x, E4M3), scale)))
    return cases


def tuning_cases(elements: int) -> list[Case]:
    """The device copy, then every candidate setting of each kind of kernel."""
    have = Inputs.of(elements)
    x, codes = have.x, have.codes
    options: dict[str, Any] = {"scale": have.scale, "amax_out": have.largest}
    tried: list[tuple[str, float, Any, Callable[..., Any]]] = []
    for flat in CAST_SETTINGS:
        tried += [
            ("cast with amax", 3, flat, partial(casting.quantize, x, E4M3, **options)),
            ("requantise", 2, flat, partial(casting.requantize, codes, E4M3, scale=have.scale)),
        ]
    for decode in DECODE_SETTINGS:
        call = partial(casting.dequantize, codes, inverse_scale=have.scale)
        tried += [
            ("dequantise", 5, decode, call),
            ("dequantise", 5, replace(decode, cast_path="integer"), call),
        ]
    both = scaling.quantize_blocks_with_transpose
    for tile in (*SMALL_TILE_SETTINGS, *TILE_SETTINGS):
        by_tile = scaling.BlockSettings(tiles=tile)
        decode_blocks = partial(scaling.dequantize_blocks, codes, have.inverse)
        tried += [
            ("transpose", 4, tile, partial(casting.quantize_with_transpose, x, E4M3, **options)),
            ("amax of lines", 2, tile, partial(scaling.amax_of_lines, x)),
            ("MX, both", 4.0625, by_tile, partial(scaling.quantize_mx_with_transpose, x, E4M3)),
            ("dequantise blocks 1x128", 5.03125, tile, decode_blocks),
        ]
        if tile in TILE_SETTINGS:
            tried += [
                ("blocks 1x128, both", 4.0625, by_tile, partial(both, x, E4M3)),
                ("blocks 128x128, both", 4, by_tile, partial(both, x, E4M3, block=(128, 128))),
                ("blocks 1x128", 3.03125, by_tile, partial(scaling.quantize_blocks, x, E4M3)),
            ]
    for pairs in PAIR_SETTINGS:
        tile = TileSettings(pairs=(pairs,))
        by_pairs = scaling.BlockSettings(tiles=tile)
        tried += [
            ("transpose", 4, tile, partial(casting.quantize_with_transpose, x, E4M3, **options)),
            ("MX, both", 4.0625, by_pairs, partial(scaling.quantize_mx_with_transpose, x, E4M3)),
        ]
        if pairs.columns >= 128:
            tried.append(("blocks 1x128, both", 4.0625, by_pairs, partial(both, x, E4M3)))
    for row in ROW_SETTINGS:
        by_row = partial(scaling.quantize_blocks, x, E4M3, block=(1, None), power_of_two=False)
        tried.append(("row-wise", 3, scaling.BlockSettings(rows=row), by_row))
    return [
        have.copy(),
        *(
            Case(
                name, _short(chosen), elements, int(each * elements), partial(call, settings=chosen)
            )
            for name, each, chosen, call in tried
        ),
    ]


def _short(settings: Any) -> str:
    if isinstance(settings, scaling.BlockSettings):
        tile = settings.tiles != BLOCK_TILES or settings.rows == RowSettings()
        return _short(settings.tiles if tile else settings.rows)
    if isinstance(settings, TileSettings):
        if settings.pairs:
            return "pairs " + _of_tile(settings.pairs[0])
        return _of_tile(settings, f" band{settings.band}")
    path = "" if settings.cast_path == "auto" else f" {settings.cast_path}"
    return f"{settings.block} w{settings.num_warps}{path}"


def _of_tile(settings: TileSettings | PairSettings, order: str = "") -> str:
    limit = f" r{settings.registers}" if settings.registers else ""
    return f"{settings.rows}x{settings.columns} w{settings.num_warps}{order}{limit}"


def _ours(name: str, elements: int, size: int, call: Callable[[], Any]) -> Case:
    return Case(name, "fp8lab", elements, size, call)


def _bound(function: Callable[..., Any], x: torch.Tensor) -> Callable[[], Any]:
    return lambda: function(x)


def _small_cast(
    x: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor
) -> Callable[[], torch.Tensor]:
    return lambda: casting.quantize(x, E4M3, scale=scale, amax_out=largest)


def _small_torch(x: torch.Tensor) -> Callable[[], Any]:
    return lambda: (x.abs().amax(), x.to(torch.float8_e4m3fn))


def _small_decode(codes: torch.Tensor, scale: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: casting.dequantize(codes, inverse_scale=scale)
