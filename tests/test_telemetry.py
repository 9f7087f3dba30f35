"""Telemetry of a model: rates, microbatches, what counts once, parameters, state, sinks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8lab
from fp8lab.bridge import to_numpy
from fp8lab.checkpoint import take_state
from fp8lab.checkpoint_tree import rebuild
from fp8lab.cli import main
from fp8lab.data import Corpus
from fp8lab.emulation import telemetry as oracle
from fp8lab.emulation.moments import StoredMoment, read_moment
from fp8lab.emulation.telemetry import CastCounts
from fp8lab.errors import UserError
from fp8lab.experiments import bench_telemetry as bench
from fp8lab.experiments.block_cases import Shape
from fp8lab.experiments.plot_casts import draw_casts, table
from fp8lab.gradients import LossScaler, UpdateStep
from fp8lab.linear import operand_casts
from fp8lab.models import TransformerConfig
from fp8lab.ops_operands import Codes
from fp8lab.ops_telemetry import CastTable
from fp8lab.optimizer import AdamW
from fp8lab.recipes import recipe_named
from fp8lab.records import to_json
from fp8lab.resume_folder import state_of
from fp8lab.telemetry import Telemetry
from fp8lab.telemetry_parameters import moment_values
from fp8lab.telemetry_sinks import JsonLines, TensorBoard, scalars_of
from fp8lab.training import TrainingRun
from fp8lab.training_config import TrainingConfig
from fp8lab.watch import view
from fp8lab.watch_rows import Source
from fp8lab.watch_text import Style

TINY = TransformerConfig(context=8, width=32, layers=1, heads=2)
Noted = dict[int, list[tuple[Tensor, Codes | None]]]


def stack(recipe: str = "blockwise", device: str = "cpu", products: str = "decoded") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    return fp8lab.convert(model, recipe, products=products)


def compiled_model(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def batch(seed: int, rows: int = 32, device: str = "cpu") -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Copies of all that is counted, by row."""
    found: Noted = {}
    add = CastTable.add

    def recording(
        self: CastTable, row: int, x: Tensor, codes: Codes | None, *, sums: bool = True
    ) -> None:
        kept = None
        if codes is not None:
            scale = None if codes.scale is None else codes.scale.clone()
            kept = replace(codes, codes=codes.codes.clone(), scale=scale)
        found.setdefault(row, []).append((x.detach().clone(), kept))
        add(self, row, x, codes, sums=sums)

    monkeypatch.setattr(CastTable, "add", recording)
    return found


def expected(noted: Noted) -> list[CastCounts]:
    """What the oracle counts of the same tensors."""
    return [
        sum(
            (
                oracle.count_cast(
                    to_numpy(x),
                    None if codes is None else to_numpy(codes.codes),
                    inverse_scale=None if codes is None else to_numpy(codes.inverse),
                    scale=None if codes is None or codes.scale is None else to_numpy(codes.scale),
                    block=None if codes is None else codes.block,
                )
                for x, codes in calls
            ),
            CastCounts(),
        )
        for _, calls in sorted(noted.items())
    ]


def test_watched_steps_go_by_the_rate_and_leave_nothing_behind() -> None:
    model = stack()
    telemetry = Telemetry(model, every=3, parameters=False)
    seen = []
    for step in range(1, 8):
        if telemetry.begin_step():
            seen.append(step)
        assert all(cast.observe == (step in seen) for _, cast in operand_casts(model))
        model(batch(step)).sum().backward()
        row = telemetry.end_step()
        assert (row is not None) == (step in seen)
        assert all(cast.meter is None and not cast.observe for _, cast in operand_casts(model))
    assert (seen, telemetry.steps, telemetry.watched) == ([1, 3, 6], 7, 3)
    assert telemetry.totals["0.input"]["elements"] == 3 * 32 * 64


@pytest.mark.parametrize("recipe", ["blockwise", "delayed", "rowwise", "mx", "bf16"])
def test_microbatches_add_up_and_a_weight_counts_once(recipe: str, noted: Noted) -> None:
    model = stack(recipe)
    telemetry = Telemetry(model, parameters=False)
    with telemetry.step():
        for part in range(3):
            model(batch(part)).square().sum().backward()
    assert [len(calls) for _, calls in sorted(noted.items())] == [3, 1, 3] * 2
    assert list(telemetry.counts.values()) == expected(noted)
    assert telemetry.counts["0.input"].elements == 3 * 32 * 64
    assert telemetry.counts["0.input"].amax == max(float(batch(i).abs().max()) for i in range(3))
    assert telemetry.counts["0.weight"].elements == 64 * 128


def test_what_is_computed_again_does_not_count_again() -> None:
    plain, again = stack("delayed"), stack("delayed")
    counts = []
    for model in (plain, again):
        telemetry = Telemetry(model, parameters=False)
        x = batch(0).requires_grad_()
        with telemetry.step():
            y = model(x) if model is plain else checkpoint(model, x, use_reentrant=False)
            y.square().sum().backward()
        counts.append(telemetry.counts)
    assert counts[0] == counts[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_compiled_model_is_watched_the_same(recipe: str) -> None:
    counts = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = stack(recipe, products="codes")
        forward: Any = (
            torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        )
        telemetry = Telemetry(model, parameters=False, every=2)
        for step in range(2):
            with telemetry.step():
                forward(batch(step)).square().sum().backward()
        counts.append((telemetry.counts, telemetry.totals))
    assert counts[0] == counts[1]


def test_a_pattern_chooses_layers() -> None:
    model = stack()
    telemetry = Telemetry(model, include="2")
    with telemetry.step():
        model(batch(0)).sum().backward()
    assert list(telemetry.counts) == ["2.input", "2.weight", "2.grad_output"]


def test_bad_settings_are_refused() -> None:
    model = stack()
    bad: Any
    for bad in (0, -1, 1.5, "10", True):
        with pytest.raises(UserError, match=r"telemetry: every is .*; accepted: a whole number"):
            Telemetry(model, every=bad)
    with pytest.raises(UserError, match=r"pattern 'head' matches no FP8 layer; there are: 0, 2"):
        Telemetry(model, include=["*", "head"])
    with pytest.raises(UserError, match="pattern '' matches no FP8 layer"):
        Telemetry(model, include=())
    with pytest.raises(UserError, match="there are: none"):
        Telemetry(nn.Linear(4, 4))
    first, second = Telemetry(model), Telemetry(model)
    first.begin_step()
    with pytest.raises(UserError, match=r"0.input is watched already"):
        second.begin_step()


def test_an_error_inside_a_step_ends_the_watch() -> None:
    model = stack()
    telemetry = Telemetry(model)
    with pytest.raises(ZeroDivisionError), telemetry.step():
        raise ZeroDivisionError
    assert telemetry.watched == 0
    assert all(cast.meter is None for _, cast in operand_casts(model))


@pytest.mark.parametrize("moments", [("float32", "float32"), ("e4m3_128", "e4m3_tensor_keep")])
def test_norms_and_histograms_of_parameters(moments: tuple[str, str]) -> None:
    model = stack()
    optimizer = AdamW(model.parameters(), lr=1e-2, exp_avg=moments[0], exp_avg_sq=moments[1])
    scaler = LossScaler(1024.0)
    update = UpdateStep(model, optimizer, scaler=scaler)
    telemetry = Telemetry(model, optimizer, every=1, scaler=scaler)
    before = {name: param.detach().double() for name, param in model.named_parameters()}
    telemetry.begin_step()
    update.zero_grad()
    update.backward(model(batch(0)).square().mean())
    update()
    row = telemetry.end_step()
    assert row is not None
    for name, param in model.named_parameters():
        entry, state = row["parameters"][name], optimizer.state[param]
        assert param.grad is not None
        close = {
            "weight_norm": param.detach().double().norm(),
            "grad_norm": param.grad.double().norm() / 1024,
            "update_norm": (param.detach().double() - before[name]).norm(),
        }
        for moment, fmt in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            found = moment_values(state, moment, getattr(optimizer.formats, moment))
            assert found is not None
            scale = state.get(f"{moment}_scale")
            stored = StoredMoment(
                getattr(optimizer.formats, moment),
                to_numpy(state[moment]),
                None if scale is None else to_numpy(scale),
            )
            values = read_moment(stored)
            assert np.array_equal(to_numpy(found), values), fmt
            assert entry[f"{moment}_bins"] == oracle.magnitude_bins(values).tolist()
            close[f"{moment}_norm"] = torch.tensor(values).double().norm()
        for key, value in close.items():
            assert entry[key] == pytest.approx(float(value), rel=1e-5, abs=1e-30), key
        assert entry["update_norm"] > 0
        assert set(entry) == {*close, "exp_avg_bins", "exp_avg_sq_bins"}


def test_a_foreign_optimizer_and_none() -> None:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters())
    for given in (optimizer, None):
        telemetry = Telemetry(model, given)
        with telemetry.step():
            model(batch(0)).sum().backward()
            optimizer.step()
        assert telemetry.watched == 1
    expanded = {"exp_avg": torch.zeros(2), "exp_avg_power": torch.zeros(1)}
    assert moment_values(expanded, "exp_avg", None) is None


def corpus() -> Corpus:
    text = np.frombuffer(bytes(range(32, 127)) * 40, np.uint8)
    return Corpus("c", text[:3000], text[3000:], "")


def config(**more: Any) -> TrainingConfig:
    settings = {"steps": 4, "batch": 4, "model": TINY, "observe_every": 2, "validation_count": 4}
    return TrainingConfig(recipe_named("delayed"), **{**settings, **more})


def test_a_run_shows_more_only_where_it_is_asked_for() -> None:
    text = corpus()
    plain, full = TrainingRun(config(), text), TrainingRun(config(telemetry=True), text)
    assert "telemetry" not in config().to_dict()
    assert config(telemetry=True).to_dict()["telemetry"] is True
    for step in range(1, 5):
        row, more = plain.advance(), full.advance()
        assert row["loss"] == more["loss"]
        assert ("parameters" in more) == (step != 3)
        if step == 3:
            assert "casts" not in row
            continue
        assert "parameters" not in row
        for name, entry in row["casts"].items():
            assert list(entry) == ["amax", "scale", "overflow", "underflow"]
            assert list(more["casts"][name].items())[:4] == list(entry.items())
            assert set(more["casts"][name]) - set(entry) == {"sqnr_db", "zeros", "nonfinite"}


def test_totals_go_on_in_a_resumed_run() -> None:
    text = corpus()
    whole = TrainingRun(config(telemetry=True, steps=6), text)
    first = TrainingRun(config(telemetry=True, steps=6), text)
    for _ in range(4):
        whole.advance()
        first.advance()
    taken = take_state(state_of(first).capture())
    state = {part: rebuild(own.json, own.tensors) for part, own in taken.items()}
    resumed = TrainingRun(config(telemetry=True, steps=6), text)
    state_of(resumed).restore(state)
    for _ in range(2):
        assert whole.advance() == resumed.advance()
    assert whole.telemetry.state_dict() == resumed.telemetry.state_dict()
    assert whole.telemetry.watched == 4
    assert "telemetry" not in state_of(TrainingRun(config(), text)).capture()
    unlike = whole.telemetry.state_dict() | {"totals": {"other.input": {}}}
    with pytest.raises(UserError, match=r"watches 'other.input', which is not watched here"):
        resumed.telemetry.load_state_dict(unlike)


def test_the_command_line_asks_for_it_and_resumes_with_it(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 60)
    out = tmp_path / "run"
    given = ["train", "--steps", "3", "--text", str(text), "--out", str(out)]
    assert main([*given, "--telemetry", "--stop-after", "2"]) == 0
    assert main(["train", "--resume", str(out), "--text", str(text)]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert ["parameters" in row for row in rows] == [True, False, True]
    assert all("sqnr_db" in cast for cast in rows[2]["casts"].values())


def test_rows_go_to_a_file(tmp_path: Path) -> None:
    model = stack()
    path = tmp_path / "there" / "telemetry.jsonl"
    telemetry = Telemetry(model, every=1, sinks=[JsonLines(path)])
    for step in range(2):
        with telemetry.step():
            model(batch(step)).sum().backward()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    entry = rows[1]["casts"]["0.input"]
    assert entry["sqnr_db"] == round(telemetry.counts["0.input"].sqnr_db, 4)
    assert entry["nonfinite"] == 0


def test_tensorboard_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "step": 7,
        "casts": {"0.input": {"amax": 2.0, "sqnr_db": "inf"}},
        "parameters": {"w": {"weight_norm": 1.0, "exp_avg_bins": [1, 2]}},
    }
    assert dict(scalars_of(row)) == {
        "casts/0.input/amax": 2.0,
        "casts/0.input/sqnr_db": math.inf,
        "parameters/w/weight_norm": 1.0,
    }
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="need the package tensorboard, which is not installed"):
        TensorBoard(tmp_path)

    class Module:
        class SummaryWriter:
            def __init__(self, folder: str) -> None:
                self.folder, self.scalars = folder, [("", 0.0, 0)][:0]
                self.closed = False

            def add_scalar(self, tag: str, value: float, step: int) -> None:
                self.scalars.append((tag, value, step))

            def flush(self) -> None:
                assert self.scalars

            def close(self) -> None:
                self.closed = True

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Module)
    board = TensorBoard(tmp_path)
    board(row)
    board.close()
    assert board._writer.scalars[0] == ("casts/0.input/amax", 2.0, 7)
    assert board._writer.closed


def test_the_benchmark_times_each_kind_of_step() -> None:
    """With the first step of each run, which is watched in any case, left behind."""
    shape = Shape(layers=1, hidden=64, ffn=96, heads=4, kv_heads=2, batch=1, length=16)
    blocks = bench.blocks_kinds("delayed", shape, device="cpu", compiled=False)
    row = blocks["watched"]()
    assert set(row["casts"]["blocks.0.down.weight"]) >= {"sqnr_db", "overflow"}
    assert blocks["unwatched"]() is None
    model = bench.model_kinds(config(steps=100, observe_every=10**9), corpus())
    assert "parameters" in model["watched"]()
    assert "casts" not in model["unwatched"]()
    assert "parameters" not in model["without"]()
    assert "casts" not in model["without"]()
    assert {name: len(own) for name, own in bench.timed(blocks, 1).items()} == dict.fromkeys(
        ("without", "unwatched", "watched"), 1
    )


def test_a_watched_step_is_timed_before_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the steps' own: other work on the machine changes nothing."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def lasting(seconds: float) -> Callable[[], None]:
        def step() -> None:
            nonlocal now
            now += seconds

        return step

    kinds = {"without": lasting(1.0), "unwatched": lasting(2.0), "watched": lasting(5.0)}
    times = bench.timed(kinds, 2)
    assert times == {"without": [1e3] * 2, "unwatched": [2e3] * 2, "watched": [5e3] * 2}


def test_the_mean_of_a_step_at_each_rate() -> None:
    row = bench.summary({"without": [10.0], "unwatched": [10.0], "watched": [20.0]})
    assert (row["every_100"], row["every_10"]) == (1.01, 1.1)
    line = bench.line_of({"group": "blocks", "recipe": "delayed", **row})
    assert line.endswith("20.0 watched; every 100: +1.00 %, every 10: +10.00 %")


def test_sqnr_is_watched_and_drawn_where_rows_have_it(tmp_path: Path) -> None:
    run = TrainingRun(config(telemetry=True), corpus())
    rows = [run.advance() for _ in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(to_json(row) + "\n" for row in rows))
    text = view(Source(path).runs(), Style(), 10)
    shown = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert shown["amax"] == ["amax", "scale", "overflow", "underflow", "sqnr", "dB"]
    name, entry = next(iter(rows[-1]["casts"].items()))
    assert shown[name][5] == f"{entry['sqnr_db']:.1f}"
    for folder in ("one", "two"):
        draw_casts(path, tmp_path / folder / "casts.png")
    one, two = (tmp_path / folder / "casts.png" for folder in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    plain = table([{"casts": {"a": {"scale": 1.0}}}], ["a", "b"], "sqnr_db")
    assert np.isnan(plain).all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mx", "bf16"])
def test_a_model_on_the_card_is_counted_as_by_the_oracle(
    recipe: str, compiled: bool, noted: Noted
) -> None:
    model = stack(recipe, "cuda", "codes").bfloat16()
    if compiled:
        torch.compiler.reset()
    forward: Any = compiled_model(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters())
    telemetry = Telemetry(model, optimizer, every=2)
    for step in range(2):
        noted.clear()
        with telemetry.step():
            for part in range(2):
                forward(batch(step + 2 * part, 128, "cuda").bfloat16()).square().sum().backward()
            optimizer.step()
    assert list(telemetry.counts.values()) == expected(noted)
    assert len(telemetry.counts) == 6


@pytest.mark.gpu
def test_a_run_on_the_card_shows_its_parameters() -> None:
    run = TrainingRun(config(telemetry=True, device="cuda", products="codes"), corpus())
    rows = [run.advance() for _ in range(4)]
    for entry in rows[3]["parameters"].values():
        assert sum(entry["exp_avg_bins"]) == sum(entry["exp_avg_sq_bins"]) > 0
        assert entry["update_norm"] > 0
        assert entry["grad_norm"] > 0
    assert all(math.isfinite(own["sqnr_db"]) for own in rows[3]["casts"].values())
