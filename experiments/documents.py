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
        UserError: A marker is missing.
    """
    opening, closing = markers(section)
    before, begin, rest = document.read_text(encoding="utf-8").partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end:
        raise UserError(f"{document} lacks the markers {opening} and {closing}")
    write_atomically(document, f"{before}{opening}\n\n{text}\n\n{closing}{after}")
