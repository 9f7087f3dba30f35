"""The blocks that are timed: every variant that runs here takes steps, and names are told apart."""

from __future__ import annotations

import pytest
import torch

from fp8lab.errors import UserError
from fp8lab.experiments.bench_blocks import chosen_variants, kind_of, line_of
from fp8lab.experiments.block_cases import VARIANTS, Shape, Variant, blocks_step, model_step

TINY = Shape(layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, batch=2, length=16)
OURS = [variant for variant in VARIANTS if variant.stack in ("torch", "fp8lab")]


@pytest.mark.parametrize("variant", OURS, ids=lambda variant: variant.name)
def test_a_step_of_the_blocks_repeats(variant: Variant) -> None:
    step = blocks_step(variant, TINY, device="cpu", compiled=False)
    first, second = step(), step()
    assert bool(first.isfinite().all())
    assert first.abs().sum() > 0
    # Delayed scales move on; everything else stays.
    assert torch.equal(first, second) == (variant.recipe != "delayed")


@pytest.mark.parametrize("variant", OURS, ids=lambda variant: variant.name)
def test_a_step_of_the_model_lowers_the_loss(variant: Variant) -> None:
    step = model_step(variant, TINY, device="cpu", compiled=False)
    losses = [float(step()) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_kernels_are_told_apart() -> None:
    for kernel, kind in (
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "product"),
        ("matmul_kernel", "product"),
        ("quantize_tiles_kernel", "cast"),
        ("amax_kernel", "cast"),
        ("pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("adamw_kernel", "optimizer"),
        ("triton_poi_fused_mul_silu_3", "rest"),
    ):
        assert kind_of(kernel) == kind


def test_variants_by_name() -> None:
    found = chosen_variants("fp8lab delayed")
    assert [variant.name for variant in found] == ["torch bf16", "fp8lab delayed"]
    with pytest.raises(UserError, match="unknown variant 'te delayed'; accepted: torch bf16"):
        chosen_variants("te delayed")
    row = {"group": "blocks", "variant": "x", "ms": 50.0, "tokens_per_second": 9, "over_bf16": 1.5}
    assert "1.500 of BF16 (host 20.0 ms)" in line_of(row | {"host_ms": 20.0})
