"""Faults that people reported, or that libraries have today: found, and named, with no hint.

`docs/fault-gallery.md` holds a program for each and what it reports; both are run and compared.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8lab.testing.faults.document import ran, sections, with_outputs, with_table

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "fault-gallery.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
SECTIONS = {section.title: section for section in sections(TEXT)}

# From the beginning of a section's title (the project, and its number where it was reported) to
# the fault that the kit must name.
FAULTS = {
    "Triton's interpreter casts": "triton-interpreter",
    "triton 11753": "double-rounding-float16",
    "triton 8322": "lost-carry",
    "ml_dtypes 260 and 400": "saturation-missing",
    "torch's own cast to E5M2": "saturation-missing",
    "ml_dtypes on float64": "double-rounding-float32",
    "oneDNN 2903": "subnormals-flushed",
    "TransformerEngine 3262": "exponent-shifted-alone",
    "onnx 7030 and ml_dtypes 298": "scale-rounded-otherwise",
    "ao 4725": "exponent-from-logarithm",
    "TransformerEngine 2589": "smallest-scale",
    "ao 4713 and 3356": "amax-unguarded",
    "ao 1766": "scale-in-16-bits",
    "pytorch 136181 and ao 3171": "amax-in-16-bits",
    "torch divides a number": "reciprocal-multiplied",
    "TransformerEngine 786": "scale-unbounded",
    "TransformerEngine 825": "idle-step-changes-state",
    "titan 698": "state-not-updated",
    "TransformerEngine 3207": "empty-tensor-ends-list",
    "ao 4915": "step-in-16-bits",
    "pytorch 94060": "scale-twice",
}


@pytest.mark.parametrize("beginning", FAULTS)
def test_a_reported_fault_is_found_and_named(beginning: str, device: str) -> None:
    if beginning.startswith("Triton") and device != "cpu":
        pytest.skip("the interpreter is off")
    (section,) = [s for title, s in SECTIONS.items() if title.startswith(beginning)]
    found = ran(section)
    assert found.fault == FAULTS[beginning], found.output
    assert found.output == section.output, "run python -m fp8lab.testing.faults.document"


def test_every_section_of_the_gallery_is_run() -> None:
    titles = [title for title in SECTIONS if not any(title.startswith(b) for b in FAULTS)]
    assert not titles
    assert TEXT.count("```python") == len(SECTIONS) == len(FAULTS)


def test_the_table_of_the_document_is_what_the_code_gives() -> None:
    assert with_table(TEXT) == TEXT, "run python -m fp8lab.testing.faults.document"


def test_a_stale_output_is_found_and_a_missing_table_refused() -> None:
    stale = "### One\n\nText.\n\n```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    assert with_outputs(stale) == stale.replace("3\n", "2\n")
    with pytest.raises(ValueError, match="0 places for the table"):
        with_table("none")
