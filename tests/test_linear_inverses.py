"""Inverse scales of a model are made in one go, and its casts found without their names."""

from __future__ import annotations

import copy

import torch
from torch import nn

import fp8lab
from fp8lab.linear import Fp8Linear, advance_scaling, delayed_groups, operand_casts
from fp8lab.linear_state import _casts


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    shared = nn.Linear(32, 32)
    model = nn.Sequential(
        nn.Linear(32, 32),
        nn.Sequential(shared, nn.ReLU(), nn.Linear(32, 32, bias=False)),
        shared,
        nn.Linear(32, 16),
    )
    model.register_module("nothing", None)
    fp8lab.convert(model, {"3": "tensorwise", "*": "delayed"}, products="decoded")
    return model


def _step(model: nn.Module, factor: float) -> None:
    model(torch.randn(16, 32) * factor).square().sum().backward()
    advance_scaling(model)


def test_casts_come_in_the_order_of_their_names() -> None:
    model = _model()
    assert _casts(model) == [cast for _, cast in operand_casts(model)]
    assert len(_casts(model)) == 12
    assert _casts(nn.ReLU()) == []


def test_inverses_are_those_of_the_scales_of_now() -> None:
    model = nn.Sequential(*[layer for layer in _model() if layer is not None])
    for factor in (1.0, 100.0, 0.01):
        _step(model, factor)
        for group in delayed_groups(model):
            for cast in group.casts:
                policy = cast.delayed
                assert policy is not None
                scale, inverse = cast._state_scale(policy, cast.scale.device)
                assert torch.equal(inverse, 1.0 / scale)
                assert inverse.data_ptr() % 16 == 0  # or kernels would come in more variants


def test_inverses_follow_scales_that_were_set_or_loaded() -> None:
    layers = [layer for layer in _model() if isinstance(layer, Fp8Linear)]
    model = nn.Sequential(layers[0])
    _step(model, 1.0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = copy.deepcopy(model)
    _step(model, 50.0)
    model.load_state_dict(state)
    cast = layers[0].cast_of("input")
    assert cast.delayed is not None
    for change in (lambda: None, lambda: cast.scale.fill_(3.0), lambda: cast.scale.mul_(7.0)):
        change()
        scale, inverse = cast._state_scale(cast.delayed, cast.scale.device)
        assert torch.equal(inverse, 1.0 / scale)
    its = other[0].cast_of("input")  # type: ignore[operator]
    scale, inverse = its._state_scale(its.delayed, its.scale.device)
    assert torch.equal(scale, state["0.casts.input.scale"])
    assert torch.equal(inverse, 1.0 / scale)
