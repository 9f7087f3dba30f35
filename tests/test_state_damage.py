"""Every entry of a state, lost or turned into something else: refused by name, or taken over."""

from __future__ import annotations

import copy
import enum
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8lab.checkpoint import CheckpointError
from fp8lab.checkpoint_tree import leaves, same_leaf
from fp8lab.errors import UserError
from fp8lab.loss_scaler import LossScaler
from fp8lab.optimizer import AdamW
from fp8lab.state import TrainingState
from fp8lab.state_random import random_problems
from fp8lab.state_values import kind_of_value, misfit, rough_misfit
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


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def way(path: str) -> tuple[Any, ...]:
    return tuple(int(key) if key.isdigit() else key for key in path.split("/"))


def changed(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    new = copy.deepcopy(state)
    at(new, path[:-1])[path[-1]] = value
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


KNOWN = ("model", "modes", "optimizer", "random")  # what the lab knows all of
TABLES = [path for path in PATHS if path[0] in KNOWN and isinstance(at(SAVED, path), dict)]
TABLES = [path for path in TABLES if path[-1] != "1.bias" and "_extra_state" not in str(path)]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: "/".join(map(str, path)))
def test_an_entry_too_many(path: tuple[Any, ...]) -> None:
    """Refused, and nothing changed; or listed and left out."""
    state = changed(SAVED, (*path, "odd"), [])
    run = training_state(4, steps=1, **SETTINGS)
    before = copied(run)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        run.restore(state)
    assert_same_state(copied(run), before)
    if path[0] != "random" or len(path) == 1:  # a generator takes its state or not
        assert [own.problem for own in run.restore(state, strict=False)] == ["unknown"]
        assert "odd" not in at(copied(run), path)


def test_modes_that_are_empty() -> None:
    run = training_state(4, steps=1, **SETTINGS)
    left = run.restore({**SAVED, "modes": {}}, strict=False)
    assert [own.path for own in left] == ["modes/eval", "modes/frozen"]


def test_what_only_begins_alike_is_read_back() -> None:
    class Forgetful(Kept):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Take nothing over."""

    run = TrainingState(nn.Linear(2, 2), others={"own": Forgetful({"a": 1, "ab": 1})})
    saved = {**copied(run), "own": {"ab": 2}}
    with pytest.raises(CheckpointError, match=r"own/ab .* was not taken over"):
        run.restore(saved, strict=False)


def test_an_entry_that_is_missing_stays_as_it_is() -> None:
    run = training_state(4, steps=1, **SETTINGS)
    run.restore(without(SAVED, "optimizer/state/0.weight/step"), strict=False)
    assert copied(run)["optimizer"]["state"]["0.weight"]["step"] == 1


@pytest.mark.parametrize("strict", [True, False])
def test_a_scaler_of_another_shape_changes_nothing(strict: bool) -> None:
    run = TrainingState(nn.Linear(2, 2), scaler=LossScaler())
    before = copied(run)
    state = changed(before, ("scaler", "good_steps"), torch.zeros(3, dtype=torch.int32))
    state["model"]["weight"] += 1
    with pytest.raises(CheckpointError, match="does not fit this run: scaler/good_steps"):
        run.restore(state, strict=strict)
    assert_same_state(copied(run), before)


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
    cut = copy.deepcopy(SAVED)
    *outer, last = way(path)
    del at(cut, tuple(outer))[last]
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


class Kept(Counter):
    """An object of which the lab knows what its `state_dict` gives, no more."""

    def __init__(self, state: dict[Any, Any]) -> None:
        super().__init__(0)
        self.state = state


@pytest.mark.parametrize(
    ("live", "saved"),
    [
        ({"shadow": None, "n": 0}, {"shadow": torch.ones(3), "n": 3}),
        ({"shadow": torch.ones(3)}, {"shadow": None}),
        ({"best": float("inf")}, {"best": torch.ones(())}),
        ({"flag": False}, {"flag": 3}),
        ({"seen": torch.ones(2)}, {"seen": torch.ones(5, dtype=torch.int8)}),
        ({"list": [1]}, {"list": [1, "x", None]}),
        ({0: 1, "a": 1}, {0: 2, "a": 3}),
    ],
)
def test_what_an_object_may_have_kept_by_now(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    model = nn.Linear(2, 2)
    state = copied(TrainingState(model, others={"own": Kept(saved)}))
    kept = Kept(live)
    assert TrainingState(model, others={"own": kept}).restore(state) == []
    assert_same_state({"own": kept.state}, {"own": saved})


def test_keys_that_are_integers_are_named() -> None:
    model = nn.Linear(2, 2)
    state = copied(TrainingState(model, others={"own": Kept({"b": 2})}))
    run = TrainingState(model, others={"own": Kept({0: 1, "a/b": 1})})
    with pytest.raises(CheckpointError, match=r"own/0 .*: missing \(and 1 more\)"):
        run.restore(state)
    listed = [own.path for own in run.restore(state, strict=False)]
    assert listed == ["own/0", "own/a%2Fb"]


def test_names_with_a_slash() -> None:
    def run(*names: str) -> TrainingState:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        state = TrainingState(model, AdamW(model.parameters()))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        assert state.optimizer is not None
        state.optimizer.step()
        return state

    state = copied(run("a/b"))
    assert run("a/b").restore(state) == []
    del state["optimizer"]["state"]["a/b.bias"], state["model"]["a/b.weight"]
    listed = [own.path for own in run("a/b").restore(state, strict=False)]
    assert listed == ["model/a%2Fb.weight", "optimizer/state/a%2Fb.bias"]


@pytest.mark.parametrize("name", ["torch", "python", "numpy"])
def test_a_generator_may_have_the_name_of_a_global_one(name: str) -> None:
    for generator in (np.random.default_rng(3), random.Random(3), torch.Generator()):
        state = TrainingState(nn.Linear(2, 2), generators={name: generator})
        assert state.restore(copied(state)) == []


def test_a_global_generator_of_another_kind() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(4))  # type: ignore[attr-defined]
        state = TrainingState(nn.Linear(2, 2))
        kept = copied(state)
        drawn = np.random.rand()  # noqa: NPY002
        assert state.restore(kept) == []
        assert np.random.rand() == drawn  # noqa: NPY002
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_a_generator_that_cannot_be_copied() -> None:
    class Own(np.random.PCG64):
        def __init__(self, seed: int, name: str) -> None:
            super().__init__(seed)

    generator = np.random.Generator(Own(3, "a"))
    state = TrainingState(nn.Linear(2, 2), generators={"own": generator})
    kept = copied(state)
    drawn = generator.random()
    assert state.restore(kept) == []
    assert generator.random() == drawn


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        ("eval", ["1", "x"], "it names 'x', which the model lacks"),
        ("frozen", ["0.weight", "0.weight"], "not in the model's order, each once"),
        ("eval", ["1", "0"], "not in the model's order, each once"),
        ("eval", ["1", 0], "it was saved as no list of names"),
    ],
)
def test_modes_of_what_is_not_there(kind: str, names: list[Any], said: str) -> None:
    state = changed(SAVED, ("modes", kind), names)
    run = training_state(4, steps=1, **SETTINGS)
    before = copied(run)
    for strict in (True, False):
        with pytest.raises(CheckpointError) as error:
            run.restore(state, strict=strict)
        assert said in str(error.value)
        assert_same_state(copied(run), before)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.Adafactor(params, lr=0.1),
    lambda params: torch.optim.LBFGS(params, lr=0.1, history_size=3),
]


def stepped(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> TrainingState:
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    for step in range(steps):

        def closure(scale: float = step + 1.0) -> float:
            optimizer.zero_grad()
            loss: Tensor = (model(torch.ones(4, 3)) * scale - 1).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        optimizer.step(closure)
    return TrainingState(model, optimizer)


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["AdamW", "SGD", "Adafactor", "LBFGS"])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_torchs_optimizers_fresh_or_not(
    make: Callable[[Any], torch.optim.Optimizer], before: int
) -> None:
    saved = copied(stepped(make, 2))
    run = stepped(make, before)
    assert run.restore(saved) == []
    assert_same_state(copied(run), saved)


def test_a_group_may_bring_what_a_schedule_will_need() -> None:
    """torch's schedules put initial_lr into the groups, and want it there to go on from a step."""
    saved = stepped(OPTIMIZERS[0], 1)
    assert saved.optimizer is not None
    torch.optim.lr_scheduler.StepLR(saved.optimizer, 5)
    run = stepped(OPTIMIZERS[0], 0)
    assert run.restore(copied(saved)) == []
    assert run.optimizer is not None
    torch.optim.lr_scheduler.StepLR(run.optimizer, 5, last_epoch=3)
    with pytest.raises(CheckpointError, match=r"param_groups/0/initial_lr .*: missing"):
        run.restore(copied(stepped(OPTIMIZERS[0], 1)))


@pytest.mark.parametrize("other", [torch.optim.NAdam, torch.optim.Adamax, torch.optim.SGD])
def test_another_optimizers_groups_are_refused(other: Callable[..., Any]) -> None:
    saved = copied(stepped(OPTIMIZERS[0], 0))
    with pytest.raises(CheckpointError, match=r"param_groups/0/\w+ .*: (missing|unknown)"):
        stepped(lambda params: other(params, lr=0.1), 0).restore(saved)
    with pytest.raises(CheckpointError, match=r"param_groups/0/\w+ .*: (missing|unknown)"):
        stepped(lambda params: AdamW(params, lr=0.1), 0).restore(saved)


@pytest.mark.parametrize("value", ["x", [0.1], {}])
def test_odd_values_in_another_optimizers_groups(value: Any) -> None:
    saved = changed(
        copied(stepped(OPTIMIZERS[1], 1)), ("optimizer", "param_groups", 0, "lr"), value
    )
    with pytest.raises(CheckpointError, match="this run keeps a number"):
        stepped(OPTIMIZERS[1], 0).restore(saved)


class Level(enum.IntEnum):
    HIGH = 3


def test_numbers_of_other_types_are_numbers() -> None:
    """NumPy's, which a schedule's function may have made, and members of an enumeration."""
    pairs: list[tuple[Any, Any]] = [
        (np.float64(0.5), 0.25),
        (0.25, np.float64(0.5)),
        (Level.HIGH, 2),
        ((np.float64(0.9), 0.99), (0.9, 0.99)),
        (np.str_("a"), "b"),
    ]
    for live, saved in pairs:
        assert misfit(live, saved) is None
        assert rough_misfit(live, saved) is None

    def run() -> TrainingState:
        state = stepped(lambda params: AdamW(params, lr=0.1), 1)
        assert state.optimizer is not None
        schedule = torch.optim.lr_scheduler.LambdaLR(
            state.optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 10))
        )
        state.optimizer.step()
        schedule.step()
        return state

    saved = copied(run())
    assert run().restore(saved) == []


def test_an_optimizer_that_keeps_more() -> None:
    def make(count: int) -> TrainingState:
        state = stepped(OPTIMIZERS[0], 1)
        assert state.optimizer is not None
        state.optimizer.register_state_dict_post_hook(lambda _, table: {**table, "more": count})
        return state

    saved = copied(make(3))
    assert make(3).restore(saved) == []
    del saved["optimizer"]["more"]
    with pytest.raises(CheckpointError, match=r"optimizer/more .*: missing"):
        make(3).restore(saved)


@pytest.mark.parametrize("lost", ["state", "param_groups"])
def test_the_rest_is_looked_at_where_a_table_is_missing(lost: str) -> None:
    spoilt = without(SAVED, f"optimizer/{lost}")
    if lost == "state":
        spoilt["optimizer"]["param_groups"][0]["params"].reverse()
    else:
        spoilt["optimizer"]["state"]["0.weight"]["exp_avg"] = torch.ones(7)
    spoilt["optimizer"]["zz"] = 1
    run = training_state(4, steps=1, **SETTINGS)
    before = copied(run)
    with pytest.raises(CheckpointError, match="it was saved as") as error:
        run.restore(spoilt, strict=False)
    assert "does not fit" in str(error.value)
    assert_same_state(copied(run), before)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("param_groups/0/lr", -1.0, "lr is -1.0; accepted: a number, finite, at least 0"),
        ("param_groups/0/lr", 10**400, "accepted: a number, finite, at least 0"),
        ("param_groups/0/betas", (0.9, 2.0), "beta2 is 2.0; accepted: a number, at least 0"),
        ("state/0.weight/step", -1, "it is -1; accepted: an integer, 0 and up"),
        ("state/0.weight/step", 1.5, "it is 1.5; accepted: an integer, 0 and up"),
    ],
)
def test_numbers_with_which_no_step_can_be_taken(path: str, value: Any, said: str) -> None:
    run = training_state(4, steps=1, **SETTINGS)
    before = copied(run)
    with pytest.raises(CheckpointError) as error:
        run.restore(changed(SAVED, ("optimizer", *way(path)), value))
    assert said in str(error.value)
    assert_same_state(copied(run), before)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (UserError("cursor: no such batch"), UserError, r"^cursor: no such batch$"),
        (
            IndexError("no such batch"),
            CheckpointError,
            r"not taken over \(IndexError: no such batch\); parts of it are put back already",
        ),
    ],
)
def test_an_object_that_fails_is_told_in_one_line(
    error: Exception, kind: type[Exception], said: str
) -> None:
    """In its own words where they are meant for users."""

    class Failing(Counter):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise error

    run = TrainingState(nn.Linear(2, 2), others={"cursor": Failing(1)})
    with pytest.raises(kind, match=said):
        run.restore(copied(run))


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
        (1, True, False, True),
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
        (torch.zeros(()), 0.0, False, True),
        (torch.zeros(()), None, False, True),
        ("x", 1, False, False),
    ],
)
def test_what_may_stand_in_a_place(live: Any, saved: Any, fits: bool, roughly: bool) -> None:
    assert (misfit(live, saved) is None) is fits
    assert (rough_misfit(live, saved) is None) is roughly
    if not fits:
        assert kind_of_value(saved) in str(misfit(live, saved))
