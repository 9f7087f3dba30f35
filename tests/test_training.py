"""One run: rows repeat, the loss falls, divergence is noticed, the optimizer is the oracle's."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8lab.data import Corpus, load_corpus
from fp8lab.emulation.adamw import adamw
from fp8lab.errors import UserError
from fp8lab.models import MlpConfig, Transformer, TransformerConfig
from fp8lab.optimizer import AdamW
from fp8lab.recipes import PRESETS, recipe_named
from fp8lab.records import Row
from fp8lab.testing import assert_bits_equal, to_numpy
from fp8lab.training import TrainingRun, summary_of, training_rows
from fp8lab.training_config import TrainingConfig, learning_rate

TINY = TransformerConfig(context=16, width=32, layers=1, heads=2)
CONFIG = TrainingConfig(
    recipe_named("bf16"),
    steps=12,
    batch=8,
    model=TINY,
    warmup=3,
    observe_every=5,
    validate_every=6,
    validation_count=8,
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """The project's own prose: real text that is always there."""
    return load_corpus(Path(__file__).parent.parent / "CONTRIBUTING.md")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_seed_gives_the_same_rows(preset: str, corpus: Corpus) -> None:
    config = replace(CONFIG, recipe=recipe_named(preset))
    first = list(training_rows(config, corpus))
    assert first == list(training_rows(config, corpus))
    assert first != list(training_rows(replace(config, seed=1), corpus))
    assert [row["step"] for row in first] == list(range(1, 13))
    assert [row["step"] for row in first if "validation_loss" in row] == [6, 12]
    assert [row["step"] for row in first if "casts" in row] == [1, 5, 10, 12]
    assert len(first[0]["casts"]) == 4 * 3


def test_the_loss_falls(corpus: Corpus) -> None:
    config = replace(CONFIG, recipe=recipe_named("current"), steps=60)
    rows = list(training_rows(config, corpus))
    assert rows[0]["loss"] == pytest.approx(math.log(256), abs=0.2)
    assert summary_of(rows)["validation_loss"] < 4
    assert not summary_of(rows)["diverged"]


def test_recipes_differ_and_share_their_start(corpus: Corpus) -> None:
    losses = {}
    for preset in ("bf16", "current", "static"):
        rows = list(training_rows(replace(CONFIG, recipe=recipe_named(preset)), corpus))
        losses[preset] = [row["loss"] for row in rows]
    assert losses["bf16"] != losses["current"] != losses["static"]
    starts = [loss[0] for loss in losses.values()]
    assert max(starts) - min(starts) < 0.05


def test_a_loss_that_is_not_finite_ends_the_run(corpus: Corpus) -> None:
    config = replace(CONFIG, peak_lr=1e30, warmup=0, weight_decay=0.0)
    rows = list(training_rows(config, corpus))
    assert not math.isfinite(rows[-1]["loss"])
    assert len(rows) < config.steps
    result = summary_of(rows)
    assert result["diverged"]
    assert math.isnan(result["validation_loss"])


def test_a_loss_that_rises_again_counts_as_diverged() -> None:
    casts = {"a": {"overflow": 0.0, "underflow": 0.5}}
    rows: list[Row] = [
        {"step": 1, "loss": 3.0, "validation_loss": 3.0, "casts": casts},
        {"step": 2, "loss": 5.0, "validation_loss": 4.5},
    ]
    assert summary_of(rows)["diverged"]
    rows[1]["validation_loss"] = 3.9
    assert not summary_of(rows)["diverged"]
    assert summary_of(rows)["underflow"] == 0.5


def test_the_learning_rate_warms_up_and_decays() -> None:
    config = replace(CONFIG, steps=110, warmup=10, peak_lr=1.0, final_lr=0.1)
    assert learning_rate(config, 1) == pytest.approx(0.1)
    assert learning_rate(config, 10) == 1
    assert learning_rate(config, 60) == pytest.approx(0.55)
    assert learning_rate(config, 110) == pytest.approx(0.1)


def test_the_optimizer_is_the_oracles_adamw() -> None:
    param = nn.Parameter(torch.randn(7, generator=torch.Generator().manual_seed(0)))
    optimizer = AdamW([param], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    p, m, v = to_numpy(param).copy(), np.zeros(7, np.float32), np.zeros(7, np.float32)
    for step in range(1, 6):
        param.grad = torch.sin(param.detach() * step)
        g = to_numpy(param.grad)
        p, m, v = adamw(
            p, g, m, v, step=step, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
        optimizer.step()
        assert_bits_equal(param, p)
    assert_bits_equal(optimizer.state[param]["exp_avg_sq"], v)
    assert optimizer.state[param]["step"] == 5


def test_a_model_is_causal_and_its_seed_decides() -> None:
    model = Transformer(TINY, recipe_named("bf16"), seed=3)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9] = 200
    before, after = model(tokens), model(changed)
    assert_bits_equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])
    assert_bits_equal(before, Transformer(TINY, recipe_named("bf16"), seed=3)(tokens))
    assert not torch.equal(before, Transformer(TINY, recipe_named("bf16"), seed=4)(tokens))


def test_products_of_codes_train_too(corpus: Corpus) -> None:
    """The card's bits on the CPU: near the decoded products, and not the same."""
    config = replace(CONFIG, recipe=recipe_named("tensorwise"), steps=4)
    decoded = list(training_rows(config, corpus))
    codes = list(training_rows(replace(config, products="codes"), corpus))
    assert codes == list(training_rows(replace(config, products="codes"), corpus))
    assert [row["loss"] for row in codes] != [row["loss"] for row in decoded]
    assert codes[-1]["loss"] < codes[0]["loss"]


@pytest.mark.parametrize(
    "change",
    [
        {"microbatches": 4},
        {"loss_scale": 1024.0},
        {"loss_scale": 65536.0, "dynamic_loss_scale": True},
        {"master": "bfloat16_remainder"},
        {"autocast": True},
        {"model": MlpConfig(context=16, width=16, layers=2, window=4)},
    ],
    ids=lambda change: "-".join(change),
)
def test_settings_of_a_step(change: dict[str, Any], corpus: Corpus) -> None:
    config = replace(CONFIG, recipe=recipe_named("delayed"), **change)
    rows = list(training_rows(config, corpus))
    assert rows == list(training_rows(config, corpus))
    assert rows[-1]["validation_loss"] < rows[0]["loss"]
    assert summary_of(rows)["skipped"] == 0
    assert ("loss_scale" in rows[0]) == config.dynamic_loss_scale
    json.dumps(config.to_dict())


def test_a_step_that_overflows_is_skipped_and_counted(corpus: Corpus) -> None:
    """A loss scale near the largest float32: gradients overflow until it has come down."""
    config = replace(
        CONFIG, recipe=recipe_named("tensorwise"), loss_scale=2.0**60, dynamic_loss_scale=True
    )
    run = TrainingRun(config, corpus)
    run.update.scaler.scale.fill_(2.0**127)
    run.update.scaler.largest = 2.0**127
    rows = [run.advance() for _ in range(12)]
    skipped = [row for row in rows if "skipped" in row]
    assert len(skipped) >= 1
    assert rows[0] in skipped
    assert summary_of(rows)["skipped"] == len(skipped) == int(run.update.scaler.skipped_steps)
    assert "skipped" not in rows[-1]
    assert math.isfinite(rows[-1]["loss"])


def test_bad_settings_are_refused(corpus: Corpus) -> None:
    for name in ("steps", "batch", "observe_every"):
        with pytest.raises(UserError, match=f"{name} is 0; accepted: 1 to"):
            replace(CONFIG, **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="seed is 9223372036854775808; accepted: 0 to"):
        replace(CONFIG, seed=2**63)
    with pytest.raises(UserError, match="model width is 40000000; accepted: 1 to 16384"):
        replace(TINY, width=40000000)
    with pytest.raises(UserError, match="device is 'tpu'; accepted: cpu, cuda"):
        replace(CONFIG, device="tpu")
    with pytest.raises(UserError, match="products is 'fast'; accepted: codes, kernels, decoded"):
        replace(CONFIG, products="fast")
    with pytest.raises(UserError, match="master is 'half'; accepted: float32"):
        replace(CONFIG, master="half")
    with pytest.raises(UserError, match="batch is 8, which 3 microbatches do not divide"):
        replace(CONFIG, microbatches=3)
    with pytest.raises(UserError, match="model window is 0; accepted: 1 to 65536"):
        MlpConfig(window=0)
    with pytest.raises(UserError, match="width 10 is not a multiple of its 4 heads"):
        TransformerConfig(width=10)
    long = replace(CONFIG, model=replace(TINY, context=65536))
    with pytest.raises(UserError, match="context of 65536 needs at least"):
        next(training_rows(long, corpus))


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
def test_rows_repeat_on_the_card(preset: str, corpus: Corpus, device: str) -> None:
    config = replace(CONFIG, recipe=recipe_named(preset), device=device, products="codes")
    first = list(training_rows(config, corpus))
    assert first == list(training_rows(config, corpus))
    assert all(math.isfinite(row["loss"]) for row in first)
