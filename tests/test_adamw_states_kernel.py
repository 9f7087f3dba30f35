"""The AdamW kernel on stored states against the oracle, bit for bit, many tensors a launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation import adamw as oracle
from fp8lab.emulation.adamw_states import AdamState, adamw_state
from fp8lab.emulation.amax import amax
from fp8lab.emulation.casting import quantize
from fp8lab.emulation.masters import split_master
from fp8lab.emulation.moments import StoredMoment, store_moment, zero_moment
from fp8lab.emulation.random import random_words as philox_words
from fp8lab.formats import BFLOAT16, E4M3, E5M2, Float8Format
from fp8lab.kernels.adamw import step_constants
from fp8lab.kernels.adamw_plan import AdamPlan
from fp8lab.kernels.adamw_settings import AdamSettings
from fp8lab.kernels.adamw_tensors import AdamTensors, MomentTensors, empty_moment
from fp8lab.optimizer_formats import MASTER_FORMATS, MOMENT_FORMATS, ORDERS
from fp8lab.testing import (
    AdamWCase,
    adamw_states,
    assert_bits_equal,
    ragged_sizes,
    to_numpy,
    to_torch,
)
from fp8lab.testing.values import random_words, wide_floats

BLOCK = 256
SMALL = AdamSettings(block=BLOCK, num_warps=1)
SEED = -(2**40) - 3
GRADS = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16))
OPTIONS: dict[str, Any] = {
    "step": 3,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
}


@dataclass(frozen=True)
class Formats:
    """What a plan keeps and computes."""

    order: str = "plain"
    exp_avg: str = "float32"
    exp_avg_sq: str = "float32"
    master: str = "float32"
    decoupled: bool = True
    weight: bool = False
    codes: Float8Format | None = None


def state_of(case: AdamWCase, formats: Formats) -> AdamState:
    """The case, stored in those formats."""
    with np.errstate(all="ignore"):
        exp_avg = store_moment(case.exp_avg, formats.exp_avg, grad=case.grad)
        exp_avg_sq = store_moment(case.exp_avg_sq, formats.exp_avg_sq, grad=case.grad)
        if formats.master == "float32":
            return AdamState(case.param, exp_avg, exp_avg_sq)
        weight, remainder = split_master(case.param)
        kept = remainder if formats.master == "bfloat16_remainder" else None
        return AdamState(weight, exp_avg, exp_avg_sq, kept)


def on_device(array: Any, device: str) -> torch.Tensor:
    return to_torch(np.array(array), device=device)


def tensors_of(
    state: AdamState, grad: Any, formats: Formats, device: str, offset: int
) -> AdamTensors:
    """The state as tensors of their own."""

    def moment(stored: StoredMoment) -> MomentTensors:
        parts = (stored.codes, stored.scale, stored.power)
        codes, scale, power = (None if p is None else on_device(p, device) for p in parts)
        assert codes is not None
        return MomentTensors(codes, scale, power)

    param = on_device(state.param, device)
    remainder = None if state.remainder is None else on_device(state.remainder, device)
    weight = torch.empty_like(param, dtype=torch.bfloat16) if formats.weight else None
    extra: dict[str, Any] = {}
    if formats.codes is not None:
        extra = {
            "codes": torch.empty_like(param, dtype=getattr(torch, formats.codes.dtype_name)),
            "codes_scale": torch.tensor([3.0], device=device),
            "codes_amax": torch.zeros(1, device=device),
        }
    return AdamTensors(
        param,
        on_device(grad, device),
        moment(state.exp_avg),
        moment(state.exp_avg_sq),
        remainder,
        weight,
        random_offset=offset,
        **extra,
    )


def check(
    cases: list[AdamWCase],
    formats: Formats,
    device: str,
    *,
    grad_dtype: Any = np.float32,
    factor: float | None = None,
    skip: bool = False,
    launch_settings: AdamSettings = SMALL,
    hardware: bool | None = None,
    steps: int = 1,
) -> None:
    """All that the kernel writes is the oracle's, for every tensor, after every step."""
    with np.errstate(all="ignore"):
        grads = [case.grad.astype(grad_dtype) for case in cases]
    states = [state_of(case, formats) for case in cases]
    offsets = [int(o) for o in np.cumsum([0] + [-(-c.param.size // 4) for c in cases[:-1]])]
    tensors = [
        tensors_of(state, grad, formats, device, offset)
        for state, grad, offset in zip(states, grads, offsets, strict=True)
    ]
    plan = AdamPlan(
        tensors,
        formats.order,
        formats.decoupled,
        formats.exp_avg,
        formats.exp_avg_sq,
        formats.master,
        formats.codes,
        launch_settings,
        hardware,
    )
    flags: dict[str, Any] = {
        "factor": None if factor is None else torch.tensor([factor], device=device),
        "skip": torch.tensor([int(skip)], dtype=torch.int32, device=device),
        "seed": torch.tensor([SEED], dtype=torch.int64, device=device),
    }
    options = dict(cases[0].options)
    for _ in range(steps):
        constants = step_constants(ORDERS[formats.order], decoupled=formats.decoupled, **options)
        plan.launch(constants.to(device), **flags)
        for place, grad in enumerate(grads):
            words = philox_words(SEED, grad.shape, offset=offsets[place])
            states[place] = adamw_state(
                states[place],
                grad,
                order=formats.order,
                decoupled=formats.decoupled,
                grad_factor=None if factor is None else np.float32(factor),
                skip=skip,
                random_words=words if formats.master == "bfloat16_stochastic" else None,
                **options,
            )
            compare(tensors[place], states[place], cases[place], formats, skip)
        options["step"] += 1


def compare(
    tensors: AdamTensors, state: AdamState, case: AdamWCase, formats: Formats, skip: bool
) -> None:
    pairs: dict[str, tuple[Any, Any]] = {
        "param": (tensors.param, state.param),
        "remainder": (tensors.remainder, state.remainder),
    }
    for name in ("exp_avg", "exp_avg_sq"):
        found, expected = getattr(tensors, name), getattr(state, name)
        for part in ("codes", "scale", "power"):
            pairs[f"{name}.{part}"] = getattr(found, part), getattr(expected, part)
    inputs = dict(zip(("param", "grad", "exp_avg", "exp_avg_sq"), case.tensors, strict=True))
    visible = state.param
    if formats.weight and not skip:
        visible = quantize(state.param, BFLOAT16, overflow="ieee")
        pairs["weight"] = tensors.weight, visible
    if formats.codes is not None and not skip:
        pairs["codes"] = tensors.codes, quantize(visible, formats.codes, scale=3.0)
    for name, (found, expected) in pairs.items():
        assert (found is None) == (expected is None), name
        if found is None:
            continue
        try:
            shown = inputs if expected.shape == case.param.shape else None
            assert_bits_equal(found, expected, inputs=shown)
        except AssertionError as error:
            raise AssertionError(f"{name}, {formats}: {error}") from None


FORMATS = st.builds(
    Formats,
    order=st.sampled_from(sorted(ORDERS)),
    exp_avg=st.sampled_from(sorted(MOMENT_FORMATS)),
    exp_avg_sq=st.sampled_from(sorted(MOMENT_FORMATS)),
    master=st.sampled_from(MASTER_FORMATS),
    decoupled=st.booleans(),
    codes=st.sampled_from([None, E4M3, E5M2]),
)


@settings(max_examples=40)
@given(data=st.data())
def test_every_format_equals_the_oracle(data: st.DataObject, device: str) -> None:
    formats = data.draw(FORMATS, label="formats")
    if formats.master == "float32":
        formats = replace(formats, weight=data.draw(st.booleans(), label="weight"))
    case = data.draw(adamw_states(sizes=ragged_sizes(BLOCK)), label="case")
    other = data.draw(adamw_states(sizes=st.integers(0, 40)), label="other")
    other = replace(other, **case.options)
    check(
        [other, case],
        formats,
        device,
        grad_dtype=data.draw(st.sampled_from(GRADS), label="grad"),
        factor=data.draw(st.sampled_from([None, 1.0, 2.0**-16, 0.3]), label="factor"),
        skip=data.draw(st.sampled_from([False, False, False, True]), label="skip"),
    )


def ordinary(size: int, seed: int = 0) -> AdamWCase:
    words = [random_words(seed + place, size)[:, 1] for place in range(4)]
    low = ((-10, 1), (-20, -4), (-22, -6), (-44, -12))
    tensors = [wide_floats(w, *span) for w, span in zip(words, low, strict=True)]
    tensors[1][::5] = 0
    return AdamWCase(tensors[0], tensors[1], tensors[2], np.abs(tensors[3]), **OPTIONS)


@pytest.mark.parametrize("fmt", sorted(MOMENT_FORMATS))
def test_every_moment_format_over_steps(fmt: str, device: str) -> None:
    formats = Formats(exp_avg=fmt, exp_avg_sq=fmt, master="bfloat16_remainder")
    check([ordinary(300), ordinary(0), ordinary(256, 9)], formats, device, steps=2)


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_order_over_steps(order: str, decoupled: bool, device: str) -> None:
    check([ordinary(261), ordinary(37, 5)], Formats(order, decoupled=decoupled), device, steps=2)


def test_l2_knows_the_place_of_an_element(device: str) -> None:
    """torch_cuda treats one in four apart: neighbours of 260, stretches of 512 of 2600 + 1."""
    formats = Formats("torch_cuda", decoupled=False)
    check([ordinary(260, 3), ordinary(2601, 7)], formats, device, steps=2)


def test_views_that_are_not_aligned(device: str) -> None:
    case = ordinary(300)
    whole = [torch.zeros(301, device=device) for _ in range(4)]
    views = [tensor[1:] for tensor in whole]
    for view, array in zip(views, case.tensors, strict=True):
        view.copy_(to_torch(array, device=device))
    param, grad, exp_avg, exp_avg_sq = views
    tensors = AdamTensors(param, grad, MomentTensors(exp_avg), MomentTensors(exp_avg_sq))
    constants = step_constants(ORDERS["plain"], **OPTIONS).to(device)
    AdamPlan([tensors], settings=SMALL).launch(constants)
    for found, want in zip(
        (param, exp_avg, exp_avg_sq), oracle.adamw(*case.tensors, **OPTIONS), strict=True
    ):
        assert_bits_equal(found, want)
    assert all(float(tensor[0]) == 0 for tensor in whole)


def test_fresh_moments_are_the_oracles(device: str) -> None:
    param = torch.zeros(300, device=device)
    for fmt in sorted(MOMENT_FORMATS):
        found, want = empty_moment(param, fmt), zero_moment((300,), fmt)
        for part in ("codes", "scale", "power"):
            if getattr(want, part) is None:
                assert getattr(found, part) is None
            else:
                assert_bits_equal(getattr(found, part), getattr(want, part))


def test_codes_come_with_the_amax_of_the_weight(device: str) -> None:
    case = ordinary(300)
    formats = Formats(codes=E4M3, weight=True)
    tensors = tensors_of(state_of(case, formats), case.grad, formats, device, 0)
    plan = AdamPlan([tensors], codes=E4M3, settings=SMALL)
    plan.launch(step_constants(ORDERS["plain"], **OPTIONS).to(device))
    assert tensors.weight is not None
    assert tensors.codes_amax is not None
    assert_bits_equal(tensors.codes_amax.reshape(()), amax(to_numpy(tensors.weight)))


LARGE = (1 << 18) + 5


def wide(size: int) -> AdamWCase:
    """Every tensor over the exponents from -140 to 20."""
    words = [random_words(place, size)[:, 1] for place in range(4)]
    tensors = [wide_floats(w, -140, 20) for w in words]
    return AdamWCase(tensors[0], tensors[1], tensors[2], np.abs(tensors[3]), **OPTIONS)


@pytest.mark.gpu
@pytest.mark.parametrize("place", range(len(MOMENT_FORMATS)))
def test_every_moment_format_on_the_card(place: int) -> None:
    """With the card's conversions and without, over two steps; the masters take turns."""
    fmt = sorted(MOMENT_FORMATS)[place]
    master = MASTER_FORMATS[place % len(MASTER_FORMATS)]
    for hardware in (True, False):
        check(
            [ordinary(LARGE), wide(LARGE), ordinary(3)],
            Formats(exp_avg=fmt, exp_avg_sq=fmt, master=master, codes=E4M3),
            "cuda",
            grad_dtype=ml_dtypes.bfloat16,
            factor=0.3,
            launch_settings=AdamSettings(2048, 8),
            hardware=hardware,
            steps=2,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("order", sorted(ORDERS))
def test_every_order_on_the_card(order: str, decoupled: bool) -> None:
    for hardware in (True, False):
        check(
            [ordinary(LARGE), wide(LARGE)],
            Formats(order, decoupled=decoupled, weight=True, codes=E5M2),
            "cuda",
            grad_dtype=np.float16,
            launch_settings=AdamSettings(),
            hardware=hardware,
            steps=2,
        )


@pytest.mark.gpu
def test_a_tensor_of_more_than_2_to_the_31_elements() -> None:
    size, tail = (1 << 31) + 2048, 4096
    if torch.cuda.mem_get_info()[0] < 10 * size:
        pytest.skip("needs 22 GB of free memory on the card")
    case = ordinary(tail)
    formats = Formats(exp_avg="e4m3_128", exp_avg_sq="e4m3_128", master="bfloat16_remainder")
    state = state_of(case, formats)
    small = tensors_of(state, case.grad.astype(ml_dtypes.bfloat16), formats, "cuda", 0)
    param, grad, remainder = (
        torch.zeros(size, dtype=dtype, device="cuda")
        for dtype in (torch.bfloat16, torch.bfloat16, torch.int16)
    )
    first, second = (empty_moment(param, "e4m3_128") for _ in range(2))
    big = AdamTensors(param, grad, first, second, remainder)
    pairs = [
        (param, small.param),
        (grad, small.grad),
        (remainder, small.remainder),
        (first.codes, small.exp_avg.codes),
        (first.scale, small.exp_avg.scale),
        (second.codes, small.exp_avg_sq.codes),
        (second.scale, small.exp_avg_sq.scale),
    ]
    for whole, part in pairs:
        assert whole is not None
        assert part is not None
        whole.view(torch.uint8)[-part.numel() * part.element_size() :].copy_(part.view(torch.uint8))
    plan = AdamPlan([big], exp_avg="e4m3_128", exp_avg_sq="e4m3_128", master="bfloat16_remainder")
    plan.launch(step_constants(ORDERS["plain"], **OPTIONS).cuda())
    want = adamw_state(state, case.grad.astype(ml_dtypes.bfloat16), **OPTIONS)
    assert_bits_equal(param[-tail:], want.param)
    assert want.remainder is not None
    assert_bits_equal(remainder[-tail:], want.remainder)
    assert_bits_equal(second.codes[-tail:], want.exp_avg_sq.codes)
    assert not param[:-tail].any()
