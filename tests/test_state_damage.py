"""Every entry of a state, lost or turned into something else: refused by name, or taken over."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8lab.checkpoint import CheckpointError
from fp8lab.checkpoint_tree import leaves, same_leaf
from fp8lab.state import TrainingState
from fp8lab.state_random import random_problems
from fp8lab.state_values import kind_of_value, misfit
from tests.test_state import Counter, assert_same_state, copied, training_state, without

SETTINGS: dict[str, Any] = {"exp_avg": "e4m3_128", "exp_avg_sq": "e4m3_128_keep"}
OTHERS: list[Any] = [None, True, -1, 0.5, float("nan"), "x", [], {}, [1], {"a": 1}]
OTHERS += [torch.zeros(()), torch.zeros(2, dtype=torch.uint8)]


def paths_of(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every entry, of tables within as well."""
    if path:
        yield path
    items: Any = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    for key, value in items:
        yield from paths_of(value, (*path, key))


def changed(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    new = copy.deepcopy(state)
    table: Any = new
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return new


SAVED = copied(training_state(0, steps=2, **SETTINGS))
PATHS = list(paths_of(SAVED))


def test_the_paths_are_all_there_is() -> None:
    names = {path[0] for path in PATHS}
    assert names == {"model", "modes", "optimizer", "scaler", "cursor", "random"}
    assert ("optimizer", "state", "0.weight", "exp_avg_scale") in PATHS
    assert ("optimizer", "state", "1.bias") in PATHS  # of which nothing is kept
    assert ("optimizer", "param_groups", 0, "betas") in PATHS
    assert ("random", "generator:philox", "state", "counter") in PATHS


@pytest.mark.parametrize("part", list(SAVED))
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_damaged_is_refused_or_taken_over(part: str, strict: bool) -> None:
    """Never another exception; and a refusal changes nothing, but where an object's own read-back
    was what told (the counters that stand for a data cursor and the like).
    """
    run = training_state(4, steps=1, **SETTINGS)
    fresh = copied(run)
    for path in (own for own in PATHS if own[0] == part):
        for value in OTHERS:
            state = changed(SAVED, path, value)
            if same(state, SAVED):
                continue
            refused, left = restored(run, state, strict=strict)
            if refused and "was not taken over" not in refused:
                assert "\n" not in refused, path
                assert_same_state(copied(run), fresh)
                continue
            if not refused and not left:
                assert_same_state(copied(run), state)
            assert not (strict and left), path
            run = training_state(4, steps=1, **SETTINGS)
            fresh = copied(run)


def restored(run: TrainingState, state: dict[str, Any], *, strict: bool) -> tuple[str, list[Any]]:
    """What a restore said where it refused, and what it listed."""
    try:
        return "", list(run.restore(state, strict=strict))
    except CheckpointError as error:
        return str(error), []


def same(one: Any, other: Any) -> bool:
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    return ours.keys() == theirs.keys() and all(same_leaf(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("optimizer/state/0.weight", "optimizer/state/0.weight (optimizer state): missing"),
        ("optimizer/state/1.bias", "optimizer/state/1.bias (optimizer state): missing"),
        ("optimizer/state", "optimizer/state (optimizer's groups): missing"),
        ("optimizer/param_groups/0/betas", "optimizer/param_groups/0/betas (optimizer's groups)"),
        ("modes/eval", "modes/eval (modes of modules): missing"),
        ("random/numpy/has_gauss", "random/numpy (random state): it is no state of this"),
        ("random/python/gauss", "random/python (random state): it is no state of this"),
        ("random/generator:batches/state", "random/generator:batches (random state): it is no"),
    ],
)
def test_what_was_lost_is_named(path: str, said: str) -> None:
    cut: Any = copy.deepcopy(SAVED)
    *way, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    table = cut
    for key in way:
        table = table[key]
    del table[last]
    run = training_state(4, steps=1, **SETTINGS)
    before = copied(run)
    with pytest.raises(CheckpointError) as error:
        run.restore(cut)
    assert said in str(error.value)
    assert_same_state(copied(run), before)


def test_moments_that_are_missing_stay_as_they_are() -> None:
    """Not strict: the live ones stay; an optimizer that took no step begins with its first."""
    cut = without(SAVED, "optimizer/state/0.weight")
    run = training_state(4, steps=1, **SETTINGS)
    before = copied(run)["optimizer"]["state"]["0.weight"]
    left = [str(own) for own in run.restore(cut, strict=False)]
    assert left == ["optimizer/state/0.weight (optimizer state): missing"]
    now = copied(run)["optimizer"]["state"]
    assert_same_state(now["0.weight"], before)
    assert_same_state(now["1.weight"], SAVED["optimizer"]["state"]["1.weight"])
    new = training_state(4, **SETTINGS)
    new.restore(cut, strict=False)
    assert copied(new)["optimizer"]["state"]["0.weight"] == {}


def test_an_object_that_fails_is_told_in_one_line() -> None:
    class Failing(Counter):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise IndexError("no such batch")

    run = training_state(1)
    run = TrainingState(
        run.model,
        run.optimizer,
        scaler=run.scaler,
        generators=run.generators,
        others={"cursor": Failing(1)},
    )
    said = r"not taken over \(IndexError: no such batch\); parts of it are put back already"
    with pytest.raises(CheckpointError, match=said):
        run.restore(SAVED_PLAIN)


SAVED_PLAIN = copied(training_state(0, steps=1))


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ([torch.zeros(16, dtype=torch.uint8)] * 2, None),
        ([torch.zeros(16, dtype=torch.uint8)], None),  # a machine with one GPU less
        ([torch.zeros(16, dtype=torch.uint8)] * 3, "it was saved with 3 GPUs, here are 2"),
        ([torch.zeros(16, dtype=torch.int8)] * 2, "it is no state of these generators"),
        ([torch.zeros(8, dtype=torch.uint8)], "it is no state of these generators"),
        ([], "it is no state of these generators"),
        (None, "it is no state of these generators"),
    ],
)
def test_generators_of_gpus(saved: Any, said: str | None) -> None:
    live = {"torch_cuda": [torch.zeros(16, dtype=torch.uint8)] * 2}
    problems = [] if said is None else [("torch_cuda", said)]
    assert random_problems(live, {"torch_cuda": saved}, {}) == problems


@pytest.mark.parametrize(
    ("live", "saved", "fits", "roughly"),
    [
        (1, 2.5, True, True),
        (1, True, False, False),
        (1, "1", False, False),
        (1, None, False, True),
        (None, 3, False, True),
        (None, "x", True, True),
        (True, None, True, True),
        ([1, 2], (3, 4), True, True),
        ([1, 2], [3], False, True),
        ([1, 2], [3, None], False, True),
        ([1], 1, False, False),
        ({}, {"a": 1}, True, True),
        ({}, [], False, False),
        (torch.zeros(2), torch.zeros(3), False, True),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int8), False, True),
        (torch.zeros(2), torch.ones(2), True, True),
        (torch.zeros(()), 0.0, False, False),
        (torch.zeros(()), None, False, False),
    ],
)
def test_what_may_stand_in_a_place(live: Any, saved: Any, fits: bool, roughly: bool) -> None:
    assert (misfit(live, saved) is None) is fits
    assert (misfit(live, saved, sizes=False) is None) is roughly
    if not fits:
        assert kind_of_value(saved) in str(misfit(live, saved))
