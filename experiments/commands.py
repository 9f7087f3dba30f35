"""What the experiments' commands share: how they end, and what their `--out` and lists mean."""

from __future__ import annotations

import math
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp8lab import cli_parser
from fp8lab.errors import UserError
from fp8lab.records import Row, today

FIGURES = (".png", ".pdf", ".svg")
ROWS = ".jsonl"
_KEPT = "rows that are finished stay where they are"


class Parser(cli_parser.Parser):
    """The parser of an experiment, which calls itself by what it was begun with."""

    def __init__(self, **options: Any) -> None:
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        name = getattr(spec, "name", "")
        if name.startswith("fp8lab."):
            options.setdefault("prog", f"python -m {name}")
        super().__init__(**options)


def exit_code(main: Callable[..., int | None], arguments: list[str] | None = None) -> int:
    """Do a command; return its exit code.

    Whatever is not a fault of the code ends in one line on stderr: a mistake of the user, or a disk
    that is full, with 2; Ctrl-C with 130. Output whose reader has gone ends with 141. The notes of
    an exception say what became of its rows.
    """
    try:
        code = main() if arguments is None else main(arguments)
    except UserError as error:
        return _said(str(error), 2, _notes(error))
    except KeyboardInterrupt as error:
        return _said("interrupted", 130, _notes(error) or [_KEPT])
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        return _said(f"{place}{error.strerror or error}", 2, _notes(error) or [_KEPT])
    return code or 0


def command_of(experiment: str, arguments: Sequence[str] | None = None) -> str:
    """The command that rows are made with: this process's, or with other arguments."""
    words = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", f"fp8lab.experiments.{experiment}", *words])


def made_by(experiment: str, arguments: Sequence[str] | None = None) -> Row:
    """When (the day, UTC) and with which command rows are made: `date` and `command`."""
    return {"date": today(), "command": command_of(experiment, arguments)}


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _said(message: str, code: int, notes: list[str]) -> int:
    print(" ".join("; ".join([message, *notes]).splitlines()), file=sys.stderr)
    return code


def rows_and_figure(out: Path) -> tuple[Path, Path]:
    """The file of rows and the figure that `--out` means: it names one, the other lies beside.

    >>> [str(path) for path in rows_and_figure(Path("a.jsonl"))]
    ['a.jsonl', 'a.png']
    >>> [str(path) for path in rows_and_figure(Path("a.pdf"))]
    ['a.jsonl', 'a.pdf']

    Raises:
        UserError: Another suffix, one of the two is a folder, or the figure cannot be written.
    """
    check_suffix(out, (ROWS, *FIGURES))
    rows = out.with_suffix(ROWS)
    figure = out.with_suffix(FIGURES[0]) if out.suffix == ROWS else out
    for path in (rows, figure):
        if path.is_dir():
            raise UserError(f"{path} is a folder; name another --out")
    if not out.exists():  # rows that are there may be for reading alone
        check_writable(out)
    check_writable(figure)
    return rows, figure


def check_suffix(out: Path, accepted: tuple[str, ...], option: str = "--out") -> None:
    """Refuse a file of another kind.

    Raises:
        UserError: With what is accepted.
    """
    if out.suffix not in accepted:
        raise UserError(f"{option} is {str(out)!r}; accepted: a file in {', '.join(accepted)}")


def check_writable(path: Path, option: str = "--out") -> None:
    """Refuse a file that cannot be written, before anything is done for it; nothing is made.

    Raises:
        UserError: It is a folder or no plain file, or nothing can be written where it would lie.
    """
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; name another {option}")
        if path.exists():
            if not path.is_file():
                raise UserError(f"{path} is no plain file; name another {option}")
            path.open("ab").close()
        place = path.absolute().parent
        while not place.exists():  # its folder is made later
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another {option}") from None


def listed(text: str, option: str) -> tuple[str, ...]:
    """The names of a list with commas.

    Raises:
        UserError: There is none, or one stands there twice.
    """
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    check_distinct(found, option)
    return found


def check_distinct(found: tuple[object, ...], option: str) -> None:
    """Refuse a list without names, or with one twice.

    Raises:
        UserError: With what is accepted.
    """
    if not found or len(set(found)) < len(found):
        names = ", ".join(map(str, found)) or "none"
        raise UserError(
            f"{option} names {names}; accepted: at least one, each once, separated by commas"
        )


def check_at_least(value: int, least: int, option: str) -> None:
    """Refuse a smaller number.

    Raises:
        UserError: With what is accepted.
    """
    if value < least:
        raise UserError(f"{option} is {value}; accepted: {least} and up")


def check_positive(value: float, option: str) -> None:
    """Refuse a number that is not above 0, or not finite.

    Raises:
        UserError: With what is accepted.
    """
    if not 0 < value < math.inf:
        raise UserError(f"{option} is {value:g}; accepted: more than 0, and finite")


def check_pattern(text: str, option: str) -> None:
    """Refuse what is no regular expression.

    Raises:
        UserError: With what is wrong.
    """
    try:
        re.compile(text)
    except re.error as error:
        raise UserError(f"{option} is {text!r}; accepted: a regular expression ({error})") from None
