"""docs/testing-kit.md and the README: commands give the output shown, and examples hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8lab.cli import main
from fp8lab.testing import checks

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "testing-kit.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(PAGE)
SECONDS = re.compile(r"\d+\.\d s\)")
TESTS = ("test_mine.py", "test_adapted.py", "test_bounded.py")


def examples() -> dict[str, str]:
    """The Python examples by the file that their first line names."""
    return {
        block.partition("\n")[0].removeprefix("# "): block
        for kind, block in BLOCKS
        if kind == "python"
    }


def replaced(source: str, lines: str) -> str:
    """A source whose lines that assign to the same names are these."""
    for line in lines.splitlines():
        start = line.partition("=")[0] + "="
        assert sum(old.startswith(start) for old in source.splitlines()) == 1, start
        source = re.sub(rf"^{re.escape(start)}.*$", line.replace("\\", r"\\"), source, flags=re.M)
    return source


def outputs(block: str, capsys: pytest.CaptureFixture[str]) -> str:
    """A block of commands with what they print."""
    text = ""
    for line in block.splitlines():
        if not line.startswith("$ fp8lab "):
            continue
        arguments = line.removeprefix("$ fp8lab ").split()
        # In this process: to start another takes seconds.
        main([*arguments, *(["--in-process"] if arguments[0] == "verify" else [])])
        text += f"{line}\n{capsys.readouterr().out}"
    return SECONDS.sub("1.3 s)", text)


def test_the_walk_through_is_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FP8LAB_CASES", raising=False)
    kernels = Path("my_kernels.py")
    ran = 0
    for kind, block in BLOCKS:
        first, _, rest = block.partition("\n")
        if kind == "console":
            assert outputs(block, capsys) == SECONDS.sub("1.3 s)", block)
            ran += 1
        elif first == "# my_kernels.py":
            kernels.write_text(block)
        elif first.startswith("# my_kernels.py, instead"):
            kernels.write_text(replaced(kernels.read_text(), rest))
    assert ran == 3


def test_the_kernel_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FP8LAB_CASES", raising=False)
    blocks = [block for _, block in BLOCK.findall((ROOT / "README.md").read_text("utf-8"))]
    (kernel,) = [block for block in blocks if block.startswith("# my_kernels.py")]
    (shown,) = [block for block in blocks if block.startswith("$ fp8lab verify my_kernels.py")]
    Path("my_kernels.py").write_text(kernel)
    assert outputs(shown, capsys) == shown


def test_the_examples_hold(tmp_path: Path) -> None:
    for name in TESTS:
        (tmp_path / name).write_text(examples()[name])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "fp8lab.pytest_plugin", "-W", "error", *TESTS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


@pytest.mark.gpu
def test_the_cupy_example_holds(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    path = tmp_path / "cupy_kernel.py"
    path.write_text(examples()["cupy_kernel.py"])
    exec(compile(path.read_text(), str(path), "exec"), {})


def test_every_example_is_run_here() -> None:
    known = {*TESTS, "cupy_kernel.py", "my_kernels.py"}
    assert {name.partition(",")[0] for name in examples()} == known


def test_every_check_and_bound_is_on_the_page() -> None:
    names = {name for name in vars(checks) if name.startswith("check_")}
    assert len(names) >= 13
    for name in names:
        assert f"`{name}(" in PAGE
