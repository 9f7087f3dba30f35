"""Each order against a slow scalar form in exact fractions, and against torch itself."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation.adamw import adamw
from fp8lab.emulation.adamw_orders import step_constants
from fp8lab.optimizer_formats import ORDERS, AdamOrder, order_named
from fp8lab.testing import AdamWCase, adamw_states, assert_bits_equal, to_numpy

CAPABLE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
MEASURED_TORCH = pytest.mark.skipif(
    not CAPABLE,
    reason="torch's CPU kernels fuse under AVX2 and AVX-512; this one runs"
    f" {torch.backends.cpu.get_cpu_capability()}",
)


def r(exact: Any) -> np.float32:
    """A fraction or float to float32. Fractions go through float64 made odd: one rounding."""
    if not isinstance(exact, Fraction):
        with np.errstate(all="ignore"):
            return np.float32(exact)
    close = float(exact) if abs(exact) < Fraction(2) ** 1000 else np.inf
    if close and np.isfinite(close) and Fraction(close) != exact:
        word = np.float64(close).view(np.int64)
        if word % 2 == 0:
            word += 1 if (Fraction(close) < exact) == (close > 0) else -1
        close = float(word.view(np.float64))
    with np.errstate(all="ignore"):
        return np.float32(close)


def fused(a: Any, b: Any, c: Any) -> np.float32:
    """a*b + c in fractions, rounded once; special values and signed zeros by IEEE rules."""
    a, b, c = np.float64(a), np.float64(b), np.float64(c)
    with np.errstate(all="ignore"):
        plain = a * b + c
    if not np.isfinite([a, b, c]).all() or plain == 0:
        return np.float32(plain)
    return r(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def one_element(
    row: tuple[Any, ...], case: AdamWCase, order: AdamOrder, decoupled: bool, place: int
) -> tuple[np.float32, np.float32, np.float32]:
    """The contract of `AdamOrder`, written once more, one rounded operation after another."""
    p, g, m0, v0 = row
    k = step_constants(order, decoupled=decoupled, **case.options)
    b1, w1, b2, w2 = k.beta1, k.weight1, k.beta2, k.weight2
    still = order.skips_zero_decay and k.decay == 0
    if not decoupled and not still:
        turn = place if case.param.size % 4 == 0 else place // 512
        plain = order.l2 == "rounded" or (order.l2 == "first_rounded" and turn % 4 == 0)
        g = g + k.decay * p if plain else fused(k.decay, p, g)
    if decoupled and order.decay == "multiply":
        p = p * k.decay
    elif decoupled and order.decay == "subtract" and not still:
        p = p - k.decay * p
    elif decoupled and order.decay == "subtract_fused" and not still:
        p = fused(-k.decay, p, p)
    first: dict[str, Callable[[], Any]] = {
        "weighted": lambda: b1 * m0 + w1 * g,
        "decay_fused": lambda: fused(b1, m0, w1 * g),
        "nested_fused": lambda: fused(b1, m0, fused(-b1, g, g)),
        "lerp_fused": lambda: (
            fused(w1, g - m0, m0) if w1 < 0.5 else fused(w1 - np.float32(1), g - m0, g)
        ),
    }
    m = first[order.first_moment]()
    second: dict[str, Callable[[], Any]] = {
        "square": lambda: b2 * v0 + w2 * (g * g),
        "weight_fused": lambda: fused(w2 * g, g, b2 * v0),
        "decay_fused": lambda: fused(b2, v0, (w2 * g) * g),
        "square_fused": lambda: fused(w2, g * g, b2 * v0),
        "nested_fused": lambda: fused(b2, v0, fused(-b2, g * g, g * g)),
    }
    last = place >= case.param.size // 8 * 8
    v = second[(order.tail if last else None) or order.second_moment]()
    if order.denominator == "corrected_square":
        d = np.sqrt(v / k.correction2) + k.eps
    else:
        d = np.sqrt(v) / k.correction2 + k.eps
    if order.update == "moment":
        p = p - k.lr * ((m / k.correction1) / d)
    elif order.update == "step_size":
        p = p - (k.correction1 * m) / d
    elif order.update == "step_size_fused":
        p = fused(-k.correction1, m / d, p)
    else:
        u = (m / k.correction1) / d
        p = fused(-k.lr, fused(k.decay, p, u) if decoupled else u, p)
    return p, m, v


@given(
    case=adamw_states(sizes=st.integers(0, 40)),
    name=st.sampled_from(sorted(ORDERS)),
    decoupled=st.booleans(),
)
@settings(max_examples=120)
def test_each_order_rounds_as_it_says(case: AdamWCase, name: str, decoupled: bool) -> None:
    order = ORDERS[name]
    found = adamw(*case.tensors, order=name, decoupled=decoupled, **case.options)
    with np.errstate(all="ignore"):
        rows = [
            one_element(row, case, order, decoupled, place)
            for place, row in enumerate(zip(*case.tensors, strict=True))
        ]
    for place, tensor in enumerate(found):
        assert_bits_equal(tensor, np.array([row[place] for row in rows], np.float32))


@MEASURED_TORCH
@pytest.mark.parametrize("size", [4096, 1003, 7])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.95), (0.0, 0.0)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("torch", {"fused": True}),
        ("torch_foreach", {"foreach": True}),
        ("torch_foreach", {"foreach": False}),
    ],
)
@pytest.mark.parametrize("decoupled", [True, False])
def test_equals_torch_on_the_cpu_over_20_steps(
    size: int,
    betas: tuple[float, float],
    weight_decay: float,
    order: str,
    options: dict[str, bool],
    decoupled: bool,
) -> None:
    rng = np.random.default_rng(size)
    state = [rng.normal(size=size).astype(np.float32), *np.zeros((2, size), np.float32)]
    param = torch.nn.Parameter(torch.from_numpy(state[0].copy()))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind([param], lr=1e-3, betas=betas, weight_decay=weight_decay, **options)
    comparable = np.zeros((20, size), bool)
    for step in range(1, 21):
        grad = (rng.normal(size=size) * 10.0 ** rng.integers(-6, 1)).astype(np.float32)
        param.grad = torch.from_numpy(grad.copy())
        theirs.step()
        wanted, exp_avg, exp_avg_sq = adamw(
            state[0],
            grad,
            state[1],
            state[2],
            step=step,
            lr=1e-3,
            betas=betas,
            eps=1e-8,
            weight_decay=weight_decay,
            order=order,
            decoupled=decoupled,
        )
        moments = theirs.state[param]
        assert_bits_equal(to_numpy(moments["exp_avg"]), exp_avg)
        assert_bits_equal(to_numpy(moments["exp_avg_sq"]), exp_avg_sq)
        same = np.ones(size, bool)
        if "foreach" in options:
            # torch.sqrt is MKL's on a CPU and not always the nearest, which depends on the machine.
            same = to_numpy(moments["exp_avg_sq"].sqrt()) == np.sqrt(exp_avg_sq)
        comparable[step - 1] = same
        found = to_numpy(param).copy()
        assert_bits_equal(found[same], wanted[same])
        state = [found, exp_avg, exp_avg_sq]  # the next step starts where torch's does
    assert comparable.mean() > (0.5 if "foreach" in options else 0.999)


def test_torchs_tail_is_the_last_n_mod_8() -> None:
    """The body's rule and the tail's differ for these values, so the place of the seam is seen."""
    rng = np.random.default_rng(3)
    tensors = [rng.normal(size=4096).astype(np.float32) for _ in range(3)]
    tensors.append(np.abs(rng.normal(size=4096)).astype(np.float32))
    options: dict[str, Any] = {
        "step": 5,
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "order": "torch",
    }
    whole = adamw(*tensors, **options)[2]
    for cut in (4095, 4089):
        shorter = adamw(*(tensor[:cut] for tensor in tensors), **options)[2]
        assert_bits_equal(shorter[:4088], whole[:4088])
    alone = np.concatenate(
        [adamw(*(t[i : i + 1] for t in tensors), **options)[2] for i in range(64)]
    )
    assert (alone != whole[:64]).any()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_gradients_are_widened(dtype: Any) -> None:
    grad = np.array([1.5, -(2.0**-14), 0.0, 3.0], dtype)
    one = np.ones(4, np.float32)
    options: dict[str, Any] = {
        "step": 1,
        "lr": 1e-3,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    for found, want in zip(
        adamw(one, grad, one, one, **options),
        adamw(one, grad.astype(np.float32), one, one, **options),
        strict=True,
    ):
        assert_bits_equal(found, want)


def test_orders_give_different_bits() -> None:
    """Else naming them would be idle."""
    rng = np.random.default_rng(0)
    tensors = [rng.normal(size=10_000).astype(np.float32) for _ in range(3)]
    tensors.append(np.abs(rng.normal(size=10_000)).astype(np.float32))
    params = {
        name: adamw(
            *tensors,
            step=100,
            lr=1e-3,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.1,
            order=name,
        )[0].tobytes()
        for name in ORDERS
    }
    # They differ from "torch" in the tail alone, and 10,000 is a multiple of 8.
    assert params["torch"] == params["torch_foreach"]
    assert len(set(params.values())) == len(ORDERS) - 1


def test_a_zero_decay_is_skipped_where_the_stack_skips_it() -> None:
    inf = np.full(1, np.inf, np.float32)
    zero = np.zeros(1, np.float32)
    for name, order in ORDERS.items():
        p, _, _ = adamw(
            inf,
            zero,
            zero,
            zero,
            step=1,
            lr=1e-3,
            betas=(0.9, 0.99),
            eps=1e-8,
            weight_decay=0.0,
            order=name,
        )
        assert np.isnan(p[0]) != order.skips_zero_decay


def test_an_order_is_accepted_as_itself_and_the_powers_are_a_choice() -> None:
    order = order_named("torch_cuda")
    assert order_named(order) is order
    options: dict[str, Any] = {
        "step": 2,
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    made = step_constants(order, **options)
    given_ones = step_constants(order, powers=(0.81, float(np.float32(0.999) ** 2)), **options)
    assert made.correction1 != 0
    assert given_ones.correction1 == np.float32(1e-3) / (np.float32(1) - np.float32(0.81))
