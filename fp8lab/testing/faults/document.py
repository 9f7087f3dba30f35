"""The parts of `docs/fault-gallery.md` that are made: `python -m fp8lab.testing.faults.document`.

Between two comments stands the table of the faults. Below it each section holds a Python block and,
after it, a text block: what a run of the first one prints or reports. The command writes both anew,
and tests compare them with what the code gives.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8lab.testing.faults import TOPICS
from fp8lab.testing.findings import KernelFault

DOCUMENT = Path("docs/fault-gallery.md")
_TABLE = re.compile(r"(<!-- table: faults -->\n).*?(<!-- end: faults -->)", re.DOTALL)
_SECTION = re.compile(
    r"^### (?P<title>[^\n]+)\n(?:(?!^###? ).)*?```python\n(?P<code>.*?)```\n\n"
    r"```text\n(?P<output>.*?)```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Section:
    """One fault of the gallery.

    Attributes:
        title: Its heading.
        code: A whole Python program that ends in a check.
        output: What the document says that it reports.
    """

    title: str
    code: str
    output: str


@dataclass(frozen=True)
class Ran:
    """What became of a section's program.

    Attributes:
        output: The report, or what it printed where it reported nothing.
        fault: The name of the fault that was guessed; empty where there is none.
    """

    output: str
    fault: str


def faults_table() -> str:
    """Every fault that has a name: what it looks like, and what to do about it."""
    lines = []
    for topic, faults in TOPICS.items():
        lines += [f"### {topic}", "", "| fault | what is seen | what to do |", "|---|---|---|"]
        lines += [f"| `{f.name}` | {f.sign} | {f.remedy} |" for f in faults]
        lines.append("")
    return "\n".join(lines)


def sections(text: str) -> Iterator[Section]:
    """The sections of a document that hold a program and its output."""
    for found in _SECTION.finditer(text):
        yield Section(found["title"], found["code"], found["output"])


def ran(section: Section) -> Ran:
    """Run a section's program in this process, as a file of its own; its case is not saved."""
    printed = io.StringIO()
    before = os.environ.get("FP8LAB_CASES")
    os.environ["FP8LAB_CASES"] = ""
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
            file = Path(folder) / "example.py"
            file.write_text(section.code, encoding="utf-8")
            runpy.run_path(str(file))
    except KernelFault as fault:
        guess = fault.finding.guess
        return Ran(f"{fault}\n", "" if guess is None else guess.fault)
    finally:
        if before is None:
            del os.environ["FP8LAB_CASES"]
        else:
            os.environ["FP8LAB_CASES"] = before
    return Ran(printed.getvalue(), "")


def with_table(text: str) -> str:
    """A document with the table as it is today."""
    fresh, count = _TABLE.subn(lambda found: found[1] + faults_table() + found[2], text)
    if count != 1:
        raise ValueError(f"{count} places for the table of faults; accepted: one")
    return fresh


def with_outputs(text: str) -> str:
    """A document with the outputs of its programs as they are today."""

    def rewritten(found: re.Match[str]) -> str:
        section = Section(found["title"], found["code"], found["output"])
        start = found.start("output") - found.start()
        end = found.end("output") - found.start()
        return found[0][:start] + ran(section).output + found[0][end:]

    return _SECTION.sub(rewritten, text)


def main() -> int:
    """Write the document anew, from the repository's root."""
    os.environ["TRITON_INTERPRET"] = "1"
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_outputs(with_table(text)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
