"""What an audit says: names of layers and parameters, the message of a difference, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fp8lab
from fp8lab import ops_linear
from fp8lab.audit_names import Names
from fp8lab.errors import UserError
from fp8lab.linear import Fp8Linear
from fp8lab.recipes import recipe_named
from tests.audit_cases import ROWS, K, Loop, M, N, after, network, of_shape


def test_the_message_names_layer_operation_element_and_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    after(ops_linear, "oracle_matmul", of_shape((ROWS, M), (4, 17)))(monkeypatch)
    loop = Loop(network())
    with fp8lab.audit(sample=ROWS * M * 2, on_difference="count") as report:
        loop.step()
    assert (report.differences, len(report.found)) == (1, 1)
    text = str(report.found[0])
    assert "step 1, 2, forward product: element (4, 17) differs (1 of 384 compared)" in text
    for word in ("a  ", "b  ", "inverse_scale_a", "expected", "actual", "0x"):
        assert word in text
    assert text in str(report)
    assert "audited 1 of 1 steps" in str(report)


def test_a_parameter_has_its_name_after_its_memory_was_anothers() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 3), "two": nn.Linear(2, 3)})
    weights = list(model.parameters())[::2]
    names = Names()
    names.note_model(model)
    for _ in range(2):
        assert [names.parameter(own, 0) for own in weights] == ["one.weight", "two.weight"]
        first, second = (own.data for own in weights)
        weights[0].data, weights[1].data = second, first
    assert names.parameter(torch.zeros(2, 3), 7) == "parameter 7 (2, 3)"


def test_names_without_convert() -> None:
    layer = Fp8Linear(K, N, recipe_named("tensorwise"))
    with fp8lab.audit(sample=1) as report:
        layer(torch.ones(2, K))
    assert {name for name, _ in report.lines} == {f"layer 0 ({K} to {N})"}
    model = nn.ModuleDict({"own": layer})
    with fp8lab.audit(sample=1, model=model) as report:
        layer(torch.ones(2, K))
    assert {name for name, _ in report.lines} == {"own"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0; accepted: an integer, 1 and up"),
        ({"sample": 0}, "sample is 0; accepted: an integer, 1 and up, or None"),
        ({"sample": -3}, "sample is -3; accepted"),
        ({"every": 1.5}, "every is 1.5; accepted"),
        ({"sample": True}, "sample is True; accepted"),
        ({"on_difference": "log"}, "on_difference is 'log'; accepted: raise, count"),
        ({"seed": "a"}, r"seed is 'a'; accepted: an integer, from -2\*\*63 to 2\*\*64 - 1"),
        ({"seed": None}, "seed is None; accepted"),
        ({"seed": 2**64}, "seed is 18446744073709551616; accepted"),
        ({"slow": 2}, "slow is 2; accepted: True, False"),
        ({"model": 5}, r"model is of int; accepted: a torch.nn.Module, or None"),
        ({"model": nn.Linear}, "model is of type; accepted"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message), fp8lab.audit(**options):
        pytest.fail("not reached")


def test_integers_of_any_kind_are_settings() -> None:
    """A NumPy integer would overflow where a sample is multiplied."""
    settings: dict[str, Any] = {"every": np.int8(1), "sample": np.int8(100), "seed": np.int64(-1)}
    with fp8lab.audit(**settings) as report:
        network()(torch.ones(ROWS, K))
    assert report.lines["0", "cast of input, codes"].elements == ROWS * K


def test_no_fp8_operation_inside_is_an_error() -> None:
    loop = Loop(network("bf16"), exp_avg="float32", exp_avg_sq="float32")
    with pytest.raises(UserError, match="no FP8 operation ran inside the audit"), fp8lab.audit():
        loop.step()
    with pytest.raises(ZeroDivisionError), fp8lab.audit():
        raise ZeroDivisionError


def test_a_compiled_model_is_refused() -> None:
    model = network()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with pytest.raises(UserError, match=r"without torch\.compile"), fp8lab.audit():
        compiled(torch.ones(ROWS, K))
    compiled(torch.ones(ROWS, K))
