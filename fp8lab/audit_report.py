"""What an audit found: counts by layer and operation, and each difference with its bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8lab.testing.comparison import cell_text

KEPT = 100  # differences that a report keeps whole
_SHOWN = 8  # elements of an input that a message shows


@dataclass(frozen=True)
class Difference:
    """The first differing element of one output of one operation.

    Attributes:
        step: In which step, from 1.
        layer: Whose it is: a layer's name, or a parameter's.
        operation: Which operation, and which of its outputs: "cast of input, transposed codes".
        element: Its index in that output.
        inputs: What it was computed from, by name: NumPy arrays and scalars.
        expected, actual: Both values, as NumPy scalars.
        count: How many of the compared elements of that output differ.
        compared: How many were compared.
        form: What computed the expected value: "oracle", or its "slow form".
    """

    step: int
    layer: str
    operation: str
    element: tuple[int, ...]
    inputs: dict[str, Any]
    expected: Any
    actual: Any
    count: int
    compared: int
    form: str

    def __str__(self) -> str:
        place = self.element[0] if len(self.element) == 1 else self.element
        lines = [
            f"step {self.step}, {self.layer}, {self.operation}: element {place} differs"
            f" ({self.count} of {self.compared} compared)",
            *(f"  {name:<18}  {_shown(value)}" for name, value in self.inputs.items()),
            f"  {'expected':<18}  {_shown(self.expected)}  by the {self.form}",
            f"  {'actual':<18}  {_shown(self.actual)}",
        ]
        return "\n".join(lines)


class AuditError(AssertionError):
    """An operation gave another bit than the oracle.

    Attributes:
        difference: Which.
    """

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


@dataclass
class Line:
    """One output of one operation of one layer.

    Attributes:
        checks: How often it was looked at.
        elements: How many elements were compared.
        differences: How many of them differed.
        period: After how many looks every element was compared once.
    """

    checks: int = 0
    elements: int = 0
    differences: int = 0
    period: int = 1


@dataclass
class AuditReport:
    """What an audit saw so far; it may be read while the audit is open.

    Attributes:
        steps: How many steps began.
        audited: How many of them were looked at.
        checked: Outputs of operations that were compared.
        elements: Elements of them.
        differences: Elements that differed.
        found: The first differences, at most `KEPT`.
        lines: By layer and operation.
        unchecked: How many of what cannot be computed again.
    """

    steps: int = 0
    audited: int = 0
    checked: int = 0
    elements: int = 0
    differences: int = 0
    found: list[Difference] = field(default_factory=list)
    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    unchecked: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """A table with a line for each layer and operation, its outputs together; then the sums."""
        rows: list[tuple[str, ...]] = [
            ("layer", "operation", "checks", "elements", "differ", "all seen in")
        ]
        for (layer, operation), line in self._by_operation().items():
            numbers = (line.checks, line.elements, line.differences, line.period)
            rows.append((layer, operation, *map(str, numbers)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        summary = (
            f"audited {self.audited} of {self.steps} steps: {self.checked} outputs,"
            f" {self.elements} elements compared, {self.differences} differ"
        )
        notes = [f"not audited: {count} {what}" for what, count in self.unchecked.items()]
        return "\n".join([*table, summary, *notes, *map(str, self.found[:4])])

    def _by_operation(self) -> dict[tuple[str, str], Line]:
        found: dict[tuple[str, str], Line] = {}
        for (layer, operation), line in self.lines.items():
            sums = found.setdefault((layer, operation.partition(",")[0]), Line())
            sums.checks = max(sums.checks, line.checks)
            sums.elements += line.elements
            sums.differences += line.differences
            sums.period = max(sums.period, line.period)
        return found


def _shown(value: Any) -> str:
    array = np.asarray(value)
    if array.size == 1:
        return cell_text(array.reshape(())[()])
    words = array.reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize])
    digits = 2 * array.itemsize
    some = " ".join(f"{word:0{digits}X}" for word in words[:_SHOWN].tolist())
    more = f" ... ({array.size} in all)" if array.size > _SHOWN else ""
    return f"{some}{more}"
