"""What the optimizer keeps on the device: counted steps, skips, copies of the weight, graphs."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8lab.emulation.amax import amax
from fp8lab.emulation.casting import quantize
from fp8lab.formats import BFLOAT16, E4M3
from fp8lab.ops_adamw_steppers import make_stepper
from fp8lab.optimizer import AdamW
from fp8lab.optimizer_formats import MASTER_FORMATS
from fp8lab.testing import assert_bits_equal, to_numpy

SHAPES = ((20, 15), (7,), (0, 4), (9, 128))


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Lets steps be taken by the kernel, wherever the parameters are, or by the oracle."""

    def choose(kernel: bool) -> None:
        monkeypatch.setattr("fp8lab.optimizer.make_stepper", partial(make_stepper, kernel=kernel))

    return choose


def parameters(master: str, device: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    dtype = torch.float32 if master == "float32" else torch.bfloat16
    return [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], seed: int, *, scale: float = 1.0) -> None:
    rng = np.random.default_rng(seed)
    for param in params:
        grad = torch.from_numpy(rng.normal(size=tuple(param.shape)).astype(np.float32)) * scale
        if param.grad is None:
            param.grad = grad.to(param.device, param.dtype)
        else:
            param.grad.copy_(grad)


def copies_of(param: Tensor, kind: str) -> dict[str, Tensor]:
    """Room for what is written beside a parameter: "weight", "codes", "both" or nothing."""
    found: dict[str, Tensor] = {}
    if kind in ("weight", "both") and param.dtype == torch.float32:
        found["weight"] = torch.zeros_like(param, dtype=torch.bfloat16)
    if kind in ("codes", "both"):
        found["codes"] = torch.zeros(param.shape, dtype=torch.float8_e4m3fn, device=param.device)
        found["scale"] = torch.tensor([3.0], device=param.device)
        found["amax"] = torch.zeros(1, device=param.device)
    return found


def bits(optimizer: AdamW, params: list[nn.Parameter], copies: list[dict[str, Tensor]]) -> Any:
    found: list[Any] = [to_numpy(param).tobytes() for param in params]
    state = optimizer.state_dict()["state"]
    for place in range(len(params)):
        for name, value in sorted(state.get(place, {}).items()):
            found.append((name, to_numpy(value).tobytes() if isinstance(value, Tensor) else value))
    return found + [to_numpy(tensor).tobytes() for own in copies for tensor in own.values()]


KINDS = ("both", "codes", "none", "weight")


@pytest.mark.parametrize(
    ("master", "moments"),
    list(zip(MASTER_FORMATS, ("e4m3_128_settle", "e5m2_tensor", "float32"), strict=True)),
)
@pytest.mark.parametrize("capturable", [False, True])
def test_the_kernel_gives_the_oracles_bits(
    master: str, moments: str, capturable: bool, device: str, by_kernel: Callable[[bool], None]
) -> None:
    """Parameters of every kind in one launch; with steps on the device one of four is skipped."""
    found = []
    for kernel, place in ((False, "cpu"), (True, device)):
        by_kernel(kernel)
        params = parameters(master, place)
        optimizer = AdamW(
            [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.0}],
            lr=0.01,
            exp_avg=moments,
            exp_avg_sq=moments,
            master=master,
            seed=5,
            capturable=capturable,
        )
        copies = [copies_of(param, kind) for param, kind in zip(params, KINDS, strict=True)]
        for param, own in zip(params, copies, strict=True):
            optimizer.also_write(param, **own)
        for step in range(4):
            give_gradients(params, step)
            options: dict[str, Any] = {"factor": torch.tensor([0.3], device=place)}
            if capturable:
                options["skip"] = torch.tensor([int(step == 2)], dtype=torch.int32, device=place)
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step(**options)
        found.append(bits(optimizer, params, copies))
        steps = {own["step"] for own in optimizer.state_dict()["state"].values()}
        assert steps == {3 if capturable else 4}
    assert found[0] == found[1]


@pytest.mark.parametrize("kernel", [False, True])
def test_copies_are_casts_of_the_new_weight(
    kernel: bool, device: str, by_kernel: Callable[[bool], None]
) -> None:
    by_kernel(kernel)
    params = parameters("float32", device if kernel else "cpu")
    optimizer = AdamW(params)
    copies = [copies_of(param, kind) for param, kind in zip(params, KINDS, strict=True)]
    for param, own in zip(params, copies, strict=True):
        optimizer.also_write(param, **own)
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    for param, own in zip(params, copies, strict=True):
        visible = to_numpy(param)
        if "weight" in own:
            visible = quantize(visible, BFLOAT16, overflow="ieee")
            assert_bits_equal(own["weight"], visible)
        if "codes" in own:
            assert_bits_equal(own["codes"], quantize(visible, E4M3, scale=3.0))
            assert float(own["amax"]) >= float(amax(visible)), "the larger of the two steps'"
    first = copies[0]
    first["amax"].zero_()
    optimizer.step()
    assert first["amax"].reshape(()).item() == amax(to_numpy(first["weight"]))
    optimizer.also_write(params[0])
    before = to_numpy(first["codes"]).tobytes()
    optimizer.step()
    assert to_numpy(first["codes"]).tobytes() == before, "it was told to write none"


@pytest.mark.parametrize("master", MASTER_FORMATS)
def test_counted_steps_are_the_same_steps(master: str) -> None:
    """Steps on the host and on the device, a save and a load between them, late gradients."""
    found = []
    for capturable in (False, True):
        params = parameters(master, "cpu")
        optimizer = AdamW(params, lr=0.01, master=master, seed=3, capturable=capturable)
        for step in range(2):
            give_gradients(params[: 2 + step], step)
            optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        others = copy.deepcopy(params)
        loaded = AdamW(others, lr=0.01, master=master, seed=3, capturable=capturable)
        loaded.load_state_dict(torch.load(file))
        give_gradients(others, 7)
        loaded.step()
        found.append(bits(loaded, others, []))
        state = loaded.state_dict()["state"]
        assert [state[place]["step"] for place in range(4)] == [3, 3, 2, 1]
    assert found[0] == found[1]


def test_a_skip_leaves_everything(device: str, by_kernel: Callable[[bool], None]) -> None:
    by_kernel(True)
    params = parameters("bfloat16_stochastic", device)
    optimizer = AdamW(params, master="bfloat16_stochastic", capturable=True)
    copies = [copies_of(param, "codes") for param in params]
    for param, own in zip(params, copies, strict=True):
        optimizer.also_write(param, **own)
    give_gradients(params, 0)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    optimizer.step(skip=flag)
    before = bits(optimizer, params, copies)
    give_gradients(params, 1, scale=float("nan"))
    flag.fill_(1)
    optimizer.step(skip=flag)
    assert bits(optimizer, params, copies) == before


def test_what_does_not_fit_is_refused() -> None:
    params = parameters("float32", "cpu")
    optimizer = AdamW(params)
    give_gradients(params, 0)
    before = bits(optimizer, params, [])
    with pytest.raises(
        ValueError, match=r"a skip flag needs steps on the device; build AdamW\(cap"
    ):
        optimizer.step(skip=torch.zeros(1, dtype=torch.int32))
    param = params[0]
    good = copies_of(param, "both")
    optimizer.also_write(params[3], **copies_of(params[3], "codes"))
    bad: list[tuple[Any, str, dict[str, Any]]] = [
        (ValueError, "all three or none", {"scale": None}),
        (TypeError, "weight has dtype torch.float32; accepted: torch.bfloat16", {"weight": param}),
        (TypeError, r"codes has dtype torch.uint8; accepted: torch.float8", {"codes": "uint8"}),
        (ValueError, r"amax has shape \(2,\); accepted: one element", {"amax": torch.zeros(2)}),
        (ValueError, r"weight has shape \(3,\); accepted: the par", {"weight": "short"}),
        (ValueError, "weight is on cpu with strides", {"weight": "strided"}),
        (ValueError, "accepted: one format for all parameters", {"codes": "float8_e5m2"}),
    ]
    made = {
        "uint8": torch.zeros(param.shape, dtype=torch.uint8),
        "float8_e5m2": torch.zeros(param.shape, dtype=torch.float8_e5m2),
        "short": torch.zeros(3, dtype=torch.bfloat16),
        "strided": torch.zeros((15, 20), dtype=torch.bfloat16).T,
    }
    for error, text, changes in bad:
        changed = {k: made[v] if isinstance(v, str) else v for k, v in changes.items()}
        with pytest.raises(error, match=text):
            optimizer.also_write(param, **{**good, **changed})
    with pytest.raises(ValueError, match=r"of shape \(2,\) is no parameter of this optimizer"):
        optimizer.also_write(torch.ones(2))
    half = parameters("bfloat16_remainder", "cpu")
    small = AdamW(half, master="bfloat16_remainder")
    weight = torch.zeros(SHAPES[0], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a weight goes with float32 parameters"):
        small.also_write(half[0], weight=weight)
    assert bits(optimizer, params, []) == before


@pytest.mark.gpu
@pytest.mark.parametrize("master", MASTER_FORMATS)
def test_a_captured_step_is_the_optimizers(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, skip, step and codes in one graph, with a schedule: the bits of steps one by one."""
    from fp8lab.kernels.gradients import GradientPlan

    def machine() -> tuple[AdamW, list[nn.Parameter], list[dict[str, Tensor]], Callable[[], None]]:
        params = parameters(master, "cuda")
        give_gradients(params, 0)
        optimizer = AdamW(
            params,
            lr=0.1,
            exp_avg="e4m3_128",
            exp_avg_sq="e4m3_128_keep",
            master=master,
            capturable=True,
        )
        copies = [copies_of(param, "both") for param in params]
        for param, own in zip(params, copies, strict=True):
            optimizer.also_write(param, **own)
        grads = GradientPlan([param.grad for param in params if param.grad is not None])
        one = torch.ones(1, device="cuda")

        def step() -> None:
            summary = grads.run(inverse_scale=one, max_norm=one)
            optimizer.step(factor=summary.factor, skip=summary.skip)

        return optimizer, params, copies, step

    plain, plain_params, plain_copies, plain_step = machine()
    graphed, params, copies, step = machine()
    plain_step()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for round_ in range(1, 6):
        for optimizer, own in ((plain, plain_params), (graphed, params)):
            give_gradients(own, round_, scale=float("inf") if round_ == 3 else 1.0)
            optimizer.param_groups[0]["lr"] = 0.1 / round_
        plain_step()
        graphed.update_numbers()
        graph.replay()
    torch.cuda.synchronize()
    assert bits(plain, plain_params, plain_copies) == bits(graphed, params, copies)
    assert {own["step"] for own in graphed.state_dict()["state"].values()} == {5}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    graphed.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="call update_numbers"):
        graphed.step()
    graphed.param_groups[0]["lr"] = 0.1 / 5
    params[0].grad = torch.zeros_like(params[0])
    with pytest.raises(RuntimeError, match="the gradients moved since the last step"):
        graphed.step()
