"""The pytest plugin, in a pytest of its own: marks, options, devices, what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8lab import pytest_plugin
from fp8lab.cli import main

TESTS = """
import pytest
import torch
from fp8lab.emulation.casting import quantize
from fp8lab.formats import E4M3, E5M2
from fp8lab.testing import to_numpy, to_torch

def right(fmt):
    return lambda x, scale: to_torch(quantize(to_numpy(x), fmt, scale=scale))

@pytest.mark.fp8_kernel("cast", fmt=E4M3)
def test_right():
    return right(E4M3)

@pytest.mark.fp8_kernel("cast", fmt="E4M3")
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_with_arguments(device, fmt):
    assert device == "cpu"
    return right(fmt)

@pytest.mark.fp8_kernel("cast", fmt=E4M3)
@pytest.mark.fp8_kernel("cast", fmt=E4M3, rounding="toward_zero")
def test_two_marks():
    return right(E4M3)

@pytest.mark.fp8_kernel("matmul", exact_sums=True, bound="any_order")
def test_within_a_bound():
    return lambda a, b, scale_a, scale_b: (a.float() @ b.float()) * (scale_a * scale_b)

@pytest.mark.fp8_kernel("cast", fmt=E4M3)
def test_that_returns_nothing():
    pass

@pytest.mark.fp8_kernel("cats")
def test_of_an_unknown_contract():
    return right(E4M3)

@pytest.mark.fp8_kernel
def test_of_no_contract():
    return right(E4M3)

@pytest.mark.fp8_kernel("cast", fmt=E4M3)
@pytest.mark.skip(reason="not today")
def test_that_is_skipped():
    raise AssertionError

def test_without_a_mark(device):
    import os
    assert os.environ["TRITON_INTERPRET"] == "1"
"""


ROOT = Path(__file__).resolve().parent.parent


def run_pytest(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code and the output of pytest in a folder, with the plugin and warnings as errors.

    The plugin is named, so that it is there whether or not this checkout is installed.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    kept.pop("TRITON_INTERPRET", None)
    own = {"PYTHONPATH": str(ROOT), "FP8LAB_CASES": "", "CUDA_VISIBLE_DEVICES": ""}
    own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ("-p", "fp8lab.pytest_plugin", "-p", "no:cacheprovider", "-W", "error")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=folder,
        env={**kept, **own, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_package_brings_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"fp8lab": "fp8lab.pytest_plugin"}


def test_marked_tests_hold_or_fail(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS)
    code, printed = run_pytest(tmp_path, "-v", "--strict-markers", "--fp8-device=interpreter")
    assert code == 1
    for name, outcome in [
        ("test_right", "PASSED"),
        ("test_with_arguments[fmt0]", "PASSED"),
        ("test_with_arguments[fmt1]", "FAILED"),
        ("test_two_marks", "FAILED"),
        ("test_within_a_bound", "PASSED"),
        ("test_that_returns_nothing", "FAILED"),
        ("test_of_an_unknown_contract", "FAILED"),
        ("test_of_no_contract", "FAILED"),
        ("test_that_is_skipped", "SKIPPED"),
        ("test_without_a_mark", "PASSED"),
    ]:
        assert f"{name} {outcome}" in printed
    assert "does not hold cast(fmt=E4M3, rounding=toward_zero, overflow=saturate)" in printed
    assert "this one returned None" in printed
    assert "the mark fp8_kernel: unknown contract 'cats'; accepted:" in printed
    assert "the mark fp8_kernel: a contract is given by its name" in printed


def test_an_unknown_profile_is_said(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(
        "import pytest\n"
        "@pytest.mark.fp8_kernel('cast', fmt='E4M3')\n"
        "def test_it():\n"
        "    return print\n"
    )
    code, printed = run_pytest(tmp_path, "--fp8-profile=slow")
    assert code == 1
    assert "unknown profile 'slow'; accepted: quick, ci, thorough, exhaustive" in printed


@pytest.mark.parametrize(
    ("choice", "there", "device"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("interpreter", True, "cpu")],
)
def test_the_device(choice: str, there: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pytest_plugin._device(options(choice)) == device


def test_a_gpu_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.UsageError, match="--fp8-device=gpu, but torch finds no CUDA"):
        pytest_plugin._device(options("gpu"))


def options(choice: str) -> Any:
    """A stand-in for pytest's configuration."""
    return SimpleNamespace(getoption=lambda name: choice)


@pytest.mark.parametrize(
    ("text", "nodes", "interpreted"),
    [
        ("from fp8lab.testing import check_cast", (), True),
        ("import numpy", (), False),
        ("from fp8lab.testing import check_cast", ("/",), False),
    ],
)
def test_where_triton_interprets(
    text: str,
    nodes: tuple[str, ...],
    interpreted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pytest_plugin, "_GPU_NODES", nodes)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = tmp_path / "test_some.py"
    path.write_text(text)
    parent: Any = SimpleNamespace(config=options("auto"))
    pytest_plugin.pytest_pycollect_makemodule(path, parent)
    assert ("TRITON_INTERPRET" in os.environ) == interpreted


def test_it_is_not_noticed_where_it_is_not_used(tmp_path: Path) -> None:
    """Nothing heavy is imported, no variable is set, a fixture of that name is the user's."""
    (tmp_path / "test_other.py").write_text(
        "import os, sys\n"
        "import pytest\n"
        "@pytest.fixture\n"
        "def device():\n"
        "    return 'mine'\n"
        "def test_it(device):\n"
        "    assert device == 'mine'\n"
        "    assert 'TRITON_INTERPRET' not in os.environ\n"
        "    assert not {'torch', 'triton', 'numpy', 'hypothesis'} & set(sys.modules)\n"
    )
    code, printed = run_pytest(tmp_path, "-q")
    assert code == 0, printed


def test_a_new_kernel_passes_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    assert main(["new-kernel", "my_cast", "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    names = ["bench_my_cast.py", "my_cast.py", "my_cast_oracle.py", "test_my_cast.py"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert all(str(folder / name) in printed for name in names)
    assert not any("NEW_KERNEL" in path.read_text() for path in folder.iterdir())
    code, output = run_pytest(folder, "-q", TRITON_INTERPRET="1", CI="1")
    assert code == 0, output
    assert "2 passed" in output
    done = subprocess.run(
        [sys.executable, "bench_my_cast.py", "2048"],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "cpu: 2048 elements" in done.stdout


def test_a_new_kernel_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_mine.py").write_text("kept")
    for arguments, message in [
        (["mine", "--out", str(tmp_path)], "test_mine.py exists already"),
        (["my-cast", "--out", str(tmp_path)], "NAME is 'my-cast'; accepted: a Python identifier"),
        (["class", "--out", str(tmp_path)], "NAME is 'class'"),
        (["torch", "--out", str(tmp_path)], "NAME is 'torch', the name of a module; choose"),
        (["mine", "--out", str(tmp_path / "test_mine.py")], "which is no folder"),
    ]:
        assert main(["new-kernel", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
    assert (tmp_path / "test_mine.py").read_text() == "kept"
