"""A norm of gradients is that of unscaled ones, whichever step made them; or it is not reported."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8lab
from fp8lab.errors import UserError
from fp8lab.gradients import LossScaler, UpdateStep
from fp8lab.optimizer import AdamW
from fp8lab.telemetry import Telemetry

KINDS: list[Callable[..., Any]] = [
    AdamW,
    lambda params, lr: AdamW(params, lr=lr, capturable=True),
    torch.optim.SGD,
    torch.optim.AdamW,
]


def stack() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    return fp8lab.convert(model, "bf16", products="decoded")


def batch() -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def norms_of(row: Any) -> dict[str, float]:
    own = row["parameters"]
    return {name: own[name]["grad_norm"] for name in own if "grad_norm" in own[name]}


def take(telemetry: Telemetry, step: UpdateStep) -> dict[str, float]:
    """A watched step; the norms that its row says."""
    telemetry.begin_step(True)
    step.zero_grad()
    step.backward(step.model(batch()).square().mean())
    step()
    return norms_of(telemetry.end_step())


def plain_norms(model: nn.Module) -> Any:
    """The norms without a loss scale: scales are powers of two, so bfloat16 rounds alike."""
    own = copy.deepcopy(model)
    own(batch()).square().mean().backward()
    norms = {name: float(p.grad.norm()) for name, p in own.named_parameters() if p.grad is not None}
    return pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_of_several_steps_the_used_one_counts(kind: Any) -> None:
    model = stack()
    optimizer = kind(model.parameters(), lr=1e-3)
    steps = [UpdateStep(model, optimizer, scaler=LossScaler(s)) for s in (1024.0, 4.0)]
    telemetry, bare = Telemetry(model, optimizer), Telemetry(model)
    for step in (steps[0], steps[1], steps[0]):
        expected = plain_norms(model)
        assert take(telemetry, step) == expected
        expected = plain_norms(model)
        assert take(bare, step) == expected
    del step
    last = steps.pop(0)
    del steps  # the other one is gone
    expected = plain_norms(model)
    assert take(telemetry, last) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_is_unscaled_by_its_own_step(kind: Any, copied: Callable[[Any], Any]) -> None:
    model = stack()
    step = UpdateStep(model, kind(model.parameters(), lr=1e-3), scaler=LossScaler(1024.0))
    own_model, own = copied((model, step))
    own.scaler.scale.fill_(16.0)
    expected = plain_norms(own_model)
    assert take(Telemetry(own_model, own.optimizer), own) == expected
    expected = plain_norms(model)
    assert take(Telemetry(model, step.optimizer), step) == expected
    # The copy of an optimizer alone has the same parameters, and their gradients have their scale.
    expected = plain_norms(model)
    assert take(Telemetry(model, copy.copy(step.optimizer)), step) == expected


def test_the_scale_is_that_of_before_the_step() -> None:
    model = stack()
    scaler = LossScaler(1024.0, dynamic=True, interval=1)  # it grows with each step
    step = UpdateStep(model, AdamW(model.parameters()), scaler=scaler)
    telemetry = Telemetry(model, step.optimizer)
    for _ in range(3):
        expected = plain_norms(model)
        assert take(telemetry, step) == expected
    assert float(scaler.scale) == 8192


def test_a_skipped_step_of_a_foreign_optimizer_leaves_gradients_scaled() -> None:
    model = stack()
    step = UpdateStep(model, torch.optim.SGD(model.parameters(), 0.1), scaler=LossScaler(1024.0))
    telemetry = Telemetry(model, step)
    expected = plain_norms(model)
    telemetry.begin_step()
    step.backward(model(batch()).square().mean())
    bias: Any = model[2].bias  # type: ignore[index]
    bias.grad[0] = torch.inf
    assert int(step().skip) == 1
    found = norms_of(telemetry.end_step())
    assert found.pop("2.bias") == float("inf")
    del expected.expected["2.bias"]
    assert found == expected


def test_what_is_not_known_is_left_out() -> None:
    model: Any = stack()
    step = UpdateStep(model, AdamW(model[0].parameters()), scaler=LossScaler(1024.0))
    found = take(Telemetry(model, step), step)
    assert set(found) == {"0.weight", "0.bias"}  # nobody says what others' gradients are
    for telemetry in (Telemetry(model, step), Telemetry(model, step.optimizer), Telemetry(model)):
        with telemetry.step():  # the step is there, and is not used
            model(batch()).sum().backward()
        row: list[Any] = []
        telemetry.sinks = (row.append,)
        telemetry.begin_step(True)
        model(batch()).sum().backward()
        assert norms_of(telemetry.end_step()) == {}


def test_without_a_step_gradients_are_as_they_lie_or_as_the_scaler_says() -> None:
    model = stack()
    scaler = LossScaler(1024.0)
    expected = plain_norms(model)
    for given, factor in (({}, None), ({"scaler": scaler}, scaler)):
        optimizer = AdamW(model.parameters())
        telemetry = Telemetry(model, optimizer, **given)  # type: ignore[arg-type]
        telemetry.begin_step()
        loss = model(batch()).square().mean()
        (loss if factor is None else factor(loss)).backward()
        assert norms_of(telemetry.end_step()) == expected
        optimizer.zero_grad()


def test_what_is_ambiguous_is_refused() -> None:
    model = stack()
    optimizer = AdamW(model.parameters())
    first, second = (UpdateStep(model, optimizer, scaler=LossScaler(s)) for s in (2.0, 4.0))
    loss = model(batch()).square().mean()
    telemetry = Telemetry(model, optimizer)
    telemetry.begin_step()
    first.backward(loss)
    second()
    with pytest.raises(UserError, match="UpdateSteps with several loss scales were used on one"):
        telemetry.end_step()
    assert telemetry.watched == 0
    for given in ({"optimizer": first}, {"optimizer": optimizer, "scaler": first.scaler}):
        with pytest.raises(UserError, match="used in the watched step has another loss scaler tha"):
            take(Telemetry(model, **given), second)
    telemetry.begin_step(True)
    third = UpdateStep(model, optimizer, scaler=LossScaler(8.0))
    third.backward(model(batch()).square().mean())
    with pytest.raises(UserError, match="made and used inside the watched step"):
        telemetry.end_step()
    same = UpdateStep(model, optimizer, scaler=LossScaler(4.0))  # as large as that of the second
    del third
    telemetry.begin_step(True)
    second.zero_grad()
    expected = plain_norms(model)
    second.backward(model(batch()).square().mean())
    same()
    assert norms_of(telemetry.end_step()) == expected


def test_wrong_arguments_are_refused_at_once() -> None:
    model, other = stack(), stack()
    optimizer = AdamW(model.parameters())
    step = UpdateStep(model, optimizer, scaler=LossScaler(2.0))
    cases: list[tuple[tuple[Any, ...], Any, str]] = [
        (
            (model, "x"),
            None,
            "optimizer is of type str; accepted: a torch optimizer, an UpdateStep",
        ),
        ((model, model), None, "optimizer is of type Sequential; accepted: a torch optimizer"),
        ((None,), None, "model is of type NoneType; accepted: a torch.nn.Module"),
        ((model, optimizer), 2.0, "scaler is of type float; accepted: a LossScaler, or None"),
        ((other, step), None, "the UpdateStep has no parameter of this model"),
        ((other, optimizer), None, "the AdamW has no parameter of this model"),
        ((model, step), LossScaler(2.0), "the step has another loss scaler than the one given"),
        ((model, optimizer), LossScaler(2.0), "the step has another loss scaler than the one giv"),
        ((model,), LossScaler(2.0), "scaler is for fp8lab.optimizer.AdamW"),
        (
            (other, torch.optim.SGD(other.parameters(), 0.1)),
            LossScaler(2.0),
            "in place of another optimizer give its UpdateStep",
        ),
    ]
    for given, scaler, message in cases:
        for parameters in (True, False):
            with pytest.raises(UserError, match=message) as error:
                Telemetry(*given, scaler=scaler, parameters=parameters)
            assert "\n" not in str(error.value)
