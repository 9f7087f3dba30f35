"""What is damaged in a run's folder though its sums fit: one line that says so, never a traceback.

A flipped bit is found by the sums (`test_checkpoint`). Here the files say odd things and their sums
are made anew: what a faulty writer, another program or a hand would leave.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fp8lab.checkpoint import CheckpointError, load, read_manifest, verify
from fp8lab.checkpoint_manifest import MIGRATIONS, canonical, sum_line
from fp8lab.checkpoint_store import CheckpointStore, checkpoints_in
from fp8lab.cli import main
from fp8lab.data import load_corpus
from fp8lab.errors import UserError
from fp8lab.fallback_run import fallback_from_text
from fp8lab.models import MlpConfig
from fp8lab.records import read_rows
from fp8lab.resume import CheckpointPlan
from fp8lab.resume_config import StepCount
from fp8lab.training import TrainingRun
from tests.test_resume import CONFIG, TEXT, do, go_on, rows_of

SMALL = replace(CONFIG, model=MlpConfig(context=8, width=8, layers=1, window=4), steps=6)
SMALL = replace(SMALL, fallback=fallback_from_text(""), dynamic_loss_scale=True, telemetry=True)
OTHERS: list[Any] = [None, True, -1, 0.5, 10**400, "x", [], {}, [1], {"a": 1}]
LOST = object()
CAST = ("amax", "scale", "overflow", "underflow")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 2 and 4, of 6."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    do(run, SMALL, CheckpointPlan(every=2, stop_after=4))
    return run


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-000004"


def rewrite(folder: Path, file: str, data: bytes) -> None:
    """Change a file of a checkpoint, and make its sums fit."""
    (folder / file).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    if file != "manifest.json":
        sums = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest["files"][file] = sums
        data = canonical(manifest)
        (folder / "manifest.json").write_bytes(data)
    (folder / "manifest.sha256").write_bytes(sum_line(data))


@contextmanager
def tensors_of(run: Path, part: str) -> Iterator[dict[str, Tensor]]:
    """The tensors of a part of the newest checkpoint, to be changed: its sums fit afterwards."""
    file = f"{part}.safetensors"
    tensors = safetensors.torch.load((newest(run) / file).read_bytes())
    yield tensors
    rewrite(newest(run), file, safetensors.torch.save(tensors))


def changes_of(tree: Any, depth: int) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Ways to spoil each entry of a table, down to a depth: it is lost, or something else."""

    def places(table: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        for key in list(table) if isinstance(table, dict) else range(len(table)):
            yield (*path, key)
            if isinstance(table[key], dict | list) and len(path) + 1 < depth:
                yield from places(table[key], (*path, key))

    for path in places(tree, ()):
        for value in (LOST, *OTHERS):

            def change(
                whole: Any, path: tuple[Any, ...] = path, value: Any = value, tree: Any = tree
            ) -> None:
                for key in path[:-1]:
                    whole = whole[key]
                if value is LOST:
                    del whole[path[-1]]
                else:
                    whole[path[-1]] = value

            yield f"{'/'.join(map(str, path))} {'lost' if value is LOST else repr(value)}", change


def looked_at(look: Callable[[], object], what: str) -> str | None:
    """What it says where it refuses; None where it does not. Any other exception is a failure."""
    try:
        look()
    except UserError as error:
        said = str(error)
    else:
        return None
    assert "\n" not in said, what
    return said


def test_a_manifest_that_says_odd_things(run: Path) -> None:
    """Whatever `inspect` and a store's pruning may look at is what it should be."""
    folder = newest(run)
    whole = json.loads((folder / "manifest.json").read_bytes())
    accepted = []
    for what, change in [*changes_of(whole, 3), ("more", lambda table: table.update(more=1))]:
        manifest = copy.deepcopy(whole)
        change(manifest)
        if manifest == whole and what != "version True":  # True is 1
            continue
        rewrite(folder, "manifest.json", canonical(manifest))
        refused = looked_at(lambda: verify(folder), what)
        looked_at(lambda: read_manifest(folder), what)
        if refused is None and not what.startswith("fingerprint/"):
            accepted.append(what)
            found = read_manifest(folder)
            assert isinstance(found.step, int)
            assert found.metric is None or math.isfinite(found.metric)
            assert isinstance(found.fingerprint, dict)
    assert sorted(accepted) == [
        *("fingerprint {'a': 1}", "fingerprint {}", "fp8lab 'x'"),
        *("metric -1", "metric 0.5", "metric None"),
    ]


def test_a_state_that_says_odd_things(run: Path) -> None:
    """Resuming refuses it, or goes on where the value may be that; no other exception."""
    folder = newest(run)
    whole = json.loads((folder / "state.json").read_bytes())
    for file in ("result.json", "resumed.jsonl"):
        assert not (run / file).exists()
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused = 0
    for place, (what, change) in enumerate(changes_of(whole, 5)):
        if place % 7:  # a sample, since each resume takes a while; of all kinds: they are 11
            continue
        state = copy.deepcopy(whole)
        change(state)
        rewrite(folder, "state.json", json.dumps(state).encode())
        refused += looked_at(lambda: go_on(run, stop_after=5), what) is not None
        for path in [path for path in run.rglob("*") if path.is_file() and path not in kept]:
            path.unlink()
        shutil.rmtree(run / "checkpoints" / "step-000005", ignore_errors=True)
        for path, data in kept.items():
            path.write_bytes(data)
    assert refused > 100


@pytest.mark.parametrize("depth", [600, 100_000])
def test_a_state_that_is_nested_without_end(run: Path, depth: int) -> None:
    whole = (newest(run) / "state.json").read_text()
    deep = whole.replace('{"step":4}', '{"step":4,"more":' + "[" * depth + "]" * depth + "}", 1)
    rewrite(newest(run), "state.json", deep.encode())
    assert looked_at(lambda: verify(newest(run)), "deep")


def test_parts_and_files_are_those_that_the_manifest_names(run: Path) -> None:
    folder = newest(run)
    whole = json.loads((folder / "manifest.json").read_bytes())
    more = copy.deepcopy(whole)
    more["files"]["other.safetensors"] = {"bytes": 0, "sha256": ""}
    rewrite(folder, "manifest.json", canonical(more))
    with pytest.raises(CheckpointError, match=r"differ in the file other.safetensors"):
        verify(folder)
    more = copy.deepcopy(whole)
    more["tensors"]["other"] = {}
    rewrite(folder, "manifest.json", canonical(more))
    with pytest.raises(CheckpointError, match="differ in the part other"):
        verify(folder)


def test_a_configuration_that_says_odd_things(run: Path) -> None:
    whole = json.loads((run / "config.json").read_text())
    shutil.rmtree(newest(run))  # what is not refused finds no checkpoint of its settings
    shutil.rmtree(run / "checkpoints" / "step-000002")
    for what, change in changes_of(whole, 2):
        config = copy.deepcopy(whole)
        change(config)
        (run / "config.json").write_text(json.dumps(config))
        assert looked_at(lambda: go_on(run), what), what
    for name in whole:
        for value in (math.nan, math.inf):
            (run / "config.json").write_text(json.dumps(whole | {name: value}))
            with pytest.raises(UserError, match=r"config\.json is damaged: it is not JSON"):
                go_on(run)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "4"},
        {"step": None},
        {"step": 4.0},
        {"loss": "x"},
        {"time": "x"},
        {"time": {"seconds": "x"}},
        {"casts": [1]},
        {"time": {"seconds": "nan"}},
        {"validation_loss": []},
    ],
    ids=repr,
)
def test_rows_that_are_none(run: Path, change: dict[str, Any]) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | change)]) + "\n")
    before = path.read_bytes()
    with pytest.raises(UserError, match="no whole rows up to step 4, one a step; it was changed"):
        go_on(run)
    assert path.read_bytes() == before


@pytest.mark.parametrize("row", ["[" * 100_000, '{"step": 4}'])
def test_rows_that_are_no_rows(run: Path, row: str) -> None:
    path = run / "metrics.jsonl"
    path.write_text("\n".join([*path.read_text().splitlines()[:-1], row]) + "\n")
    with pytest.raises(UserError, match="no whole rows up to step 4"):
        go_on(run)


INPUT = "hidden.0.casts.input"


@pytest.mark.parametrize("casts", [None, {"a": dict.fromkeys(CAST, "nan")}], ids=repr)
def test_rows_that_may_be(run: Path, casts: Any) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {"casts": casts})]))
    go_on(run)
    overflow = json.loads((run / "result.json").read_text())["overflow"]
    assert (overflow == "nan") is bool(casts)


SWAPS: list[tuple[str, str, str, str]] = [
    ("model", "norm.bias", "norm.weight", "resume check failed"),
    ("model", f"{INPUT}.scale", "hidden.0.casts.weight.scale", "resume check failed"),
    (
        "model",
        f"{INPUT}.amax_history",
        "hidden.0.casts.weight.amax_history",
        rf"gives the updated {INPUT}\.scale",
    ),
    ("optimizer", "state/norm.bias/exp_avg", "state/norm.weight/exp_avg", "resume check failed"),
]


@pytest.mark.parametrize(("part", "one", "other", "said"), SWAPS)
def test_two_tensors_that_changed_places_are_found(
    run: Path, part: str, one: str, other: str, said: str
) -> None:
    """The histories, too, of which the check's step uses nothing: it looks at them afterwards."""
    with tensors_of(run, part) as tensors:
        tensors[one], tensors[other] = tensors[other], tensors[one]
    verify(newest(run))
    with pytest.raises(CheckpointError, match=said):
        go_on(run)


def test_a_history_in_another_order_is_found(run: Path) -> None:
    """Its largest value, and so the next scale, is the same."""
    with tensors_of(run, "model") as tensors:
        history = tensors[f"{INPUT}.amax_history"]
        history[1:] = history[1:].flip(0)
    with pytest.raises(CheckpointError, match=rf"gives the updated {INPUT}\.amax_history"):
        go_on(run)


def test_the_loss_scaler_is_looked_at_after_the_checks_step(run: Path) -> None:
    with tensors_of(run, "scaler") as tensors:
        tensors["good_steps"] += 1
    with pytest.raises(CheckpointError, match=r"gives the updated scaler\.good_steps"):
        go_on(run)


def test_a_checkpoint_of_format_version_1_is_gone_on_with(run: Path) -> None:
    """It left out parameters of which the optimizer kept nothing, and recorded no buffers."""
    whole = do(run.parent / "whole", SMALL, CheckpointPlan())
    state = json.loads((newest(run) / "state.json").read_bytes())
    del state["check"]["buffers"]
    rewrite(newest(run), "state.json", json.dumps(state).encode())
    manifest = json.loads((newest(run) / "manifest.json").read_bytes())
    rewrite(newest(run), "manifest.json", canonical(manifest | {"version": 1}))
    go_on(run)
    rows = [{k: v for k, v in row.items() if k != "time"} for row in whole]
    assert rows_of(run) == rows


def test_version_1_had_no_table_of_a_parameter_without_state() -> None:
    groups = [{"params": ["a", "b"]}, {"params": ["c"]}]
    part = {"state": {"b": {"step": 1}}, "param_groups": groups}
    moved = MIGRATIONS[1]({"optimizer": part, "model": {"a": 0}})
    expected = {"state": {"a": {}, "b": {"step": 1}, "c": {}}, "param_groups": groups}
    assert moved == {"optimizer": expected, "model": {"a": 0}}
    others: list[dict[str, Any]] = [{"optimizer": {"betas": 1}}, {"optimizer": [1]}, {"model": {}}]
    for other in others:
        assert MIGRATIONS[1](dict(other)) == other
    part = {"state": {"z": {"step": 1}}, "param_groups": [{"params": ["a"]}]}
    moved = MIGRATIONS[1]({"optimizer": part})
    assert moved["optimizer"]["state"] == {"a": {}, "z": {"step": 1}}  # which is then unknown


def test_a_record_of_the_check_that_is_not_whole(run: Path) -> None:
    state = json.loads((newest(run) / "state.json").read_bytes())
    records = [{k: v for k, v in state["check"].items() if k != key} for key in state["check"]]
    assert len(records) == 6
    spoilt: list[Any] = [*records, None, True, [], {**state["check"], "amax": 1}]
    spoilt.append({**state["check"], "buffers": None})
    for record in spoilt:
        rewrite(newest(run), "state.json", json.dumps({**state, "check": record}).encode())
        with pytest.raises(CheckpointError, match="recorded for the resume check is not whole"):
            go_on(run)


def test_a_step_of_another_checkpoint(run: Path) -> None:
    state = json.loads((newest(run) / "state.json").read_bytes())
    state["progress"]["step"] -= 1
    rewrite(newest(run), "state.json", json.dumps(state).encode())
    with pytest.raises(CheckpointError, match="the manifest says step 4, the state does not"):
        go_on(run)


@pytest.mark.parametrize("step", [True, 1.0, "1", -1, None])
def test_a_count_of_steps_that_is_none(stopped: Path, step: Any) -> None:
    with pytest.raises(UserError, match="the saved progress's step is"):
        StepCount(TrainingRun(SMALL, load_corpus(TEXT))).load_state_dict({"step": step})


@pytest.mark.parametrize("metric", [math.nan, math.inf, True, "1"])
def test_a_metric_that_is_none(run: Path, metric: Any) -> None:
    manifest = json.loads((newest(run) / "manifest.json").read_bytes()) | {"metric": metric}
    rewrite(newest(run), "manifest.json", json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match=r"metric is .*; accepted: a finite number, or null"):
        read_manifest(newest(run))


def test_a_step_that_was_skipped_has_its_checkpoint(tmp_path: Path) -> None:
    """--stop-after promises one; a fallback goes on after a step whose loss is not finite."""
    config = replace(SMALL, peak_lr=1e25, warmup=0, steps=8, loss_scale=256.0)
    whole = do(tmp_path / "whole", config, CheckpointPlan())
    assert any(row.get("skipped") for row in whole[:6])
    stop = max(place for place, row in enumerate(whole[:-1], start=1) if row.get("skipped"))
    rows = do(tmp_path / "run", config, CheckpointPlan(stop_after=stop))
    assert rows[-1]["skipped"]
    names = [path.name for path in checkpoints_in(tmp_path / "run" / "checkpoints")]
    assert names == [f"step-{stop:06d}"]
    go_on(tmp_path / "run")
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_what_was_not_checked_is_not_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    do(tmp_path / "run", SMALL, CheckpointPlan(stop_after=2, check=False))
    assert main(["train", "--resume", str(tmp_path / "run"), "--stop-after", "4"]) == 0
    said = "the resume check was not made: the checkpoint was saved with --unchecked"
    assert said in capsys.readouterr().out
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert said not in capsys.readouterr().out
    checked = [row["checked"] for row in read_rows(tmp_path / "run" / "resumed.jsonl")]
    assert checked == [False, True]


def test_who_wants_no_check_is_not_told_of_the_saver(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(run), "--unchecked"]) == 0
    assert "the resume check was not made" not in capsys.readouterr().out


def test_links_and_files_in_the_way_of_pruning(run: Path, tmp_path: Path) -> None:
    """A checkpoint that was moved to another disk and linked back: the link goes, no more."""
    moved = tmp_path / "moved"
    newest(run).rename(moved)
    newest(run).symlink_to(moved)
    (run / "checkpoints" / ".x.partial-file").touch()
    (run / "checkpoints" / ".y.partial-link").symlink_to(moved)
    go_on(run, keep_last=1)
    names = [path.name for path in (run / "checkpoints").iterdir()]
    assert names == ["step-000006"]
    assert load(moved).manifest.step == 4


def test_a_link_to_nothing_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "step-000001").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"step-000001 \(state.json\): it exists already"):
        CheckpointStore(tmp_path).save({"part": {"x": torch.ones(2)}}, step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
