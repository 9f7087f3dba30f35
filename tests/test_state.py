"""Training state by name: all of it comes back; what is missing or unlike is refused by name."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8lab.checkpoint import CheckpointError, load, save, take_state
from fp8lab.checkpoint_tree import leaves, rebuild, same_leaf
from fp8lab.optimizer import AdamW
from fp8lab.optimizer_formats import MASTER_FORMATS, MOMENT_FORMATS
from fp8lab.state import TrainingState
from fp8lab.state_names import kind_of
from fp8lab.state_random import AnyGenerator


class Scaled(nn.Module):
    """A layer with what FP8 layers keep: a scale, a history, codes, and a counter that is plain."""

    scale: Tensor
    amax_history: Tensor
    weight_codes: Tensor

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(12, 20, generator=generator).to(dtype))
        self.bias = nn.Parameter(torch.randn(12, generator=generator).to(dtype))
        self.register_buffer("scale", torch.tensor(2.0**seed))
        # Strided, as a column of the state of many layers is.
        self.register_buffer("amax_history", torch.rand(3, 5, generator=generator)[:, 1])
        self.register_buffer("weight_codes", self.weight.detach().to(torch.float8_e4m3fn))
        self.windows = {"bad": seed, "seen": [seed, seed]}

    def get_extra_state(self) -> dict[str, Any]:
        return self.windows

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.windows = state

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


class Counter:
    """A part of its own: a data cursor, counters."""

    def __init__(self, count: int) -> None:
        self.state = {"count": count, "seen": torch.arange(count)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)


def training_state(seed: int, *, steps: int = 0, **settings: Any) -> TrainingState:
    """A model, its optimizer after some steps, a scaler and generators, different for each seed."""
    dtype = torch.float32 if settings.get("master", "float32") == "float32" else torch.bfloat16
    model = nn.Sequential(Scaled(seed, dtype), Scaled(seed + 1, dtype))
    model.add_module("tied", model[0])
    model[1].eval()
    model[1].bias.requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=0.01, **settings)
    generators: dict[str, AnyGenerator] = {
        "batches": np.random.default_rng(seed),
        "philox": np.random.Generator(np.random.Philox(seed)),
        "torch": torch.Generator().manual_seed(seed),
        "python": random.Random(seed),
    }
    state = TrainingState(
        model,
        optimizer,
        scaler=Counter(seed + 1),
        generators=generators,
        others={"cursor": Counter(seed + 2)},
    )
    train(state, steps)
    return state


def train(state: TrainingState, steps: int) -> list[Any]:
    """Steps whose gradients depend on every generator; what was drawn is returned."""
    drawn = []
    for _ in range(steps):
        numbers = [
            state.generators["batches"].integers(1000),  # type: ignore[union-attr]
            state.generators["philox"].random(),  # type: ignore[union-attr]
            torch.rand((), generator=state.generators["torch"]).item(),  # type: ignore[arg-type]
            state.generators["python"].random(),  # type: ignore[union-attr]
            random.random(),
            np.random.rand(),  # noqa: NPY002
            torch.rand(()).item(),
        ]
        for param in state.model.parameters():
            if param.requires_grad:
                param.grad = (torch.sin(param.detach().float() * 3 + sum(map(float, numbers)))).to(
                    param.dtype
                )
        assert state.optimizer is not None
        state.optimizer.step()
        drawn.append(numbers)
    return drawn


def copied(state: TrainingState) -> dict[str, Any]:
    """Its state as a checkpoint would have it, without a disk."""
    taken = take_state(state.capture())
    return {part: rebuild(own.json, own.tensors) for part, own in taken.items()}


def layer(state: TrainingState, place: int) -> Scaled:
    found = state.model.get_submodule(str(place))
    assert isinstance(found, Scaled)
    return found


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        assert same_leaf(value, theirs[path]), path


def formats() -> list[dict[str, Any]]:
    """Each format of a moment in either place, and each master, once."""
    found: list[dict[str, Any]] = [{"exp_avg": n, "exp_avg_sq": n} for n in MOMENT_FORMATS]
    found += [{"master": master} for master in MASTER_FORMATS]
    return [
        *found,
        {"master": "bfloat16_remainder", "exp_avg": "bfloat16", "exp_avg_sq": "e4m3_128"},
    ]


@pytest.mark.parametrize("settings", formats(), ids=lambda s: "-".join(s.values()))
def test_steps_after_a_restore_are_those_of_the_run(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Five steps, saved, loaded into other objects, five more: all bits are those of ten steps."""
    first = training_state(0, steps=5, **settings)
    save(tmp_path / "ckpt", first.capture(), step=5)
    drawn = train(first, 5)

    second = training_state(7, **settings)
    assert second.restore(load(tmp_path / "ckpt").state) == []
    assert train(second, 5) == drawn
    assert_same_state(copied(second), copied(first))


def test_what_is_kept_is_in_place(tmp_path: Path) -> None:
    """Views stay views: a state that several layers share in one buffer is still shared."""
    first, second = training_state(1, steps=2), training_state(5, steps=1)
    own = layer(second, 0)
    base = own.amax_history.untyped_storage().data_ptr()
    where = {
        name: value.data_ptr()
        for name, value in second.model.state_dict().items()
        if isinstance(value, Tensor)
    }
    second.restore(copied(first))
    assert own.amax_history.untyped_storage().data_ptr() == base
    assert own.amax_history.stride() == (5,)
    for name, value in second.model.state_dict().items():
        assert not isinstance(value, Tensor) or value.data_ptr() == where[name]
    assert own.windows == {"bad": 1, "seen": [1, 1]}
    assert not layer(second, 1).training
    assert not layer(second, 1).bias.requires_grad
    assert_same_state(copied(second), copied(first))


def test_remainders_at_their_extremes_and_a_long_count(tmp_path: Path) -> None:
    """Remainders of -2**15 and 2**15 - 1; 300 steps, where a bfloat16 counter sticks at 256."""
    first = training_state(0, steps=1, master="bfloat16_remainder", exp_avg="bfloat16")
    assert first.optimizer is not None
    weight = layer(first, 0).weight
    own = first.optimizer.state[weight]
    own["step"] = 299
    own["remainder"].view(-1)[:4] = torch.tensor([-(2**15), 2**15 - 1, -1, 0], dtype=torch.int16)
    save(tmp_path / "ckpt", first.capture(), step=299)
    train(first, 1)
    second = training_state(3, master="bfloat16_remainder", exp_avg="bfloat16")
    second.restore(load(tmp_path / "ckpt").state)
    assert second.optimizer is not None
    found = second.optimizer.state[layer(second, 0).weight]
    assert found["remainder"].view(-1)[:4].tolist() == [-(2**15), 2**15 - 1, -1, 0]
    assert (found["exp_avg"].dtype, found["remainder"].dtype) == (torch.bfloat16, torch.int16)
    train(second, 1)
    assert found["step"] == 300
    assert_same_state(copied(second), copied(first))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchs_own_optimizers_keep_their_dtypes(dtype: torch.dtype) -> None:
    """torch casts what it loads to the parameter's dtype: float32 moments of bfloat16 weights."""

    def fresh(seed: int) -> TrainingState:
        model = nn.Sequential(Scaled(seed, torch.bfloat16))
        return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    first, second = fresh(0), fresh(1)
    train_sgd(first)
    assert first.optimizer is not None
    for own in first.optimizer.state.values():
        own["momentum_buffer"] = own["momentum_buffer"].to(dtype) / 3
    saved = copied(first)
    second.restore(saved)
    assert_same_state(copied(second), saved)


def train_sgd(state: TrainingState) -> None:
    assert state.optimizer is not None
    for param in state.model.parameters():
        param.grad = torch.ones_like(param)
    state.optimizer.step()


MISSING = [
    ("model/1.scale", "scale"),
    ("model/1.amax_history", "amax history"),
    ("model/1.weight_codes", "weight codes"),
    ("model/1.weight", "parameter or buffer"),
    ("model/1._extra_state", "extra state"),
    ("modes", "modes of modules"),
    ("optimizer", "optimizer's groups"),
    ("optimizer/state/1.weight/exp_avg_scale", "moment's scale"),
    ("optimizer/state/1.weight/exp_avg", "moment"),
    ("optimizer/state/1.weight/remainder", "remainder of the master weight"),
    ("optimizer/state/1.weight/step", "step counter"),
    ("scaler", "loss scaler"),
    ("scaler/count", "loss scaler"),
    ("random", "random state"),
    ("random/torch", "random state"),
    ("random/generator:batches", "random state"),
    ("cursor", "state of cursor"),
]


def without(state: dict[str, Any], path: str) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    table: Any = changed
    *way, last = path.split("/")
    for key in way:
        table = table[key]
    del table[last]
    return changed


@pytest.mark.parametrize(("path", "kind"), MISSING)
def test_what_is_missing_is_refused_by_name(path: str, kind: str) -> None:
    settings: dict[str, Any] = {"exp_avg": "e4m3_128", "master": "bfloat16_remainder"}
    state, run = copied(training_state(0, steps=2, **settings)), training_state(4, **settings)
    before = copied(run)
    cut = without(state, path)
    with pytest.raises(CheckpointError, match="does not fit this run") as error:
        run.restore(cut)
    assert f"{path} ({kind}): missing" in str(error.value)
    assert "\n" not in str(error.value)
    assert_same_state(copied(run), before)  # refused, so nothing was changed

    assert [str(d) for d in run.restore(cut, strict=False)] == [f"{path} ({kind}): missing"]
    now, left = dict(leaves(copied(run))), dict(leaves(before))
    for name, value in leaves(state):
        gone = name == path or name.startswith(path + "/")
        if not gone:
            assert same_leaf(now[name], value), name
        elif not path.startswith("optimizer/state"):  # what another optimizer's state begins with
            assert name not in left or same_leaf(now[name], left[name]), name


def test_what_is_of_another_kind_is_refused_even_if_told_not_to_be_strict() -> None:
    state = copied(training_state(0, steps=2, exp_avg="e4m3_128"))
    cases: list[tuple[str, Any, str]] = [
        ("model/0.scale", torch.ones(1), r"saved as float32 \(1,\), this run keeps float32 \(\)"),
        ("model/0.scale", torch.ones((), dtype=torch.bfloat16), "saved as bfloat16"),
        ("optimizer/state/0.weight/exp_avg", torch.zeros(12, 20), "saved as float32"),
        (
            "optimizer/state/0.weight/step",
            torch.ones(()),
            "saved as float32 .*, this run keeps a number",
        ),
        ("optimizer/param_groups", [{"params": ["1.weight"]}], "1 parameters from 1.weight"),
    ]
    for path, value, message in cases:
        changed = without(state, path)
        table: Any = changed
        *way, last = path.split("/")
        for key in way:
            table = table[key]
        table[last] = value
        for strict in (True, False):
            with pytest.raises(CheckpointError, match=message):
                training_state(4, exp_avg="e4m3_128").restore(changed, strict=strict)


def test_what_the_run_has_no_place_for_is_refused() -> None:
    state = copied(training_state(0, steps=1))
    state["model"]["2.scale"] = torch.ones(())
    state["fallback"] = {"windows": 3}
    run = training_state(1)
    with pytest.raises(CheckpointError, match=r"fallback .*: unknown \(and 1 more\)"):
        run.restore(state)
    listed = [d.path for d in run.restore(state, strict=False)]
    assert listed == ["fallback", "model/2.scale"]


def test_an_object_that_does_not_take_its_state_over_is_found() -> None:
    class Forgetful(Counter):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.state = {**state_dict, "count": 0}

    first = training_state(0, steps=1)
    state = copied(first)
    run = training_state(1)
    run = TrainingState(
        run.model,
        run.optimizer,
        scaler=run.scaler,
        generators=run.generators,
        others={"cursor": Forgetful(1)},
    )
    with pytest.raises(CheckpointError, match=r"cursor/count .* was not taken over"):
        run.restore(state)


def test_moments_follow_names_not_places() -> None:
    """A model whose layers come in another order does not get the moments of the wrong ones."""
    first = training_state(0, steps=1)
    other = training_state(0)
    assert other.optimizer is not None
    params = list(other.model.parameters())
    turned = TrainingState(
        other.model,
        AdamW(params[::-1], lr=0.01),
        scaler=other.scaler,
        generators=other.generators,
        others=other.others,
    )
    with pytest.raises(CheckpointError, match=r"param_groups .*from 0.weight, this run .*1.bias"):
        turned.restore(copied(first))
    stranger = TrainingState(other.model, AdamW([nn.Parameter(torch.zeros(3))]))
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer, .* is not the model's"):
        stranger.capture()
    with pytest.raises(ValueError, match="'random' is this class's own"):
        TrainingState(other.model, others={"random": Counter(1)})


@pytest.mark.parametrize("bits", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_every_numpy_generator_goes_on_where_it_was(bits: str) -> None:
    model = nn.Linear(2, 2)
    generator = np.random.Generator(getattr(np.random, bits)(3))
    generator.integers(9, size=3, dtype=np.int32)  # leaves half a word behind
    state = TrainingState(model, generators={"g": generator})
    saved = copied(state)
    expected = generator.integers(9, size=50, dtype=np.int32).tolist()
    other = TrainingState(model, generators={"g": np.random.Generator(getattr(np.random, bits)(4))})
    other.restore(saved)
    assert other.generators["g"].integers(9, size=50, dtype=np.int32).tolist() == expected  # type: ignore[union-attr]


def test_paths_have_kinds() -> None:
    assert kind_of("model/blocks.0.qkv.casts.input.amax_history") == "amax history"
    assert kind_of("model/blocks.0.qkv.casts.input.scale") == "scale"
    assert kind_of("optimizer/state/a.weight/exp_avg_sq_power") == "moment's scale"
    assert kind_of("optimizer/state/a.weight/max_thing") == "optimizer state"
    assert kind_of("scheduler/last") == "schedule"


@pytest.mark.gpu
def test_the_cards_generators_and_dtypes_come_back(tmp_path: Path, device: str) -> None:
    def fresh(seed: int) -> TrainingState:
        model = nn.Sequential(Scaled(seed)).to(device)
        generator = torch.Generator(device).manual_seed(seed)
        optimizer = AdamW(model.parameters(), exp_avg="e4m3_128", exp_avg_sq="e4m3_128_keep")
        return TrainingState(model, optimizer, generators={"card": generator})

    def step(state: TrainingState) -> list[float]:
        torch.rand(5, device=device)
        noise = torch.rand(3, device=device, generator=state.generators["card"])  # type: ignore[arg-type]
        for param in state.model.parameters():
            param.grad = torch.sin(param.detach() * noise.sum() + torch.rand((), device=device))
        assert state.optimizer is not None
        state.optimizer.step()
        return [torch.rand((), device=device).item(), *noise.tolist()]

    first, second = fresh(0), fresh(1)
    step(first)
    save(tmp_path / "ckpt", first.capture(), step=1)
    expected = [step(first), step(first)]
    torch.cuda.manual_seed(5)
    second.restore(load(tmp_path / "ckpt").state)
    assert [step(second), step(second)] == expected
    assert_same_state(copied(second), copied(first))
