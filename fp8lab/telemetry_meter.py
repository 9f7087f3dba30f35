"""Who counts what one cast does; a CUDA graph that is captured with it counts at each replay."""

from __future__ import annotations

from torch import Tensor

from fp8lab.linear_replay import in_backward
from fp8lab.ops_operands import Codes
from fp8lab.ops_telemetry import CastTable


class CastMeter:
    """A `fp8lab.linear_casts.Meter` that adds to a row of a table, and reads nothing on the host.

    All that it does on a GPU is one launch that adds to a table which stays where it is once a step
    was counted. So what is captured with it counts when it is replayed; `GraphedStep` takes it for
    a part of a graph.

    Args:
        table: Where counts go.
        row: Which row of it.
        role: The operand's. What is computed again in a backward pass does not count as an input; a
            weight counts once a step, however often it is used.
        sums: Whether signal and noise are summed.
    """

    def __init__(self, table: CastTable, row: int, role: str, *, sums: bool) -> None:
        self._table, self._row, self._role, self._sums = table, row, role, sums
        self._seen = False

    def begin(self) -> None:
        """Called before a step that is counted."""
        self._seen = False

    def __call__(self, x: Tensor, codes: Codes | None) -> None:
        """Count a cast; arguments as for `CastTable.add`."""
        if self._role == "input" and in_backward():
            return
        if self._role == "weight" and self._seen:
            return
        self._seen = True
        self._table.add(self._row, x, codes, sums=self._sums)
