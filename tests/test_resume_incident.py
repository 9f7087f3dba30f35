"""The incident's experiment: its controls are exact, each part is left out, rows give a figure."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.checkpoint import CheckpointError
from fp8lab.data import Corpus, load_corpus
from fp8lab.errors import UserError
from fp8lab.experiments import incident_runs, resume_incident
from fp8lab.experiments.incident_rows import check_rows
from fp8lab.experiments.incident_runs import (
    CONDITIONS,
    LOST,
    Case,
    Condition,
    IncidentRun,
    Setting,
    cases_of,
    configuration,
    is_observed,
    one_ulp,
    row_of,
    without,
)
from fp8lab.experiments.plot_resume import draw, gaps, table
from fp8lab.experiments.resume_incident import main, tasks_of, variants_named
from fp8lab.models import TransformerConfig
from fp8lab.records import Row, read_rows, to_json
from tests.unstamped import rows_of as unstamped

TEXT = Path(__file__).parent.parent / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(TEXT)


def rows_of(condition: str, corpus: Corpus, setting: Setting) -> list[Row]:
    found = [row_of(case, setting, corpus) for case in cases_of([condition], 1, tuple(LOST))]
    return [row for row in found if row is not None]


@pytest.fixture(scope="module")
def rows(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    setting = Setting(4, 3, False, None, tmp_path_factory.mktemp("work"), corpus.sha256)
    return rows_of("history 16", corpus, setting)


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


def test_blockwise_has_no_scales_to_lose(corpus: Corpus, tmp_path: Path) -> None:
    rows = rows_of("blockwise", corpus, Setting(1, 1, False, None, tmp_path, corpus.sha256))
    assert all(row["missing"] or row["variant"] in ("exact", "one ulp") for row in rows[1:])
    lost = {row["variant"] for row in rows}
    assert lost == {"continuous", *LOST} - {v for v in LOST if "history" in v or v == "no scales"}
    assert rows[1]["loss"] == rows[0]["loss"]


def test_an_outlier_changes_gradients_and_no_loss(corpus: Corpus) -> None:
    def run_of(condition: Condition) -> list[Row]:
        config = configuration(condition, 0, 3, 1)
        run = IncidentRun(config, corpus, condition)
        return [run.advance() for _ in range(2)]

    plain = run_of(Condition("bf16"))
    condition = Condition("bf16", outlier_every=2)
    outlier = run_of(condition)
    assert outlier[0] == plain[0]
    assert outlier[1]["loss"] == plain[1]["loss"]
    run = IncidentRun(configuration(condition, 0, 3, 1), corpus, condition)
    eager = []
    for run.step in (1, 2, 3, 4):
        eager.append(run.eager_now())
    assert eager == [False, True, False, True]  # a CUDA graph has none of it
    assert outlier[1]["grad_norm"] == pytest.approx(256 * plain[1]["grad_norm"], rel=1e-2)


def test_parts_are_left_out_by_their_paths() -> None:
    scale = torch.ones(())
    state: dict[str, Any] = {"model": {"a.scale": scale, "a.w": 1}, "scaler": {"scale": scale}}
    assert without(state, ("model/*.scale",)) == {"model": {"a.w": 1}, "scaler": {"scale": scale}}
    assert without(state, ("scaler",)) == {"model": state["model"]}
    assert without(state, ()) == state


@pytest.mark.parametrize(
    ("large", "name", "place"), [(False, "tokens.weight", (101, 0)), (True, "norm.weight", (0,))]
)
def test_one_ulp_is_moved_where_the_loss_feels_it(
    large: bool, name: str, place: tuple[int, ...]
) -> None:
    model = {"tokens.weight": torch.ones(256, 4), "norm.weight": torch.ones(4)}
    moved = one_ulp({"model": model, "scaler": {}}, large=large)
    assert moved["scaler"] == {}
    for key, before in model.items():
        different = (moved["model"][key] != before).nonzero().tolist()
        assert different == ([list(place)] if key == name else [])
    assert moved["model"][name][place] == 1 + 2**-23


def test_the_large_model_has_its_ulp_elsewhere(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, moved = Case.configuration, []

    def noted(state: Any, *, large: bool) -> Any:
        moved.append(large)
        return one_ulp(state, large=large)

    monkeypatch.setattr(incident_runs, "one_ulp", noted)
    # So small that it runs anywhere; the rest is as for the large one.
    monkeypatch.setattr(
        Case, "configuration", lambda self, setting: small(self, replace(setting, large=False))
    )
    for large in (False, True):
        setting = Setting(1, 1, large, None, tmp_path / str(large), corpus.sha256)
        for variant in ("common", "one ulp"):
            row_of(Case("blockwise", 0, variant), setting, corpus)
    assert moved == [False, True]


def test_rows_give_a_table_and_the_same_figure_again(tmp_path: Path, rows: list[Row]) -> None:
    assert np.array_equal(gaps(rows, "history 16", "exact"), np.zeros((1, 3)))
    lines = table(rows).splitlines()
    assert len(lines) == 2 + len(LOST)
    assert "| history 16 | exact | +0.0000 | +0.0000 |" in lines[2]
    assert "0 of 3" in lines[2]
    draw(rows, tmp_path / "one.png")
    draw(rows, tmp_path / "two.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_lines_and_tables_take_what_is_there(tmp_path: Path, rows: list[Row]) -> None:
    some = [row for row in rows if row["variant"] in ("continuous", "exact")]
    alone = {**rows[2], "seed": 7}  # its continuous run is missing
    assert len(table([*some, alone]).splitlines()) == 3
    draw([*some, alone], tmp_path / "some.png")
    assert (tmp_path / "some.png").exists()


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    only = {"blockwise": CONDITIONS["blockwise"]}
    monkeypatch.setattr(resume_incident, "CONDITIONS", only)
    options = ["--seeds", "1", "--before", "1", "--after", "2", "--text", str(TEXT)]
    return [*options, "--out", str(tmp_path / "x.png"), "--work", str(tmp_path / "work")]


def test_the_command(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(options)
    first = capsys.readouterr().out
    assert read_rows(tmp_path / "x.jsonl")[0]["resume_incident"]["after"] == 2
    (tmp_path / "x.png").unlink()
    main(["--redraw", "--out", str(tmp_path / "x.png")])
    assert capsys.readouterr().out == first
    assert (tmp_path / "x.png").exists()


def test_sittings_give_the_file_of_one(tmp_path: Path, options: list[str]) -> None:
    """Some variants, a kill within a row, another work folder, two processes: the same rows."""
    main(options)
    path = tmp_path / "x.jsonl"
    whole = unstamped(path)
    command = read_rows(path)[0]["environment"]["command"]
    assert command == shlex.join(["python", "-m", resume_incident.__name__, *options])
    path.unlink()
    main([*options, "--variants", "no random state, exact"])
    assert [row["variant"] for row in read_rows(path)[1:]] == [
        "continuous",
        "exact",
        "no random state",
    ]
    with path.open("ab") as file:
        file.write(to_json(whole[-2])[:200].encode())
    main([*options, "--work", str(tmp_path / "elsewhere"), "--jobs", "2"])
    assert unstamped(path) == whole
    main(options)  # nothing is missing
    assert unstamped(path) == whole
    with pytest.raises(UserError, match="holds rows of another resume_incident"):
        main([*options, "--after", "3"])


def test_commands_with_other_options_share_the_work(tmp_path: Path, options: list[str]) -> None:
    main(options)
    whole = unstamped(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").unlink()
    exact = [*options, "--variants", "exact"]
    main(exact)
    main([*exact, "--after", "3", "--out", str(tmp_path / "longer.png")])
    other = tmp_path / "other.txt"
    other.write_bytes(TEXT.read_bytes()[::-1])
    main([*exact, "--text", str(other), "--out", str(tmp_path / "text.png")])
    main(options)
    assert unstamped(tmp_path / "x.jsonl") == whole


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--after", "0"], "--after is 0; accepted: 1 and up"),
        (["--before", "0"], "--before is 0; accepted: 1 and up"),
        (["--seeds", "-1"], "--seeds is -1; accepted: 1 and up"),
        (["--jobs", "0"], "--jobs is 0; accepted"),
        (["--variants", "exact,no scales"], "'no scales', which the condition blockwise cannot"),
        (["--out", "x.xyz"], "--out is 'x.xyz'; accepted: a file in .jsonl, .png, .pdf, .svg"),
    ],
)
def test_mistakes_are_said_before_any_work(
    tmp_path: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(resume_incident, "row_of", None)
    with pytest.raises(UserError, match=re.escape(said)):
        main([*options, *given])
    assert not list(tmp_path.iterdir())


def test_rows_that_are_not_whole_are_refused(tmp_path: Path, options: list[str]) -> None:
    main([*options, "--variants", "exact"])
    path = tmp_path / "x.jsonl"
    head, row = path.read_text().splitlines()[:2]
    for line, said in (
        (row.replace('"condition"', '"kind"'), "line 2, is damaged: it lacks condition"),
        (row.replace('"blockwise"', '"other"'), "line 2, is damaged: condition is 'other'"),
        (row.replace('"loss": [', '"loss": ["abc", '), "line 2, is damaged: loss is"),
        (row.replace('"loss": [', '"loss": [1.0, '), "a list has another length"),
        ("5", "line 2, is damaged: it holds no JSON object"),
    ):
        text = f"{head}\n{line}\n"
        path.write_text(text)
        for more in ([], ["--redraw"]):
            with pytest.raises(UserError, match=said):
                main([*options, *more])
        assert path.read_text() == text
    path.write_text(head + "\n")
    with pytest.raises(UserError, match="holds nothing to compare yet"):
        main([*options, "--redraw"])


HEAD: Row = {
    "resume_incident": {"seeds": 1, "before": 4, "after": 3},
    "corpus": {"name": "x", "sha256": "0"},
    "environment": {"device": "cpu"},
}


@pytest.mark.parametrize(
    ("place", "changes", "said"),
    [
        (2, {"observed": ["nan", 2, 3]}, "line 3, is damaged: observed"),
        (2, {"observed": []}, "line 3, is damaged: observed"),
        (2, {"observed": [0, 1, 2]}, "line 3, is damaged: observed is not steps from 1 to 3"),
        (2, {"observed": [1, 3, 2]}, "line 3, is damaged: observed is not steps from 1 to 3"),
        (2, {"observed": [1, 2, 2]}, "line 3, is damaged: observed is not steps from 1 to 3"),
        (1, {"observed": [1, 2, 10**400]}, "line 2, is damaged: observed"),
        (2, {"loss": [1.0, 10**400, 1.0]}, "line 3, is damaged: loss"),
        (2, {"overflow": [1.0, 10**400, 1.0]}, "line 3, is damaged: overflow"),
        (2, {"underflow": [1.0, 10**400, 1.0]}, "line 3, is damaged: underflow"),
        (2, {"scale": [1.0, 10**400, 1.0]}, "line 3, is damaged: scale"),
        (2, {"validation_loss": -(10**400)}, "line 3, is damaged: validation_loss"),
        (2, {"variant": "continuous"}, "line 3, is damaged: condition history 16, seed 0, variant"),
        (0, {"corpus": None}, "line 1, is damaged: corpus"),
        (0, {"resume_incident": {"after": 3}}, "line 1, is damaged: resume_incident"),
    ],
)
def test_damaged_rows_are_refused(
    tmp_path: Path, rows: list[Row], place: int, changes: Row, said: str
) -> None:
    whole = [HEAD, *rows]
    assert check_rows(whole, tmp_path) == whole
    whole[place] = whole[place] | changes
    with pytest.raises(UserError, match=f"{tmp_path}, {said}"):
        check_rows(whole, tmp_path)
    for key in ("corpus", "environment"):
        with pytest.raises(UserError, match=f"line 1, is damaged: it lacks {key}"):
            check_rows([{k: v for k, v in HEAD.items() if k != key}, *rows], tmp_path)


def test_rows_observed_at_other_steps_are_no_rows_of_one_file(
    tmp_path: Path, rows: list[Row]
) -> None:
    names = ("observed", "overflow", "underflow", "scale")
    shorter = rows[1] | {name: rows[1][name][:2] for name in names}
    with pytest.raises(UserError, match="line 3, is damaged: observed has other steps than line 2"):
        check_rows([HEAD, rows[0], shorter], tmp_path)


def test_nothing_is_compared_without_a_continuous_run(
    tmp_path: Path, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    redraw = ["--redraw", "--out", str(path)]
    path.write_text("".join(to_json(row) + "\n" for row in [HEAD, *rows[1:]]))
    with pytest.raises(UserError, match="holds nothing to compare yet"):
        main(redraw)
    assert not path.with_suffix(".png").exists()
    alone = rows[2] | {"seed": 1}
    path.write_text("".join(to_json(row) + "\n" for row in [HEAD, *rows, alone]))
    main(redraw)
    said = capsys.readouterr().out
    assert said.startswith(table([HEAD, *rows]))
    assert said.endswith("left out: history 16, seed 1: one ulp; its continuous run is not there\n")


def test_what_a_sitting_has_to_do(tmp_path: Path) -> None:
    setting = Setting(1, 1, False, None, tmp_path, "text")
    cases = cases_of(["blockwise"], 1, ("exact", "one ulp"))
    continuous, exact, ulp = cases
    common = Case("blockwise", 0, "common")
    assert tasks_of(cases, [], setting) == cases
    done: Row = {"condition": "blockwise", "seed": 0, "variant": "continuous"}
    assert tasks_of(cases, [done], setting) == [common, exact, ulp]
    place = continuous.checkpoint(setting)
    place.mkdir(parents=True)
    assert tasks_of(cases, [done], setting) == [exact, ulp]
    # Of another sitting, and perhaps of other code: not taken for this continuous run's.
    assert tasks_of(cases, [], setting) == cases
    assert not place.exists()


def test_a_checkpoint_of_other_settings_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    setting = Setting(1, 1, False, None, tmp_path, corpus.sha256)
    row_of(Case("blockwise", 0, "common"), setting, corpus)
    exact = Case("blockwise", 0, "exact")
    row_of(exact, setting, corpus)
    other = replace(setting, after=2)  # another length of the schedule
    place = exact.checkpoint(other)
    place.parent.mkdir()
    exact.checkpoint(setting).rename(place)
    with pytest.raises(CheckpointError, match="steps"):
        row_of(exact, other, corpus)


def test_what_a_checkpoint_depends_on_is_in_its_path(tmp_path: Path) -> None:
    setting = Setting(1, 1, False, None, tmp_path, "text")
    cases = [Case(name, seed, "exact") for name in CONDITIONS for seed in (0, 1)]
    others: list[dict[str, Any]] = [
        {"before": 2},
        {"after": 2},
        {"large": True},
        {"sha256": "other"},
    ]
    settings = [setting, *(replace(setting, **other) for other in others)]
    places = {case.checkpoint(own) for case in cases for own in settings}
    assert len(places) == len(cases) * len(settings)
    assert cases[0].checkpoint(setting) == replace(cases[0], variant="common").checkpoint(setting)


def test_variants_by_name() -> None:
    with pytest.raises(UserError, match=r"--variants names exact, exact; accepted: .* each once"):
        variants_named("exact,exact")
    assert variants_named(None) == tuple(LOST)
    assert variants_named("exact,no scales, no history,no scales") == (
        "exact",
        "no scales, no history",
        "no scales",
    )
    for text in ("", "exact,nothing"):
        with pytest.raises(UserError, match="accepted: exact; one ulp; no amax history"):
            variants_named(text)


def test_steps_that_are_observed() -> None:
    small = [step for step in range(1, 301) if is_observed(step, large=False)]
    assert small == [*range(1, 21), *range(30, 301, 10)]
    large = [step for step in range(1, 2001) if is_observed(step, large=True)]
    assert large == [*range(1, 21), *range(40, 301, 20), *range(400, 2001, 200)]


def test_the_large_model_has_120_million_weights() -> None:
    config = configuration(CONDITIONS["history 16"], 0, 200, 2000, large=True)
    model = config.model
    assert isinstance(model, TransformerConfig)
    in_blocks = 12 * model.width**2 * model.layers
    assert 119e6 < in_blocks + (2 * 256 + model.context) * model.width < 123e6
    assert (config.device, config.products, config.steps) == ("cuda", "codes", 2200)
    assert model.context * config.batch == 8192
    assert config.autocast
