"""The torch optimizer: the oracle's bits, groups, schedules, closures, saved states."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8lab.emulation.adamw_states import AdamState, adamw_state
from fp8lab.emulation.gradients import gradient_norm
from fp8lab.emulation.masters import join_master
from fp8lab.emulation.moments import zero_moment
from fp8lab.emulation.random import random_words
from fp8lab.optimizer import AdamW
from fp8lab.optimizer_formats import MASTER_FORMATS
from fp8lab.testing import assert_bits_equal, to_numpy, to_torch

EIGHT_BIT = {"exp_avg": "e4m3_128_settle", "exp_avg_sq": "e4m3_128_keep"}


def parameters(master: str = "float32", device: str = "cpu") -> list[nn.Parameter]:
    torch.manual_seed(0)
    dtype = torch.float32 if master == "float32" else torch.bfloat16
    shapes = ((20, 15), (7,), (0, 4))
    return [nn.Parameter(torch.randn(s).to(device, dtype)) for s in shapes]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for param in params:
        grad = torch.from_numpy(rng.normal(size=tuple(param.shape)).astype(np.float32))
        param.grad = grad.to(param.device, param.dtype)


def bits(optimizer: AdamW, params: list[nn.Parameter]) -> list[bytes]:
    found = [to_numpy(param).tobytes() for param in params]
    for param in params:
        for name, value in sorted(optimizer.state[param].items()):
            if isinstance(value, Tensor):
                found.append(name.encode() + to_numpy(value).tobytes())
    return found


@pytest.mark.parametrize("master", MASTER_FORMATS)
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "e5m2_256", "e4m3_128_expanded"])
def test_it_is_the_oracle(master: str, moments: str) -> None:
    params = parameters(master)
    optimizer = AdamW(
        params, lr=0.01, order="apex", exp_avg=moments, exp_avg_sq=moments, master=master, seed=5
    )
    remainder = master == "bfloat16_remainder"
    states = [
        AdamState(
            to_numpy(param).copy(),
            zero_moment(tuple(param.shape), moments),
            zero_moment(tuple(param.shape), moments),
            np.zeros(tuple(param.shape), np.int16) if remainder else None,
        )
        for param in params
    ]
    for step in range(1, 4):
        give_gradients(params, step)
        optimizer.step(factor=torch.tensor([0.3]))
        offset = 0
        for place, param in enumerate(params):
            assert param.grad is not None
            words = random_words((5 << 32) + step, tuple(param.shape), offset=offset)
            states[place] = adamw_state(
                states[place],
                to_numpy(param.grad),
                step=step,
                lr=0.01,
                betas=(0.9, 0.999),
                eps=1e-8,
                weight_decay=0.01,
                order="apex",
                grad_factor=0.3,
                random_words=words if master == "bfloat16_stochastic" else None,
            )
            offset += -(-param.numel() // 4)
            assert_bits_equal(param, states[place].param)
            kept = optimizer.state[param]
            assert_bits_equal(kept["exp_avg_sq"], states[place].exp_avg_sq.codes)
            if remainder:
                assert_bits_equal(kept["remainder"], states[place].remainder)


def test_a_remainder_follows_float32_masters() -> None:
    weights, masters = parameters("bfloat16_remainder"), parameters()
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            master.copy_(weight)
    small = AdamW(weights, lr=1e-4, master="bfloat16_remainder")
    full = AdamW(masters, lr=1e-4)
    for step in range(10):
        give_gradients(weights, step)
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        small.step()
        full.step()
    for weight, master in zip(weights, masters, strict=True):
        remainder = small.state[weight]["remainder"]
        assert_bits_equal(join_master(to_numpy(weight), to_numpy(remainder)), master)


@pytest.mark.parametrize("master", MASTER_FORMATS)
@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "float16_scaled", "e4m3_128_expanded"])
def test_a_saved_state_goes_on_bit_for_bit(master: str, fmt: str) -> None:
    formats: dict[str, Any] = {"exp_avg": fmt, "exp_avg_sq": fmt, "master": master}
    params = parameters(master)
    optimizer = AdamW(params, **formats)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = copy.deepcopy(params)
    loaded = AdamW(others, **formats)
    loaded.load_state_dict(torch.load(file))
    assert bits(loaded, others) == bits(optimizer, params)
    for param, other in zip(params, others, strict=True):
        assert loaded.state[other]["step"] == optimizer.state[param]["step"] == 3
    for step in range(3, 5):
        give_gradients(params, step)
        give_gradients(others, step)
        optimizer.step()
        loaded.step()
    assert bits(loaded, others) == bits(optimizer, params)


def test_a_state_of_other_formats_is_refused() -> None:
    params = parameters()
    optimizer = AdamW(params)
    give_gradients(params, 0)
    optimizer.step()
    other = AdamW(copy.deepcopy(params), **EIGHT_BIT)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="build it with the formats that were saved"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_groups_schedules_and_late_gradients() -> None:
    first, second, _ = parameters()
    optimizer = AdamW([{"params": [first], "lr": 0.1}], lr=0.01, weight_decay=0.0)
    optimizer.add_param_group({"params": [second], "weight_decay": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    alone = copy.deepcopy(second)
    reference = AdamW([alone], lr=0.005, weight_decay=0.5)
    give_gradients([first], 0)
    optimizer.step()  # second has no gradient yet: its first step is still to come
    schedule.step()
    give_gradients([first, second], 1)
    alone.grad = second.grad
    optimizer.step()
    reference.step()
    assert optimizer.state[first]["step"] == 2
    assert optimizer.state[second]["step"] == 1
    assert_bits_equal(second, alone)


def test_a_closure_is_called_with_gradients() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([param])

    def closure() -> float:
        optimizer.zero_grad()
        loss = (param * param).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    assert optimizer.step(closure) == 3.0
    assert param.grad is not None
    assert float(param.detach()[0]) < 1


def test_nothing_to_do_is_fine() -> None:
    params = parameters()
    assert AdamW(params).step() is None
    give_gradients(params[2:], 0)
    AdamW(params).step()


def test_unscaled_and_clipped_in_the_step() -> None:
    """pytorch 94060, through the optimizer: divided once."""
    plain, scaled = parameters(), parameters()
    give_gradients(plain, 1)
    give_gradients(scaled, 1)
    for param in scaled:
        assert param.grad is not None
        param.grad *= 65536
    factors = []
    for params, inverse in ((plain, 1.0), (scaled, 1 / 65536)):
        grads = [to_numpy(p.grad) for p in params if p.grad is not None]
        summary = gradient_norm(grads, inverse_scale=inverse, max_norm=1.0)
        factors.append(summary.factor)
        AdamW(params).step(factor=to_torch(np.array([summary.factor])))
    assert factors[0] != factors[1]
    for one, other in zip(plain, scaled, strict=True):
        assert_bits_equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr is -1.0; accepted: a number, finite, at least 0"),
        ({"lr": torch.tensor(0.1)}, r"lr is 0.1.*; accepted: a number"),
        ({"lr": "0.1"}, r"lr is 0.1; accepted: a number"),
        ({"eps": float("nan")}, "eps is nan; accepted"),
        ({"weight_decay": float("inf")}, "weight_decay is inf; accepted"),
        ({"betas": (1.0, 0.9)}, r"beta1 is 1.0; accepted: a number, at least 0 and below 1"),
        ({"betas": (0.9,)}, r"betas is \(0.9,\); accepted: two numbers"),
        ({"betas": 0.9}, r"betas is 0.9; accepted: two numbers"),
        ({"order": "adam"}, "unknown order 'adam'; accepted: plain"),
        ({"exp_avg": "fp8"}, "unknown moment format 'fp8'; accepted: float32"),
        ({"master": "half"}, "unknown master 'half'; accepted: float32"),
        ({"seed": -1}, "seed is -1; accepted: an integer, 0 to"),
        ({"seed": 1.5}, r"seed is 1.5; accepted: an integer, 0 to"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW(parameters(), **options)


def test_bad_parameters_and_gradients_leave_the_state_alone() -> None:
    with pytest.raises(TypeError, match=r"a parameter has dtype torch.bfloat16; accepted with mas"):
        AdamW(parameters("bfloat16_remainder"))
    params = parameters()
    optimizer = AdamW(params)
    give_gradients(params, 0)
    optimizer.step()
    before = bits(optimizer, params)
    with pytest.raises(ValueError, match="lr is -1; accepted"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -1})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"lr is -1.0; accepted"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    params[1].grad = torch.ones(7).to_sparse()
    with pytest.raises(TypeError, match=r"a gradient has layout torch.sparse_coo; accepted: dense"):
        optimizer.step()
    assert bits(optimizer, params) == before
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize(
    ("grad", "given", "error", "message"),
    [
        (torch.ones(7).to_sparse(), {}, TypeError, "a gradient has layout torch.sparse_coo"),
        (torch.ones(7).double(), {}, TypeError, "a gradient has dtype torch.float64; accepted"),
        (None, {"factor": 1.0}, TypeError, r"factor is 1.0; accepted: a tensor of one element"),
        (None, {"factor": torch.ones(2)}, TypeError, r"factor is .* shape \(2,\); accepted: one"),
        (None, {"factor": torch.ones(1).double()}, TypeError, r"factor is torch.float64 .*float32"),
        (None, {"skip": torch.zeros(1)}, (TypeError, ValueError), "skip"),
        (None, {"skip": False}, (TypeError, ValueError), "skip"),
    ],
)
def test_a_refused_step_makes_no_state_and_counts_nothing(
    capturable: bool,
    taken: int,
    grad: Tensor | None,
    given: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    params = parameters()
    optimizer = AdamW(params, capturable=capturable)
    give_gradients(params, 0)
    for _ in range(taken):
        optimizer.step()
    if grad is not None:
        params[1].grad_dtype = None
        params[1].grad = grad
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    with pytest.raises(error, match=message):
        optimizer.step(**given)
    after = optimizer.state_dict()["state"]
    assert len(after) == (3 if taken else 0)
    torch.testing.assert_close((params, after), before, rtol=0, atol=0)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("master", MASTER_FORMATS)
@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_a_copy_goes_on_bit_for_bit(capturable: bool, master: str, way: str) -> None:
    params = parameters(master)
    formats: dict[str, Any] = {**EIGHT_BIT, "master": master}
    optimizer = AdamW(params, seed=3, capturable=capturable, **formats)
    give_gradients(params, 0)
    optimizer.step()
    if way == "deepcopy":
        others, other = copy.deepcopy((params, optimizer))
    else:
        file = io.BytesIO()
        torch.save((params, optimizer), file)
        file.seek(0)
        others, other = torch.load(file, weights_only=False)
    for own, chosen in ((params, optimizer), (others, other)):
        give_gradients(own, 1)
        chosen.step()
        assert chosen.state_dict()["state"][0]["step"] == 2
    assert bits(other, others) == bits(optimizer, params)


def test_a_saved_step_that_cannot_be_is_refused() -> None:
    params = parameters()
    optimizer = AdamW(params)
    give_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["step"] = -1
    before = bits(optimizer, params)
    with pytest.raises(ValueError, match="the saved step is -1; accepted: an integer, 0 and up"):
        optimizer.load_state_dict(saved)
    assert bits(optimizer, params) == before


def test_numbers_of_numpy_count_as_the_floats_they_are() -> None:
    one, other = parameters(), parameters()
    lr: Any = np.float32(0.1)
    decay: Any = np.float32(0.3)
    for params, numbers in ((one, (lr, decay)), (other, (float(lr), float(decay)))):
        give_gradients(params, 1)
        AdamW(params, lr=numbers[0], weight_decay=numbers[1]).step()
    for param, same in zip(one, other, strict=True):
        assert_bits_equal(param, same)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fmt", "master", "order"),
    [
        ("float32", "float32", "plain"),
        ("e4m3_128_expanded", "bfloat16_stochastic", "apex"),
        ("e5m2_tensor", "bfloat16_remainder", "torch"),
    ],
)
def test_the_card_gives_the_bits_of_the_cpu(fmt: str, master: str, order: str) -> None:
    options: dict[str, Any] = {"exp_avg": fmt, "exp_avg_sq": fmt, "master": master, "order": order}
    here, there = parameters(master), parameters(master, "cuda")
    on_cpu, on_card = AdamW(here, **options), AdamW(there, **options)
    for step in range(3):
        for params, optimizer in ((here, on_cpu), (there, on_card)):
            optimizer.zero_grad(set_to_none=True)
            give_gradients(params, step)
            optimizer.step()
    assert bits(on_cpu, here) == bits(on_card, there)
