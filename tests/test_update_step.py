"""Loss scale, clip and the step that is skipped as a whole."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8lab
from fp8lab.emulation.gradients import gradient_norm as oracle_norm
from fp8lab.errors import UserError
from fp8lab.gradients import LossScaler, UpdateStep, accumulate_in_float32, live_steps
from fp8lab.linear import Fp8Linear, amax_is_finite, operand_casts
from fp8lab.optimizer import AdamW
from fp8lab.testing import assert_bits_equal, to_numpy


def network(preset: str = "delayed:history=2") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32, bias=False))
    return fp8lab.convert(model, preset)  # type: ignore[return-value]


def inputs(seed: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    found = [to_numpy(value).tobytes() for value in model.state_dict().values()]
    for param in model.parameters():
        for value in optimizer.state[param].values():
            found.append(to_numpy(value).tobytes() if isinstance(value, Tensor) else b"%d" % value)
    return found


def test_unscaled_clipped_and_updated_as_the_oracle_says() -> None:
    model, other = network(), network()
    scaler = LossScaler(1024.0)
    update = UpdateStep(model, AdamW(model.parameters()), scaler=scaler, clip_norm=0.01)
    plain = AdamW(other.parameters())
    for step in range(3):
        update.zero_grad()
        update.backward(model(inputs(step)).square().mean())
        other.load_state_dict(model.state_dict())
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            two.grad = None if one.grad is None else one.grad.clone()
        expected = oracle_norm(
            [to_numpy(grad) for grad in gradients(model)], inverse_scale=1 / 1024, max_norm=0.01
        )
        summary = update()
        assert_bits_equal(summary.norm[0], expected.norm)
        assert_bits_equal(summary.factor[0], expected.factor)
        assert not int(summary.skip)
        plain.step(factor=summary.factor)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert_bits_equal(one, two)
    assert int(scaler.skipped_steps) == 0


def test_a_power_of_two_changes_no_bit() -> None:
    """pytorch 94060 through the whole step; gradients that FP8 casts by their own amax."""
    runs = []
    for scale in (1.0, 65536.0):
        model = network("tensorwise")
        optimizer = AdamW(model.parameters())
        update = UpdateStep(model, optimizer, scaler=LossScaler(scale), clip_norm=1.0)
        for step in range(3):
            update.zero_grad()
            update.backward(model(inputs(step)).square().mean())
            update()
        runs.append(state(model, optimizer))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("preset", ["delayed:history=2", "tensorwise", "blockwise", "bf16"])
def test_a_bad_gradient_skips_everything_at_once(preset: str, bad: float) -> None:
    model = network(preset)
    optimizer = AdamW(model.parameters())
    update = UpdateStep(model, optimizer, scaler=LossScaler(4.0, dynamic=True, interval=2))
    for step in range(2):
        update.zero_grad()
        update.backward(model(inputs(step)).square().mean())
        update()
    assert float(update.scaler.scale) == 8
    before = state(model, optimizer)
    update.zero_grad()
    update.backward(model(inputs(7) * 100).square().mean())
    grad = model[0].bias.grad
    assert isinstance(grad, Tensor)
    grad[3] = bad
    summary = update()
    assert int(summary.skip) == 1
    # The amaxes of that step are gone too, though they were finite.
    assert state(model, optimizer) == before
    assert float(update.scaler.scale) == 4
    assert int(update.scaler.skipped_steps) == 1
    assert int(update.scaler.good_steps) == 0
    update.zero_grad()
    update.backward(model(inputs(3)).square().mean())
    assert not int(update().skip)
    assert state(model, optimizer) != before


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_an_fp8_cast_hides_is_seen_in_its_amax(bad: float) -> None:
    """An Inf saturates in the cast: the gradients behind it are finite, the amax is not."""
    model = network()
    optimizer = AdamW(model.parameters())
    update = UpdateStep(model, optimizer)
    update.backward(model(inputs(0)).square().mean())
    update()
    before = state(model, optimizer)
    update.zero_grad()
    last = model[2]
    assert isinstance(last, Fp8Linear)
    y = model(inputs(1))
    gradient = torch.ones_like(y)
    gradient[2, 5] = bad
    y.backward(gradient)
    if bad == math.inf:
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    finite = amax_is_finite(model)
    assert finite is not None
    assert not bool(finite)
    assert int(update().skip) == 1
    assert state(model, optimizer) == before
    for _, cast in operand_casts(model):
        assert bool(cast.amax_history.isfinite().all())
        assert float(cast.amax_history[0]) == 0


def test_a_dynamic_scale_grows_and_shrinks_within_its_bounds() -> None:
    scaler = LossScaler(
        8.0, dynamic=True, growth=4.0, backoff=0.25, interval=3, smallest=1.0, largest=100.0
    )
    good, skipped = torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    seen = []
    for flag in (good, good, good, good, good, good, skipped, skipped, skipped, good):
        scaler.update(flag)
        seen.append((float(scaler.scale), int(scaler.good_steps)))
    assert seen == [
        (8, 1),
        (8, 2),
        (32, 0),
        (32, 1),
        (32, 2),
        (100, 0),
        (25, 0),
        (6.25, 0),
        (1.5625, 0),
        (1.5625, 1),
    ]
    assert int(scaler.skipped_steps) == 3
    other = LossScaler(1.0)
    other.load_state_dict(scaler.state_dict())
    assert_bits_equal(other.scale, scaler.scale)
    assert float(scaler(torch.tensor(2.0))) == 3.125
    fixed = LossScaler(2.0)
    fixed.update(skipped)
    assert (float(fixed.scale), int(fixed.skipped_steps)) == (2, 1)


def test_another_optimizer_is_unscaled_and_skipped_too() -> None:
    model, other = network("tensorwise"), network("tensorwise")
    update = UpdateStep(model, torch.optim.SGD(model.parameters(), 0.1), scaler=LossScaler(64.0))
    update.backward(model(inputs(0)).square().mean())
    UpdateStep(other, AdamW(other.parameters())).backward(other(inputs(0)).square().mean())
    torch.optim.SGD(other.parameters(), 0.1).step()
    update()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_bits_equal(one, two)
    model(inputs(0) * math.nan).sum().backward()
    assert int(update().skip) == 1
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_bits_equal(one, two)


def steps_of(optimizer: torch.optim.Optimizer) -> set[UpdateStep]:
    return {step for step in live_steps() if step.optimizer is optimizer}


@pytest.mark.parametrize("kind", [AdamW, torch.optim.SGD])
def test_the_steps_of_an_optimizer_are_known_while_they_live(kind: Any) -> None:
    model = network()
    optimizer, other = kind(model.parameters(), lr=0.1), kind(model.parameters(), lr=0.1)
    assert not steps_of(optimizer)
    first, last = (UpdateStep(model, optimizer, scaler=LossScaler(s)) for s in (2.0, 4.0))
    assert steps_of(optimizer) == {first, last}
    assert not steps_of(other)
    # A copy is nobody's yet, and brings neither step nor model along.
    for own in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not steps_of(own)
    del last
    gc.collect()
    assert steps_of(optimizer) == {first}


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL, None])
def test_a_copied_step_is_that_of_its_own_optimizer(protocol: int | None) -> None:
    model = network()
    step = UpdateStep(model, AdamW(model.parameters()), scaler=LossScaler(2.0))
    step.backward(model(inputs(0)).square().mean())
    own: UpdateStep = (
        copy.deepcopy(step) if protocol is None else pickle.loads(pickle.dumps(step, protocol))
    )
    assert steps_of(own.optimizer) == {own}
    assert steps_of(step.optimizer) == {step}
    assert own.scaler is not step.scaler
    assert (step.uses, own.uses) == (1, 0)


@pytest.mark.parametrize("master", ["float32", "bfloat16_remainder"])
def test_gradients_that_add_up_in_float32(master: str) -> None:
    """Two microbatches into main_grad, and the optimizer takes that sum."""
    dtype = torch.float32 if master == "float32" else torch.bfloat16
    model = network("rowwise").to(dtype)
    other = copy.deepcopy(model)
    accumulate_in_float32(model)
    optimizer: Any = AdamW(model.parameters(), master=master)
    update = UpdateStep(model, optimizer)
    for seed in range(2):
        model(inputs(seed).to(dtype)).float().square().mean().backward()
    weights: list[Any] = [layer.weight for layer in model if isinstance(layer, Fp8Linear)]
    sums: list[Tensor] = [weight.main_grad.clone() for weight in weights]
    assert all(weight.grad is None for weight in weights)
    bias = model[0].bias
    assert isinstance(bias, nn.Parameter)
    assert bias.grad is not None
    expected = oracle_norm([to_numpy(grad) for grad in (sums[0], bias.grad, sums[1])])
    plain: Any = AdamW(other.parameters(), master=master)
    for param, grad in zip(other.parameters(), (sums[0], bias.grad, sums[1]), strict=True):
        if param.dtype != grad.dtype:
            param.grad_dtype = grad.dtype
        param.grad = grad.clone()
    summary = update()
    assert_bits_equal(summary.norm[0], expected.norm)
    plain.step(factor=summary.factor)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_bits_equal(one, two)
    update.zero_grad()
    assert all(not weight.main_grad.any() for weight in weights)


def test_bad_settings_and_a_step_without_gradients() -> None:
    for options, message in (
        ({"scale": 0.0}, "loss scaler: scale is 0.0; accepted"),
        ({"scale": math.nan}, "loss scaler: scale is nan; accepted"),
        ({"growth": 1.0}, "growth is 1.0; accepted: above 1"),
        ({"backoff": 1.0}, "backoff is 1.0; accepted: above 0 and below 1"),
        ({"interval": 0}, "interval is 0; accepted: an integer, 1 and up"),
        ({"smallest": 4.0, "largest": 2.0}, "largest is 2.0; accepted: 4.0 to"),
    ):
        with pytest.raises(UserError, match=message):
            LossScaler(**options)
    model = network()
    optimizer = AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros(param.shape).to_sparse()
    with pytest.raises(TypeError, match=r"a gradient has layout torch.sparse_coo; accepted: den"):
        UpdateStep(model, optimizer)()
    optimizer.zero_grad()
    with pytest.raises(UserError, match="loss scaler: scale is 'dynamic'; accepted: a number"):
        LossScaler("dynamic")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="clip_norm is 1; accepted: finite, at least 0"):
        UpdateStep(model, optimizer, clip_norm="1")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"clip_norm is -1.0; accepted: finite, at least 0"):
        UpdateStep(model, optimizer, clip_norm=-1.0)
    with pytest.raises(UserError, match="no parameter has a gradient; call `backward`"):
        UpdateStep(model, optimizer)()
    for given, message in (
        ((None, optimizer), "model is of type NoneType; accepted: a torch.nn.Module"),
        ((model, None), "optimizer is of type NoneType; accepted: a torch optimizer"),
        ((model, model), "optimizer is of type Sequential; accepted: a torch optimizer"),
    ):
        with pytest.raises(UserError, match=message):
            UpdateStep(*given)
    with pytest.raises(UserError, match="scaler is of type float; accepted: a LossScaler, or None"):
        UpdateStep(model, optimizer, scaler=2.0)  # type: ignore[arg-type]
