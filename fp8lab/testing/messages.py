"""Messages between a process and its worker: a length of eight bytes, then a pickle.

Both ends are this package's own; nothing from a file is ever read like this.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import IO, Any

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Found:
    """A kernel in a worker's file.

    Attributes:
        name: The function's name.
        contract: The contract's name, empty for a function without marks.
        settings: The contract's, as JSON values.
        bound: The bound's name, or empty.
        traits: What adapters say of it.
    """

    name: str
    contract: str
    settings: dict[str, Any]
    bound: str
    traits: frozenset[str]


@dataclass(frozen=True)
class Call:
    """A call to make: a function, a contract with its settings, and the inputs."""

    kernel: str
    contract: str
    settings: dict[str, Any]
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Every input there is, to be tried on a cast."""

    kernel: str
    settings: dict[str, Any]


def send(stream: IO[bytes], message: Any) -> None:
    """Write a message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read a message.

    Raises:
        EOFError: The other end has gone.
    """
    return pickle.loads(_exactly(stream, _LENGTH.unpack(_exactly(stream, _LENGTH.size))[0]))


def _exactly(stream: IO[bytes], count: int) -> bytes:
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
