"""`fp8lab checkpoint`: inspect, verify, diff, and mistakes in one line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8lab.checkpoint import save
from fp8lab.checkpoint_diff import differences
from fp8lab.cli import main


def small_state(**changes: Any) -> dict[str, Any]:
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    model = {
        "w": weight,
        "casts.input.scale": torch.tensor(2.0),
        "codes": torch.zeros(3).to(torch.float8_e4m3fn),
        "n": torch.tensor([1, -2], dtype=torch.int16),
        "z": torch.ones(2, dtype=torch.complex64),
    }
    numbers = {"loss": 2.5, "step": 5}
    return {"model": model | changes.pop("model", {}), "numbers": numbers | changes}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (5, 10):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        fingerprint = {"recipe": {"name": "delayed"}, "long": ["x" * 300]}
        save(folder, small_state(), step=step, fingerprint=fingerprint, metric=1.5)
    return tmp_path / "run"


def test_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "step-000010: step 10, format 2, fp8lab" in shown
    assert 'recipe: {"name": "delayed"}' in shown
    assert "metric 1.5" in shown
    assert max(len(line) for line in shown.splitlines()) < 250
    model = next(line for line in shown.splitlines() if line.startswith("model"))
    assert model.split()[:4] == ["model", "5", "14", "2"]
    assert "numbers" in shown
    assert main(["checkpoint", "inspect", "--tensors", str(run)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model/casts.input.scale", "scale", "one", "float32"] in lines
    assert ["model/w", "parameter", "or", "buffer", "2", "x", "3", "float32"] in lines


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = run / "checkpoints" / "step-000005"
    assert main(["checkpoint", "verify", str(older)]) == 0
    assert "step-000005 is whole: step 5, 5 tensors" in capsys.readouterr().out
    (older / "model.safetensors").write_bytes(b"")
    assert main(["checkpoint", "verify", str(older)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fp8lab checkpoint: ")
    assert "model.safetensors is damaged" in error
    assert len(error.splitlines()) == 1
    assert main(["checkpoint", "verify", str(run)]) == 0


def test_diff(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = (run / "checkpoints" / name for name in ("step-000005", "step-000010"))
    assert main(["checkpoint", "diff", str(older), str(newer)]) == 0
    assert "the same bits, all 7 tensors and values" in capsys.readouterr().out
    other = small_state(model={"w": torch.tensor([[0, 1, 2], [3, 4.5, -5]])}, loss=math.nan)
    save(tmp_path / "other", other, step=5)
    assert main(["checkpoint", "diff", str(older), str(tmp_path / "other")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[0] == "model/w"
    assert "2 of 6" in lines[1]
    assert "[4] 4.0 (0x40800000) and 4.5 (0x40900000)" in lines[1]
    assert lines[2].split() == ["numbers/loss", "state", "of", "numbers", "2.5", "and", "nan"]
    assert lines[-1].endswith("2 tensors and values differ")


def test_each_kind_of_difference_is_shown() -> None:
    def first(**changes: Any) -> str:
        (found,) = differences(small_state(), small_state(**changes))
        return found.first

    assert first(model={"codes": torch.tensor([0.0, 0, -0.0]).to(torch.float8_e4m3fn)}) == (
        "[2] 0.0 (0x00) and -0.0 (0x80)"
    )
    assert first(model={"n": torch.tensor([1, 3], dtype=torch.int16)}) == (
        "[1] -2 (0xfffe) and 3 (0x0003)"
    )
    assert first(model={"z": torch.tensor([1, 2j])}).startswith("[1] (1+0j) (0x")
    assert first(model={"n": torch.zeros(2)}) == "int16 (2,) and float32 (2,)"
    assert first(model={"new": torch.zeros(2)}) == "only in the second"
    assert first(step=5.0) == "5 and 5.0"
    assert first(step="x" * 100) == f"5 and '{'x' * 36}..."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "nowhere"], "no checkpoint in nowhere; name a checkpoint's folder"),
        (["diff", "nowhere", "there"], "no checkpoint in nowhere"),
        (["inspect", "."], "no checkpoint in ."),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_no_action_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint"])
    assert left.value.code == 2
    assert "ACTION" in capsys.readouterr().err
