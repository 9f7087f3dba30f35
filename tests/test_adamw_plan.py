"""The plan of a launch: lists of tensors, other gradients, constants on the device, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.emulation.adamw_orders import step_constants as oracle_constants
from fp8lab.formats import E4M3
from fp8lab.kernels.adamw import step_constants
from fp8lab.kernels.adamw_plan import AdamPlan
from fp8lab.kernels.adamw_settings import AdamSettings
from fp8lab.kernels.adamw_tensors import AdamTensors, MomentTensors, empty_moment
from fp8lab.kernels.gradients import GradientPlan
from fp8lab.optimizer_formats import ORDERS
from fp8lab.testing import assert_bits_equal, to_numpy

SMALL = AdamSettings(block=256, num_warps=1)
FORMATS = {"exp_avg": "e4m3_128", "exp_avg_sq": "e4m3_128_keep", "master": "bfloat16_remainder"}
OPTIONS: dict[str, Any] = {
    "step": 3,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
}


def tensors_of(size: int, device: str) -> AdamTensors:
    """Random values; the moments are fresh."""
    values = torch.randn(2, size, generator=torch.Generator().manual_seed(size)).to(device)
    param = values[0].bfloat16()
    remainder = torch.full_like(param, 5, dtype=torch.int16)
    first, second = (empty_moment(param, FORMATS[name]) for name in ("exp_avg", "exp_avg_sq"))
    return AdamTensors(param, values[1].clone(), first, second, remainder)


def plan_of(sizes: list[int], device: str, **options: Any) -> tuple[AdamPlan, list[AdamTensors]]:
    tensors = [tensors_of(size, device) for size in sizes]
    return AdamPlan(tensors, **{**FORMATS, "settings": SMALL, **options}), tensors


def bytes_of(tensors: AdamTensors) -> list[bytes]:
    plan = (tensors.param, tensors.remainder, *vars(tensors.exp_avg).values())
    return [to_numpy(t).tobytes() for t in plan if t is not None]


def test_empty_tensors_among_many(device: str) -> None:
    """TransformerEngine 3207: [4, 0] elements; 40 tensors with empty ones at 29 and 35."""
    for sizes in ([4, 0], [0, 4], [0], [0 if place in (29, 35) else 3 for place in range(40)]):
        plan, tensors = plan_of(sizes, device)
        before = [bytes_of(t) for t in tensors]
        plan.launch(step_constants(ORDERS["plain"], **OPTIONS).to(device))
        for size, t, old in zip(sizes, tensors, before, strict=True):
            assert (bytes_of(t) != old) == (size > 0)


def test_order_grouping_and_launch_change_nothing(device: str) -> None:
    sizes = [700, 3, 256, 40]
    constants = step_constants(ORDERS["plain"], **OPTIONS).to(device)

    def run(places: list[int], **options: Any) -> dict[int, list[bytes]]:
        _, tensors = plan_of(sizes, device)
        chosen = [tensors[place] for place in places]
        plan = AdamPlan(chosen, **{**FORMATS, "settings": SMALL, **options})
        plan.launch(constants)
        return {place: bytes_of(tensors[place]) for place in places}

    whole = run([0, 1, 2, 3])
    assert run([2, 0, 3, 1]) == whole
    assert run([0, 2]) | run([1, 3]) == whole
    assert run([0, 1, 2, 3], settings=AdamSettings(block=1024, num_warps=8)) == whole


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("decoupled", [True, False])
def test_constants_made_on_the_device_are_the_oracles(
    order: str, decoupled: bool, device: str
) -> None:
    """Also ao 4915: 300 steps count 300; a counter in bfloat16 sticks at 256."""
    plan, _ = plan_of([3], device, order=order, decoupled=decoupled)
    groups = [(1e-3, 0.9, 0.999, 1e-8, 0.1), (3e-4, 0.0, 0.95, 1e-15, 0.0)]
    numbers = torch.tensor(groups, dtype=torch.float64, device=device)
    constants = torch.zeros(2, 9, device=device)
    steps = torch.tensor([0, 298], device=device)
    for taken in range(1, 4):
        plan.advance(numbers, steps, constants)
        for place, (lr, beta1, beta2, eps, decay) in enumerate(groups):
            options: dict[str, Any] = {
                "step": taken + 298 * place,
                "lr": lr,
                "betas": (beta1, beta2),
                "eps": eps,
                "weight_decay": decay,
                "decoupled": decoupled,
            }
            if order == "torch_cuda" and device == "cuda":
                options["powers"] = powf(device, options["betas"], options["step"])
            want = oracle_constants(ORDERS[order], **options)
            assert_bits_equal(constants[place], np.array(list(vars(want).values()), np.float32))
            host = step_constants(ORDERS[order], **options)
            assert_bits_equal(host[0], constants[place])
    assert steps.tolist() == [3, 301]
    plan.advance(numbers, steps, constants, skip=torch.ones(1, dtype=torch.int32, device=device))
    assert steps.tolist() == [3, 301], "a skipped step does not count"


def powf(device: str, betas: tuple[float, float], step: int) -> tuple[float, float]:
    """The card's float32 power, from torch."""
    base = torch.tensor(betas, device=device)
    first, second = (base ** torch.tensor(float(step), device=device)).tolist()
    return first, second


def test_gradients_can_be_exchanged(device: str) -> None:
    plan, tensors = plan_of([300, 20], device)
    constants = step_constants(ORDERS["plain"], **OPTIONS).to(device)
    grads = [torch.full_like(t.grad, 0.25) for t in tensors]
    plan.set_grads(grads)
    plan.launch(constants)
    other, fresh = plan_of([300, 20], device)
    for t, grad in zip(fresh, grads, strict=True):
        t.grad.copy_(grad)
    other.launch(constants)
    assert [bytes_of(t) for t in tensors] == [bytes_of(t) for t in fresh]
    with pytest.raises(ValueError, match="1 gradients given; the plan has 2"):
        plan.set_grads(grads[:1])


def bad_plans(device: str) -> dict[str, tuple[type[Exception], str, dict[str, Any], Any]]:
    """What a plan refuses: the error, its text, the plan's options, and what is wrong."""
    one = torch.ones(3, device=device)
    value, kind = ValueError, TypeError
    return {
        "master": (value, "unknown master 'f32'; accepted: float32, bfl", {"master": "f32"}, {}),
        "moment": (value, "unknown moment format 'fp8'", {"exp_avg": "fp8"}, {}),
        "order": (value, "unknown order 'adam'", {"order": "adam"}, {}),
        "codes": (value, "codes is 3; accepted: E4M3, E5M2, None", {"codes": 3}, {}),
        "block": (
            value,
            "block is 16; accepted here: 128 and up",
            {"exp_avg": "e4m3_128", "settings": AdamSettings(block=16)},
            {},
        ),
        "sparse": (kind, "grad has layout torch.sparse_coo", {}, {"grad": one.to_sparse()}),
        "dtype": (kind, "grad has dtype torch.float64", {}, {"grad": one.double()}),
        "shape": (value, "grad has shape", {}, {"grad": torch.ones(4, device=device)}),
        "shared": (value, "share memory", {}, {"grad": "param"}),
        "remainder": (
            value,
            "a remainder goes with",
            {"master": "bfloat16_remainder"},
            {"param": one.bfloat16()},
        ),
        "weight": (
            value,
            "a weight goes with float32 masters",
            {"master": "bfloat16_stochastic"},
            {"param": one.bfloat16(), "weight": one.bfloat16()},
        ),
        "parts": (value, "codes come with a format", {"codes": E4M3}, {"codes_amax": one[:1]}),
        "format": (
            kind,
            "codes has dtype torch.float8_e5m2; accepted: torch.float8_e4m3fn",
            {"codes": E4M3},
            {
                "codes": torch.zeros(3, dtype=torch.float8_e5m2, device=device),
                "codes_scale": one[:1].clone(),
                "codes_amax": one[:1].clone(),
            },
        ),
        "scale": (
            kind,
            "exp_avg has dtype torch.float32; accepted: torch.float8",
            {"exp_avg": "e4m3_128"},
            {},
        ),
        "blocks": (
            value,
            r"exp_avg.scale does not fit e4m3_128: it takes 1 values",
            {"exp_avg": "e4m3_128"},
            {"exp_avg": MomentTensors(torch.zeros(3, dtype=torch.float8_e4m3fn, device=device))},
        ),
    }


@pytest.mark.parametrize("name", sorted(bad_plans("cpu")))
def test_what_does_not_fit_is_refused(name: str, device: str) -> None:
    error, text, options, changes = bad_plans(device)[name]
    tensors = [torch.ones(3, device=device) for _ in range(4)]
    parts: dict[str, Any] = {
        "param": tensors[0],
        "grad": tensors[1],
        "exp_avg": MomentTensors(tensors[2]),
        "exp_avg_sq": MomentTensors(tensors[3]),
    }
    parts |= {key: parts["param"] if value == "param" else value for key, value in changes.items()}
    with pytest.raises(error, match=text):
        AdamPlan([AdamTensors(**parts)], **options)
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in tensors)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="max_registers is 33; accepted: None, multiples of 8 fr"):
        AdamSettings(max_registers=33)


def test_what_a_launch_lacks_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="no tensors given"):
        AdamPlan([])
    one = torch.ones(3, device=device)
    tensors = AdamTensors(
        one.bfloat16(), one, MomentTensors(one.clone()), MomentTensors(one.clone())
    )
    plan = AdamPlan([tensors], master="bfloat16_stochastic", settings=SMALL)
    with pytest.raises(ValueError, match="needs a seed: one int64 tensor"):
        plan.launch(torch.zeros(1, 9, device=device))
    with pytest.raises(TypeError, match=r"constants has dtype torch.float64; accepted: torch.flo"):
        plan.launch(torch.zeros(1, 9, device=device, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"seed has shape \(0,\); accepted: one element"):
        plan.launch(
            torch.zeros(1, 9, device=device),
            seed=torch.zeros(0, dtype=torch.int64, device=device),
        )


def test_tables_that_lack_a_row_are_refused_before_a_launch(device: str) -> None:
    """The kernel would read beyond their ends."""
    one = torch.ones(3, device=device)
    parts = [[one.clone() for _ in range(4)] for _ in range(2)]
    tensors = [
        AdamTensors(p, g, MomentTensors(m), MomentTensors(v), group=2 * index)
        for index, (p, g, m, v) in enumerate(parts)
    ]
    plan = AdamPlan(tensors, settings=SMALL)
    no_flag = torch.zeros(0, dtype=torch.int32, device=device)
    for shape in ((2, 9), (3, 8), (27,)):
        with pytest.raises(ValueError, match=r"constants has shape .*; accepted: \(3 or more gro"):
            plan.launch(torch.zeros(shape, device=device))
    constants = torch.zeros(3, 9, device=device)
    with pytest.raises(ValueError, match=r"skip has shape \(0,\); accepted: one element"):
        plan.launch(constants, skip=no_flag)
    numbers = torch.zeros(3, 5, dtype=torch.float64, device=device)
    steps = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"hyperparameters has shape \(2, 5\)"):
        plan.advance(numbers[:2], steps, constants)
    with pytest.raises(ValueError, match=r"steps has 2 values on .*, hyperparameters 3 rows"):
        plan.advance(numbers, steps[:2], constants)
    with pytest.raises(ValueError, match=r"skip has shape \(0,\); accepted: one element"):
        plan.advance(numbers, steps, constants, skip=no_flag)
    assert all(torch.equal(tensor, one) for part in parts for tensor in part)
    assert not steps.any()


@pytest.mark.gpu
def test_a_cuda_graph_takes_the_same_steps() -> None:
    """Norm, constants, skip and update in a graph, the learning rate changed on the device."""
    numbers = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.1]], dtype=torch.float64, device="cuda")

    def machine() -> tuple[Callable[[], None], list[AdamTensors], torch.Tensor]:
        plan, tensors = plan_of([5000, 300, 0, 7], "cuda")
        grads = GradientPlan([t.grad for t in tensors])
        steps = torch.zeros(1, dtype=torch.int64, device="cuda")
        constants = torch.zeros(1, 9, device="cuda")
        one = torch.ones(1, device="cuda")

        def whole() -> None:
            summary = grads.run(inverse_scale=one, max_norm=one)
            plan.advance(numbers, steps, constants, skip=summary.skip)
            plan.launch(constants, factor=summary.factor, skip=summary.skip)

        return whole, tensors, steps

    step, tensors, steps = machine()
    captured, others, other_steps = machine()
    step()
    captured()  # compiled before it is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured()
    for round_ in range(6):
        numbers[0, 0] = 1e-3 / (round_ + 1)
        bad = round_ == 3
        for group in (tensors, others):
            group[1].grad.fill_(float("nan") if bad else 0.25)
        step()
        graph.replay()
    torch.cuda.synchronize()
    assert steps.tolist() == other_steps.tolist() == [6]
    assert [bytes_of(t) for t in tensors] == [bytes_of(t) for t in others]
