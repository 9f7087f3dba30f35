"""Rows that take the place of those before as a whole: never fewer, and none is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8lab.errors import UserError
from fp8lab.experiments.commands import check_writable
from fp8lab.experiments.new_rows import NewRows
from fp8lab.records import Row, read_rows

HEAD: Row = {"bench": {}}


def rows_of(count: int) -> list[Row]:
    return [{"place": place} for place in range(count)]


def written(path: Path, count: int) -> NewRows:
    with NewRows(path, HEAD) as new:
        for row in rows_of(count):
            new.add(row)
    return new


def test_as_many_rows_replace_those_before(tmp_path: Path) -> None:
    path = tmp_path / "made" / "x.jsonl"
    for count in (1, 2, 2, 3):
        new = written(path, count)
        assert new.path == path
        assert read_rows(path) == new.rows == [HEAD, *rows_of(count)]
        assert list(path.parent.iterdir()) == [path]


def test_fewer_rows_stay_beside_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    written(path, 3)
    for name in ("x.partial.jsonl", "x.partial-2.jsonl", "x.partial-3.jsonl"):
        new = written(path, 2)
        assert new.path == tmp_path / name
        said = f"{path} has 4 rows, these are 3: it stays as it is, and they are in {new.path}\n"
        assert capsys.readouterr().out == said
        assert read_rows(new.path) == [HEAD, *rows_of(2)]
    assert read_rows(path) == [HEAD, *rows_of(3)]


def test_rows_are_on_the_disk_as_they_come(tmp_path: Path) -> None:
    path, beside = tmp_path / "x.jsonl", tmp_path / "x.partial.jsonl"
    with NewRows(path, HEAD) as new:
        assert read_rows(beside) == [HEAD]
        new.add(*rows_of(2))
        assert read_rows(beside) == [HEAD, *rows_of(2)]
        assert not path.exists()


@pytest.mark.parametrize("there", [0, 4])
@pytest.mark.parametrize("count", [0, 1])
def test_an_error_says_where_rows_are(tmp_path: Path, there: int, count: int) -> None:
    path, beside = tmp_path / "x.jsonl", tmp_path / "x.partial.jsonl"
    if there:
        written(path, there)

    def stopped() -> None:
        with NewRows(path, HEAD) as new:
            new.add(*rows_of(count))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        stopped()
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert (f"rows so far: 1, in {beside}" in notes) == beside.exists() == bool(count)
    assert (f"{path} is as it was" in notes) == path.exists() == bool(there)
    if there:
        assert read_rows(path) == [HEAD, *rows_of(there)]


def test_a_full_disk_keeps_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    def filled() -> None:
        with NewRows(tmp_path / "x.jsonl", HEAD) as new:
            new.add(*rows_of(1))
            monkeypatch.setattr("os.fsync", full)
            new.add({"place": 1})

    with pytest.raises(UserError, match=r"cannot write .*: No space left"):
        filled()
    assert read_rows(tmp_path / "x.partial.jsonl") == [HEAD, *rows_of(1)]


@pytest.mark.parametrize("text", ["no rows\n", '{"sweep": {}}\n', "[]\n"])
def test_something_else_is_not_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match="holds something else than such rows; name another --out"):
        NewRows(path, HEAD)
    path.write_text("")
    assert NewRows(path, HEAD).rows == [HEAD]


def test_what_cannot_be_written_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path, said in (
        (tmp_path / "folder", "is a folder; name another --out"),
        (tmp_path / "file" / "x", r"cannot write .*: Not a directory; name another --out"),
        (Path("/dev/null"), "is no plain file; name another --out"),
        (tmp_path / ("x" * 300), r"cannot write .*: File name too long; name another --out"),
    ):
        with pytest.raises(UserError, match=said):
            check_writable(path)
    check_writable(tmp_path / "a" / "b" / "x.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
