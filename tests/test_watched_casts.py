"""Telemetry and fallback beside what else changes or watches a model; states that are damaged."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8lab
from fp8lab.errors import UserError
from fp8lab.fallback import FallbackRule, most_sqnr_db
from fp8lab.fallback_run import Fallback, FallbackConfig
from fp8lab.gradients import LossScaler, UpdateStep
from fp8lab.linear import Fp8Linear, operand_casts
from fp8lab.optimizer import AdamW
from fp8lab.telemetry import Telemetry

ROOT = Path(__file__).resolve().parent.parent
RULE = FallbackRule(overflow=1e-3, after=1)


def stack(recipe: str = "delayed") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    return fp8lab.convert(model, recipe, products="decoded")


def batch() -> Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def test_the_step_gives_the_loss_scale() -> None:
    """A `LossScaler(dynamic=True)` begins at 65536; the norm is that of unscaled gradients."""
    norms = []
    for scaler, alone in ((None, False), (LossScaler(dynamic=True), False), (None, True)):
        model = stack("bf16")
        optimizer = AdamW(model.parameters(), lr=1e-3)
        step = UpdateStep(model, optimizer, scaler=LossScaler(dynamic=True) if alone else scaler)
        telemetry = Telemetry(model, optimizer if alone else step)
        telemetry.begin_step()
        step.zero_grad()
        step.backward(model(batch()).square().mean())
        step()
        row = telemetry.end_step()
        assert row is not None
        assert "exp_avg_norm" in row["parameters"]["0.weight"]
        norms.append([own["grad_norm"] for own in row["parameters"].values()])
    assert norms[1] == norms[2] == pytest.approx(norms[0], rel=1e-3)


def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, section = (ROOT / "docs" / "watching.md").read_text().partition("\n## Telemetry\n\n")
    example = section.partition("\n\nIt is given")[0].splitlines()
    assert all(not own or own.startswith("    ") for own in example)
    model = stack()
    names = {
        "model": model,
        "optimizer": AdamW(model.parameters(), lr=1e-3),
        "batches": [batch()],
        "loss": lambda model, given: model(given).square().mean(),
    }
    monkeypatch.chdir(tmp_path)
    exec(textwrap.dedent("\n".join(example)), names)
    row = json.loads(Path("telemetry.jsonl").read_text())
    for name, param in model.named_parameters():
        assert param.grad is not None
        norm = float(param.grad.double().norm()) / 65536
        assert row["parameters"][name]["grad_norm"] == pytest.approx(norm, rel=1e-9)


def test_another_scaler_than_that_of_the_step_is_refused() -> None:
    model = stack()
    step = UpdateStep(model, AdamW(model.parameters()), scaler=LossScaler(4.0))
    Telemetry(model, step, scaler=step.scaler)
    with pytest.raises(UserError, match="the step has another loss scaler than the one given"):
        Telemetry(model, step, scaler=LossScaler(4.0))


def keep_one(model: nn.Module) -> Any:
    return fp8lab.convert(model, "bf16", include="2", products="decoded")


CHANGES: list[Callable[[nn.Module], Any]] = [
    lambda model: fp8lab.convert(model, "static"),
    keep_one,
    fp8lab.restore,
    fp8lab.freeze,
]


@pytest.mark.parametrize("change", CHANGES, ids=["convert", "keep", "restore", "freeze"])
def test_a_model_that_was_changed_is_not_watched_in_silence(change: Callable[..., Any]) -> None:
    model = stack()
    telemetry, fallback = Telemetry(model, every=2), Fallback(model, RULE, window=1)
    state = fallback.state_dict()
    change(model)
    with pytest.raises(UserError, match=r"telemetry: the model was converted, restored or frozen"):
        telemetry.begin_step()
    assert telemetry.steps == 0
    with (
        pytest.raises(UserError, match=r"fallback: the model was converted, .* make it after that"),
        fallback.watching(),
    ):
        pass
    with pytest.raises(UserError, match="fallback: the model was converted"):
        fallback.load_state_dict(state)


def test_a_layer_that_became_fp8_later_is_not_overlooked() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    fp8lab.convert(model, "delayed", include="0")
    telemetry, fallback = Telemetry(model), Fallback(model, RULE, window=1)
    own = Telemetry(model, include="0")
    fp8lab.convert(model, "delayed", include="1")
    own.begin_step()
    own.end_step()
    with pytest.raises(UserError, match=r"so that 1\.input is not what it was"):
        telemetry.begin_step()
    with pytest.raises(UserError, match=r"so that 1\.input is not"), fallback.watching():
        pass


def test_a_step_is_watched_once_and_left_as_it_was() -> None:
    model = stack()
    fallback = Fallback(model, RULE, window=2, every=2)
    for _ in range(4):
        with fallback.watching():
            with (
                pytest.raises(UserError, match="this step is watched already"),
                fallback.watching(),
            ):
                pass
            model(batch()).sum().backward()
        fallback.advance()
        assert all(not cast.observe and cast.meter is None for _, cast in operand_casts(model))


def test_a_cast_that_its_user_observes_stays_observed() -> None:
    model = stack()
    cast = dict(operand_casts(model))["0.input"]
    cast.observe = True
    telemetry = Telemetry(model)
    with telemetry.step():
        model(batch())
    assert telemetry.counts["0.input"].elements == 4 * 32
    assert [own.observe for _, own in operand_casts(model)] == [True] + [False] * 5
    model(batch())
    assert cast.statistics is not None


def test_a_telemetry_goes_around_a_fallback() -> None:
    model = stack()
    telemetry, fallback = Telemetry(model, every=1), Fallback(model, RULE, window=1)
    with telemetry.step(), fallback.watching():
        model(batch()).sum().backward()
    assert telemetry.counts["0.input"].elements == 4 * 32
    with (
        pytest.raises(UserError, match=r"by a fallback .*a fallback's goes inside"),
        fallback.watching(),
        telemetry.step(),
    ):
        pass
    assert telemetry.steps == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "x"}, "the saved fallback's steps is 'x'; accepted: an integer, 0 and up"),
        ({"steps": -5}, "steps is -5"),
        ({"norms": None}, "norms is None; accepted: a table"),
        ({"norms": {"0": [-1.0]}}, r"gradient norms of '0' are \[-1.0\]"),
        ({"norms": {"1": [1.0]}}, "gradient norms of '1'"),
        ({"norms": {"0": 1.0}}, "0 is 1.0; accepted: a list"),
        ({"events": 5}, "events is 5; accepted: a list"),
        ({"events": [5]}, "events hold 5; accepted: tables"),
        ({"window": None}, "window is None; accepted: a table"),
        ({"window": {"0": {"weight": 1}}}, "a window's signs are 1"),
        ({"window": {"7": {"weight": {}}}}, r"window shows 7\.weight"),
        ({"states": {"0": 5}}, "0 is 5; accepted: a table"),
        ({"states": {"0": {"weight": None}}}, "a fallback state is None"),
    ],
)
def test_a_damaged_fallback_state_changes_nothing(change: dict[str, Any], message: str) -> None:
    model = stack()
    fallback = Fallback(model, RULE, layers="0", window=2)
    before = fallback.state_dict()
    saved = fallback.state_dict()
    saved["states"]["0"]["input"] |= {"fallen": 1, "wait": 3}
    with pytest.raises(UserError, match=message):
        fallback.load_state_dict({**saved, **change})
    assert fallback.state_dict() == before
    assert not fallback.in_bf16
    del saved["norms"]
    with pytest.raises(UserError, match="'norms' is missing"):
        fallback.load_state_dict(saved)
    bad: Any = None
    with pytest.raises(UserError, match="the saved fallback holds None"):
        fallback.load_state_dict(bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -3}, "the saved telemetry's steps is -3"),
        ({"steps": True}, "steps is True"),
        ({"watched": "x"}, "watched is 'x'; accepted: an integer, 0 to 1"),
        ({"watched": 2}, "watched is 2"),
        ({"totals": 5}, "totals is 5; accepted: a table"),
        ({"totals": {"0.input": {"elements": 1}}}, "counts elements of '0.input'; accepted: elem"),
        ({"totals": {"0.input": {}}}, "counts nothing of '0.input'"),
        ({"totals": {"0.input": None}}, "0.input is None; accepted: a table"),
    ],
)
def test_a_damaged_telemetry_state_changes_nothing(change: dict[str, Any], message: str) -> None:
    model = stack()
    telemetry = Telemetry(model)
    telemetry.begin_step()
    model(batch())
    telemetry.end_step()
    before = telemetry.state_dict()
    with pytest.raises(UserError, match=message):
        telemetry.load_state_dict({**before, **change})
    assert telemetry.state_dict() == before
    telemetry.load_state_dict(before)
    assert telemetry.state_dict() == before


def test_a_rule_that_a_format_cannot_meet_is_refused() -> None:
    assert [round(most_sqnr_db(bits), 1) for bits in (2, 3)] == [28.9, 34.9]
    for limit in (60.0, 500.0, 29.0):
        with pytest.raises(UserError, match=r"no 8-bit format gives more than 34\.9"):
            FallbackRule(sqnr_db=limit)
    for limit in (-1000.0, 0.0):
        with pytest.raises(UserError, match="above 0"):
            FallbackRule(sqnr_db=limit)
    rule = FallbackRule(sqnr_db=25.0)  # and 6 dB on top: too much for E5M2
    with pytest.raises(UserError, match=r"E5M2, which 0\.grad_output is cast to, gives at most"):
        Fallback(stack("tensorwise"), rule)
    Fallback(stack("tensorwise"), rule, roles=("input", "weight"))


def test_what_a_format_gives_is_about_what_spread_values_have() -> None:
    """The best case is close to the largest values of a binade."""
    x = torch.linspace(1.875, 2, 4096).reshape(128, 32)
    model = fp8lab.convert(nn.Sequential(nn.Linear(32, 32)), "tensorwise:power_of_two=true")
    telemetry = Telemetry(model, parameters=False)
    with telemetry.step():
        model(x)
    assert 34.0 < telemetry.counts["0.input"].sqnr_db <= most_sqnr_db(3)


def test_a_spike_of_frozen_weights_can_never_fire() -> None:
    model = stack()
    for layer in model.modules():
        if isinstance(layer, Fp8Linear):
            layer.weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"are frozen .* so the rule can never fire"):
        Fallback(model, FallbackRule(overflow=None, gradient_spike=4.0))
    Fallback(model, FallbackRule(gradient_spike=4.0))


@pytest.mark.parametrize("bad", [None, 5])
def test_what_is_no_list_of_names_is_refused(bad: Any) -> None:
    model = stack()
    wrong: Any = [1]
    shown = f"is {bad}; accepted: a pattern, or a list of patterns"
    with pytest.raises(UserError, match=f"telemetry: include {shown}"):
        Telemetry(model, include=bad)
    with pytest.raises(UserError, match=r"telemetry: include holds 1; accepted: patterns"):
        Telemetry(model, include=wrong)
    for name in ("layers", "roles"):
        with pytest.raises(UserError, match=f"fallback: {name} {shown}"):
            Fallback(model, RULE, **{name: bad})
        with pytest.raises(UserError, match=f"fallback: {name} {shown}"):
            FallbackConfig(RULE, **{name: bad})
    assert FallbackConfig(layers="0").layers == ("0",)  # type: ignore[arg-type]
    layer = model.get_submodule("0")
    assert isinstance(layer, Fp8Linear)
    with pytest.raises(UserError, match=f"roles is {bad}; accepted: a list of input, weight"):
        layer.set_bf16_roles(bad)


def test_a_role_alone_or_a_rule_as_a_table_is_refused() -> None:
    model = stack()
    layer = model.get_submodule("0")
    assert isinstance(layer, Fp8Linear)
    with pytest.raises(UserError, match=r"roles is 'input'; accepted: a list of input, weight"):
        layer.set_bf16_roles("input")
    bad: Any
    for bad in ({"overflow": 0.1}, {}):
        with pytest.raises(UserError, match=r"fallback: rule is \{.*; accepted: a FallbackRule"):
            Fallback(model, bad)
