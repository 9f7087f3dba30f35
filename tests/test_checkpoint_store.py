"""Where checkpoints lie: which are kept, what a full disk or no permission leaves, threads."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8lab.checkpoint import CheckpointError, load, read_manifest, save, verify
from fp8lab.checkpoint_store import AsyncWriter, CheckpointStore, checkpoints_in, find_checkpoint

ROOT = Path(__file__).resolve().parent.parent


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), float(step))}, "numbers": {"step": step}}


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=1)
    for step, metric in enumerate([3.0, 1.0, 2.0, None, 5.0, 4.0], start=1):
        store.save(state_of(step), step=step, metric=metric)
    assert names(tmp_path) == ["step-000002", "step-000005", "step-000006"]
    store.save(state_of(7), step=7, metric=0.5)
    assert names(tmp_path) == ["step-000006", "step-000007"]
    for path in checkpoints_in(tmp_path):
        verify(path)


def test_all_are_kept_unless_told(tmp_path: Path) -> None:
    for step in (999_999, 3, 1_000_000):
        CheckpointStore(tmp_path).save(state_of(step), step=step)
    assert [read_manifest(path).step for path in checkpoints_in(tmp_path)] == [3, 999_999, 10**6]
    for bad in ({"keep_last": 0}, {"keep_best": -1}):
        with pytest.raises(ValueError, match="accepted"):
            CheckpointStore(tmp_path, **bad)


def test_a_damaged_checkpoint_is_never_the_best_and_is_not_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=1)
    store.save(state_of(1), step=1, metric=0.1)
    (tmp_path / "step-000001" / "manifest.json").write_text("{}")
    store.save(state_of(2), step=2, metric=0.2)
    assert names(tmp_path) == ["step-000002"]


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / ".step-000002.partial-77-00ff00ff"
    leftover.mkdir()
    (leftover / "state.json").write_text("{")
    CheckpointStore(tmp_path).save(state_of(1), step=1)
    assert names(tmp_path) == ["step-000001"]


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path / "step-000001", state_of(1), step=1)
    with pytest.raises(CheckpointError, match=r"step-000001 \(state.json\): it exists already"):
        save(tmp_path / "step-000001", state_of(2), step=1)
    assert load(tmp_path / "step-000001").state["numbers"] == {"step": 1}


def test_a_path_means_the_newest_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 12):
        save(root / f"step-{step:06d}", state_of(step), step=step)
    (root / "step-9").mkdir()  # no checkpoint's name
    newest = root / "step-000012"
    assert find_checkpoint(tmp_path) == find_checkpoint(root) == find_checkpoint(newest) == newest
    shutil.move(root / "step-000001", tmp_path / "kept")
    assert find_checkpoint(tmp_path / "kept") == tmp_path / "kept"
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        find_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("call", ["fsync", "mkdir", "rename"])
def test_a_full_disk_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whichever call the disk is full at, one line says so; nothing half-written stays."""
    save(tmp_path / "step-000001", state_of(1), step=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-000001").iterdir()}
    owner: Any = os if call == "fsync" else Path
    real = getattr(owner, call)
    done = 0
    for allowed in range(5 if call == "fsync" else 1):
        left = [allowed]

        def failing(*arguments: Any, left: list[int] = left, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        monkeypatch.setattr(owner, call, failing)
        with pytest.raises(CheckpointError, match="No space left on device") as error:
            save(tmp_path / "step-000002", state_of(2), step=2)
        monkeypatch.setattr(owner, call, real)
        assert "step-000002" in str(error.value)
        assert "earlier checkpoints are untouched" in str(error.value)
        assert names(tmp_path) == ["step-000001"]
        done += 1
    assert done
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "step-000001").iterdir()}
    save(tmp_path / "step-000002", state_of(2), step=2)


def test_a_rename_that_fails_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match=r"\(putting it in its place\): Invalid cross-device"):
        CheckpointStore(tmp_path).save(state_of(1), step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """The system itself refuses the write: a limit on the size of files, in another process."""
    save(tmp_path / "step-000001", state_of(1), step=1)
    script = """
        import resource, sys, torch
        from pathlib import Path
        from fp8lab.checkpoint import CheckpointError, save
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            save(Path(sys.argv[1]), {"model": {"w": torch.zeros(1000)}}, step=2)
        except CheckpointError as error:
            sys.exit(str(error))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "step-000002"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "step-000002 (model.safetensors): File too large; earlier" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert names(tmp_path) == ["step-000001"]
    verify(tmp_path / "step-000001")
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 2000


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_no_permission(open_folder: Path) -> None:
    save(open_folder / "step-000001", state_of(1), step=1)
    open_folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # the root user may write everywhere
    try:
        with pytest.raises(CheckpointError, match=r"step-000002 .*: Permission denied; earlier"):
            save(open_folder / "step-000002", state_of(2), step=2)
        with pytest.raises(CheckpointError, match=r"cannot remove .*: Permission denied"):
            CheckpointStore(open_folder, keep_last=1)._remove([open_folder / "step-000001"])
    finally:
        if user == 0:
            os.seteuid(0)
    assert names(open_folder) == ["step-000001"]
    verify(open_folder / "step-000001")


def test_a_thread_writes_what_the_state_was(tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    numbers = {"step": 1}
    with AsyncWriter(CheckpointStore(tmp_path)) as writer:
        for step in range(1, 6):
            weight.fill_(step)
            numbers["step"] = step
            writer.save({"model": {"w": weight}, "numbers": numbers}, step=step)
            weight.fill_(-1)
            numbers["step"] = -1
    for step in range(1, 6):
        folder = tmp_path / f"step-{step:06d}"
        assert load(folder).state["numbers"] == {"step": step}
        save(tmp_path / "again", state_of(step), step=step)
        ours = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert ours == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
        shutil.rmtree(tmp_path / "again")


def test_training_goes_on_while_a_thread_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    real = os.fsync

    def slow(handle: int) -> None:
        assert may_write.wait(60)
        real(handle)

    monkeypatch.setattr(os, "fsync", slow)
    writer = AsyncWriter(CheckpointStore(tmp_path))
    writer.save(state_of(1), step=1)
    assert checkpoints_in(tmp_path) == []  # we are here, and nothing is on the disk yet
    may_write.set()
    writer.close()
    assert names(tmp_path) == ["step-000001"]


def test_a_threads_error_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "step-000001").mkdir()
    writer = AsyncWriter(CheckpointStore(tmp_path))
    writer.save(state_of(1), step=1)
    with pytest.raises(CheckpointError, match="exists already"):
        writer.save(state_of(2), step=2)
    assert names(tmp_path) == ["step-000001"]
    writer.save(state_of(3), step=3)  # it was raised once; the writer still works
    writer.close()
    writer.save(state_of(3), step=3)
    with pytest.raises(CheckpointError, match="exists already"):
        writer.close()
    with pytest.raises(KeyError) as error:
        _fail_while_saving(AsyncWriter(CheckpointStore(tmp_path)))
    assert "exists already" in error.value.__notes__[0]


def _fail_while_saving(writer: AsyncWriter) -> None:
    with writer:
        writer.save(state_of(3), step=3)
        raise KeyError("the loop's own error comes first")
