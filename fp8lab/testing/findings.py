"""What a check found, and the report of it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fp8lab.testing.cases import Case
from fp8lab.testing.comparison import cell_text, differing, position, ulps_between
from fp8lab.testing.contracts.base import Contract
from fp8lab.testing.running import Outcome

if TYPE_CHECKING:
    from fp8lab.testing.bounds import Bound
    from fp8lab.testing.diagnosis import Guess

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

_SHOWN_VALUES = 8  # of an input, in a report
_SHOWN_DIFFERENCES = 4


@dataclass(frozen=True)
class Verdict:
    """Why one call of a kernel does not hold a contract.

    Attributes:
        kind: "differs", or an outcome's kind.
        text: What is wrong, as the end of a sentence about the kernel.
        expected: The oracle's answer.
        actual: The kernel's, in the oracle's dtypes where they could be read; may be empty.
        wrong: For "differs": the flat indices by output.
    """

    kind: str
    text: str
    expected: Arrays
    actual: Arrays
    wrong: Mapping[str, npt.NDArray[np.intp]]


@dataclass(frozen=True)
class Finding:
    """A contract that a kernel does not hold.

    Attributes:
        contract: The contract.
        kernel: The kernel's name.
        verdict: Of the smallest input.
        first: Of the first input that failed.
        case: The smallest input, ready to be saved.
        guess: The probable fault, or None.
        steady: Whether the same input failed again when it was tried once more.
        bound: The bound that the kernel promises, or None for equality.
    """

    contract: Contract
    kernel: str
    verdict: Verdict
    first: Verdict
    case: Case
    guess: Guess | None
    steady: bool
    bound: Bound | None = None

    def report(self, saved: Path | str | None = None) -> str:
        """The text that a person reads.

        Args:
            saved: The file that holds the case; or, in words, why there is none.
        """
        name = self.kernel.rpartition(":")[2].rpartition(".")[2]
        lines = [f"{name} does not hold {self.contract}: it {self.verdict.text}"]
        if self.bound is not None:
            lines.append(f"bound: {self.bound.name}: {self.bound.derivation}")
        lines += ["", "smallest input", shown_verdict(self.case.inputs, self.verdict)]
        if self.first.kind == "differs":
            total = sum(array.size for array in self.first.expected.values())
            count = sum(where.size for where in self.first.wrong.values())
            lines += ["", f"in the first case that failed, {count} of {total} elements differ"]
        if not self.steady:
            lines += ["", "the same input passed when it was tried again: the kernel is not steady"]
        if self.guess is not None:
            lines += ["", f"probable fault: {self.guess.fault}"]
            lines += textwrap.wrap(
                self.guess.sentence, 98, initial_indent="  ", subsequent_indent="  "
            )
        if isinstance(saved, Path):
            lines += ["", f"saved: {saved}", f"replay: {_replay(saved, self.case.kernel)}"]
        elif saved:
            lines += ["", saved]
        return "\n".join(lines)


class KernelFault(AssertionError):
    """A kernel does not hold a contract; the message is the report.

    Attributes:
        finding: What was found.
    """

    def __init__(self, finding: Finding, saved: Path | str | None = None) -> None:
        super().__init__(finding.report(saved))
        self.finding = finding


def judged(
    contract: Contract, inputs: Arrays, outcome: Outcome, bound: Bound | None = None
) -> Verdict | None:
    """Compare what came of a call with the oracle; None where all is well."""
    expected = contract.expected(inputs)
    if outcome.kind != "returned":
        return Verdict(outcome.kind, outcome.detail, expected, {}, {})
    actual = {}
    for name, want in expected.items():
        got = outcome.outputs[name]
        accepted = contract.accepted(name, want)
        if got.dtype.name not in accepted:
            text = f"gave {name} of dtype {got.dtype.name}; accepted: {', '.join(accepted)}"
            return Verdict("wrong_result", text, expected, {}, {})
        if got.shape != want.shape and (want.ndim or got.size != 1):
            text = f"gave {name} of shape {got.shape}; accepted: {want.shape}"
            return Verdict("wrong_result", text, expected, {}, {})
        actual[name] = contract.read(name, got, want)
    wrong = {}
    for name, want in expected.items():
        if bound is None:
            where = differing(actual[name], want)
        else:
            where = bound.broken(inputs, name, actual[name], want)
        if where.size:
            wrong[name] = where
    if not wrong:
        return None
    return Verdict("differs", f"gives other bits in {', '.join(wrong)}", expected, actual, wrong)


def shown_verdict(inputs: Arrays, verdict: Verdict) -> str:
    """The inputs, and the outputs that are wrong beside the right ones."""
    return "\n".join([*_inputs(inputs), *_outputs(verdict)])


def _inputs(inputs: Arrays) -> list[str]:
    width = max((len(name) for name in inputs), default=0)
    return [f"  {name:<{width}}  {_shown(array)}" for name, array in inputs.items()]


def _shown(array: Array) -> str:
    """Values with their bits; a number of Python's as it is written there."""
    if array.dtype in (np.float64, np.int64) and array.ndim == 0:
        return repr(array.item())
    if array.dtype == np.float64:
        return str(tuple(array.tolist()))
    flat = array.reshape(-1)
    cells = ", ".join(cell_text(value) for value in flat[:_SHOWN_VALUES])
    more = f", ... ({flat.size} in all)" if flat.size > _SHOWN_VALUES else ""
    shape = "" if array.shape == (1,) else f"  shape {array.shape}"
    dense = "" if array.flags.forc else "  not contiguous"
    return f"{cells or 'nothing'}{more}{shape}{dense}"


def _outputs(verdict: Verdict) -> list[str]:
    lines: list[str] = []
    for name, where in verdict.wrong.items():
        want, got = verdict.expected[name], verdict.actual[name]
        for index in where[:_SHOWN_DIFFERENCES]:
            first, second = want.reshape(-1)[index : index + 1], got.reshape(-1)[index : index + 1]
            place = "" if want.size == 1 else f" at {position(int(index), want.shape)}"
            lines += [f"{name}{place}", f"  expected  {cell_text(first[0])}"]
            lines += [
                f"  actual    {cell_text(second[0])}",
                f"  distance  {_distance(first, second)}",
            ]
    return ["", *lines] if lines else []


def _distance(first: Array, second: Array) -> str:
    if first.dtype.kind != "b":
        with np.errstate(invalid="ignore"):
            nan = np.isnan(first.astype(np.float64)), np.isnan(second.astype(np.float64))
        if any(map(bool, nan)):
            return "NaN"
    return f"{int(ulps_between(second, first)[0])} ulp"


def _replay(saved: Path, kernel: str) -> str:
    """The command that replays a case, with the kernel where a file has it under its name."""
    file, _, name = kernel.rpartition(":")
    if not file or not name.isidentifier():
        return f"fp8lab verify --case {saved}"
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"fp8lab verify {path}:{name} --case {saved}"
