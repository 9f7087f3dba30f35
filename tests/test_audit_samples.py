"""What of an operation is compared: all that is no larger than the sample, else all in a period."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8lab
from fp8lab import ops_linear
from fp8lab.audit_blocks import block_cast
from fp8lab.audit_checks import Compared, Look
from fp8lab.audit_product import product
from fp8lab.audit_sampling import Sampler
from fp8lab.emulation import scaling
from fp8lab.formats import E4M3
from fp8lab.observe import Arguments
from fp8lab.ops_linear import block_codes, tensor_codes
from fp8lab.ops_operands import Codes, Layouts
from fp8lab.recipes import BlockScaling, MxScaling, RowScaling
from tests.audit_cases import EVERY_PRESET, ROWS, K, Loop, M, N, flipped, network

Policy = RowScaling | BlockScaling | MxScaling

POLICIES: dict[str, Policy] = {
    "rows": RowScaling(),
    "blocks": BlockScaling(),
    "squares": BlockScaling(square=True),
    "mx": MxScaling(),
}
POLICY = pytest.mark.parametrize("name", POLICIES)
FORM = pytest.mark.parametrize("slow", [False, True], ids=["oracle", "slow form"])


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def looks(
    check: Callable[[Look], Callable[[Any], Iterator[Compared]]],
    given: Arguments,
    found: Any,
    slow: bool,
    sample: int,
) -> Iterator[dict[str, Compared]]:
    """Look after look at one operation, by output."""
    sampler = Sampler(0)
    while True:
        look = Look(given, "own", sampler, slow, sample)
        yield {compared.output: compared for compared in check(look)(found)}


def agrees(compared: Compared) -> bool:
    return compared.actual.tobytes() == compared.expected.tobytes()


def elements(compared: Compared) -> list[tuple[int, ...]]:
    return [compared.element(i) for i in range(compared.expected.size)]


def outputs_of(layouts: Layouts) -> dict[str, tuple[int, ...]]:
    """The shapes of the outputs of a cast by blocks."""
    first, second = layouts.plain, layouts.transposed
    assert first is not None
    assert second is not None
    return {
        "codes": tuple(first.codes.shape),
        "scales": tuple(first.inverse.shape),
        "transposed codes": tuple(second.codes.shape),
        "transposed scales": tuple(second.inverse.shape),
    }


@FORM
@POLICY
@pytest.mark.parametrize("shape", [(3, 5), (1, 160), (130, 33), (33, 130)], ids=str)
def test_what_is_no_larger_than_the_sample_is_checked_whole(
    shape: tuple[int, int], name: str, slow: bool
) -> None:
    """Also where the last band of blocks is lower, so that no whole number of bands fits."""
    given: Arguments = {"x": normal(*shape), "fmt": E4M3, "policy": POLICIES[name]}
    layouts = block_codes(**given)
    sample = -(-shape[0] * shape[1] // 16)
    seen = next(looks(block_cast, given, layouts, slow, sample))
    shapes = outputs_of(layouts)
    assert seen.keys() == shapes.keys()
    for output, compared in seen.items():
        assert compared.period == 1
        assert elements(compared) == list(np.ndindex(shapes[output])), output
        assert agrees(compared)


@FORM
@POLICY
@pytest.mark.parametrize("shape", [(1, 160), (130, 20), (20, 130)], ids=str)
def test_every_code_and_scale_is_seen_in_a_period(
    shape: tuple[int, int], name: str, slow: bool
) -> None:
    given: Arguments = {"x": normal(*shape), "fmt": E4M3, "policy": POLICIES[name]}
    layouts = block_codes(**given)
    missing = {output: set(np.ndindex(own)) for output, own in outputs_of(layouts).items()}
    sizes = {output: len(places) for output, places in missing.items()}
    turns = looks(block_cast, given, layouts, slow, 8)
    periods: dict[str, int] = {}
    for turn, seen in enumerate(turns):
        if turn >= max(periods.values(), default=1):
            break
        for output, compared in seen.items():
            periods[output] = compared.period
            assert agrees(compared)
            if turn < compared.period:
                missing[output] -= set(elements(compared))
            if slow:  # the oracle takes whole bands, however large
                assert compared.expected.size <= 128
    assert not any(missing.values()), {key: len(own) for key, own in missing.items()}
    if slow:
        assert periods["codes"] == -(-sizes["codes"] // 128)


@pytest.mark.parametrize("spec", EVERY_PRESET)
def test_of_every_preset_a_large_sample_compares_all_codes(spec: str) -> None:
    """On the CPU, by the slow form: what `docs/audit.md` says of every cast."""
    sizes = {
        "0": {"input": ROWS * K, "weight": N * K, "grad_output": ROWS * N},
        "2": {"input": ROWS * N, "weight": M * N, "grad_output": ROWS * M},
    }
    loop = Loop(network(spec, "decoded"))
    with fp8lab.audit(sample=M * N // 16) as report:
        loop.step()
    assert report.differences == 0
    casts = 0
    for (layer, operation), line in report.lines.items():
        what, _, output = operation.partition(", ")
        if what.startswith("cast of ") and output.endswith("codes"):
            assert line.period == 1
            size = sizes[layer][what.removeprefix("cast of ")]
            assert line.elements == line.checks * size
            casts += 1
    assert casts >= 6


def wrong_by(delta: int, part: int, name: str) -> Callable[..., Any]:
    """A cast whose first code, or scale, has other bits."""
    plain = getattr(scaling, name)

    def wrong(*args: Any, **options: Any) -> Any:
        parts = [np.array(own) for own in plain(*args, **options)]
        width = {1: np.uint8, 4: np.uint32}[parts[part].itemsize]
        parts[part].view(width).reshape(-1)[0] ^= width(delta)
        return tuple(parts)

    return wrong


@pytest.mark.parametrize("delta", [1, 3, 16])
@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize(("spec", "name"), [("mx", "quantize_mx"), ("rowwise", "quantize_blocks")])
def test_one_wrong_bit_in_a_small_layer_is_found_at_the_first_look(
    spec: str, name: str, part: str, delta: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = fp8lab.convert(nn.Sequential(nn.Linear(32, 48)), spec)
    x = normal(24, 32)
    monkeypatch.setattr(scaling, name, wrong_by(delta, ("codes", "scales").index(part), name))
    with fp8lab.audit(sample=5000, on_difference="count") as report:
        layer(x)
    found = {difference.operation: difference.element for difference in report.found}
    assert found[f"cast of weight, {part}"] == (0, 0)
    assert found[f"cast of input, {part}"] == (0, 0)
    assert {operation.split(", ")[1] for operation in found} <= {part, f"transposed {part}"}


@FORM
@pytest.mark.parametrize("name", [*POLICIES, "tensor", "one and rows", "rows and one"])
def test_a_right_product_is_not_accused_whatever_is_drawn(name: str, slow: bool) -> None:
    """Samples of one row and one column, too, whose scales are still one a row and one a column."""
    m, n, k = 7, 9, 40

    def operand(kind: str, x: Tensor) -> Codes:
        if kind in POLICIES:
            made = block_codes(x, E4M3, POLICIES[kind], transposed=False).plain
        else:
            scale = torch.tensor([0.7])
            made = tensor_codes(x, E4M3, scale, 1 / scale, transposed=False).plain
        assert made is not None
        return made

    kinds = {"one and rows": ("tensor", "rows"), "rows and one": ("rows", "tensor")}
    left, right = kinds.get(name, (name, name))
    a, b = operand(left, normal(m, k)), operand(right, normal(n, k) + 0.1)
    for sample in (1, 2, 3, 9):
        given = {"a": a, "b": b, "promote_every": None, "accumulate": None, "bias": None}
        found = ops_linear.matmul(a, b)
        seen: set[tuple[int, ...]] = set()
        for turn, outputs in enumerate(looks(product, given, found, slow, sample)):
            compared = outputs["product"]
            if turn == compared.period:
                break
            assert agrees(compared), elements(compared)
            seen |= set(elements(compared))
        assert seen == set(np.ndindex(m, n))


def test_a_wrong_product_is_accused_where_one_element_is_drawn() -> None:
    a = block_codes(normal(3, 40), E4M3, RowScaling(), transposed=False).plain
    b = block_codes(normal(4, 40), E4M3, RowScaling(), transposed=False).plain
    assert a is not None
    assert b is not None
    given = {"a": a, "b": b, "promote_every": None, "accumulate": None, "bias": None}
    found = flipped(ops_linear.matmul(a, b), (2, 1))
    turns = looks(product, given, found, False, 1)
    wrong = [own for _ in range(12) for own in [next(turns)["product"]] if not agrees(own)]
    assert [elements(own) for own in wrong] == [[(2, 1)]]
