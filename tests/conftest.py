"""What every test shares: where kernels run, hypothesis' profiles, one thread."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Tests hand the kit faulty kernels: what it finds is not to be kept in the working directory.
os.environ.setdefault("FP8LAB_CASES", "")

# Read when NumPy and torch start: sums must not depend on how many cores a machine has, and
# pytest-xdist already fills the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# A shell that runs tests in the background has them ignore Ctrl-C, and what they start would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On CI every run tries the same examples; elsewhere each run tries new ones. No deadline in either:
# the Triton interpreter is slow, and a shared machine slower.
settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("dev", deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def _share_cards() -> None:
    """Give each of xdist's workers one of several GPUs, in turn; before CUDA starts."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    count = torch.cuda.device_count()
    if count > 1 and worker.startswith("gw") and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker[2:]) % count)


_share_cards()


def _choose_device() -> str:
    """Where the kernels run: "cuda", or "cpu" for the Triton interpreter.

    FP8LAB_TEST_DEVICE=gpu or =interpreter chooses; otherwise a GPU is used where there is one.
    """
    choice = os.environ.get("FP8LAB_TEST_DEVICE", "")
    if choice not in ("", "gpu", "interpreter"):
        raise pytest.UsageError(f"FP8LAB_TEST_DEVICE={choice!r}; accepted: gpu, interpreter")
    if choice == "gpu" and not torch.cuda.is_available():
        raise pytest.UsageError("FP8LAB_TEST_DEVICE=gpu, but torch finds no CUDA device")
    if choice == "interpreter" or not torch.cuda.is_available():
        return "cpu"
    return "cuda"


DEVICE = _choose_device()

# Triton reads it at @triton.jit, so it is set before any test imports a kernel. Processes that a
# test starts inherit it.
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums on a GPU whose order does not change from run to run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device() -> str:
    """The torch device that kernels run on: "cuda", or "cpu" under the Triton interpreter."""
    return DEVICE


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the variants of the cast and scaling kernels in parallel, before xdist's workers each
    compile them one after the other. Only where their tests on a GPU were asked for.
    """
    config = session.config
    if DEVICE != "cuda" or config.option.markexpr != "gpu" or hasattr(config, "workerinput"):
        return
    asked = [Path(argument.partition("::")[0]) for argument in config.args]
    if any(path.is_dir() or "casting" in path.name or "scaling" in path.name for path in asked):
        command = [sys.executable, "-m", "fp8lab.experiments.kernel_variants", "--settings"]
        # What fails here fails in its test too, and is told there.
        subprocess.run([*command, "--jobs", str(os.cpu_count() or 1)], check=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where kernels do not run on one."""
    if DEVICE == "cuda":
        return
    if torch.cuda.is_available():
        reason = "needs a CUDA device; FP8LAB_TEST_DEVICE=interpreter"
    else:
        reason = "needs a CUDA device; torch finds none"
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _backward_thread() -> None:
    """On a GPU torch has a thread of its own for backward passes. If the first thing that it does
    there is a product by cuBLAS, torch warns that the thread has no CUDA context, and a warning is
    an error: so it does something else first.
    """
    if DEVICE == "cuda":
        loss = torch.ones(8, device="cuda", requires_grad=True).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Hand back what a test on a GPU leaves: memory that others need, and torch's modes."""
    if DEVICE != "cuda" or item.get_closest_marker("gpu") is None:
        return
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()
