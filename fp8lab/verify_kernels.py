"""`fp8lab verify FILE`: marked kernels held to their contracts; and saved cases replayed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.errors import UserError
from fp8lab.testing.cases import Case, load_case
from fp8lab.testing.checking import default_device, fault_in, find_fault, saved
from fp8lab.testing.contracts.base import Contract, contract_from
from fp8lab.testing.contracts.casts import Cast
from fp8lab.testing.exhaustive import Swept
from fp8lab.testing.findings import Finding, judged, shown_verdict
from fp8lab.testing.isolation import InProcess, IsolatedRunner, Worker
from fp8lab.testing.loading import hides_a_module
from fp8lab.testing.marks import bound_named
from fp8lab.testing.messages import Found
from fp8lab.testing.profiles import PROFILES, Profile, profile_named
from fp8lab.testing.running import Outcome, Runner

Array = npt.NDArray[Any]

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Target:
    """What a user named: a file, and one function in it or all that are marked."""

    file: Path
    function: str | None


def target_of(text: str) -> Target:
    """A target from "FILE" or "FILE:FUNCTION".

    Raises:
        UserError: There is no such file, it is no .py file, or it would hide a module.
    """
    name, colon, function = text.rpartition(":")
    file = Path(name if colon else text)
    if colon and (not function.isidentifier() or not name):
        raise UserError(f"{text} is no FILE or FILE:FUNCTION; accepted: my_kernels.py:my_cast")
    if file.suffix != ".py":
        raise UserError(f"{text} is no Python file; accepted: FILE.py or FILE.py:FUNCTION")
    if not file.is_file():
        raise UserError(f"there is no file {file}")
    if hides_a_module(file.stem):
        raise UserError(f"{file} would hide the module {file.stem}; give it another name")
    return Target(file, function if colon else None)


def verify_kernels(
    targets: Sequence[Target], *, device: str | None, profile: str, in_process: bool = False
) -> int:
    """Hold every marked kernel of some files to its contracts; print how it went.

    Each file is imported in a process of its own, so that a kernel may crash or hang, unless
    `in_process`.

    Args:
        targets: Files, or single functions of them.
        device: "cpu" (Triton interprets) or "cuda"; None is the GPU where there is one.
        profile: A name of `PROFILES`.
        in_process: Run the kernels here.

    Returns:
        1 if a contract does not hold, else 0.

    Raises:
        UserError: A file cannot be imported or has no marked kernel, or there is no GPU.
    """
    where, chosen = checked_device(device), _profile(profile)
    failed = total = 0
    for target in targets:
        with _worker(in_process)(target.file, where, chosen.time_limit) as worker:
            for found in _marked(worker, target):
                total += 1
                failed += not _hold(worker, found, chosen)
    print(f"{total - failed} of {total} contracts hold (profile {chosen.name}, device {where})")
    return 1 if failed else 0


def replay(
    path: Path, target: Target | None, *, device: str | None, in_process: bool = False
) -> int:
    """Look at a saved case again.

    What its kernel gave is compared with the oracle, here on the CPU, wherever it came from. With a
    target the kernel is called on the same input again.

    Args:
        path: The case.
        target: The kernel's file; the function is the one that the case names, or the only one with
            that contract, unless the target says it.
        device, in_process: As for `verify_kernels`.

    Returns:
        1 if the outputs differ from the oracle's (the new ones, with a target), else 0.

    Raises:
        UserError: The file is no case, or the target has no such kernel.
    """
    case = load_case(path)
    try:
        contract = contract_from(case.contract, case.settings)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    print(f"{contract}\nsaved: {case.kernel or 'a kernel'} on {case.device}: it {case.problem}")
    outcome = Outcome("returned", outputs=dict(case.actual))
    if case.actual:
        verdict = _judged(contract, case, outcome, path)
        print(shown_verdict(case.inputs, verdict) if verdict else "its outputs are the oracle's")
    else:
        verdict = None
        print("it holds no outputs to compare")
    if target is None:
        return int(verdict is not None or not case.actual)

    where = checked_device(device)
    profile = PROFILES["quick"]
    name = target.function or ""
    names = (name,) if name else ()
    with _worker(in_process)(target.file, where, profile.time_limit, names) as worker:
        runner = _runner_for(worker, target, case)
        finding = fault_in(contract, dict(case.inputs), runner, profile)
        print(f"\nagain, {runner.kernel} on {where}:")
        print("it holds on this input now" if finding is None else finding.report())
        return int(finding is not None)


def _worker(in_process: bool) -> type[Worker] | type[InProcess]:
    return InProcess if in_process else Worker


def checked_device(device: str | None) -> str:
    """A device that is there.

    Raises:
        UserError: "cuda" without a GPU.
    """
    there = default_device()
    if device == "cuda" and there != "cuda":
        raise UserError("--device is cuda, but torch finds no CUDA device; accepted: cpu")
    return there if device is None else device


@dataclass
class _Counting:
    """A runner that counts its calls and shows them."""

    inner: IsolatedRunner
    bar: Any
    calls: int = field(default=0)

    @property
    def device(self) -> str:
        return self.inner.device

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def traits(self) -> frozenset[str]:
        return self.inner.traits

    def run(self, contract: Contract, inputs: Mapping[str, Array]) -> Outcome:
        self.calls += 1
        self.bar.update()
        return self.inner.run(contract, inputs)

    def sweep(self, contract: Cast) -> Swept | Outcome:
        found = self.inner.sweep(contract)
        if isinstance(found, Swept):
            self.calls += found.tried
            self.bar.update(found.tried)
        return found


def _hold(worker: Worker | InProcess, found: Found, profile: Profile) -> bool:
    """Check one mark, and print what came of it."""
    from tqdm import tqdm

    contract = contract_from(found.contract, found.settings)
    bound = bound_named(found.bound or None)
    started = time.perf_counter()
    with tqdm(unit="call", desc=found.name, leave=False, disable=None) as bar:
        runner = _Counting(IsolatedRunner(worker, found.name, found.traits), bar)
        finding = _found(contract, runner, profile, bound)
    if finding is not None:
        print(finding.report(saved(finding.case)), end="\n\n")
        return False
    seconds = time.perf_counter() - started
    within = "" if bound is None else f" within the bound {bound.name}"
    print(f"{found.name} holds {contract}{within} ({runner.calls} calls, {seconds:.1f} s)")
    return True


def _found(contract: Contract, runner: Runner, profile: Profile, bound: Any) -> Finding | None:
    try:
        return find_fault(contract, runner, profile, bound)
    except ValueError as error:  # a bound or a profile that this contract does not have
        raise UserError(str(error)) from None


def _profile(name: str) -> Profile:
    try:
        return profile_named(name)
    except ValueError as error:
        raise UserError(str(error)) from None


def _marked(worker: Worker | InProcess, target: Target) -> list[Found]:
    """The marks of a file, or of one function of it."""
    marked = [found for found in worker.found if found.contract]
    names = ", ".join(dict.fromkeys(found.name for found in marked))
    if target.function is not None:
        chosen = [found for found in marked if found.name == target.function]
        if not chosen:
            raise UserError(
                f"{target.file} has no marked kernel {target.function}; marked: {names or 'none'}"
            )
        return chosen
    if not marked:
        raise UserError(
            f'{target.file} has no marked kernel; put @fp8lab.testing.contract("cast", fmt=E4M3),'
            " or another contract, above a function"
        )
    return marked


def _runner_for(worker: Worker | InProcess, target: Target, case: Case) -> IsolatedRunner:
    """The kernel that a case is replayed with."""
    named = case.kernel.rpartition(":")[2]
    fitting = [found for found in worker.found if found.contract == case.contract]
    if target.function is not None:
        fitting = [found for found in worker.found if found.name == target.function]
    elif any(found.name == named for found in fitting):
        fitting = [found for found in fitting if found.name == named]
    names = list(dict.fromkeys(found.name for found in fitting))
    if len(names) != 1:
        have = ", ".join(names) or "none"
        raise UserError(
            f"{target.file} has {len(names)} kernels with the contract {case.contract} ({have});"
            f" name one: {target.file}:FUNCTION"
        )
    return IsolatedRunner(worker, names[0], fitting[0].traits)


def _judged(contract: Contract, case: Case, outcome: Outcome, path: Path) -> Any:
    try:
        with np.errstate(all="ignore"):
            return judged(contract, case.inputs, outcome)
    except (ValueError, TypeError, KeyError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} does not fit its contract: {reason}") from None
