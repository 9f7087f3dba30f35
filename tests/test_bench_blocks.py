"""The blocks that are timed: every variant that runs here takes steps, and names are told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fp8lab.errors import UserError
from fp8lab.experiments import bench_blocks, new_rows
from fp8lab.experiments.bench_blocks import chosen_variants, kind_of, line_of
from fp8lab.experiments.block_cases import VARIANTS, Shape, Variant, blocks_step, model_step
from fp8lab.experiments.commands import exit_code
from fp8lab.records import Row, read_rows

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
    line = line_of(row | {"host_ms": 20.0, "graph": True})
    assert "1.500 of BF16 (host 20.0 ms)" in line
    assert line.split()[:3] == ["blocks", "x", "graph"]


def test_ratios_are_to_bf16_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[str, Callable[[], None]] = dict.fromkeys(
        ("torch bf16", "fp8lab delayed"), lambda: None
    )
    found = iter([8.0, 4.0, 6.0, 2.0, 7.0, 5.0])
    monkeypatch.setattr(bench_blocks, "_milliseconds", lambda step: next(found))
    monkeypatch.setattr(bench_blocks, "_host_milliseconds", lambda step: 1.0)
    rows = list(bench_blocks.timed(steps, TINY, 3))
    assert [(row["variant"], row["ms"], row["over_bf16"]) for row in rows] == [
        ("torch bf16", 7.0, 1.0),
        ("fp8lab delayed", 4.0, 2.0),
    ]
    assert rows[1]["over_bf16_range"] == [1.4, 3.0]


def test_an_unknown_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="unknown group 'layers'; accepted: blocks, model"):
        bench_blocks.main(["--groups", "blocks,layers", "--out", str(tmp_path)])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Rows in place of measurements; an exception in the list comes after the first one."""
    raised: list[BaseException] = []

    def measure(chosen: list[Variant], *, rounds: int, groups: list[str]) -> Iterator[Row]:
        for group in groups:
            for variant in chosen:
                row: Row = {"group": group, "graph": False, "variant": variant.name, "ms": 1.0}
                yield row | {"tokens_per_second": 1, "over_bf16": 1.0, "host_ms": 1.0}
                if raised:
                    raise raised[0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(new_rows, "environment", lambda device: {"device": device})
    monkeypatch.setattr(bench_blocks, "measure", measure)
    return raised


@pytest.mark.usefixtures("measured")
def test_groups_in_any_order_have_one_file(tmp_path: Path) -> None:
    for groups in ("model,blocks", "blocks,model"):
        assert exit_code(bench_blocks.main, ["--groups", groups, "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["blocks-model.jsonl"]
    assert exit_code(bench_blocks.main, ["--groups", "blocks,blocks", "--out", str(tmp_path)]) == 2


def test_fewer_rows_do_not_replace_more(
    tmp_path: Path, measured: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path)]
    assert exit_code(bench_blocks.main, words) == 0
    whole = (tmp_path / "blocks.jsonl").read_bytes()
    one = [*words, "--only", "torch bf16"]
    assert exit_code(bench_blocks.main, one) == 0
    assert "it stays as it is, and they are in" in capsys.readouterr().out
    measured.append(KeyboardInterrupt())
    assert exit_code(bench_blocks.main, one) == 130
    beside = tmp_path / "blocks.partial-2.jsonl"
    assert capsys.readouterr().err == (
        f"interrupted; rows so far: 1, in {beside}; {tmp_path / 'blocks.jsonl'} is as it was\n"
    )
    assert (tmp_path / "blocks.jsonl").read_bytes() == whole
    for path in (beside, tmp_path / "blocks.partial.jsonl"):
        assert [row.get("variant") for row in read_rows(path)] == [None, "torch bf16"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("variant", OURS, ids=lambda variant: variant.name)
def test_a_graph_of_a_step_has_its_bits(variant: Variant) -> None:
    for make, calls in ((blocks_step, 1), (model_step, 5)):
        plain = make(variant, TINY, compiled=False)
        graphed = make(variant, TINY, compiled=False, graph=True)
        # Taken before the capture: by `captured_call` at once, by `GraphedStep` call by call.
        ours = make is model_step and variant.stack == "fp8lab"
        for _ in range(0 if ours else 3):
            plain()
        for _ in range(calls):
            assert torch.equal(plain(), graphed())
