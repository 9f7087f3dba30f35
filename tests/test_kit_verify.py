"""`fp8lab verify FILE`: what it prints, its exit codes, crashes, hangs, replays and mistakes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp8lab import verify_kernels
from fp8lab.cli import main
from fp8lab.formats import E4M3
from fp8lab.testing import PROFILES, checking, contract, contracts, profiles
from fp8lab.testing.cases import Case, load_case, save_case
from fp8lab.testing.checking import find_fault
from fp8lab.testing.exhaustive import Swept
from fp8lab.testing.isolation import InProcess, IsolatedRunner, Worker
from fp8lab.testing.marks import marks_of

KERNELS = """
import os
import signal
import time

import torch

import fp8lab.testing
from fp8lab.emulation.casting import quantize
from fp8lab.formats import E4M3
from fp8lab.testing import to_numpy, to_torch

def right(x, scale):
    return to_torch(quantize(to_numpy(x), E4M3, scale=scale))

@fp8lab.testing.contract("cast", fmt=E4M3)
def good(x, scale):
    print("a kernel may print")
    return right(x, scale)

@fp8lab.testing.contract("cast", fmt=E4M3)
def bad(x, scale):
    codes = right(x, scale).view(torch.uint8)
    return torch.where(x.abs() >= 2.0, codes ^ 1, codes)

@fp8lab.testing.contract("cast", fmt="E4M3")
def crashes(x, scale):
    if x.numel() == 33:
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(x, scale)

@fp8lab.testing.contract("cast", fmt="E4M3")
def leaves(x, scale):
    if x.numel() == 33:
        os._exit(3)
    return right(x, scale)

@fp8lab.testing.contract("cast", fmt="E4M3")
def hangs(x, scale):
    if x.numel() == 33:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # as code that never comes back to Python
        time.sleep(60)
    return right(x, scale)

@fp8lab.testing.contract("matmul", exact_sums=True, bound="any_order", core="ieee_float32")
def product(a, b, scale_a, scale_b):
    return (a.float() @ b.float()) * (scale_a * scale_b)

also_good = good

def unmarked(x, scale):
    return right(x, scale)
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of kernels, in the working directory; its cases are saved beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FP8LAB_CASES", raising=False)
    path = tmp_path / "my_kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in this process."""
    monkeypatch.setattr(verify_kernels, "Worker", InProcess)  # starting one takes seconds


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile that waits a short time alone."""
    quick = replace(PROFILES["quick"], time_limit=2.0, examples=2, fixed=None)
    monkeypatch.setitem(profiles.PROFILES, "quick", quick)
    monkeypatch.setattr("fp8lab.testing.isolation._SPARE_SECONDS", 1.0)
    for kind in checking._SLOW_CALLS:  # each would start a process
        monkeypatch.setitem(checking._SLOW_CALLS, kind, 0)


@pytest.mark.usefixtures("in_process")
def test_the_report_and_the_way_to_a_fix(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "my_kernels.py:bad", "my_kernels.py:good", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    report = (
        "bad does not hold cast(fmt=E4M3, rounding=nearest_even, overflow=saturate):"
        " it gives other bits in codes\n\nsmallest input\n"
        "  x      2.0 (0x40000000)\n  scale  1.0\n\ncodes\n"
        "  expected  2.0 (0x40)\n  actual    2.25 (0x41)\n  distance  1 ulp\n"
    )
    assert printed.startswith(report)
    assert re.search(r"in the first case that failed, \d+ of 2568 elements differ", printed)
    assert re.search(r"good holds cast\(fmt=E4M3, .*\) \(\d\d calls, \d", printed)
    assert printed.endswith("1 of 2 contracts hold (profile quick, device cpu)\n")

    command = re.search(r"replay: fp8lab (.*)", printed)
    assert command is not None
    arguments = command[1].split()
    assert arguments[:2] == ["verify", "my_kernels.py:bad"]
    assert main([*arguments, "--device", "cpu"]) == 1
    replayed = capsys.readouterr().out
    assert replayed.count("actual    2.25 (0x41)") == 2  # what was saved, and again

    # The saved outputs alone, against the oracle; then the mended kernel.
    assert main(["verify", *arguments[2:]]) == 1
    assert "actual    2.25 (0x41)" in capsys.readouterr().out
    kernels.write_text(KERNELS.replace("codes ^ 1", "codes"))
    assert main([*arguments, "--device", "cpu"]) == 0
    assert "it holds on this input now" in capsys.readouterr().out
    assert main(["verify", "my_kernels.py", *arguments[2:], "--device", "cpu"]) == 0


@pytest.mark.usefixtures("impatient")
def test_a_kernel_may_crash(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("crashes", "good")
    assert main(["verify", *(f"my_kernels.py:{name}" for name in names), "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "it ended its process: SIGSEGV" in printed
    assert "good holds" in printed
    assert "1 of 2 contracts hold" in printed
    (saved,) = Path(".fp8lab/cases").iterdir()
    assert load_case(saved).inputs["x"].shape == (33,)
    assert main(["verify", "--case", str(saved)]) == 1
    assert "it holds no outputs to compare" in capsys.readouterr().out


@pytest.mark.usefixtures("in_process")
def test_a_bound_is_named(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "my_kernels.py:product", "--device", "cpu"]) == 0
    assert "within the bound any_order" in capsys.readouterr().out


def test_a_case_of_a_gpu_is_judged_here(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = contracts.Cast(E4M3).settings
    inputs = {"x": np.array([1.0625], np.float32), "scale": np.asarray(1.0)}
    actual = {"codes": np.array([0x39], np.uint8).view(E4M3.dtype)}
    case = Case("cast", settings, inputs, actual, "gives other bits in codes", "k", "NVIDIA H200")
    path = save_case(case)
    assert main(["verify", "--case", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "saved: k on NVIDIA H200: it gives other bits in codes" in printed
    assert "expected  1.0 (0x38)" in printed
    fine = replace(case, actual={"codes": np.array([0x38], np.uint8).view(E4M3.dtype)})
    assert main(["verify", "--case", str(save_case(fine))]) == 0
    assert "its outputs are the oracle's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no file missing.py"),
        (["my_kernels.txt"], "my_kernels.txt is no Python file; accepted: FILE.py"),
        (["my_kernels.py:"], "is no FILE or FILE:FUNCTION"),
        (["my_kernels.py:unmarked"], "has no marked kernel unmarked; marked: good, bad, crashes"),
        (["my_kernels.py", "--profile", "slow"], "unknown profile 'slow'; accepted: quick, ci"),
        (["my_kernels.py", "--sample", "3"], "--sample and FILE do not go together"),
        (["my_kernels.py", "--out", "x.json"], "--out is for the patterns"),
        (["--profile", "quick"], "name a FILE that holds some"),
        (["--case", "no.json"], "cannot read the case no.json: No such file"),
        (["--case", "no.json", "a.py", "b.py"], "--case takes one FILE at most"),
        (["--mutants", "my_kernels.py"], "--mutants takes no FILE"),
        (["--mutants", "--jobs", "0"], "--jobs is 0; accepted: 1 or more"),
        (["--mutants", "--profile", "slow"], "unknown profile 'slow'; accepted: quick, ci"),
        (["part/queue.py"], "queue.py would hide the module queue; give it another name"),
        (["broken.py"], "broken.py raised ZeroDivisionError: division by zero (broken.py:1)"),
        (["empty.py"], "empty.py has no marked kernel; put @fp8lab.testing.contract"),
        (["wrong.py"], "unknown contract 'cats'; accepted"),
        (["ends.py"], "importing ends.py ended its process: exit code 5"),
    ],
)
def test_mistakes_end_in_one_line(
    arguments: list[str], message: str, kernels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.py").write_text("1 / 0\n")
    Path("part").mkdir()
    Path("part/queue.py").write_text("1 / 0\n")
    Path("empty.py").write_text("x = 1\n")
    Path("wrong.py").write_text("import fp8lab.testing\nfp8lab.testing.contract('cats')\n")
    Path("ends.py").write_text("import os\nos._exit(5)\n")
    given = [*arguments]
    if arguments[0].endswith(".py") and "--sample" not in arguments:
        given += ["--device", "cpu"]
    assert main(["verify", *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_gpu_that_is_not_there_is_said(
    kernels: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_kernels, "default_device", lambda: "cpu")
    assert main(["verify", "my_kernels.py", "--device", "cuda"]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
def test_replaying_needs_one_kernel(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = {"x": np.array([3.0], np.float32), "scale": np.asarray(1.0)}
    case = Case("cast", contracts.Cast(E4M3).settings, inputs, {}, "p", "other.py:gone", "cpu")
    path = str(save_case(case))
    assert main(["verify", "my_kernels.py", "--case", path, "--device", "cpu"]) == 2
    assert "has 5 kernels with the contract cast" in capsys.readouterr().err
    # A function without a mark will do where the case says the contract.
    assert main(["verify", "my_kernels.py:unmarked", "--case", path, "--device", "cpu"]) == 0
    assert main(["verify", "my_kernels.py:nothing", "--case", path, "--device", "cpu"]) == 2
    assert "my_kernels has no function nothing" in capsys.readouterr().err


def test_a_case_that_does_not_fit_its_contract_is_said(
    kernels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = contracts.Cast(E4M3).settings
    actual = {"codes": np.array([0], np.uint8)}
    for contract_settings, inputs in [
        ({**settings, "fmt": "E9M9"}, {}),
        (settings, {"y": np.array([1.0], np.float32)}),
    ]:
        path = save_case(Case("cast", contract_settings, inputs, actual, "p", "k", "cpu"))
        assert main(["verify", "--case", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_hangs_or_ends_is_started_again(kernels: Path) -> None:
    with Worker(kernels, "cpu", 2.0) as worker:
        runner = IsolatedRunner(worker, "crashes", frozenset())
        cast = contracts.Cast(E4M3)
        x = np.ones(33, np.float32)
        inputs = {"x": x, "scale": np.asarray(1.0)}
        outcome = IsolatedRunner(worker, "leaves", frozenset()).run(cast, inputs)
        assert (outcome.kind, outcome.detail) == ("crashed", "ended its process: exit code 3")
        outcome = IsolatedRunner(worker, "hangs", frozenset()).run(cast, inputs)
        assert (outcome.kind, outcome.detail) == ("hung", "did not return within 2 s")
        inputs["x"] = x[:3]
        assert runner.run(cast, inputs).kind == "returned"
        assert runner.name == f"{kernels}:crashes"
        half = replace(cast, dtypes=("float16",))
        swept = IsolatedRunner(worker, "bad", frozenset()).sweep(half)
        assert isinstance(swept, Swept)
        assert swept.words[0] == 0x4000  # 2.0
        exhaustive = replace(PROFILES["exhaustive"], examples=1, fixed=1)
        good = IsolatedRunner(worker, "good", frozenset())
        assert find_fault(half, good, exhaustive) is None


def test_marks_stack_and_are_checked_at_once() -> None:
    @contract("cast", fmt=E4M3)
    @contract("cast", fmt="E5M2", bound="one_code")
    def kernel(x: Any, scale: float) -> None: ...

    first, second = marks_of(kernel)
    assert (first.contract, first.bound) == (contracts.Cast(E4M3), None)
    assert second.bound is not None
    with pytest.raises(ValueError, match="unknown bound 'loose'; accepted: any_order"):
        contract("cast", fmt=E4M3, bound="loose")
    with pytest.raises(ValueError, match="unknown overflow policy"):
        contract("cast", fmt=E4M3, overflow="wrap")


def test_the_score_of_the_kit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table, on results that are made up; the score itself is another test."""
    from fp8lab.testing import mutants

    def result(name: str, **more: Any) -> Any:
        given: dict[str, Any] = {
            "name": name,
            "description": f"what {name} does",
            "contract": "cast",
        }
        given |= {"caught": True, "by": "cast", "guess": "g", "guess_right": True}
        return SimpleNamespace(**{**given, "equivalent": None, **more})

    results = [result("one"), result("two", guess_right=False), result("three", caught=False)]
    results.append(result("four", caught=False, equivalent="a proof"))
    monkeypatch.setattr(mutants, "run", lambda profile, jobs: results)
    assert main(["verify", "--mutants", "--jobs", "2"]) == 1
    printed = capsys.readouterr().out
    assert "2 of 3 caught, 1 with the right guess" in printed
    assert "survived: three: what three does" in printed
    assert "equivalent: four: a proof" in printed
    results.remove(results[2])
    assert main(["verify", "--mutants"]) == 0
