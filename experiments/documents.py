"""Text of documents that experiments write: what stands between two markers."""

from __future__ import annotations

from pathlib import Path

from fp8lab.errors import UserError
from fp8lab.records import write_atomically


def markers(section: str) -> tuple[str, str]:
    """What begins and what ends a section.

    >>> markers("casts")
    ('<!-- casts: begin -->', '<!-- casts: end -->')
    """
    return f"<!-- {section}: begin -->", f"<!-- {section}: end -->"


def fill(document: Path, section: str, text: str) -> None:
    """Put the text between a section's markers in a document, which must have both.

    Raises:
        UserError: It cannot be read, or a marker is missing.
    """
    opening, closing = markers(section)
    before, after = check_document(document, section)
    write_atomically(document, f"{before}{opening}\n\n{text}\n\n{closing}{after}")


def check_document(document: Path, section: str) -> tuple[str, str]:
    """What stands before and after a section of a document.

    Raises:
        UserError: It cannot be read, or a marker is missing.
    """
    opening, closing = markers(section)
    try:
        before, begin, rest = document.read_text(encoding="utf-8").partition(opening)
    except OSError as error:
        raise UserError(f"cannot read {document}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{document} is not UTF-8 text; name another --document") from None
    _, end, after = rest.partition(closing)
    if not begin or not end:
        raise UserError(f"{document} lacks the markers {opening} and {closing}")
    return before, after
