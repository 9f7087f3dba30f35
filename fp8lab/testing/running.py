"""Calling a kernel on a contract's inputs, so that whatever it does becomes an `Outcome`.

Each tensor lies in a larger buffer whose margins are all ones bits: NaN in every floating type. A
kernel that reads past an end without a mask gets a NaN, and one that writes there is found out.
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from fp8lab.bridge import to_numpy, to_torch
from fp8lab.testing.comparison import cell_text
from fp8lab.testing.contracts.base import Contract, Kernel, WrongResult
from fp8lab.testing.contracts.casts import Cast
from fp8lab.testing.exhaustive import Swept, swept
from fp8lab.testing.launch import run_kernel

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

MARGIN = 4096  # bytes to either side: keeps every alignment that an allocation has
MARGIN_BYTE = 0xFF


@dataclass(frozen=True)
class Outcome:
    """What came of one call.

    Attributes:
        kind: "returned", or what went wrong: "raised", "hung", "crashed", "wrong_result",
            "changed_input", "unwritten", "outside".
        detail: What went wrong, as the end of a sentence about the kernel; empty for "returned".
        outputs: The outputs by name; empty where there are none.
    """

    kind: str
    detail: str = ""
    outputs: Arrays = field(default_factory=dict)


class Runner(Protocol):
    """Whatever can call one kernel again and again."""

    @property
    def device(self) -> str:
        """Where the kernel runs: "cpu" or "cuda"."""

    @property
    def name(self) -> str:
        """The kernel's name: "FILE:FUNCTION" where it is a function in a file."""

    @property
    def traits(self) -> frozenset[str]:
        """What adapters say of the inputs that can be passed on."""

    def run(self, contract: Contract, inputs: Mapping[str, Array]) -> Outcome:
        """Call the kernel once."""

    def sweep(self, contract: Cast) -> Swept | Outcome:
        """Call it on every input that there is; an outcome where that did not end."""


class KernelProblem(AssertionError):
    """An adapter saw a kernel do what it must not; `kind` is an outcome's."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"the kernel {detail}")
        self.kind = kind
        self.detail = detail


class TimeUp(BaseException):
    """Not an Exception, so that a kernel's own handlers let it pass."""


@dataclass
class LocalRunner:
    """Calls a kernel in this process.

    Attributes:
        kernel: Anything callable on torch tensors.
        device: Where the tensors are: "cpu" or "cuda".
        time_limit: Seconds a call may take. It is kept in the main thread of a Unix process, and
            as soon as Python code runs again.
    """

    kernel: Kernel
    device: str
    time_limit: float

    @property
    def name(self) -> str:
        """See `Runner`."""
        return name_of(self.kernel)

    @property
    def traits(self) -> frozenset[str]:
        """See `Runner`."""
        return traits_of(self.kernel)

    def sweep(self, contract: Cast) -> Swept:
        """See `Runner`."""
        return swept(contract, self.kernel, device=self.device)

    def run(self, contract: Contract, inputs: Mapping[str, Array]) -> Outcome:
        """Call the kernel once; never raises for what the kernel does."""
        placed = {
            name: None if name in contract.scalars else Placed(array, self.device)
            for name, array in inputs.items()
        }
        given = {
            name: _number(inputs[name]) if place is None else place.tensor
            for name, place in placed.items()
        }
        try:
            with _limited(self.time_limit):
                results = run_kernel(contract.call, self.kernel, given)
        except TimeUp:
            return Outcome("hung", f"did not return within {self.time_limit:g} s")
        except KernelProblem as problem:
            return Outcome(problem.kind, problem.detail)
        except WrongResult as wrong:
            return Outcome("wrong_result", f"gave what cannot be read: {wrong}")
        except (Exception, SystemExit) as error:
            return Outcome("raised", f"raised {described(error)}")
        return _collected(results, {n: p for n, p in placed.items() if p is not None})


def traits_of(kernel: Kernel) -> frozenset[str]:
    """What an adapter says about the inputs that it can pass on."""
    return frozenset(getattr(kernel, "fp8lab_traits", ()))


def name_of(kernel: Kernel) -> str:
    """A kernel's name for reports: "FILE:FUNCTION" where it is a function in a file."""
    inner = inspect.unwrap(kernel)
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", None) or type(inner).__name__
    file = getattr(getattr(inner, "__code__", None), "co_filename", "")
    return f"{file}:{name}" if file.endswith(".py") else str(name)


class Placed:
    """A copy of an array on a device, with its strides, between margins."""

    def __init__(self, array: Array, device: str) -> None:
        import torch

        self.before = array
        size = array.dtype.itemsize
        strides = [step // size for step in array.strides]
        reach = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
        self._bytes = reach * size if array.size else 0
        self.buffer = torch.full(
            (2 * MARGIN + self._bytes,), MARGIN_BYTE, dtype=torch.uint8, device=device
        )
        dense = to_torch(np.ascontiguousarray(array).reshape(array.shape).copy(), device=device)
        inside = self.buffer[MARGIN : MARGIN + self._bytes].view(dense.dtype)
        self.tensor: torch.Tensor = (
            torch.as_strided(inside, array.shape, strides, inside.storage_offset())
            if array.size
            else inside.view(array.shape)
        )
        _copy_bits(self.tensor, dense)

    def is_base_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this buffer."""
        storage = tensor.untyped_storage()
        return bool(storage.data_ptr() == self.buffer.untyped_storage().data_ptr())

    def change(self) -> str | None:
        """The first value that is not that of before, in words, or None."""
        before, after = (
            np.ascontiguousarray(array).reshape(-1)
            for array in (self.before, to_numpy(self.tensor))
        )
        word = f"u{before.dtype.itemsize}"
        where = np.flatnonzero(before.view(word) != after.view(word))
        if where.size == 0:
            return None
        return f"{cell_text(before[where[0]])} became {cell_text(after[where[0]])}"

    def margins_changed(self) -> str | None:
        """Where something was written past an end, or None."""
        return changed_margin(self.buffer, self._bytes)


def changed_margin(buffer: torch.Tensor, inside: int) -> str | None:
    """What was written into the margins around `inside` bytes, in words, or None."""
    margins = buffer.cpu().numpy()
    before = np.flatnonzero(margins[:MARGIN] != MARGIN_BYTE)
    after = np.flatnonzero(margins[MARGIN + inside :] != MARGIN_BYTE)
    if after.size:
        return f"past its end, the first {int(after[0])} bytes after it ({after.size} bytes)"
    if before.size:
        return (
            f"before its start, the nearest {MARGIN - int(before[-1])} bytes ahead"
            f" ({before.size} bytes)"
        )
    return None


def _copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy without a conversion, which not every dtype has."""
    import torch

    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    word = words[source.element_size()]
    target.view(word).copy_(source.view(word))


def _collected(results: Mapping[str, Any], placed: Mapping[str, Placed]) -> Outcome:
    """The outputs as arrays, unless an input was changed that is no output."""
    import torch
    from torch.utils.dlpack import from_dlpack

    outputs: Arrays = {}
    in_place: set[str] = set()
    for name, result in results.items():
        if isinstance(result, bool | int | float):
            result = torch.tensor(result)
        elif not isinstance(result, torch.Tensor) and hasattr(result, "__dlpack__"):
            result = from_dlpack(result)
        if not isinstance(result, torch.Tensor):
            kind = type(result).__name__
            return Outcome("wrong_result", f"gave {name} as {kind}; accepted: a torch tensor")
        # In the memory of another input it is a result, but that input is changed.
        if name in placed and placed[name].is_base_of(result):
            in_place.add(name)
        try:
            outputs[name] = to_numpy(result).copy()
        except (TypeError, RuntimeError) as error:
            return Outcome("wrong_result", f"gave {name}, which cannot be read: {error}")
    for name, place in placed.items():
        if where := place.margins_changed():
            return Outcome("outside", f"wrote outside of {name}, {where}", outputs)
        if name not in in_place and (change := place.change()):
            return Outcome("changed_input", f"changed its input {name}: {change}", outputs)
    return Outcome("returned", outputs=outputs)


def _number(array: Array) -> Any:
    values = array.tolist()
    return tuple(values) if isinstance(values, list) else values


def described(error: BaseException) -> str:
    """Type, message and the innermost line of the user's own code."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else f"{text[:300]}..."
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def _is_library(filename: str) -> bool:
    testing = Path(__file__).resolve().parent
    oracle = testing.parent / "emulation"
    own = (str(testing), str(oracle), str(oracle.resolve()))
    return "site-packages" in Path(filename).parts or filename.startswith(("<", *own))


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeUp in this thread after some seconds. A timer that runs already goes on after."""
    usable = hasattr(signal, "SIGALRM") and (threading.current_thread() is threading.main_thread())
    if not usable:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    left, interval = signal.getitimer(signal.ITIMER_REAL)
    if left and left <= seconds:  # the other one rings first, and is right to
        yield
        return
    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            passed = time.monotonic() - started
            signal.setitimer(signal.ITIMER_REAL, max(left - passed, 1e-3), interval)
