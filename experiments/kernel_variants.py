"""Every cast and scaling kernel once, on small ragged inputs: to compile them, or to watch them.

    python -m fp8lab.experiments.kernel_variants --jobs 16
    compute-sanitizer --tool memcheck python -m fp8lab.experiments.kernel_variants
    compute-sanitizer --tool racecheck python -m fp8lab.experiments.kernel_variants

With several jobs, processes share the calls: Triton keeps what they compile on disk, so that what
runs next finds it there; with --settings, so do the tests, which call it before they begin. On a
machine without a GPU, set TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, product
from multiprocessing import get_context
from typing import Any

import torch

from fp8lab.errors import UserError
from fp8lab.experiments.commands import Parser, check_at_least, check_pattern, exit_code
from fp8lab.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8lab.kernels import casting, scaling, swiglu
from fp8lab.kernels.launch import (
    CastSettings,
    DecodeSettings,
    PairSettings,
    RowSettings,
    TileSettings,
    interpreted,
)
from fp8lab.kernels.scaling_rules import Block

Call = tuple[str, Callable[[], Any]]

# Whole tiles, and none.
SETTING_SHAPES = ((512, 1024), (300, 1021), (1023, 272))

# One line each: the settings under which every result must have the same bits.
CAST_SETTINGS = tuple(
    CastSettings(block, warps) for block, warps in ((1024, 4), (4096, 8), (8192, 4), (8192, 8))
)
DECODE_SETTINGS = tuple(
    DecodeSettings(block, warps) for block, warps in ((1024, 4), (4096, 4), (4096, 8), (8192, 8))
)
TILE_SETTINGS = tuple(
    TileSettings(rows, columns, warps, band, registers)
    for rows, columns, warps, band, registers in (
        (128, 128, 8, 1, None),
        (128, 128, 8, 8, None),
        (128, 128, 8, 1, 96),
        (128, 128, 16, 1, None),
        (128, 128, 16, 1, 64),
        (256, 128, 16, 4, None),
        (128, 256, 16, 1, None),
    )
)
# For what has no blocks of 128.
SMALL_TILE_SETTINGS = tuple(
    TileSettings(rows, columns, warps, band)
    for rows, columns, warps, band in (
        (64, 64, 4, 1),
        (32, 128, 4, 1),
        (64, 128, 4, 1),
        (64, 128, 8, 1),
        (128, 64, 4, 1),
        (128, 64, 4, 8),
        (128, 64, 8, 1),
        (256, 64, 8, 1),
    )
)
# For the kernel that takes bfloat16 by pairs.
PAIR_SETTINGS = tuple(
    PairSettings(rows, columns, warps, registers)
    for rows, columns, warps, registers in (
        (256, 64, 4, None),
        (128, 64, 2, None),
        (128, 64, 4, None),
        (64, 128, 4, None),
        (128, 128, 4, None),
        (128, 128, 8, None),
        (128, 128, 8, 80),
        (256, 128, 8, 96),
        (256, 128, 8, 128),
        (256, 128, 16, None),
        (512, 64, 8, None),
    )
)
ROW_SETTINGS = tuple(
    RowSettings(block, warps, longest=longest)
    for block, warps, longest in (
        (8192, 8, 16384),
        (4096, 4, 16384),
        (8192, 16, 16384),
        (1024, 4, 1024),
    )
)


def launches(device: str) -> Iterator[Call]:
    """(name, call) for each kernel and the ways it is compiled."""
    generator = torch.Generator(device).manual_seed(0)
    ragged = torch.randn(150, 271, generator=generator, device=device)
    even = torch.randn(256, 512, generator=generator, device=device)
    for x, dtype in product((ragged, even), (torch.float32, torch.bfloat16, torch.float16)):
        for name, call in _of_input(x.to(dtype)):
            yield f"{name} {tuple(x.shape)} {dtype}", call
    yield from _of_codes(even)
    yield from _of_swiglu(device)
    state = scaling.DelayedScalingState.fresh(1500, (11,), device=device)
    group = torch.ones(11, device=device)
    yield "update", partial(scaling.update_delayed, state, E4M3, group_amax=group)
    yield (
        "update in place",
        partial(scaling.update_delayed_, state, E5M2, algorithm="most_recent"),
    )
    for preset, warm_up in product(("torchao", "ms_amp"), (False, True)):
        step = partial(scaling.step_delayed, state, group, E4M3, preset=preset, warm_up=warm_up)
        yield f"step {preset} {warm_up}", step
    yield "step in place", partial(scaling.step_delayed_, state, group, E4M3, preset="ms_amp")
    yield "step merged", partial(scaling.step_delayed, state, group, E4M3)


def settings_launches(device: str) -> Iterator[Call]:
    """(name, call) for each launch setting, on what the tests that compare settings cast."""
    for shape, dtype in product(SETTING_SHAPES, (torch.float32, torch.bfloat16)):
        x = torch.ones(shape, dtype=dtype, device=device)
        for name, call in _of_settings(x):
            yield f"{name} {shape} {dtype}", call


def _of_settings(x: torch.Tensor) -> Iterator[Call]:
    both = scaling.quantize_blocks_with_transpose
    both_mx = scaling.quantize_mx_with_transpose
    options: dict[str, Any] = {"scale": 0.7, "amax_out": torch.zeros(1, device=x.device)}
    for tile in (*SMALL_TILE_SETTINGS, *TILE_SETTINGS):
        how = scaling.BlockSettings(tiles=tile)
        yield (
            "transpose",
            partial(casting.quantize_with_transpose, x, E4M3, settings=tile, **options),
        )
        yield "MX, both", partial(both_mx, x, E4M3, settings=how)
        yield "MX", partial(scaling.quantize_mx, x, E4M3, settings=how)
        yield "blocks", partial(scaling.quantize_blocks, x, E4M3, block=(1, 64), settings=how)
        if tile in TILE_SETTINGS:
            for power in (True, False):
                told: dict[str, Any] = {"power_of_two": power, "settings": how}
                yield "1x128", partial(both, x, E4M3, block=(1, 128), **told)
                yield "128x128", partial(both, x, E5M2, block=(128, 128), **told)
                yield "lines", partial(both, x, E4M3, block=(1, None), **told)
    if x.dtype == torch.bfloat16:
        whole = [p for p in PAIR_SETTINGS if not (x.shape[0] % p.rows or x.shape[1] % p.columns)]
        for pairs in whole:
            tile = TileSettings(pairs=(pairs,))
            by_pairs = scaling.BlockSettings(tiles=tile)
            length = min(128, pairs.columns, pairs.rows)
            yield (
                "pairs",
                partial(casting.quantize_with_transpose, x, E4M3, settings=tile, **options),
            )
            yield "pairs, MX", partial(both_mx, x, E4M3, settings=by_pairs)
            yield "pairs, blocks", partial(both, x, E4M3, block=(1, length), settings=by_pairs)


def _of_input(x: torch.Tensor) -> Iterator[Call]:
    largest = torch.zeros(1, device=x.device)
    scale = torch.full((1,), 0.7, device=x.device)
    flat = x.flatten()
    options: dict[str, Any] = {"scale": scale, "amax_out": largest}
    for fmt in (E4M3, E5M2):
        yield f"cast {fmt.name}", partial(casting.quantize, flat, fmt, **options)
        with_transpose = partial(casting.quantize_with_transpose, x, fmt, **options)
        yield f"transpose {fmt.name}", with_transpose
    yield "amax", partial(scaling.amax, flat)
    both, one = scaling.quantize_blocks_with_transpose, scaling.quantize_blocks
    for block, power in product(((1, 128), (128, 128), (1, None)), (True, False)):
        yield f"both {block} {power}", partial(both, x, E4M3, block=block, power_of_two=power)
    shapes: tuple[Block, ...] = ((1, 128), (128, 1), (1, None), (None, 1))
    for shape in shapes:
        yield f"blocks {shape}", partial(one, x, E4M3, block=shape)
    yield "MX", partial(scaling.quantize_mx_with_transpose, x, E4M3)
    if x.dtype == torch.float32:
        yield from _of_roundings(x)


def _of_roundings(x: torch.Tensor) -> Iterator[Call]:
    for fmt, rounding in product((E4M3, E5M2, E4M3FNUZ, E5M2FNUZ), casting.ROUNDINGS):
        options: dict[str, Any] = {"rounding": rounding}
        if rounding == "stochastic":
            options["seed"] = 1
        integer = CastSettings(cast_path="integer")
        yield (
            f"cast {fmt.name} {rounding}",
            partial(casting.quantize, x.flatten(), fmt, settings=integer, **options),
        )
    yield "MX stochastic", partial(scaling.quantize_mx, x, E4M3, rounding="stochastic", seed=1)


def _of_codes(x: torch.Tensor) -> Iterator[Call]:
    one = torch.ones(1, device=x.device)
    for fmt in (E4M3, E5M2, E4M3FNUZ):
        codes, inverse = scaling.quantize_blocks(x, fmt)
        yield f"decode {fmt.name}", partial(casting.dequantize, codes, inverse_scale=one)
        yield f"decode blocks {fmt.name}", partial(scaling.dequantize_blocks, codes, inverse)
        yield (
            f"requantise {fmt.name}",
            partial(casting.requantize, codes, E5M2, inverse_scale=one, scale=one),
        )
        elements, shared = scaling.quantize_mx(x, fmt)
        yield f"decode MX {fmt.name}", partial(scaling.dequantize_mx, elements, shared)
    largest = scaling.amax(x, block=(1, None))
    yield "scales", partial(scaling.scale_from_amax, largest, E4M3)
    yield "torchao's scales", partial(scaling.current_scale, largest, E4M3, preset="torchao")
    yield "MX scales", partial(scaling.mx_scale, largest, E4M3)


def _of_swiglu(device: str) -> Iterator[Call]:
    scale = torch.full((1,), 0.7, device=device)
    options: dict[str, Any] = {"scale": scale, "amax_out": torch.zeros(1, device=device)}
    for (rows, columns), dtype in product(
        ((150, 271), (256, 384)), (torch.bfloat16, torch.float32)
    ):
        gate_up = torch.ones(rows, 2 * columns, dtype=dtype, device=device)
        dh = torch.ones(rows, columns, dtype=dtype, device=device)
        name = f"SwiGLU {rows} x {columns} {dtype}"
        yield name, partial(swiglu.swiglu, gate_up)
        yield f"{name}, gradients", partial(swiglu.swiglu_grad, dh, gate_up)
        for given in (None, dh):
            cast = partial(swiglu.quantize_swiglu, gate_up, E4M3, dh=given, **options)
            yield f"{name}, one scale", cast
            if given is None or columns % 128 == 0:
                blocks = partial(swiglu.quantize_swiglu_blocks, gate_up, E4M3, dh=given)
                yield f"{name}, blocks", blocks


def run(share: int = 0, shares: int = 1, only: str = "", *, settings: bool = False) -> int:
    """Make every `shares`-th call, from call `share` on; return how many that were.

    Args:
        only: A regular expression: what is searched for in a call's name.
        settings: Whether to make the calls of every launch setting too.
    """
    device = "cpu" if interpreted() else "cuda"
    made = 0
    calls = chain(launches(device), settings_launches(device) if settings else ())
    for place, (name, call) in enumerate(calls):
        if place % shares == share and re.search(only, name):
            call()
            made += 1
    if device == "cuda":
        torch.cuda.synchronize()
    return made


def in_processes(function: Callable[[int, int], int], jobs: int) -> int:
    """The sum of function(0, jobs), function(1, jobs), ..., each in a process of its own."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return sum(pool.map(function, range(jobs), [jobs] * jobs))


def main(given: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--only", default="", help="regular expression of names, for one process")
    parser.add_argument("--settings", action="store_true", help="every launch setting too")
    arguments = parser.parse_args(given)
    check_at_least(arguments.jobs, 1, "--jobs")
    check_pattern(arguments.only, "--only")
    if arguments.only and arguments.jobs > 1:
        raise UserError(f"--only is for one process; --jobs is {arguments.jobs}")
    if not interpreted() and not torch.cuda.is_available():
        raise UserError("kernel_variants needs a CUDA device; without one, set TRITON_INTERPRET=1")
    every = partial(run, settings=arguments.settings)
    if arguments.jobs == 1:
        made = every(only=arguments.only)
    else:
        made = in_processes(every, min(arguments.jobs, os.cpu_count() or 1))
    if not made:
        raise UserError(f"--only is {arguments.only!r}, which is in no call's name")
    print(f"{made} calls")


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
