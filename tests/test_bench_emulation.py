"""The oracle's benchmark: it runs, and its rows say what was measured."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from fp8lab.errors import UserError
from fp8lab.experiments.bench_emulation import OURS, Case, inputs, main, run_case
from fp8lab.records import read_rows


def test_rows_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.jsonl"
    arguments = ["--elements", "4096", "--repeats", "2", "--only", "quantize E4M3 float32"]
    assert main([*arguments, "--out", str(out)]) == 0
    described, *rows = read_rows(out)
    assert described["bench"]["command"].endswith(shlex.join([*arguments, "--out", str(out)]))
    assert described["bench"]["environment"]["packages"]["numpy"] == np.__version__
    assert [row["case"] for row in rows] == [
        "quantize E4M3 float32 normal",
        "quantize E4M3 float32 wide",
        "quantize E4M3 float32 normal, two threads",
    ]
    assert {OURS, "ml_dtypes"} <= set(rows[0]["rates"])
    assert out.with_suffix(".png").stat().st_size > 10_000
    assert "goal" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "name"), [("thread", "thread_time"), ("wall", "perf_counter")])
def test_the_ratio_is_of_medians_an_element(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(f"time.{name}", lambda: clock[0])
    turns = iter(range(100))

    def ours() -> None:
        clock[0] += 1

    def other() -> None:
        clock[0] += 1000 if next(turns) == 2 else 4  # one hiccup, which a median ignores

    work = {OURS: ours, "other": other}
    case = Case("x", 100, work, "other", shares={"other": 10}, clock=kind)
    row = run_case(case, repeats=7)
    assert row["ratio"] == 40  # 4 s for 10 elements against 1 s for 100
    assert row["rates"] == {OURS: 100, "other": 2}


def test_inputs_are_shuffled_and_repeat() -> None:
    first, again = inputs(10_000), inputs(10_000)
    for kind in ("normal", "wide"):
        assert np.array_equal(first[kind], again[kind])
        ordered = np.sort(first[kind])
        assert not np.array_equal(first[kind], ordered)
    exponents = np.frexp(first["wide"])[1]
    assert exponents.max() - exponents.min() > 45


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nope"], "--only is 'nope'; accepted: a part of quantize E4M3"),
        (["--elements", "1000"], "--elements is 1000; accepted: multiples of 4096"),
        (["--repeats", "0"], "--repeats is 0; accepted: 1 and up"),
    ],
)
def test_a_mistake_leaves_the_rows_that_are_there(
    tmp_path: Path, words: list[str], said: str
) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text('{"bench": {}}\n{"case": "a"}\n')
    before = out.read_bytes()
    with pytest.raises(UserError, match=said):
        main([*words, "--out", str(out)])
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]
