"""The audit of casts: special values are no false alarm, a wrong bit of the kernel is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8lab
from fp8lab.auditing import AuditError
from fp8lab.linear import Fp8Linear, advance_scaling
from fp8lab.recipes import recipe_named
from tests.audit_cases import ROWS, K, Loop, N, after, flipped, network

SPECIAL: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda x: x.index_fill(1, torch.tensor([3]), float("nan")),
    "inf": lambda x: x.index_fill(1, torch.tensor([3]), -float("inf")),
    "negative zeros": lambda x: x * -0.0,
    "tiny": lambda x: x * 1e-38,
    "huge": lambda x: x * 3e38,
    "one row": lambda x: x[:1],
    "no rows": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("spec", ["tensorwise", "delayed", "rowwise", "mx"])
def test_special_values_are_no_false_alarm(spec: str, kind: str, dtype: torch.dtype) -> None:
    layer = Fp8Linear(K, N, recipe_named(spec), dtype=dtype)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(5, size, generator=generator) for size in (K, N))
    with fp8lab.audit(sample=4) as report:
        given = SPECIAL[kind](x).to(dtype).requires_grad_()
        layer(given).backward(SPECIAL[kind](dy).to(dtype))
        advance_scaling(layer)
    assert report.differences == 0


def test_a_batch_of_nan_is_audited_as_any_other() -> None:
    loop = Loop(network("delayed"))
    with fp8lab.audit(sample=4) as report:
        loop.step()
        with torch.no_grad():
            weight: Any = loop.model.get_submodule("0").weight
            weight[1, 1] = float("nan")
        loop.step()
        loop.step()
    assert report.differences == 0
    assert int(loop.update.scaler.skipped_steps) == 2


def codes_of(layout: int) -> Callable[[Any], Any]:
    """Of the casts of the first layer's input, (ROWS, K)."""

    def change(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if found[0].shape == (ROWS, K):
            flipped(found[layout], (3, 5))
        return found

    return change


@pytest.mark.parametrize(
    ("layout", "operation"),
    [(0, "cast of input, codes"), (1, "cast of input, transposed codes")],
)
def test_a_wrong_bit_of_a_cast_kernel(
    layout: int, operation: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8lab.kernels import casting

    after(casting, "quantize_with_transpose", codes_of(layout))(monkeypatch)
    loop = Loop(network("delayed", "kernels", device), exp_avg="float32", exp_avg_sq="float32")
    with pytest.raises(AuditError) as error, fp8lab.audit():
        loop.step()
    found = error.value.difference
    assert (found.layer, found.operation, found.element) == ("0", operation, (3, 5))
    assert found.form == "oracle"
