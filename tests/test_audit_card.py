"""The audit on a GPU: kernels against the oracle, and a wrong bit of each."""

from __future__ import annotations

from typing import Any

import pytest

import fp8lab
from fp8lab import ops_adamw_steppers
from fp8lab.auditing import AuditError
from tests.audit_cases import (
    EVERY_PRESET,
    MOMENTS,
    ROWS,
    K,
    Loop,
    M,
    N,
    Plant,
    after,
    flipped,
    network,
    of_shape,
)


def wrong_update(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8lab.kernels import scaling as kernels

    plain = kernels.update_delayed_

    def update(state: Any, *args: Any, **options: Any) -> None:
        plain(state, *args, **options)
        flipped(state.scale, (1,))

    monkeypatch.setattr(kernels, "update_delayed_", update)


def wrong_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8lab.kernels.gradients import GradientPlan

    def change(found: Any) -> Any:
        flipped(found.norm, (0,))
        return found

    after(GradientPlan, "run", change)(monkeypatch)


def wrong_product(shape: tuple[int, int]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        from fp8lab.kernels import matmul

        after(matmul, "matmul", of_shape(shape, (4, 11)))(monkeypatch)

    return plant


def wrong_step(name: str) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        stepper = ops_adamw_steppers.KernelStepper
        plain = stepper._changed

        def changed(self: Any) -> None:
            plain(self)
            tensor = self._params[0] if name == "param" else self._states[0][name]
            flipped(tensor, (7, 2))

        monkeypatch.setattr(stepper, "_changed", changed)

    return plant


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("plant", "layer", "operation", "element"),
    [
        (wrong_product((ROWS, M)), "2", "forward product", (4, 11)),
        (wrong_product((ROWS, K)), "0", "data_grad product", (4, 11)),
        (wrong_product((N, K)), "0", "weight_grad product", (4, 11)),
        (wrong_update, "0.weight", "scale update, scale", (1,)),
        (wrong_norm, "-", "norm", (0,)),
        *((wrong_step(n), "0.weight", f"optimizer, {n}", (7, 2)) for n in ("param", *MOMENTS)),
    ],
)
def test_a_wrong_bit_of_a_kernel_on_the_card(
    plant: Plant,
    layer: str,
    operation: str,
    element: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    loop = Loop(network("delayed", "codes", "cuda"))
    with pytest.raises(AuditError) as error, fp8lab.audit():
        loop.step()
    found = error.value.difference
    assert (found.layer, found.operation, found.element) == (layer, operation, element)


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("spec", EVERY_PRESET)
def test_kernels_hold_to_the_oracle_on_the_card(spec: str, capturable: bool) -> None:
    loop = Loop(network(spec, "codes", "cuda"), capturable=capturable)
    with fp8lab.audit(slow=True) as report:
        for _ in range(3):
            loop.step()
    assert (report.steps, report.differences, report.unchecked) == (3, 0, {})
    assert ("0", "data_grad product") in report.lines  # the backward pass has a thread of its own
