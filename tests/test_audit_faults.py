"""One wrong bit planted in every operation: the audit names it within its sampling period."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fp8lab
from fp8lab import ops, ops_adamw_steppers, ops_gradients, ops_linear
from fp8lab.auditing import AuditError
from fp8lab.emulation import scaling
from fp8lab.ops_operands import Layouts
from fp8lab.recipes import PRODUCTS
from tests.audit_cases import ROWS, K, Loop, M, N, Plant, after, flipped, network, of_shape

# Preset, products, what is planted; the layer, operation and element that must be named.
Planted = tuple[str, str, Plant, str, str, tuple[int, ...]]


def transposed(found: Layouts) -> Layouts:
    if found.transposed is not None and found.transposed.codes.shape == (K, ROWS):
        flipped(found.transposed.codes, (5, 3))
    return found


def both_of(shape: tuple[int, ...], part: int, place: tuple[int, ...]) -> Callable[[Any], Any]:
    def change(found: tuple[Any, Any]) -> tuple[Any, Any]:
        parts = list(found)
        if parts[0].shape == shape:
            parts[part] = flipped(parts[part], place)
        return parts[0], parts[1]

    return change


def moment(name: str) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        if state.param.shape != (N, K):
            return state
        own = getattr(state, name)
        if name == "param":
            return replace(state, param=flipped(own, (7, 2)))
        return replace(state, **{name: replace(own, codes=flipped(own.codes, (7, 2)))})

    return change


PLANTED: dict[str, Planted] = {
    "cast": (
        "tensorwise",
        "codes",
        after(ops, "quantize", of_shape((ROWS, K), (3, 5))),
        "0",
        "cast of input, codes",
        (3, 5),
    ),
    "transpose": (
        "tensorwise",
        "codes",
        after(ops_linear, "Layouts", transposed),
        "0",
        "cast of input, transposed codes",
        (5, 3),
    ),
    "amax of the cast": (
        "delayed",
        "codes",
        after(ops, "amax", lambda found: flipped(found, ())),
        "0",
        "cast of weight, amax",
        (0,),
    ),
    "amax": (
        "tensorwise",
        "codes",
        after(scaling, "amax", lambda found: flipped(found, ())),
        "0",
        "amax of weight",
        (0,),
    ),
    "scale": (
        "tensorwise",
        "codes",
        after(ops, "scale_from_amax", lambda found: flipped(found, ())),
        "0",
        "scale of weight",
        (0,),
    ),
    "scale update": (
        "delayed",
        "codes",
        after(
            scaling,
            "update_delayed",
            lambda state: replace(state, scale=flipped(state.scale, (1,))),
        ),
        "0.weight",
        "scale update, scale",
        (1,),
    ),
    "history": (
        "delayed",
        "codes",
        after(
            scaling,
            "update_delayed",
            lambda state: replace(state, amax_history=flipped(state.amax_history, (15, 1))),
        ),
        "0.weight",
        "scale update, amax history",
        (15, 1),
    ),
    "codes of rows": (
        "rowwise",
        "codes",
        after(scaling, "quantize_blocks", both_of((ROWS, K), 0, (6, 1))),
        "0",
        "cast of input, codes",
        (6, 1),
    ),
    "scales of rows": (
        "rowwise",
        "codes",
        after(scaling, "quantize_blocks", both_of((K, ROWS), 1, (9, 0))),
        "0",
        "cast of input, transposed scales",
        (9, 0),
    ),
    "scales of MX": (
        "mx",
        "codes",
        after(scaling, "quantize_mx", both_of((N, K), 1, (30, 0))),
        "0",
        "cast of weight, scales",
        (30, 0),
    ),
    "decoded": (
        "tensorwise",
        "decoded",
        after(ops, "dequantize", of_shape((ROWS, K), (2, 9))),
        "0",
        "dequantize, values",
        (2, 9),
    ),
    "forward": (
        "tensorwise",
        "codes",
        after(ops_linear, "oracle_matmul", of_shape((ROWS, M), (4, 17))),
        "2",
        "forward product",
        (4, 17),
    ),
    "data gradient": (
        "blockwise",
        "codes",
        after(ops_linear, "oracle_matmul", of_shape((ROWS, K), (4, 11))),
        "0",
        "data_grad product",
        (4, 11),
    ),
    "weight gradient": (
        "mx",
        "codes",
        after(ops_linear, "oracle_matmul", of_shape((N, K), (20, 11))),
        "0",
        "weight_grad product",
        (20, 11),
    ),
    "norm": (
        "tensorwise",
        "codes",
        after(
            ops_gradients, "oracle", lambda found: replace(found, norm=flipped(found.norm, ())[()])
        ),
        "-",
        "norm",
        (0,),
    ),
    "factor": (
        "tensorwise",
        "codes",
        after(
            ops_gradients,
            "oracle",
            lambda found: replace(found, factor=flipped(found.factor, ())[()]),
        ),
        "-",
        "norm, factor",
        (0,),
    ),
    **{
        name: (
            "tensorwise",
            "codes",
            after(ops_adamw_steppers, "adamw_state", moment(name)),
            "0.weight",
            f"optimizer, {name}",
            (7, 2),
        )
        for name in ("param", "exp_avg", "exp_avg_sq")
    },
}


@pytest.mark.parametrize("name", PLANTED)
def test_one_wrong_bit_is_named_within_its_sampling_period(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, products, plant, layer, operation, element = PLANTED[name]
    loop = Loop(network(spec, products))
    of_layer = operation.startswith(("cast", "amax", "scale of", "dequantize", *PRODUCTS))
    update = not of_layer or " of weight" in operation  # which is cast once a step
    with fp8lab.audit(sample=16) as report:
        loop.step(update=update)
    period = max(line.period for (_, what), line in report.lines.items() if what == operation)
    plant(monkeypatch)
    with pytest.raises(AuditError) as error, fp8lab.audit(sample=16) as report:
        loop.steps(period, update=update)
    found = error.value.difference
    assert (found.layer, found.operation, found.element) == (layer, operation, element)
    assert found.form == "slow form"
    bits = [
        np.asarray(v).view({1: "u1", 2: "u2", 4: "u4"}[np.asarray(v).itemsize])
        for v in (found.expected, found.actual)
    ]
    assert int(bits[0] ^ bits[1]) == 1
    assert report.differences == found.count
