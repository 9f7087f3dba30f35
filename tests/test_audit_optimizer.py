"""The audit of the optimizer: every state, skipped steps, copies; its kernel against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fp8lab
from fp8lab import ops_adamw_steppers
from fp8lab.auditing import AuditError
from fp8lab.linear import Fp8Linear
from fp8lab.ops_adamw import AdamFormats, StepNumbers, WeightCopies, fresh_state
from fp8lab.optimizer import AdamW
from fp8lab.recipes import recipe_named
from tests.audit_cases import K, Loop, N, after, flipped, network

FP8_MOMENTS = ("e4m3_128", "e4m3_128_keep")


@pytest.mark.parametrize("master", ["bfloat16_remainder", "bfloat16_stochastic"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "e4m3_tensor", "e4m3_128_expanded"])
def test_every_state_of_the_optimizer(master: str, moments: str) -> None:
    loop = Loop(network().bfloat16(), master=master, exp_avg=moments, exp_avg_sq=moments)
    with fp8lab.audit(sample=2) as report:
        loop.step()
        loop.step()
    assert report.differences == 0


@pytest.mark.parametrize("moments", ["e4m3_128", "e4m3_tensor"])
def test_a_parameter_no_larger_than_the_sample_is_checked_whole(moments: str) -> None:
    """Of 208 elements in blocks of 128, the second of which is not whole."""
    loop = Loop(fp8lab.convert(nn.Sequential(nn.Linear(K, 13)), "tensorwise"), exp_avg=moments)
    with fp8lab.audit(sample=13) as report:
        loop.step()
    line = report.lines["0.weight", "optimizer, exp_avg"]
    assert (line.elements, line.period) == (13 * K, 1)


def test_a_skipped_step_of_a_device_that_counts_leaves_everything() -> None:
    loop = Loop(network(), capturable=True)
    with fp8lab.audit(sample=2) as report:
        loop.step()
        for param in loop.model.parameters():
            assert param.grad is not None
            param.grad.fill_(float("nan"))
        loop.update()
    assert report.differences == 0
    assert int(loop.update.scaler.skipped_steps) == 1
    assert report.lines["0.weight", "optimizer, param"].checks == 2


def test_copies_that_a_step_writes_are_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    loop = Loop(model)
    optimizer, weight = loop.update.optimizer, model.get_submodule("0").weight
    assert isinstance(optimizer, AdamW)
    assert isinstance(weight, nn.Parameter)
    codes = torch.zeros(N, K, dtype=torch.float8_e4m3fn)
    optimizer.also_write(
        weight,
        weight=torch.zeros(N, K, dtype=torch.bfloat16),
        codes=codes,
        scale=torch.full((1,), 64.0),
        amax=torch.zeros(1),
    )
    with fp8lab.audit(sample=64) as report:
        loop.step()
    assert report.differences == 0
    after(ops_adamw_steppers, "quantize", lambda found: flipped(found, (1, 1)))(monkeypatch)
    where = r"0.weight, optimizer, weight copy: element \(1, 1\)"
    with pytest.raises(AuditError, match=where), fp8lab.audit(sample=64):
        loop.step()


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    ("moments", "master"),
    [
        (("float32", "float32"), "float32"),
        (FP8_MOMENTS, "bfloat16_remainder"),
        (("e4m3_tensor", "e5m2_256"), "bfloat16_stochastic"),
    ],
)
def test_the_optimizers_kernel_is_held_to_the_oracle(
    moments: tuple[str, str],
    master: str,
    counted: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the interpreter, too: a large parameter in runs of blocks, with its random words."""
    formats = AdamFormats.named("plain", True, *moments, master)
    dtype = torch.float32 if master == "float32" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in ((50, 31), (7,))]
    grads = [torch.randn(param.shape, generator=generator).to(device) for param in params]
    params = [param.to(device) for param in params]
    states = [fresh_state(param, formats) for param in params]
    stepper = ops_adamw_steppers.make_stepper(
        params, states, formats, [0, 0], [0, 388], [WeightCopies()] * 2, kernel=True
    )
    row = [1e-2, 0.9, 0.95, 1e-8, 0.1]
    counts = torch.zeros(2, dtype=torch.int64, device=device)

    def steps(count: int) -> None:
        for step in range(count):
            if counted:
                table = torch.tensor([row, row], dtype=torch.float64, device=device)
                stepper.counted_step(grads, table, counts, seed=7)
            else:
                own = StepNumbers(step + 1, row[0], (row[1], row[2]), *row[3:])
                stepper.step(grads, [own], seed=7 + step)

    with fp8lab.audit(sample=32, on_difference="count") as report:
        layer = Fp8Linear(K, N, recipe_named("tensorwise"))
        layer(torch.ones(1, K))  # so that there is an FP8 operation in any case
        steps(2)
    assert report.differences == 0, str(report)
    period = report.lines["parameter 0 (50, 31)", "optimizer, param"].period
    assert period == (1 if "e4m3_tensor" in moments else 4)  # one scale for all needs all

    plain = ops_adamw_steppers.KernelStepper._changed

    def changed(self: Any) -> None:
        plain(self)
        flipped(params[0], (40, 3))

    monkeypatch.setattr(ops_adamw_steppers.KernelStepper, "_changed", changed)
    where = r"parameter 0 \(50, 31\), optimizer, param: element \(40, 3\)"
    with pytest.raises(AuditError, match=where), fp8lab.audit(sample=32):
        steps(period)
