"""The process that a kernel runs in: `python -m fp8lab.testing.worker FILE DEVICE SECONDS [NAME]`.

It imports the file, says which kernels it found, then makes one call for each message until its
input ends. What the kernel prints goes to standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from fp8lab.testing.exhaustive import Swept
    from fp8lab.testing.messages import Call, Found, Sweep
    from fp8lab.testing.running import Outcome


def main(arguments: list[str]) -> int:
    """Serve until the input ends."""
    file, device, seconds, *names = arguments
    requests, answers = _own_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    if device == "cpu":  # read when a kernel is decorated
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)

    from fp8lab.testing.loading import CannotLoad
    from fp8lab.testing.messages import receive, send

    try:
        server = Server(Path(file), device, float(seconds), names)
    except CannotLoad as error:
        send(answers, str(error))
        return 1
    send(answers, server.found)
    while True:
        try:
            message = receive(requests)
        except EOFError:
            return 0
        answer = server.answer(message)
        send(answers, answer)
        if "CUDA error" in getattr(answer, "detail", ""):
            return 1  # nothing works any more in a process whose GPU has faulted


class Server:
    """A user's file, imported here, and the calls of its kernels.

    Args:
        file: The file.
        device: "cpu" or "cuda".
        seconds: What one call may take.
        names: Functions to offer although they have no mark.

    Raises:
        CannotLoad: The file cannot be imported, or has no such function.
    """

    def __init__(self, file: Path, device: str, seconds: float, names: Iterable[str]) -> None:
        from fp8lab.testing.loading import function_named, load_file, marked_kernels

        module = load_file(file)
        self._kernels = dict(marked_kernels(module))
        for name in names:
            self._kernels[name] = function_named(module, name)
        self._device, self._seconds = device, seconds

    @property
    def found(self) -> list[Found]:
        """The marks in the file, and the functions that were asked for."""
        from fp8lab.testing.marks import marks_of
        from fp8lab.testing.messages import Found
        from fp8lab.testing.running import traits_of

        found = []
        for name, kernel in self._kernels.items():
            traits = traits_of(kernel)
            for mark in marks_of(kernel):
                bound = "" if mark.bound is None else mark.bound.name
                settings = mark.contract.settings
                found.append(Found(name, mark.contract.name, settings, bound, traits))
            if not marks_of(kernel):
                found.append(Found(name, "", {}, "", traits))
        return found

    def answer(self, message: Call | Sweep) -> Outcome | Swept:
        """Do what a message says."""
        from fp8lab.testing.contracts.base import contract_from
        from fp8lab.testing.contracts.casts import Cast
        from fp8lab.testing.messages import Sweep
        from fp8lab.testing.running import LocalRunner

        runner = LocalRunner(self._kernels[message.kernel], self._device, self._seconds)
        if isinstance(message, Sweep):
            cast = contract_from("cast", message.settings)
            assert isinstance(cast, Cast)
            return runner.sweep(cast)
        contract = contract_from(message.contract, message.settings)
        return runner.run(contract, message.inputs)


def _own_streams() -> tuple[IO[bytes], IO[bytes]]:
    """The pipes of the protocol, out of reach of what the kernel reads and prints."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
