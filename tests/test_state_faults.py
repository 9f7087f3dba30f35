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
