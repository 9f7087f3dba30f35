"""The experiment that compares presets with BF16: its rows, sittings, statistics and command."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.data import Corpus, load_corpus
from fp8lab.experiments import preset_curves, preset_run
from fp8lab.experiments.commands import exit_code
from fp8lab.experiments.documents import markers
from fp8lab.experiments.incident_runs import OF_E, move_one_ulp
from fp8lab.experiments.plot_curves import draw, paired, section, student_t
from fp8lab.experiments.preset_curves import DEFAULT, main
from fp8lab.experiments.preset_run import CONTROL, attempt, configuration, finished
from fp8lab.models import TransformerConfig
from fp8lab.records import Row, read_rows, to_json
from fp8lab.training import training_rows
from fp8lab.training_config import TrainingConfig

TINY = TransformerConfig(context=8, width=16, layers=1, heads=1)
Command = Callable[..., int]


def tiny(preset: str, seed: int, **options: Any) -> TrainingConfig:
    config = configuration(preset, seed, **options)
    return replace(config, model=TINY, batch=2, validation_count=2, validate_every=5)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(range(32, 127)) * 40)
    return path


@pytest.fixture
def corpus(text: Path) -> Corpus:
    return load_corpus(text)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> Command:
    """The command on a tiny model: two presets and two seeds, unless other options follow."""
    monkeypatch.setattr(preset_curves, "configuration", tiny)

    def run(*more: str) -> int:
        options = ["--presets", "bf16,delayed", "--seeds", "0,1", "--steps", "12"]
        options += ["--text", str(text), "--out", str(tmp_path / "x.jsonl")]
        return exit_code(main, [*options, *more])

    return run


def test_a_row_tells_how_a_run_went(corpus: Corpus) -> None:
    config = tiny("delayed", 3, steps=12, device="cpu", large=False)
    row = finished(config, corpus)
    steps = list(training_rows(config, corpus))
    losses = [step["loss"] for step in steps]
    assert (row["preset"], row["seed"], row["steps"]) == ("delayed", 3, 12)
    assert row["loss"] == [round(float(np.mean(part)), 6) for part in (losses[:10], losses[10:])]
    assert [step for step, _ in row["validation"]] == [5, 10, 12]
    assert row["validation"][-1][1] == row["validation_loss"] == steps[-1]["validation_loss"]
    assert (row["skipped"], row["diverged"]) == (0, False)
    block = 12 * 16**2 + (3 + 1 + 4 + 1) * 16 + 4 * 16  # weights, biases, norms
    assert row["parameters"] == block + (2 * 256 + 8) * 16 + 2 * 16


def test_a_run_that_diverges_says_so(corpus: Corpus) -> None:
    config = tiny("bf16", 0, steps=12, device="cpu", large=False)
    row = finished(replace(config, peak_lr=1e25, warmup=0, clip_norm=1e25), corpus)
    assert row["diverged"]
    assert row["steps"] < 12
    assert math.isnan(row["validation_loss"])


def test_a_seed_has_the_same_weights_and_batches_in_every_preset(corpus: Corpus) -> None:
    def start_and_batches(preset: str, seed: int) -> tuple[str, str]:
        row = finished(tiny(preset, seed, steps=2, device="cpu", large=False), corpus)
        return row["initial"], row["batches"]

    first, second = ({start_and_batches(name, seed) for name in DEFAULT} for seed in (0, 1))
    assert len(first) == len(second) == 1
    (one,), (two,) = first, second
    assert one[0] != two[0]
    assert one[1] != two[1]


@pytest.mark.gpu
def test_a_gpu_begins_with_the_weights_and_batches_of_a_cpu(corpus: Corpus) -> None:
    rows = []
    for device in ("cpu", "cuda"):
        config = tiny("delayed", 0, steps=3, device=device, large=False)
        rows.append(finished(config, corpus))
    for key in ("initial", "batches", "parameters", "steps"):
        assert rows[0][key] == rows[1][key], key
    assert rows[1]["validation_loss"] == pytest.approx(rows[0]["validation_loss"], abs=0.05)


def test_the_control_is_bf16_with_one_weight_moved(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[torch.Tensor] = []

    def far(weight: torch.Tensor, place: tuple[int, ...]) -> None:
        # A whole step, not an ulp: twelve steps of a tiny model would not show one.
        moved.append(weight)
        assert (weight.shape[0], place) == (256, OF_E)  # the embedding
        weight.data[place] += 1  # of one column: norms take off what all have

    def row_of(preset: str) -> Row:
        return finished(tiny(preset, 0, steps=12, device="cpu", large=False), corpus)

    bf16 = row_of("bf16")
    monkeypatch.setattr(preset_run, "move_one_ulp", far)
    assert row_of("bf16")["loss"] == bf16["loss"]
    assert not moved
    control = row_of(CONTROL)
    assert len(moved) == 1
    assert (control["preset"], control["initial"]) == (CONTROL, bf16["initial"])
    assert control["batches"] == bf16["batches"]
    assert control["loss"] != bf16["loss"]


def test_one_ulp_is_moved_in_one_place() -> None:
    weight = torch.tensor([[1.0, 2.0]]).repeat(256, 1)
    move_one_ulp(weight, OF_E)
    assert weight[ord("e")].tolist() == [1 + 2**-23, 2.0]
    assert int((weight != torch.tensor([1.0, 2.0])).sum()) == 1


def test_the_presets_are_those_of_the_lab_that_train() -> None:
    assert set(DEFAULT) == {
        CONTROL,
        "bf16",
        "tensorwise",
        "rowwise",
        "delayed",
        "blockwise",
        "mx",
        "hybrid",
    }


def test_a_later_sitting_does_what_is_missing(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = []

    def counted(config: TrainingConfig, text: Path | None) -> Row | str:
        done.append((config.seed, config.recipe.name))
        return attempt(config, text)

    monkeypatch.setattr(preset_curves, "attempt", counted)
    assert command("--seconds", "1e-9") == 0
    assert "4 of 4 runs are left: bf16 seed 0, delayed seed 0" in capsys.readouterr().out
    assert len(read_rows(tmp_path / "x.jsonl")) == 1
    assert command("--presets", "delayed", "--seeds", "1") == 0
    assert done == [(1, "delayed")]
    (kept,) = read_rows(tmp_path / "x.jsonl")[1:]
    assert command() == 0
    assert done[1:] == [(0, "bf16"), (0, "delayed"), (1, "bf16")]
    assert "1 of 4 runs are done already" in capsys.readouterr().out
    rows = read_rows(tmp_path / "x.jsonl")
    assert [(row["seed"], row["preset"]) for row in rows[1:]] == [
        (seed, preset) for seed in (0, 1) for preset in ("bf16", "delayed")
    ]
    assert rows[-1] == kept
    assert {"environment", "date", "command"} <= set(kept)
    assert command() == 0
    assert len(done) == 4


def test_a_run_that_fails_stops_no_other(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(config: TrainingConfig, corpus: Corpus) -> Row:
        if config.recipe.name == "bf16":
            raise RuntimeError("no room")
        return finished(config, corpus)

    monkeypatch.setattr(preset_run, "finished", broken)
    assert command() == 1
    said = capsys.readouterr()
    assert "bf16 seed 1 failed" in said.err
    assert "RuntimeError: no room" in said.err
    assert "2 of 4 runs are left: bf16 seed 0, bf16 seed 1" in said.out
    rows = read_rows(tmp_path / "x.jsonl")[1:]
    assert {row["preset"] for row in rows} == {"delayed"}


def test_a_run_can_be_handed_to_another_process(text: Path, corpus: Corpus) -> None:
    config = tiny("hybrid", 0, steps=2, device="cpu", large=False)
    work = pickle.loads(pickle.dumps(partial(attempt, text=text)))
    row = work(pickle.loads(pickle.dumps(config)))
    assert isinstance(row, dict)
    assert row["validation"] == finished(config, corpus)["validation"]


def test_other_settings_are_refused(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command("--seeds", "0")
    before = (tmp_path / "x.jsonl").read_bytes()
    capsys.readouterr()
    assert command("--steps", "13") == 2
    error = capsys.readouterr().err
    assert "steps: 12, now 13" in error
    assert error.count("\n") == 1
    assert (tmp_path / "x.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--presets", ""], "--presets names none; accepted: at least one"),
        (["--presets", "bf16,bf16"], "--presets names bf16, bf16; accepted"),
        (["--presets", "fp7"], "unknown policy 'fp7'; accepted: bf16"),
        (["--seeds", "0,-1"], "--seeds has '-1'; accepted: whole numbers"),
        (["--seeds", ","], "--seeds names none"),
        (["--seeds", "0,00"], "--seeds names 0, 0; accepted: at least one, each once"),
        (["--out", "x.txt"], "--out is 'x.txt'; accepted: a file in .jsonl, .png, .pdf, .svg"),
        (["--out", "x.xyz", "--redraw"], "--out is 'x.xyz'"),
        (["--out", "/proc/x.jsonl"], "cannot write /proc/x.jsonl"),
        (["--document", "nowhere.md"], "cannot read nowhere.md"),
        (["--steps", "0"], "steps is 0; accepted: 1 to"),
        (["--jobs", "0"], "--jobs is 0; accepted: 1 and up"),
        (["--seconds", "0"], "--seconds is 0.0; accepted: more than 0"),
        (["--device", "cuda"], "torch finds no CUDA device"),
        (["--text", "nowhere.txt"], "no text at nowhere.txt"),
        (["--redraw"], "cannot read rows from"),
    ],
)
def test_mistakes_end_in_one_line_and_code_2(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command(*options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_rows_of_something_else_are_refused(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_text('{"sweep": {}}\n', encoding="utf-8")
    assert command("--redraw") == 2
    assert "holds no rows of preset_curves" in capsys.readouterr().err
    head = to_json(HEAD) + "\n"
    (tmp_path / "x.jsonl").write_text(head + '{"seed": 1}\n', encoding="utf-8")
    assert command("--redraw") == 2
    assert "line 2, is damaged: it lacks batches, command" in capsys.readouterr().err
    (tmp_path / "x.jsonl").write_text(head, encoding="utf-8")
    assert command("--redraw") == 2
    assert "no run is finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"5", "line 3, is damaged: it holds no JSON object"),
        (b'{"a": 1}', "line 3, is damaged: it lacks batches, command"),
        (b"\xff\xfe", "x.jsonl is"),
        (None, "line 2, is damaged: validation_loss is 'abc'"),
    ],
)
def test_rows_that_are_damaged_are_refused(
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: bytes | None,
    said: str,
) -> None:
    path = tmp_path / "x.jsonl"
    command("--presets", "bf16", "--seeds", "0")
    whole = path.read_bytes()
    broken = re.sub(rb'"validation_loss": [0-9.]+', b'"validation_loss": "abc"', whole)
    data = broken if line is None else whole + line + b"\n"
    path.write_bytes(data)
    capsys.readouterr()
    for more in ([], ["--redraw"]):
        assert command(*more) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert path.read_bytes() == data


def test_out_is_rows_or_figure(command: Command, tmp_path: Path) -> None:
    for name in ("y.png", "z.svg"):
        options = ("--presets", "bf16", "--seeds", "0", "--out", str(tmp_path / name))
        assert command(*options) == 0
        rows = tmp_path / f"{name[0]}.jsonl"
        assert len(read_rows(rows)) == 2
        before = (tmp_path / name).read_bytes()
        assert command(*options, "--redraw") == 0
        assert (tmp_path / name).read_bytes() == before


@pytest.mark.filterwarnings("error")
def test_bf16_alone_has_a_picture_and_one_seed_is_one(tmp_path: Path) -> None:
    rows = [HEAD, run_of("bf16", 0, 1.0, validation=[[5, 1.5], [10, 1.0]])]
    draw(rows, tmp_path / "x.png")
    assert "NVIDIA H200; 1 seed; " in section(rows)
    assert "; 3 seeds; " in section(BASE)


def test_rows_give_the_figure_and_the_document_again(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "training.md"
    begin, end = markers("preset curves")
    document.write_text(f"before\n{begin}\nstale\n{end}\nafter\n", encoding="utf-8")
    assert command() == 0
    first = (tmp_path / "x.png").read_bytes()
    table = capsys.readouterr().out[-200:]
    assert command("--redraw", "--document", str(document)) == 0
    assert (tmp_path / "x.png").read_bytes() == first
    assert capsys.readouterr().out.endswith(table)
    whole = document.read_text(encoding="utf-8")
    assert "| delayed | " in whole
    assert "stale" not in whole
    assert "2 of 2" in whole


def run_of(preset: str, seed: int, loss: float | str, **more: Any) -> Row:
    same = {"initial": f"weights {seed}", "batches": f"batches {seed}", "parameters": 122_456_789}
    ended = {"validation_loss": loss, "diverged": loss == "nan", "skipped": 0}
    made = {"environment": {"packages": {"torch": "2.11.0"}}, "date": "2026-11-30", "command": "c"}
    return {"preset": preset, "seed": seed, **same, **ended, **made, **more}


HEAD: Row = {
    "preset_curves": {"large": True},
    "corpus": {"name": "shakespeare"},
    "environment": {"device": "NVIDIA H200"},
    "steps": 2000,
    "batch": 8,
    "model": {"context": 1024},
}
BASE = [HEAD, *(run_of("bf16", seed, loss) for seed, loss in enumerate((1.0, 1.5, 2.0)))]


def test_differences_are_of_the_same_seed() -> None:
    rows = [*BASE, *(run_of("mx", seed, loss) for seed, loss in ((2, 2.3), (0, 1.1), (1, 1.7)))]
    pairs = paired(rows, "mx")
    assert pairs.differences == pytest.approx({0: 0.1, 1: 0.2, 2: 0.3})
    assert pairs.mean == pytest.approx(0.2)
    assert pairs.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
    lines = section(rows).splitlines()
    assert lines[0].startswith("122.5M parameters, 16.4M tokens of shakespeare, NVIDIA H200; 3")
    assert lines[-2] == "| bf16 | 1.5000 |  |  | 0 of 3 | 0 |"
    assert lines[-1] == "| mx | 1.7000 | +0.2000 (-0.0484 to +0.4484) | 3 of 3 | 0 of 3 | 0 |"


def test_one_pair_has_no_interval() -> None:
    rows = [*BASE, run_of("mx", 1, 1.25), run_of("mx", 7, 9.0)]
    assert paired(rows, "mx").differences == {1: -0.25}
    assert paired(rows, "mx").half_width is None
    assert "| -0.2500 (one pair: no interval) | 1 of 2 |" in section(rows)


def test_runs_that_cannot_be_compared_are_no_pairs() -> None:
    rows = [*BASE, run_of("mx", 0, "nan"), run_of("mx", 1, 1.0, initial="other")]
    rows.append(run_of("mx", 2, 1.0, batches="other"))
    assert paired(rows, "mx").differences == {}
    assert section(rows).splitlines()[-1] == "| mx | 1.0000 | no pair | 0 of 3 | 1 of 3 | 0 |"


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (30, 2.04227)],
)
def test_student_s_t_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert student_t(0.95, freedom) == pytest.approx(t, abs=6e-6 * t)


def test_the_large_runs_are_the_ones_that_are_said() -> None:
    config = configuration("mx", 2, steps=2000, device="cuda", large=True)
    assert config.model == TransformerConfig(context=1024, width=768, layers=17, heads=12)
    assert (config.batch, config.steps, config.seed, config.validate_every) == (8, 2000, 2, 100)
    assert (config.peak_lr, config.warmup) == (6e-4, 200)
    assert (config.products, config.autocast, config.compile) == ("codes", True, True)
