"""The SwiGLU kernels against the oracle: results, gradients, and their codes in both layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.emulation import casting, scaling
from fp8lab.emulation import swiglu as oracle
from fp8lab.formats import E4M3, E5M2
from fp8lab.kernels import swiglu as kernels
from fp8lab.kernels.casting_rules import cast_rule
from fp8lab.kernels.launch import PairSettings, TileSettings
from fp8lab.kernels.scaling_rules import scale_rule
from fp8lab.kernels.swiglu_launch import checked
from fp8lab.testing import assert_bits_equal, compiled_ptx, to_numpy
from fp8lab.testing.ptx import spilled_bytes
from fp8lab.testing.values import special_values

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECIAL = [float(value) for value in special_values()]


def operands(
    device: str, dtype: torch.dtype, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up side by side, and dh; special values meet in the first rows."""
    generator = torch.Generator().manual_seed(rows)
    gate_up = torch.randn(rows, 2 * columns, generator=generator) * 6
    dh = torch.randn(rows, columns, generator=generator)
    special = torch.tensor(SPECIAL[:columns])
    gate_up[0, : special.numel()] = special
    gate_up[1, columns : columns + special.numel()] = special
    dh[2, : special.numel()] = special
    return gate_up.to(dtype).to(device), dh.to(dtype).to(device)


def expected(gate_up: torch.Tensor, dh: torch.Tensor | None) -> Any:
    gate, up = np.split(to_numpy(gate_up), 2, axis=1)
    if dh is None:
        return oracle.swiglu(gate, up)
    return np.concatenate(oracle.swiglu_grad(to_numpy(dh), gate, up), axis=1)


def check_one_scale(
    gate_up: torch.Tensor, dh: torch.Tensor | None, fmt: Any = E4M3, **options: Any
) -> None:
    result = expected(gate_up, dh)
    amax = torch.zeros(1, device=gate_up.device)
    values = torch.empty(result.shape, dtype=gate_up.dtype, device=gate_up.device)
    codes, codes_t = kernels.quantize_swiglu(
        gate_up, fmt, dh=dh, scale=0.7, amax_out=amax, values_out=values, **options
    )
    wanted = casting.quantize(result, fmt, scale=0.7)
    assert_bits_equal(codes, wanted)
    if codes_t is not None:
        assert_bits_equal(codes_t, wanted.T)
    assert_bits_equal(values, result)
    assert_bits_equal(amax.reshape(()), scaling.amax(result))


def check_blocks(
    gate_up: torch.Tensor, dh: torch.Tensor | None, *, power_of_two: bool = True, **options: Any
) -> None:
    result = expected(gate_up, dh)
    found = kernels.quantize_swiglu_blocks(
        gate_up, E4M3, dh=dh, power_of_two=power_of_two, **options
    )
    block = (1, options.get("length", 128))
    for values, pair in ((result, found[:2]), (np.ascontiguousarray(result.T), found[2:])):
        wanted = scaling.quantize_blocks(values, E4M3, block=block, power_of_two=power_of_two)
        for actual, right in zip(pair, wanted, strict=True):
            assert_bits_equal(actual, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(37, 50), (128, 64)], ids=str)
def test_results_and_one_scale(dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    gate_up, dh = operands(device, dtype, *shape)
    assert_bits_equal(kernels.swiglu(gate_up), expected(gate_up, None))
    assert_bits_equal(kernels.swiglu_grad(dh, gate_up), expected(gate_up, dh))
    check_one_scale(gate_up, None)
    check_one_scale(gate_up, dh, E5M2)
    check_one_scale(gate_up, dh, transposed=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks(dtype: torch.dtype, device: str) -> None:
    gate_up, dh = operands(device, dtype, 130, 128)
    check_blocks(gate_up, None)
    check_blocks(gate_up, dh)
    check_blocks(gate_up, dh, power_of_two=False, length=32)
    check_blocks(operands(device, dtype, 37, 150)[0], None)


def test_rows_any_distance_apart_and_empty_ones(device: str) -> None:
    gate_up, dh = operands(device, torch.bfloat16, 80, 48)
    check_one_scale(gate_up[::2], dh[::2])
    assert kernels.swiglu(gate_up[:0]).shape == (0, 48)
    codes, codes_t = kernels.quantize_swiglu(gate_up[:0], E4M3, dh=dh[:0])
    assert codes.shape == (0, 96)
    assert codes_t is not None
    assert codes_t.shape == (96, 0)


def test_what_is_refused(device: str) -> None:
    gate_up, dh = operands(device, torch.bfloat16, 16, 64)
    with pytest.raises(ValueError, match="an even number of columns"):
        kernels.swiglu(gate_up[:, :127])
    with pytest.raises(ValueError, match="dh has shape"):
        kernels.swiglu_grad(dh[:8], gate_up)
    with pytest.raises(TypeError, match="dh has dtype"):
        kernels.swiglu_grad(dh.float(), gate_up)
    with pytest.raises(TypeError, match="gate_up has dtype"):
        kernels.swiglu(gate_up.double())
    with pytest.raises(ValueError, match="length is 96"):
        kernels.quantize_swiglu_blocks(gate_up, E4M3, length=96)
    with pytest.raises(ValueError, match="multiples of 128"):
        kernels.quantize_swiglu_blocks(gate_up, E4M3, dh=dh)
    with pytest.raises(ValueError, match="values_out has shape"):
        kernels.quantize_swiglu(gate_up, E4M3, values_out=gate_up)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_compiled_pairs(gradients: bool, blocks: bool, tmp_path: Path) -> None:
    """Accesses 16 bytes wide; one approximate reciprocal an element; nearly nothing is spilled."""
    tiles = {
        (False, False): kernels.ONE_SCALE,
        (True, False): kernels.ONE_SCALE_GRAD,
        (False, True): kernels.BLOCKS,
        (True, True): kernels.BLOCKS_GRAD,
    }[gradients, blocks]
    chosen = tiles.pairs[0]
    signature = {"gate_up": "*bf16", "codes": "*u8", "codes_t": "*u8"}
    unused = ["values", *(() if gradients else ("dh",))]
    if gradients:
        signature["dh"] = "*bf16"
    if blocks:
        signature |= {"kept": "*fp32", "kept_t": "*fp32"}
        unused += ["scale", "amax_out"]
    else:
        signature |= {"scale": "*fp32", "amax_out": "*fp32"}
        unused += ["kept", "kept_t"]
    sizes = ("width", "stride", "stride_dh", "stride_t", "across", "down_t")
    signature |= dict.fromkeys(sizes, "i32")
    ptx = compiled_ptx(
        "fp8lab.kernels.swiglu_pairs_device:swiglu_pairs_kernel",
        {**signature, "height": "i32"},
        {
            **dict.fromkeys(unused),
            "SCALING": scale_rule(E4M3, power_of_two=True) if blocks else None,
            "BLOCK": 128 if blocks else 1,
            "FLOAT8": "fp8e4nv",
            "ROWS": chosen.rows,
            "COLUMNS": chosen.columns,
        },
        aligned=signature,
        num_warps=chosen.num_warps,
        registers=chosen.registers,
    )
    each = chosen.rows * chosen.columns // (32 * chosen.num_warps)  # elements a thread
    assert ptx.count("ld.global.v4.b32") == each // 8 * (3 if gradients else 2)
    assert ptx.count("rcp.approx.ftz.f32") == each
    assert "ex2.approx" not in ptx
    assert spilled_bytes(ptx, tmp_path) <= 64


def whole(rows: int = 512, columns: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands whose gates are every bfloat16."""
    gate_up, dh = operands("cuda", torch.bfloat16, rows, columns)
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    gates = words.view(torch.bfloat16).to(gate_up.device)
    gate_up[:, :columns] = gates.repeat(rows * columns // gates.numel()).view(rows, columns)
    return gate_up, dh


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [False, True])
def test_every_gate_on_the_card(gradients: bool) -> None:
    """By pairs and by tiles."""
    gate_up, dh = whole()
    given = dh if gradients else None
    check_one_scale(gate_up, given)
    check_one_scale(gate_up, given, settings=TileSettings(64, 64, 8))
    check_blocks(gate_up, given)
    check_blocks(gate_up, given, settings=TileSettings(128, 128, 16))
    check_blocks(gate_up, given, power_of_two=False)
    check_blocks(gate_up, given, length=64)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "chosen",
    [
        PairSettings(256, 128, 8, 128),
        PairSettings(256, 128, 16),
        PairSettings(128, 128, 8),
        PairSettings(128, 64, 4),
        PairSettings(64, 128, 4),
    ],
    ids=str,
)
def test_every_setting_on_the_card(chosen: PairSettings) -> None:
    gate_up, dh = whole()
    settings = TileSettings(128, 128, 16, pairs=(chosen,))
    length = min(128, chosen.rows, chosen.columns)
    for given in (None, dh):
        check_one_scale(gate_up, given, settings=settings)
        check_blocks(gate_up, given, settings=settings, length=length)


@pytest.mark.gpu
def test_pairs_serve_what_layers_have() -> None:
    gate_up, dh = operands("cuda", torch.bfloat16, 256, 384)
    work = checked(gate_up, dh)
    rule = cast_rule(E4M3, gate_up.device)
    powers = scale_rule(E4M3, power_of_two=True)
    assert work.pairs(rule, None, 1, kernels.ONE_SCALE_GRAD) is not None
    assert work.pairs(rule, powers, 128, kernels.BLOCKS_GRAD) is not None


@pytest.mark.gpu
def test_a_million_float32_on_the_card() -> None:
    """Every exponent of the sigmoid's denominator: its reciprocal is the nearest one."""
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(1024, 2048, generator=generator)
    gate_up[:, :1024] = torch.empty(1024, 1024).uniform_(-90, 35, generator=generator)
    gate_up, dh = gate_up.cuda(), torch.randn(1024, 1024, generator=generator).cuda()
    assert_bits_equal(kernels.swiglu(gate_up), expected(gate_up, None))
    assert_bits_equal(kernels.swiglu_grad(dh, gate_up), expected(gate_up, dh))
