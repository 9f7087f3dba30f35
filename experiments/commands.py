"""What the experiments' commands share: how they end, and what their `--out` and lists mean."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from fp8lab.errors import UserError

FIGURES = (".png", ".pdf", ".svg")
ROWS = ".jsonl"


def exit_code(main: Callable[..., int | None], arguments: list[str] | None = None) -> int:
    """Do a command; return its exit code.

    Whatever is not a fault of the code ends in one line on stderr: a mistake of the user, or a disk
    that is full, with 2; Ctrl-C with 130. Output whose reader has gone ends with 141.
    """
    try:
        code = main() if arguments is None else main(arguments)
    except UserError as error:
        return _said(str(error), 2)
    except KeyboardInterrupt:
        return _said("interrupted; rows that are finished stay where they are", 130)
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        return _said(f"{place}{error.strerror or error}; rows that are finished are kept", 2)
    return code or 0


def _said(message: str, code: int) -> int:
    print(" ".join(message.splitlines()), file=sys.stderr)
    return code


def rows_and_figure(out: Path) -> tuple[Path, Path]:
    """The file of rows and the figure that `--out` means: it names one, the other lies beside.

    >>> [str(path) for path in rows_and_figure(Path("a.jsonl"))]
    ['a.jsonl', 'a.png']
    >>> [str(path) for path in rows_and_figure(Path("a.pdf"))]
    ['a.jsonl', 'a.pdf']

    Raises:
        UserError: Another suffix, or one of the two is a folder.
    """
    check_suffix(out, (ROWS, *FIGURES))
    rows = out.with_suffix(ROWS)
    figure = out.with_suffix(FIGURES[0]) if out.suffix == ROWS else out
    for path in (rows, figure):
        if path.is_dir():
            raise UserError(f"{path} is a folder; name another --out")
    return rows, figure


def check_suffix(out: Path, accepted: tuple[str, ...]) -> None:
    """Refuse an `--out` that is no such file.

    Raises:
        UserError: With what is accepted.
    """
    if out.suffix not in accepted:
        raise UserError(f"--out is {str(out)!r}; accepted: a file in {', '.join(accepted)}")


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
