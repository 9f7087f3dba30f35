"""The planted faults: each is caught by its contract in the quick profile, with the right guess."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fp8lab.testing.contracts.base import CONTRACTS, contract_from
from fp8lab.testing.faults import FAULTS
from fp8lab.testing.findings import Finding
from fp8lab.testing.mutants import MUTANTS, RIGHT, Choices, run, tried
from fp8lab.testing.mutants.scoring import find_in

# Planted faults that the kit catches and names otherwise, with the reason. At most a fifth of all.
MISNAMED = {
    "requantizes-through-bfloat16": "what bfloat16 rounds off decides only at ties, where float32"
    " rounds it off as well; the few cases that tell the two apart are not among those asked for",
}
CAUGHT = [name for name, mutant in MUTANTS.items() if not mutant.equivalent]
EQUIVALENT = [name for name, mutant in MUTANTS.items() if mutant.equivalent]


def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every contract with every choice of settings that a mutant is held to."""
    found = {}
    for mutant in MUTANTS.values():
        settings = dict(mutant.settings)
        found[str(contract_from(mutant.contract, settings))] = mutant.contract, settings
    return found


VARIANTS = variants()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_right_kernel_holds_its_contract(variant: str) -> None:
    contract, settings = VARIANTS[variant]
    found: Finding | None = find_in(contract, settings, RIGHT[contract](Choices(**settings)))
    assert found is None, found.report()


@pytest.mark.parametrize("name", CAUGHT)
def test_a_planted_fault_is_caught_and_named(name: str) -> None:
    result = tried(MUTANTS[name])
    assert result.caught, f"{name} is not caught by {result.contract}: {result.description}"
    if name not in MISNAMED:
        assert result.guess_right, f"guessed {result.guess}; planted: {MUTANTS[name].fault}"


@pytest.mark.parametrize("name", EQUIVALENT)
def test_an_equivalent_mutant_gives_the_right_bits(name: str) -> None:
    result = tried(MUTANTS[name])
    assert not result.caught, f"the proof is wrong: {result.equivalent}"


def test_there_are_enough_and_every_contract_has_some() -> None:
    assert len(CAUGHT) >= 60
    assert len(MISNAMED) <= len(CAUGHT) / 5
    assert set(MISNAMED) <= set(CAUGHT)
    count = Counter(MUTANTS[name].contract for name in CAUGHT)
    assert set(count) == set(RIGHT) == set(CONTRACTS)
    assert min(count.values()) >= 6


def test_planted_faults_say_what_they_are() -> None:
    for name, mutant in MUTANTS.items():
        assert mutant.fault in FAULTS, name
        assert mutant.description.endswith("."), name
        assert len(mutant.description) <= 100, name


def test_processes_share_the_work_and_give_the_same() -> None:
    assert run(jobs=2, names=["ties-away"]) == run(names=["ties-away"])
    names = ["ties-away", "clip-without-eps"]
    assert [result.name for result in run(names=names)] == names


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown mutants none-such"):
        run(names=["none-such"])
    with pytest.raises(ValueError, match="jobs is 0; accepted: 1 and up"):
        run(jobs=0)
