"""Reported faults of checkpoints in FP8 stacks, each as the smallest case that shows it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fp8lab.checkpoint import load, save, take_state
from fp8lab.checkpoint_tree import rebuild
from fp8lab.linear import Fp8Linear, advance_scaling
from fp8lab.optimizer import AdamW
from fp8lab.recipes import recipe_named
from fp8lab.state import TrainingState


def layer() -> Fp8Linear:
    made = Fp8Linear(16, 16, recipe_named("delayed:history=3"), bias=False, products="decoded")
    nn.init.constant_(made.weight, 0.25)
    return made


def test_a_loaded_scale_counts_before_any_update(tmp_path: Path) -> None:
    """TransformerEngine 123: the inverse scale stayed the fresh model's until an update."""
    saved, fresh = layer(), layer()
    saved.cast_of("input").scale.fill_(64)
    save(tmp_path / "ckpt", TrainingState(saved).capture(), step=1)
    x = torch.full((2, 16), 0.5)
    fresh.eval()
    fresh(x)  # the fresh model has derived what it needs from its own scale
    TrainingState(fresh).restore(load(tmp_path / "ckpt").state)
    codes = fresh.cast_of("input").cast(x).plain
    assert codes is not None
    assert codes.inverse.item() == 2.0**-6
    assert torch.equal(codes.decoded(), x)


def test_what_is_kept_are_copies(tmp_path: Path) -> None:
    """TransformerEngine 1723: metadata that was kept changed with the live buffers."""
    model = layer()
    state = TrainingState(model)
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        advance_scaling(model)
    kept = take_state(state.capture())
    cast = model.cast_of("input")
    before = cast.scale.item(), cast.amax_history.tolist()
    cast.scale.fill_(3)
    cast.amax_history.fill_(7)
    advance_scaling(model)
    state.restore({part: rebuild(own.json, own.tensors) for part, own in kept.items()})
    assert (cast.scale.item(), cast.amax_history.tolist()) == before
    advance_scaling(model)  # the views that all layers share moved on, not something left behind
    assert cast.amax_history[0] == 0


def test_a_step_counter_passes_256(tmp_path: Path) -> None:
    """torchao 4915: a counter in bfloat16 sticks at 256. Here 300 steps are 300, also loaded."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    model = nn.Module()
    model.register_parameter("weight", weight)
    optimizer = AdamW([weight], master="bfloat16_remainder", exp_avg="bfloat16")
    weight.grad = torch.ones_like(weight)
    for _ in range(300):
        optimizer.step()
    save(tmp_path / "ckpt", TrainingState(model, optimizer).capture(), step=300)
    again = AdamW([weight], master="bfloat16_remainder", exp_avg="bfloat16")
    TrainingState(model, again).restore(load(tmp_path / "ckpt").state)
    assert again.state[weight]["step"] == 300
    again.step()
    assert again.state[weight]["step"] == 301


def trained(recipe: str, steps: int) -> Fp8Linear:
    """A layer after steps whose gradients and inputs grow."""
    made = Fp8Linear(16, 16, recipe_named(recipe), bias=False, products="decoded")
    nn.init.constant_(made.weight, 0.25)
    for step in range(steps):
        made(torch.full((2, 16), 1.5**step)).sum().backward()
        advance_scaling(made)
    return made


def resumed_without(model: Fp8Linear, recipe: str, ending: str) -> Fp8Linear:
    """A new layer with the state of another, but for what ends so."""
    state = TrainingState(model).capture()
    state["model"] = {n: value for n, value in state["model"].items() if not n.endswith(ending)}
    new = trained(recipe, 0)
    lost = TrainingState(new).restore(state, strict=False)
    assert len(lost) == 3
    return new


def test_lost_static_scales_are_the_recipe_s() -> None:
    """Nothing is lost with them that the recipe does not say; and no weight code is kept."""
    recipe = "static:input.scale=8:weight.scale=64:grad_output.scale=1024"
    model = trained(recipe, 3)
    assert not [name for name in model.state_dict() if "code" in name]
    new = resumed_without(model, recipe, ".scale")
    for role in ("input", "weight", "grad_output"):
        assert torch.equal(new.cast_of(role).scale, model.cast_of(role).scale)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(new(x), model(x))


def test_a_history_of_which_the_latest_counts_is_whole_after_a_step() -> None:
    """Where the rule is the largest of all it is not, as in the incident."""
    same = {}
    for algorithm in ("most_recent", "max"):
        recipe = f"delayed:history=4:algorithm={algorithm}"
        model = trained(recipe, 3)
        new = resumed_without(model, recipe, ".amax_history")
        for own in (model, new):
            own(torch.full((2, 16), 0.5)).sum().backward()
            advance_scaling(own)
        scales = [own.cast_of("input").scale for own in (model, new)]
        same[algorithm] = torch.equal(*scales)
    assert same == {"most_recent": True, "max": False}
