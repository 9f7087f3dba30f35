"""fp8lab's pytest plugin: kernels as tests.

    @pytest.mark.fp8_kernel("cast", fmt=E4M3)
    def test_my_cast():
        return my_cast  # held to the contract, on the device, in the profile of the command line

`--fp8-profile` and `--fp8-device` choose how much and where; the fixture `device` gives the device
to tests that call kernels themselves. Nothing of fp8lab but this file is imported until a test asks
for it.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest

_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
_WORDS = (b"fp8_kernel", b"fp8lab.testing")
DEVICES = ("auto", "gpu", "interpreter")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("fp8lab", "fp8lab: FP8 kernels held to their contracts")
    group.addoption(
        "--fp8-profile",
        default="quick",
        metavar="NAME",
        help="how much is tried of each kernel: quick (default), ci, thorough, exhaustive",
    )
    group.addoption(
        "--fp8-device",
        default="auto",
        choices=DEVICES,
        help="where kernels run: gpu, interpreter (Triton's, on the CPU), or auto (default): the"
        " GPU if there is one",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line(
        "markers",
        "fp8_kernel(contract, *, bound=None, **settings): the test returns a kernel, which is held"
        " to an fp8lab contract: cast, dequantize, amax, block_quantize, matmul, adamw, ...",
    )
    if config.getoption("--fp8-device") == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """Before a test module that uses the kit is imported: Triton interprets where no GPU is.

    Triton reads the variable when a kernel is decorated. Modules that do not mention the kit, and
    machines with a GPU, are left alone.
    """
    if parent.config.getoption("--fp8-device") != "auto" or "TRITON_INTERPRET" in os.environ:
        return
    if any(Path(node).exists() for node in _GPU_NODES):
        return
    if any(word in module_path.read_bytes() for word in _WORDS):
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """The torch device that kernels run on: "cuda", or "cpu", where Triton interprets."""
    return _device(pytestconfig)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test: what it returns is held to the contracts of its marks."""
    marks = list(pyfuncitem.iter_markers("fp8_kernel"))
    if not marks:
        return None
    __tracebackhide__ = True
    from fp8lab.testing.checking import check
    from fp8lab.testing.contracts.base import contract_from
    from fp8lab.testing.marks import bound_named
    from fp8lab.testing.profiles import profile_named

    wanted = inspect.signature(pyfuncitem.obj).parameters
    given = {name: pyfuncitem.funcargs[name] for name in wanted if name in pyfuncitem.funcargs}
    kernel = pyfuncitem.obj(**given)
    if not callable(kernel):
        pytest.fail(
            f"a test with the mark fp8_kernel returns the kernel; this one returned {kernel!r}",
            pytrace=False,
        )
    config = pyfuncitem.config
    for mark in marks:
        try:
            profile = profile_named(config.getoption("--fp8-profile"))
            settings: dict[str, Any] = dict(mark.kwargs)
            bound = bound_named(settings.pop("bound", None))
            contract = contract_from(mark.args[0] if mark.args else None, settings)
        except (TypeError, ValueError) as error:
            pytest.fail(f"the mark fp8_kernel: {error}", pytrace=False)
        check(
            contract,
            kernel,
            device=_device(config),
            profile=profile,
            bound=bound,
        )
    return True


def _device(config: pytest.Config) -> str:
    import torch

    choice = config.getoption("--fp8-device")
    if choice == "interpreter":
        return "cpu"
    there = torch.cuda.is_available()
    if choice == "gpu" and not there:
        raise pytest.UsageError("--fp8-device=gpu, but torch finds no CUDA device")
    return "cuda" if there else "cpu"
