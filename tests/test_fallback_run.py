"""The fallback at work: what triggers it, for which layer and role; return, checkpoints."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8lab
from fp8lab.checkpoint import CheckpointError, take_state
from fp8lab.checkpoint_tree import rebuild
from fp8lab.cli import main
from fp8lab.data import Corpus, load_corpus
from fp8lab.errors import UserError
from fp8lab.fallback import FallbackRule, WindowSigns
from fp8lab.fallback_run import (
    Fallback,
    FallbackConfig,
    fallback_from_dict,
    fallback_from_text,
)
from fp8lab.fallback_signs import worst
from fp8lab.gradients import LossScaler, UpdateStep
from fp8lab.linear import Fp8Linear
from fp8lab.models import TransformerConfig
from fp8lab.recipes import recipe_named
from fp8lab.records import Row, read_rows, without_time
from fp8lab.resume import CheckpointPlan, resume_run, start_run, state_of
from fp8lab.resume_config import config_from_dict, fingerprint_of
from fp8lab.training import TrainingRun, training_rows
from fp8lab.training_config import TrainingConfig

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "CONTRIBUTING.md"
WHEN = 20  # the step at which a test does its mischief
RULE = FallbackRule(overflow=0.02, after=1, recover=2)
CONFIG = TrainingConfig(
    recipe_named("delayed:history=8:margin=1"),  # room for what grows by itself
    steps=32,
    batch=8,
    model=TransformerConfig(context=16, width=32, layers=2, heads=2),
    peak_lr=1e-3,
    warmup=3,
    final_lr=1.0,
    observe_every=16,
    validate_every=32,
    validation_count=8,
    fallback=FallbackConfig(RULE, window=2),
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """The project's own prose: real text that is always there."""
    return load_corpus(TEXT)


class SpoiledRun(TrainingRun):
    """A run in which something happens to a layer's input, or to the learning rate, at one step."""

    spoiled = ""
    spoil: Callable[[Tensor], Tensor] | None = None
    faster = 1.0

    def gradients(self, batch: tuple[Any, ...]) -> Tensor:
        if self.step != WHEN:
            return super().gradients(batch)
        for group in self.optimizer.param_groups:
            if not self.spoiled or group.get("own"):
                group["lr"] *= self.faster
        if self.spoil is None:
            return super().gradients(batch)
        spoil = self.spoil
        layer = self.model.get_submodule(self.spoiled)
        hook = layer.register_forward_pre_hook(lambda _, given: (spoil(given[0]),))
        try:
            return super().gradients(batch)
        finally:
            hook.remove()


def _with_outliers(x: Tensor) -> Tensor:
    """Every eighth channel is 100 times as large; the gradient of x is what it was."""
    more = torch.zeros_like(x)
    more[..., ::8] = 99 * x[..., ::8].detach()
    return x + more


def _with_a_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 0, 0] = math.nan
    return x


def spoiled_run(corpus: Corpus, config: TrainingConfig = CONFIG, **what: Any) -> SpoiledRun:
    run = SpoiledRun(config, corpus)
    for name, value in what.items():
        setattr(run, name, value)
    return run


def moves(rows: list[Row], to: str) -> set[tuple[str, str]]:
    return {(e["layer"], e["role"]) for e in events_of(rows) if e["to"] == to}


def events_of(rows: list[Row]) -> list[dict[str, Any]]:
    return [event for row in rows for event in row.get("events", ())]


def assert_went_and_returned(rows: list[Row], places: set[tuple[str, str]]) -> None:
    """These fell when the window of the mischief ended, no others, and all returned."""
    assert moves(rows, "bf16") == places
    assert {e["step"] for e in events_of(rows) if e["to"] == "bf16"} <= {WHEN, WHEN + 2}
    assert moves(rows, "fp8") == places
    assert math.isfinite(rows[-1]["loss"])
    assert math.isfinite(rows[-1]["validation_loss"])


def test_a_quiet_run_stays_in_fp8(corpus: Corpus) -> None:
    """And its rows are those of a run that nobody watches."""
    watched = list(training_rows(CONFIG, corpus))
    assert watched == list(training_rows(replace(CONFIG, fallback=None), corpus))
    assert not events_of(watched)


def test_an_outlier_in_an_activation(corpus: Corpus) -> None:
    run = spoiled_run(corpus, spoiled="blocks.1.down", spoil=_with_outliers)
    rows = [run.advance() for _ in range(CONFIG.steps)]
    assert_went_and_returned(rows, {("blocks.1.down", "input")})
    assert events_of(rows)[0] == {
        "event": "fallback",
        "layer": "blocks.1.down",
        "role": "input",
        "to": "bf16",
        "why": "overflow",
        "step": WHEN,
        "wait": 2,
    }
    assert events_of(rows)[1]["why"] == "recovered"


def test_a_nan_in_a_batch(corpus: Corpus) -> None:
    """It goes through what comes after it, and through all gradients; weights stay in FP8."""
    run = spoiled_run(corpus, spoiled="blocks.1.down", spoil=_with_a_nan)
    before: dict[str, Tensor] = {}
    rows = []
    for step in range(1, CONFIG.steps + 1):
        if step == WHEN:
            before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        rows.append(run.advance())
        if step == WHEN:
            assert all(torch.equal(p, before[n]) for n, p in run.model.named_parameters())
    layers = [name for name, own in run.model.named_modules() if isinstance(own, Fp8Linear)]
    places = {(name, "grad_output") for name in layers} | {("blocks.1.down", "input")}
    assert_went_and_returned(rows, places)
    assert [row["step"] for row in rows if "skipped" in row] == [WHEN]
    assert math.isnan(rows[WHEN - 1]["loss"])


def test_a_learning_rate_spike_in_one_layer(corpus: Corpus) -> None:
    run = spoiled_run(corpus, spoiled="blocks.1.up", faster=300.0)
    weight = run.model.get_submodule("blocks.1.up").weight
    matrices = run.optimizer.param_groups[0]
    matrices["params"] = [p for p in matrices["params"] if p is not weight]
    run.optimizer.add_param_group({**matrices, "params": [weight], "own": True})
    rows = [run.advance() for _ in range(CONFIG.steps)]
    # Its output is larger, too, and that is the next layer's input.
    assert_went_and_returned(rows, {("blocks.1.up", "weight"), ("blocks.1.down", "input")})


def test_a_learning_rate_spike_everywhere(corpus: Corpus) -> None:
    """Every weight that FP8 casts with the scale of the step before."""
    run = spoiled_run(corpus, faster=1000.0)
    rows = [run.advance() for _ in range(CONFIG.steps)]
    layers = {name for name, own in run.model.named_modules() if isinstance(own, Fp8Linear)}
    assert {name for name, role in moves(rows, "bf16") if role == "weight"} == layers
    assert moves(rows, "bf16") == moves(rows, "fp8")
    assert math.isfinite(rows[-1]["validation_loss"])


def test_a_gradient_spike_is_a_sign_of_its_layers_output_gradient(corpus: Corpus) -> None:
    rule = FallbackRule(overflow=None, gradient_spike=16.0, after=1, recover=2)
    recipe = recipe_named("tensorwise")  # which does not clip the outliers
    config = replace(CONFIG, recipe=recipe, fallback=FallbackConfig(rule, window=2))
    run = spoiled_run(corpus, config, spoiled="blocks.1.down", spoil=_with_outliers)
    rows = [run.advance() for _ in range(CONFIG.steps)]
    assert_went_and_returned(rows, {("blocks.1.down", "grad_output")})
    assert {e["why"] for e in events_of(rows)} == {"gradient_spike", "recovered"}


def test_a_low_sqnr_is_seen_and_a_role_in_bf16_is_judged_as_fp8(corpus: Corpus) -> None:
    """A static scale that flushes gradients: what FP8 would do stays bad, so none returns."""
    rule = FallbackRule(overflow=None, sqnr_db=6.0, after=1, recover=1)
    config = replace(
        CONFIG,
        recipe=recipe_named("static:grad_output.scale=0.01"),
        steps=8,
        fallback=FallbackConfig(rule, window=2, roles=("grad_output", "input")),
    )
    rows = list(training_rows(config, corpus))
    assert {role for _, role in moves(rows, "bf16")} == {"grad_output"}
    assert not moves(rows, "fp8")


@pytest.mark.gpu
def test_on_the_card_a_switch_is_captured_anew(corpus: Corpus) -> None:
    """Every second step is watched, and taken without a graph; the others replay one."""
    rule = FallbackRule(overflow=1e-4, after=1, recover=1)
    config = replace(
        CONFIG,
        recipe=recipe_named("delayed:history=2"),
        device="cuda",
        products="codes",
        fallback=FallbackConfig(rule, window=2, every=2),
    )
    rows = list(training_rows(config, corpus))
    assert rows == list(training_rows(replace(config, graph=False), corpus))
    assert {event["to"] for event in events_of(rows)} == {"bf16", "fp8"}


def small_model(recipe: str = "delayed:history=4") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    return fp8lab.convert(model, recipe)


@pytest.mark.parametrize("scale", [1.0, 4096.0])
def test_a_loop_of_ones_own_with_any_optimizer_and_loss_scale(scale: float) -> None:
    model = small_model("tensorwise")
    update = UpdateStep(model, torch.optim.SGD(model.parameters(), 0.01), scaler=LossScaler(scale))
    rule = FallbackRule(gradient_spike=20.0, after=1, recover=2)
    fallback = Fallback(model, rule, window=1, layers="2")
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 26):
        x = torch.randn(8, 16, generator=generator) * (100 if step == WHEN else 1)
        with fallback.watching(update.scaler):
            update.zero_grad()
            update.backward((model(x) - x).square().mean())
        update()
        fallback.advance()
    assert [(e["layer"], e["role"], e["to"], e["step"]) for e in fallback.events] == [
        ("2", "grad_output", "bf16", WHEN),
        ("2", "grad_output", "fp8", WHEN + 2),
    ]
    assert fallback.switches == 2
    assert not fallback.in_bf16


def test_steps_between_are_not_watched_and_others_observe_on() -> None:
    """With `every`, and while somebody else looks at the casts' statistics, or has a meter."""
    model = small_model()
    fallback = Fallback(model, RULE, window=4, every=2)
    cast = model[0].cast_of("input")  # type: ignore[index]
    seen: list[float] = []
    for step in range(1, 5):
        cast.observe, cast.statistics = step < 3, None
        cast.meter = (lambda x, _: seen.append(float(x.amax()))) if step == 2 else None
        watched = step % 2 == 0
        assert fallback.watches_next == watched
        with fallback.watching():
            assert cast.observe == (watched or step < 3)
            model(torch.ones(4, 16)).sum().backward()
        assert cast.observe == (step < 3)
        assert (cast.statistics is not None) == (step == 1)
        assert fallback.advance() == []
    assert seen == [1.0]


@pytest.mark.parametrize("stop", [21, 22, 23])
def test_decisions_survive_in_another_object(stop: int, corpus: Corpus) -> None:
    """In the middle of the window, and while roles are in BF16."""
    config = replace(CONFIG, fallback=FallbackConfig(replace(RULE, gradient_spike=8.0), window=3))
    what = {"spoiled": "blocks.1.down", "spoil": _with_outliers}
    whole = spoiled_run(corpus, config, **what)
    rows = [whole.advance() for _ in range(CONFIG.steps)]
    first = spoiled_run(corpus, config, **what)
    assert [first.advance() for _ in range(stop)] == rows[:stop]
    taken = take_state(state_of(first).capture())
    second = TrainingRun(config, corpus)
    state_of(second).restore({part: rebuild(own.json, own.tensors) for part, own in taken.items()})
    assert second.fallback is not None
    assert first.fallback is not None
    assert second.fallback.events == first.fallback.events
    assert (second.fallback.in_bf16 != []) == (stop > 20)
    for name, layer in second.model.named_modules():
        if isinstance(layer, Fp8Linear):
            assert layer.bf16_roles == first.model.get_submodule(name).bf16_roles
    assert [second.advance() for _ in range(CONFIG.steps - stop)] == rows[stop:]
    for one, other in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(events_of(rows)) >= 2


SMALL = [
    *("--text", str(TEXT), "--steps", "12", "--batch", "4", "--context", "8", "--width", "16"),
    *("--layers", "1", "--heads", "2", "--warmup", "3", "--recipe", "delayed:history=2"),
]
SETTINGS = "overflow=0.0001:after=1:recover=1:window=2:layers=blocks.*:roles=input+weight"


def rows_of(folder: Path) -> list[Row]:
    return [without_time(row) for row in read_rows(folder / "metrics.jsonl")]


def test_a_run_from_the_command_line_survives_in_another_process(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ["train", *SMALL, "--fallback", SETTINGS, "--keep", "head, *.qkv"]
    assert main([*options, "--out", str(whole), "--checkpoint-every", "12"]) == 0
    assert main([*options, "--out", str(parts), "--stop-after", "7"]) == 0
    command = [sys.executable, "-m", "fp8lab", "train", "--resume", str(parts)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    rows = rows_of(whole)
    assert rows_of(parts) == rows
    assert any("events" in row for row in rows[:7])
    assert any("events" in row for row in rows[7:])
    assert not any(e["layer"] == "blocks.0.qkv" for e in events_of(rows))
    ends = [folder / "checkpoints" / "step-000012" for folder in (whole, parts)]
    for path in ends[0].iterdir():
        assert path.read_bytes() == (ends[1] / path.name).read_bytes()
    assert main(["train", "--resume", str(parts), "--fallback"]) == 2


def test_a_skipped_step_does_not_end_a_run_with_a_fallback(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpoiledRun, "spoiled", "blocks.1.down")
    monkeypatch.setattr(SpoiledRun, "spoil", staticmethod(_with_a_nan))
    monkeypatch.setattr("fp8lab.resume.TrainingRun", SpoiledRun)
    for config, steps in ((CONFIG, 32), (replace(CONFIG, fallback=None), WHEN)):
        folder = tmp_path / str(steps)
        plan = CheckpointPlan(stop_after=WHEN + 5, check=False)
        with start_run(folder, config, corpus, plan, text=TEXT) as run:
            assert len(list(run.rows())) == min(WHEN + 5, steps)
        if steps == 32:
            with resume_run(folder, CheckpointPlan(check=False), text=TEXT) as run:
                list(run.rows())
        assert len(rows_of(folder)) == steps
        result = json.loads((folder / "result.json").read_text())
        assert result["diverged"] == (steps == WHEN)


def test_no_tied_head_is_an_error_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert main(["train", *SMALL, "--keep", "embeddings", "--out", out]) == 2
    error = capsys.readouterr().err
    assert "'embeddings' matches nothing: no linear layer shares" in error
    assert error.count("\n") == 1


def test_without_a_fallback_nothing_changes(corpus: Corpus) -> None:
    """Configurations and fingerprints that were written before there was one."""
    plain = replace(CONFIG, fallback=None)
    table = plain.to_dict()
    assert not {"fallback", "keep"} & table.keys()
    assert config_from_dict(table, "config.json") == plain
    assert "fallback" not in fingerprint_of(plain, corpus)["training"]
    kept = replace(CONFIG, keep=("first",))
    again = config_from_dict(json.loads(json.dumps(kept.to_dict())), "config.json")
    assert again == kept
    run = TrainingRun(plain, corpus)
    assert run.fallback is None
    assert "fallback" not in state_of(run).capture()


def test_kept_layers_are_in_bf16_and_never_move(corpus: Corpus) -> None:
    run = TrainingRun(replace(CONFIG, keep=("first",)), corpus)
    recipes = fp8lab.conversion_report(run.model).converted
    assert {name for name, own in recipes.items() if own == "bf16"} == {
        f"blocks.0.{part}" for part in ("qkv", "proj", "up", "down")
    }
    assert run.fallback is not None
    assert set(run.fallback.state_dict()["states"]) == {
        f"blocks.1.{part}" for part in ("qkv", "proj", "up", "down")
    }


def test_texts_and_tables_of_settings() -> None:
    assert fallback_from_text("") == FallbackConfig()
    found = fallback_from_text("overflow=none:sqnr_db=20:after=2:window=5:every=5:roles=weight")
    rule = FallbackRule(None, 20, after=2)
    assert found == FallbackConfig(rule, window=5, every=5, roles=("weight",))
    assert fallback_from_dict(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("overflow", "setting 'overflow'; accepted: NAME=VALUE"),
        ("flow=1", "setting 'flow=1'; accepted"),
        ("overflow=much", "overflow is 'much'; accepted: 0 up to"),
        ("overflow=1", "at 1 it can never fire"),
        ("overflow=none", "no sign has a limit, so the rule can never fire"),
        ("gradient_spike=1.5", "the role could never return"),
        ("window=0", "window is 0; accepted: an integer, 1 and up"),
        ("window=2:every=3", "every is 3; accepted: an integer, 1 to the window, 2"),
        ("roles=inputs", "role 'inputs'; accepted: input, weight, grad_output"),
        ("overflow=none:gradient_spike=9:roles=input", "so the rule can never fire"),
        ("overflow=0.1:overflow=0.2", "overflow is given twice; give it once"),
        ("window=2:after=1:window=2", "window is given twice"),
        ("sqnr_db=60", "the role could never return"),
        ("sqnr_db=-1000", "sqnr_db is -1000; accepted: a finite number of decibels above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        fallback_from_text(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("delayed", {"layers": "3"}, "pattern '3' matches no FP8 layer; there are: 0, 2"),
        ("delayed", {"layers": ("0", "head*")}, r"pattern 'head\*' matches no FP8 layer"),
        ("delayed", {"layers": ()}, "layers is empty, so that the rule can never fire"),
        ("bf16", {}, "none of the roles input, weight, grad_output of the chosen layers is in FP8"),
        (
            "tensorwise:data_grad.fp8=false:weight_grad.fp8=false",
            {"roles": "grad_output"},
            "none of the roles grad_output",
        ),
    ],
)
def test_nothing_to_watch_is_an_error(recipe: str, settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Fallback(small_model(recipe), RULE, **settings)


def test_a_state_of_others_is_refused() -> None:
    fallback = Fallback(small_model(), RULE, layers="0")
    saved = Fallback(small_model(), RULE).state_dict()
    with pytest.raises(UserError, match=r"do not watch the same: 2\.grad_output is in one"):
        fallback.load_state_dict(saved)
    saved = fallback.state_dict()
    saved["states"]["0"]["weight"]["wait"] = -1
    with pytest.raises(UserError, match="wait is -1"):
        fallback.load_state_dict(saved)
    saved = fallback.state_dict()
    saved["window"] = {"0": {"weight": {"overflow": "much"}}}
    with pytest.raises(UserError, match="a window's sign 'overflow' is 'much'"):
        fallback.load_state_dict(saved)


def test_a_checkpoint_without_the_fallback_is_refused(corpus: Corpus) -> None:
    run, plain = TrainingRun(CONFIG, corpus), TrainingRun(replace(CONFIG, fallback=None), corpus)
    with pytest.raises(CheckpointError, match="fallback"):
        state_of(run).restore(state_of(plain).capture())


def test_the_worst_of_two() -> None:
    one, other = WindowSigns(0.1, 20.0), WindowSigns(0.2, 30.0, 3.0)
    assert worst(one, other) == worst(other, one) == WindowSigns(0.2, 20.0, 3.0)
    assert worst(WindowSigns(), WindowSigns()) == WindowSigns()
