"""`fp8lab verify`: it agrees where all is well, and finds a planted fault."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fp8lab import verify as module
from fp8lab.cli import main
from fp8lab.errors import UserError
from fp8lab.formats import E4M3
from fp8lab.verify import CHUNK, Check, checks, differences, verify


def test_a_sample_agrees_and_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "row.json"
    assert main(["verify", "--sample", "100000", "--out", str(out)]) == 0
    row = json.loads(out.read_text())
    assert row["patterns"] == 100_000
    assert row["command"] == "fp8lab verify --sample 100000 --jobs 1"
    assert all(check["differences"] == 0 for check in row["checks"])
    assert row["environment"]["packages"]["numpy"] == np.__version__
    names = [check["check"] for check in row["checks"]]
    assert any("against ml_dtypes" in name for name in names)
    assert any("against torch" in name for name in names) or row["skipped"]
    assert "0 differ" in capsys.readouterr().out


def test_processes_share_the_patterns() -> None:
    row = verify(CHUNK + 1000, jobs=2, command="test")
    assert row["patterns"] == CHUNK + 1000
    assert not any(check["differences"] for check in row["checks"])


def test_a_planted_fault_is_counted_and_its_first_pattern_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def round_half_away(x: module.Array) -> module.Array:
        right = checks()[0][0].expected(x).copy()
        tie = x.view(np.uint32) & 0x7FFFFFFF == 0x3F880000  # 1.0625: between 1 and 1.125
        right[tie] += 1
        return right

    planted = Check("planted", E4M3, "nearest_even", "ptx_satfinite", round_half_away)
    words = np.array([0, 0xBF880000, 0x3F880000, 0x3F880001], np.uint32)
    (found,) = differences(words, [planted])
    assert (found.count, found.word, found.actual, found.expected) == (2, 0x3F880000, 0x38, 0x39)
    assert str(found) == ("E4M3, planted: 2 differ; first 0x3F880000 (1.0625): 0x38, expected 0x39")

    monkeypatch.setattr(module, "PATTERNS", 1 << 20)
    monkeypatch.setattr(module, "_STRIDE", 1 << 12)  # a sample of round patterns: ties
    monkeypatch.setattr(module, "checks", lambda: ([planted], ["torch: not here"]))
    assert main(["verify", "--sample", "1048576"]) == 1
    printed = capsys.readouterr().out
    assert "E4M3  planted: 2 differ" in printed
    assert "first 0x3F880000 (1.0625): 0x38, expected 0x39" in printed
    assert "skipped: torch: not here" in printed


def test_the_sample_is_spread_over_all_exponents() -> None:
    words = (np.arange(10_000, dtype=np.uint64) * np.uint64(module._STRIDE)).astype(np.uint32)
    assert np.unique(words).size == words.size
    assert np.unique(words >> np.uint32(23)).size == 512  # every exponent of either sign


@pytest.mark.parametrize(
    ("sample", "jobs", "message"),
    [
        (0, 1, "--sample is 0; accepted: 1 to 4294967296"),
        (1 << 33, 1, "--sample is 8589934592"),
        (10, 0, "--jobs is 0; accepted: 1 or more"),
    ],
)
def test_numbers_out_of_range_are_refused(sample: int, jobs: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        verify(sample, jobs, command="test")


def test_a_folder_that_is_not_there_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--exhaustive", "--out", str(tmp_path / "no" / "row.json")]) == 2
    assert "is not a folder" in capsys.readouterr().err
