"""The audit: clean runs of every preset, and that it changes nothing.

On the CPU the oracle computes, and is held to its slow form; kernels are held to the oracle.
"""

from __future__ import annotations

import pytest
import torch

import fp8lab
from tests.audit_cases import EVERY_PRESET, ROWS, K, Loop, network


@pytest.mark.parametrize("products", ["codes", "decoded"])
@pytest.mark.parametrize("spec", EVERY_PRESET)
def test_the_oracle_holds_to_its_slow_form(spec: str, products: str) -> None:
    loop = Loop(network(spec, products))
    with fp8lab.audit(sample=2) as report:
        for _ in range(2):
            loop.step()
    assert (report.steps, report.audited, report.differences) == (2, 2, 0)
    seen = {operation.partition(",")[0] for _, operation in report.lines}
    wanted = {"cast of input", "cast of weight", "cast of grad_output", "norm", "optimizer"}
    wanted |= {"dequantize"} if products == "decoded" else {"forward product", "data_grad product"}
    assert wanted <= seen
    assert ("weight_grad product" in seen) == (products == "codes" and not spec.endswith("gw_hp"))
    assert ("scale update" in seen) == ("delayed" in spec or spec == "hybrid")


@pytest.mark.parametrize("spec", ["tensorwise", "delayed", "rowwise", "blockwise", "mx"])
def test_interpreted_kernels_hold_to_the_oracle_and_to_its_slow_form(
    spec: str, device: str
) -> None:
    loop = Loop(network(spec, "kernels", device), exp_avg="float32", exp_avg_sq="float32")
    with fp8lab.audit(sample=4, slow=True) as report:
        loop.step()
    assert report.differences == 0
    assert report.checked > 50


def test_a_frozen_layer_is_audited() -> None:
    model = network()
    loop = Loop(model)
    loop.step()
    fp8lab.freeze(model)
    with fp8lab.audit(sample=4) as report:
        model(torch.ones(ROWS, K))
    assert ("0", "forward product") in report.lines


def test_an_audit_changes_no_bit() -> None:
    plain, audited = Loop(network("delayed")), Loop(network("delayed"))
    with fp8lab.audit(sample=1):
        audited.step()
        audited.step()
    plain.step()
    plain.step()
    for one, two in zip(
        plain.model.state_dict().values(), audited.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two)
