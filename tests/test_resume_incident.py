"""The incident's experiment: its controls are exact, each part is left out, rows give a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.data import Corpus, load_corpus
from fp8lab.experiments.plot_resume import draw, gaps, table
from fp8lab.experiments.resume_incident import (
    CONDITIONS,
    LOST,
    Condition,
    IncidentRun,
    configuration,
    incident_rows,
    main,
    without,
)
from fp8lab.models import TransformerConfig
from fp8lab.records import Row, read_rows

TEXT = Path(__file__).parent.parent / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(TEXT)


@pytest.fixture(scope="module")
def rows(corpus: Corpus) -> list[Row]:
    return list(incident_rows("history 16", 0, corpus, before=4, after=3))


def test_the_controls_are_exact_and_everything_that_is_left_out_shows(rows: list[Row]) -> None:
    assert [row["variant"] for row in rows] == ["continuous", *LOST]
    continuous, exact = rows[0], rows[1]
    assert {**exact, "variant": "continuous"} == continuous
    for row in rows[2:]:
        if row["variant"] not in ("one ulp", "no loss scaler"):  # these take longer to be seen
            assert row["loss"] != exact["loss"], row["variant"]
    missing = {row["variant"]: row["missing"] for row in rows}
    casts = 4 * 3
    assert missing["no amax history"] == missing["no scales"] == casts
    assert missing["no scales, no history"] == 2 * casts
    assert missing["no loss scaler"] == missing["no random state"] == 1
    assert missing["one ulp"] == 0
    assert all(row["observed"] == [1, 2, 3] and len(row["scale"]) == 3 for row in rows)


def test_blockwise_has_no_scales_to_lose(corpus: Corpus) -> None:
    rows = list(incident_rows("blockwise", 0, corpus, before=1, after=1))
    lost = {row["variant"] for row in rows}
    assert lost == {"continuous", *LOST} - {v for v in LOST if "history" in v or v == "no scales"}
    assert rows[1]["loss"] == rows[0]["loss"]


def test_an_outlier_changes_gradients_and_no_loss(corpus: Corpus) -> None:
    def run_of(condition: Condition) -> list[Row]:
        config = configuration(condition, 0, 3, 1)
        run = IncidentRun(config, corpus, condition)
        return [run.advance() for _ in range(2)]

    plain = run_of(Condition("bf16"))
    outlier = run_of(Condition("bf16", outlier_every=2))
    assert outlier[0] == plain[0]
    assert outlier[1]["loss"] == plain[1]["loss"]
    assert outlier[1]["grad_norm"] == pytest.approx(256 * plain[1]["grad_norm"], rel=1e-2)


def test_parts_are_left_out_by_their_paths() -> None:
    scale = torch.ones(())
    state: dict[str, Any] = {"model": {"a.scale": scale, "a.w": 1}, "scaler": {"scale": scale}}
    assert without(state, ("model/*.scale",)) == {"model": {"a.w": 1}, "scaler": {"scale": scale}}
    assert without(state, ("scaler",)) == {"model": state["model"]}
    assert without(state, ()) == state


def test_rows_give_a_table_and_the_same_figure_again(tmp_path: Path, rows: list[Row]) -> None:
    assert np.array_equal(gaps(rows, "history 16", "exact"), np.zeros((1, 3)))
    lines = table(rows).splitlines()
    assert len(lines) == 2 + len(LOST)
    assert "| history 16 | exact | +0.0000 | +0.0000 |" in lines[2]
    assert "0 of 3" in lines[2]
    draw(rows, tmp_path / "one.png")
    draw(rows, tmp_path / "two.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "fp8lab.experiments.resume_incident.CONDITIONS", {"blockwise": CONDITIONS["blockwise"]}
    )
    options = ["--seeds", "1", "--before", "1", "--after", "1", "--text", str(TEXT)]
    main([*options, "--out", str(tmp_path / "x.png")])
    first = capsys.readouterr().out
    assert read_rows(tmp_path / "x.jsonl")[0]["resume_incident"]["after"] == 1
    (tmp_path / "x.png").unlink()
    main(["--redraw", "--out", str(tmp_path / "x.png")])
    assert capsys.readouterr().out == first
    assert (tmp_path / "x.png").exists()


def test_the_large_model_has_120_million_weights() -> None:
    config = configuration(CONDITIONS["history 16"], 0, 200, 2000, large=True)
    model = config.model
    assert isinstance(model, TransformerConfig)
    in_blocks = 12 * model.width**2 * model.layers
    assert 119e6 < in_blocks + (2 * 256 + model.context) * model.width < 123e6
    assert (config.device, config.products, config.steps) == ("cuda", "codes", 2200)
    assert model.context * config.batch == 8192
