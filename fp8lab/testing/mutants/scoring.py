"""Trying the planted faults: is each caught, by its contract, with the right guess?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

from fp8lab.testing.checking import find_fault
from fp8lab.testing.contracts.base import contract_from
from fp8lab.testing.findings import Finding
from fp8lab.testing.mutants.registry import MUTANTS, Kernel, Mutant
from fp8lab.testing.profiles import Profile, profile_named
from fp8lab.testing.running import LocalRunner


@dataclass(frozen=True)
class MutantResult:
    """What became of one planted fault.

    Attributes:
        name, description, contract: The mutant's.
        caught: Whether its contract found a difference.
        by: How: what the kernel did, as the report says it; empty where it was not caught.
        guess: The fault that was guessed, or None.
        guess_right: Whether that is the planted one.
        equivalent: The proof that the mutant gives the right bits, where there is one; such a
            mutant must not be caught.
    """

    name: str
    description: str
    contract: str
    caught: bool
    by: str
    guess: str | None
    guess_right: bool
    equivalent: str


def tried(mutant: Mutant, profile: str | Profile = "quick") -> MutantResult:
    """Hold one mutant to its contract, on the CPU.

    The smallest input is not looked for: the guess is made on the first case that fails.
    """
    finding = find_in(mutant.contract, mutant.settings, mutant.kernel(), profile)
    guess = None if finding is None or finding.guess is None else finding.guess.fault
    return MutantResult(
        name=mutant.name,
        description=mutant.description,
        contract=mutant.contract,
        caught=finding is not None,
        by="" if finding is None else finding.first.text,
        guess=guess,
        guess_right=guess == mutant.fault,
        equivalent=mutant.equivalent,
    )


def find_in(
    contract: str,
    settings: Mapping[str, Any],
    kernel: Kernel,
    profile: str | Profile = "quick",
) -> Finding | None:
    """What a contract finds in a kernel on the CPU, without a search for the smallest input."""
    brief = replace(profile_named(profile), minimise_calls=0)
    runner = LocalRunner(kernel, "cpu", brief.time_limit)
    return find_fault(contract_from(contract, settings), runner, brief)


def run(
    profile: str | Profile = "quick", jobs: int = 1, names: Iterable[str] | None = None
) -> list[MutantResult]:
    """Try the planted faults.

    Args:
        profile: How much each contract tries.
        jobs: How many processes share them.
        names: Which ones; None for all.

    Returns:
        One result each, in the order in which they are registered.

    Raises:
        ValueError: jobs is below 1, or a name is unknown.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; accepted: 1 and up")
    chosen = list(MUTANTS if names is None else names)
    unknown = [name for name in chosen if name not in MUTANTS]
    if unknown:
        raise ValueError(f"unknown mutants {', '.join(unknown)}; see fp8lab verify --mutants")
    if jobs == 1:
        return [tried(MUTANTS[name], profile) for name in chosen]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(_tried_by_name, profile=profile), chosen))


def _tried_by_name(name: str, profile: str | Profile) -> MutantResult:
    import torch

    torch.set_num_threads(1)  # the processes fill the cores
    return tried(MUTANTS[name], profile)
