"""A kernel in a process of its own: a crash or an endless loop there is an outcome here."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt

from fp8lab.errors import UserError
from fp8lab.testing.contracts.base import Contract
from fp8lab.testing.contracts.casts import Cast
from fp8lab.testing.exhaustive import Swept
from fp8lab.testing.loading import CannotLoad
from fp8lab.testing.messages import Call, Found, Sweep, receive, send
from fp8lab.testing.running import Outcome
from fp8lab.testing.worker import Server

Array = npt.NDArray[Any]

_START_SECONDS = 120.0  # importing torch, and the user's file
_SPARE_SECONDS = 3.0  # the worker itself ends what Python code it can within the limit


class Worker:
    """The process that has imported a user's file.

    Args:
        file: The file.
        device: "cpu" (Triton interprets) or "cuda".
        time_limit: Seconds that one call may take.
        names: Functions to offer although they have no mark.

    Raises:
        UserError: The file cannot be imported, or has no such function.
    """

    def __init__(
        self, file: Path, device: str, time_limit: float, names: tuple[str, ...] = ()
    ) -> None:
        self.file, self.device, self.time_limit, self._names = file, device, time_limit, names
        self.found = self._start()

    def ask(self, message: Call | Sweep, seconds: float | None) -> Any:
        """Send a message and wait for its answer; an `Outcome` where there comes none.

        Args:
            message: What to do.
            seconds: How long to wait, None for ever.
        """
        if self._process.poll() is not None:
            self.close()
            self._start()
        with suppress(BrokenPipeError):
            send(self._requests, message)
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.close()
            return Outcome("hung", f"did not return within {self.time_limit:g} s")
        if answer is None:
            return Outcome("crashed", f"ended its process: {self._ending()}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        with suppress(OSError):  # what was not sent yet
            self._requests.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> list[Found]:
        environment = dict(os.environ)
        # The worker imports what this process would, installed or not.
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        command = [sys.executable, "-m", "fp8lab.testing.worker", str(self.file), self.device]
        self._process = subprocess.Popen(
            [*command, str(self.time_limit), *self._names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None
        self._requests = self._process.stdin
        self._answers: queue.Queue[Any] = queue.Queue()
        self._reader = threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), daemon=True
        )
        self._reader.start()
        try:
            first = self._answers.get(timeout=_START_SECONDS)
        except queue.Empty:
            self.close()
            raise UserError(
                f"importing {self.file} took more than {_START_SECONDS:g} s; move what is slow"
                " into a function"
            ) from None
        if first is None:
            ending = self._ending()
            self.close()
            raise UserError(f"importing {self.file} ended its process: {ending}")
        if isinstance(first, str):
            self.close()
            raise UserError(first)
        return list(first)

    def _ending(self) -> str:
        """How the process ended, in words."""
        code = self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"


class InProcess:
    """A worker's place, taken by this process: quick to start, and a debugger works.

    Nothing here outlives a crash of the kernel. Arguments and errors are those of `Worker`.
    """

    def __init__(
        self, file: Path, device: str, time_limit: float, names: tuple[str, ...] = ()
    ) -> None:
        if device == "cpu":  # read when a kernel is decorated
            os.environ["TRITON_INTERPRET"] = "1"
        self.file, self.device, self.time_limit = file, device, time_limit
        try:
            self._server = Server(file, device, time_limit, names)
        except CannotLoad as error:
            raise UserError(str(error)) from None
        self.found = self._server.found

    def ask(self, message: Call | Sweep, seconds: float | None) -> Any:
        """Do what the message says; the time is limited as `LocalRunner` limits it."""
        return self._server.answer(message)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


@dataclass(frozen=True)
class IsolatedRunner:
    """Calls one kernel of a worker; a `Runner`.

    Attributes:
        worker: The process.
        kernel: The function's name there.
        traits: What adapters say of it.
    """

    worker: Worker | InProcess
    kernel: str
    traits: frozenset[str]

    @property
    def device(self) -> str:
        """See `Runner`."""
        return self.worker.device

    @property
    def name(self) -> str:
        """See `Runner`."""
        return f"{self.worker.file}:{self.kernel}"

    def run(self, contract: Contract, inputs: Mapping[str, Array]) -> Outcome:
        """See `Runner`."""
        call = Call(self.kernel, contract.name, contract.settings, dict(inputs))
        outcome = self.worker.ask(call, self.worker.time_limit + _SPARE_SECONDS)
        assert isinstance(outcome, Outcome)
        return outcome

    def sweep(self, contract: Cast) -> Swept | Outcome:
        """See `Runner`."""
        found = self.worker.ask(Sweep(self.kernel, contract.settings), None)
        assert isinstance(found, Swept | Outcome)
        return found


def _read(stream: Any, answers: queue.Queue[Any]) -> None:
    """Put each answer into the queue, and None at the end."""
    with stream:
        try:
            while True:
                answers.put(receive(stream))
        except (EOFError, OSError, ValueError):
            answers.put(None)
