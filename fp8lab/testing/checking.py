"""Holding a kernel to a contract: the fixed cases, what Hypothesis draws, the smallest failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, Phase

from fp8lab.testing.cases import Case, save_case
from fp8lab.testing.contracts.base import Contract, Kernel
from fp8lab.testing.contracts.casts import Cast
from fp8lab.testing.exhaustive import Swept
from fp8lab.testing.findings import Finding, KernelFault, Verdict, judged
from fp8lab.testing.marks import bound_named
from fp8lab.testing.minimise import minimised
from fp8lab.testing.profiles import Profile, profile_named
from fp8lab.testing.running import LocalRunner, Outcome, Runner

if TYPE_CHECKING:
    from fp8lab.testing.bounds import Bound
    from fp8lab.testing.diagnosis import Guess

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

# For the smallest input of a kernel that hangs (each call takes the whole time limit) or crashes
# (each starts a process).
_SLOW_CALLS = {"hung": 3, "crashed": 8}


def check(
    contract: Contract,
    kernel: Kernel,
    *,
    device: str | None = None,
    profile: str | Profile = "quick",
    bound: Bound | None = None,
) -> None:
    """Hold a kernel to a contract; the functions `check_cast` and so on all come here.

    Args:
        contract: What must hold.
        kernel: The kernel; it is called in this process.
        device: "cpu" or "cuda"; None is the GPU where there is one.
        profile: How much is tried: a name of `PROFILES` or a `Profile`.
        bound: What the kernel promises instead of equality, of `fp8lab.testing.bounds`.

    Raises:
        KernelFault: (an AssertionError) It does not hold. The case is saved, see `save_case`.
        TypeError: The kernel is not callable.
        ValueError: The device, profile or bound is unknown, or the bound is for other contracts.
    """
    __tracebackhide__ = True  # pytest shows the report, not this function
    if not callable(kernel):
        raise TypeError(f"kernel is {kernel!r}; accepted: something callable on torch tensors")
    chosen, promised = profile_named(profile), bound_named(bound)
    runner = LocalRunner(kernel, _device_named(device), chosen.time_limit)
    finding = find_fault(contract, runner, chosen, promised)
    if finding is not None:
        raise KernelFault(finding, saved(finding.case))


def find_fault(
    contract: Contract, run: Runner, profile: Profile, bound: Bound | None = None
) -> Finding | None:
    """What is wrong with a kernel, on the smallest input; None if nothing is. Nothing is saved.

    Args:
        contract: What must hold.
        run: Calls the kernel.
        profile: How much is tried.
        bound: As for `check`.

    Raises:
        ValueError: The bound is not for this contract.
    """
    if bound is not None:
        bound.check_for(contract)
    untried = cases(contract, profile, run.traits)
    for inputs in untried:
        # To tell faults apart: what comes next, and in turn what has passed already. Neighbours
        # are much alike, so every third will do.
        again = contract.fixed(profile, run.traits)
        both = (case for pair in zip_longest(untried, again) for case in pair if case)
        others = islice(both, 0, None, 3)
        finding = fault_in(contract, inputs, run, profile, bound, others)
        if finding is not None:
            return finding
    if profile.exhaustive and isinstance(contract, Cast):
        return fault_in_sweep(contract, run.sweep(contract), run, profile)
    return None


def fault_in(
    contract: Contract,
    inputs: Arrays,
    run: Runner,
    profile: Profile,
    bound: Bound | None = None,
    others: Iterable[Arrays] = (),
) -> Finding | None:
    """What is wrong with a kernel on one input, brought down to the smallest; None if nothing is.

    Args:
        contract: What must hold.
        inputs: The input.
        run: Calls the kernel.
        profile: Says how long the smallest input is looked for.
        bound: As for `check`.
        others: Further inputs, tried where several faults fit, to tell them apart.
    """
    verdict = judged(contract, inputs, run.run(contract, inputs), bound)
    if verdict is None:
        return None
    return _finding(contract, inputs, verdict, run, profile, bound, others)


def fault_in_sweep(
    contract: Cast, found: Swept | Outcome, run: Runner, profile: Profile
) -> Finding | None:
    """What a sweep over every input found, on the smallest input; None if nothing was."""
    if isinstance(found, Outcome):  # the process that tried them is no more
        found = Swept(0, 0.0, contract.dtypes[0], (), found.detail)
    if not found.dtype:
        return None
    finding = fault_in(contract, found.inputs, run, profile)
    if finding is not None:
        return finding
    # Wrong among all the others, right alone: the sizes matter, or the kernel is not steady.
    text = found.problem or f"gave a wrong code for {len(found.words)} inputs or more in a sweep"
    expected = contract.expected(found.inputs)
    verdict = Verdict("differs", text, expected, {}, {})
    case = Case(contract.name, contract.settings, found.inputs, {}, text, run.name, run.device)
    return Finding(contract, run.name, verdict, verdict, case, None, steady=False)


def cases(contract: Contract, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
    """The fixed inputs, then the drawn ones."""
    fixed = contract.fixed(profile, traits)
    if profile.fixed is not None:
        every = list(fixed)
        fixed = iter(every[:: -(-len(every) // profile.fixed)])
    yield from fixed
    yield from _drawn(contract, profile, traits)


def saved(case: Case) -> Path | str | None:
    """Save a case; the file, or why there is none."""
    try:
        return save_case(case)
    except OSError as error:
        return f"the case could not be saved: {error.strerror or error} ({error.filename})"


def default_device() -> str:
    """The GPU ("cuda") where torch finds one, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_named(device: str | None) -> str:
    if device is None:
        return default_device()
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; accepted: cpu, cuda")
    if kind == "cuda" and default_device() != "cuda":
        raise ValueError(f"device is {device!r}, but torch finds no CUDA device; accepted: cpu")
    return str(device)


def _drawn(contract: Contract, profile: Profile, traits: frozenset[str]) -> Iterator[Arrays]:
    """What Hypothesis draws. It only draws: the search for the smallest failure is our own, the
    same for fixed and for drawn cases.
    """
    collected: list[Arrays] = []

    @hypothesis.settings(
        max_examples=profile.examples,
        derandomize=profile.derandomize,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(contract.drawn(profile, traits))
    def collect(inputs: Arrays) -> None:
        collected.append(inputs)

    collect()
    yield from collected


def _finding(
    contract: Contract,
    inputs: Arrays,
    first: Verdict,
    run: Runner,
    profile: Profile,
    bound: Bound | None,
    others: Iterable[Arrays],
) -> Finding:
    def fails_again() -> bool:
        again = judged(contract, inputs, run.run(contract, inputs), bound)
        return again is not None and again.kind == first.kind

    slow = first.kind in _SLOW_CALLS
    steady = slow or fails_again()
    smallest, verdict = inputs, first
    if steady:

        def fails(candidate: Arrays) -> bool:
            found = judged(contract, candidate, run.run(contract, candidate), bound)
            return found is not None and _alike(found, first)

        calls = _SLOW_CALLS.get(first.kind, profile.minimise_calls)
        if "CUDA error" in first.text:
            # In this process every later call fails, too; in a worker each starts a new one.
            calls = 0 if isinstance(run, LocalRunner) else _SLOW_CALLS["crashed"]
        head = next(iter(first.expected), "")
        wrong = first.wrong.get(head, np.empty(0, np.intp)).tolist()
        smallest = minimised(contract, inputs, wrong, fails, calls)
        if slow:  # a smaller input that failed was a second time
            verdict = replace(first, expected=contract.expected(smallest))
            steady = smallest is not inputs or fails_again()
        elif smallest is not inputs:
            found = judged(contract, smallest, run.run(contract, smallest), bound)
            steady = found is not None
            verdict = first if found is None else found
            smallest = inputs if found is None else smallest
    case = Case(
        contract.name,
        contract.settings,
        smallest,
        dict(verdict.actual),
        verdict.text,
        run.name,
        device_name(run.device),
    )
    more = _further(contract, others, run)
    # Where nothing explains the first case (two faults, say), the smallest input may show one.
    guess = _guess(contract, inputs, first, more) or _guess(contract, smallest, verdict, sure=True)
    return Finding(contract, run.name, verdict, first, case, guess, steady, bound)


def _alike(found: Verdict, first: Verdict) -> bool:
    """Whether two failures are of one kind; of exceptions, of one type."""
    if found.kind != first.kind:
        return False
    return found.kind != "raised" or found.text.split(":")[0] == first.text.split(":")[0]


def _further(
    contract: Contract, others: Iterable[Arrays], run: Runner
) -> Iterator[tuple[Arrays, Mapping[str, Array], Mapping[str, Array]]]:
    """Inputs, expected and actual outputs of further calls that return something to compare."""
    for inputs in others:
        verdict = judged(contract, inputs, run.run(contract, inputs))
        if verdict is None:
            expected = contract.expected(inputs)
            yield inputs, expected, expected
        elif verdict.actual:
            yield inputs, verdict.expected, verdict.actual


def _guess(
    contract: Contract,
    inputs: Arrays,
    verdict: Verdict,
    more: Iterable[tuple[Arrays, Mapping[str, Array], Mapping[str, Array]]] = (),
    *,
    sure: bool = False,
) -> Guess | None:
    if verdict.kind != "differs" or not verdict.actual:
        return None
    from fp8lab.testing.diagnosis import guess_fault

    try:
        return guess_fault(
            contract.name,
            contract.choices,
            inputs,
            verdict.expected,
            verdict.actual,
            more=more,
            sure=sure,
        )
    except Exception:  # a guess is a help; the report must come without it, too
        return None


def device_name(device: str) -> str:
    """What is written down as where a kernel ran."""
    if not device.startswith("cuda"):
        return device
    import torch

    return torch.cuda.get_device_name()
