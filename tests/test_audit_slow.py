"""The slow forms that the audit holds the oracle to, against the oracle, over what breaks casts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fp8lab import audit_slow as slow
from fp8lab import audit_slow_adamw as slow_adamw
from fp8lab import audit_slow_moments as slow_moments
from fp8lab.audit_product import in_any_order
from fp8lab.audit_sampling import Sampler
from fp8lab.emulation import casting, scaling
from fp8lab.emulation.adamw_states import AdamState, adamw_state
from fp8lab.emulation.gradients import gradient_norm
from fp8lab.emulation.masters import join_master, round_master, split_master
from fp8lab.emulation.matmul import matmul
from fp8lab.emulation.moments import StoredMoment, read_moment, store_moment
from fp8lab.emulation.random import random_words as philox_words
from fp8lab.formats import E4M3, E5M2, E8M0, Float8Format
from fp8lab.optimizer_formats import MOMENT_FORMATS, ORDERS
from fp8lab.testing import assert_bits_equal, special_values
from fp8lab.testing.values import random_words, wide_floats

Array = np.ndarray[Any, Any]
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def f32(numbers: Any) -> Array:
    return np.asarray(numbers, np.float32)


def values(seed: int, size: int, low: int = -149, high: int = 127) -> Array:
    found = wide_floats(random_words(seed, size)[:, 1], low, high)
    return np.concatenate([found, special_values()]).astype(np.float32)


@FORMATS
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-127, 1e30])
def test_casts(fmt: Float8Format, scale: float) -> None:
    x = values(1, 300)
    found = slow.codes(x, fmt, [float(np.float32(scale))] * len(x))
    assert_bits_equal(found, casting.quantize(x, fmt, scale=np.float32(scale)))
    inverse = np.abs(x[: len(found)])
    assert_bits_equal(
        slow.decoded(found, slow.floats(inverse)), casting.dequantize(found, inverse_scale=inverse)
    )


@FORMATS
def test_scales(fmt: Float8Format) -> None:
    amaxes = np.abs(values(2, 300))
    wide = slow.floats(amaxes)
    for power in (False, True):
        for margin in (0, 3, 64):
            found = [slow.scale_from(v, fmt, margin=margin, power_of_two=power) for v in wide]
            wanted = scaling.scale_from_amax(amaxes, fmt, margin=margin, power_of_two=power)
            assert_bits_equal(f32(found), wanted)
        found = [slow.torchao_scale(v, fmt, power_of_two=power) for v in wide]
        wanted = scaling.current_scale(amaxes, fmt, preset="torchao", power_of_two=power)
        usable = np.isfinite(wanted) & (wanted > 0)
        assert_bits_equal(f32(found), np.where(usable, wanted, np.float32(1)))
    for rounding in scaling.MX_ROUNDINGS:
        codes = [slow.mx_code(v, fmt, rounding) for v in wide]
        assert codes == scaling.mx_scale(amaxes, fmt, rounding=rounding).view(np.uint8).tolist()
    assert_bits_equal(
        f32([slow.mx_value(code) for code in range(256)]),
        casting.dequantize(np.arange(256, dtype=np.uint8).view(E8M0.dtype)),
    )


@pytest.mark.parametrize("last", [0.0, 3.0, np.inf, np.nan])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("group", [None, 0.5])
def test_updates(last: float, length: int, algorithm: str, group: float | None) -> None:
    history = f32([last, 7.0, 0.0, 2.0, 1.0][:length])
    state = scaling.DelayedScalingState(np.array(3.0, np.float32), history)
    options: dict[str, Any] = {"margin": 1, "algorithm": algorithm, "power_of_two": False}
    new = scaling.update_delayed(state, E4M3, group_amax=group, **options)
    scale, rolled = slow.update(3.0, history.tolist(), E4M3, group_amax=group, **options)
    assert_bits_equal(np.float32(scale), new.scale)
    assert_bits_equal(f32(rolled), new.amax_history)


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        ((), ()),
        ((3, 1), (4, 1)),
        ((3, 2), (4, 2)),
        ((3, 2), (1, 2)),
        ((3, 5), (4, 5)),
    ],
)
@pytest.mark.parametrize("promote", [None, 128])
def test_products(shape_a: tuple[int, ...], shape_b: tuple[int, ...], promote: int | None) -> None:
    if promote and shape_a == (3, 5):
        promote = 32
    (m, n), k = (3, 4), 150
    a = values(3, m * k, -8, 8)[: m * k].reshape(m, k).astype(E4M3.dtype)
    b = values(4, n * k, -8, 8)[: n * k].reshape(n, k).astype(E5M2.dtype)
    inverse_a, inverse_b = (
        np.random.default_rng(seed).uniform(0.5, 2, shape).astype(np.float32)
        for seed, shape in enumerate((shape_a, shape_b))
    )
    wanted = matmul(
        a, b.T, promote_every=promote, inverse_scale_a=inverse_a, inverse_scale_b=inverse_b.T
    )
    first, second = slow.Scales(inverse_a, m, k), slow.Scales(inverse_b, n, k)
    found = [
        [slow.product_element(a[i], b[j], (first, i), (second, j), promote) for j in range(n)]
        for i in range(m)
    ]
    assert_bits_equal(f32(found), wanted)


@pytest.mark.parametrize("max_norm", [None, 1.0, 0.0])
@pytest.mark.parametrize("unscale", [1.0, 0.7, 2.0**-16])
def test_norms(max_norm: float | None, unscale: float) -> None:
    grads: list[list[Array]] = [
        [values(5, 500), f32([1, 2])],
        [values(6, 20000, -30, 4)[:20000].astype(ml_dtypes.bfloat16)],
        [np.zeros(3, np.float32)],
        [f32([1e30] * 4)],
    ]
    for some in grads:
        wanted = gradient_norm(some, inverse_scale=unscale, max_norm=max_norm)
        norm, skip, factor = slow.norm(some, float(np.float32(unscale)), max_norm)
        assert_bits_equal(f32([norm, factor]), f32([wanted.norm, wanted.factor]))
        assert skip == (not wanted.finite)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("size", [520, 603])
def test_steps(name: str, decoupled: bool, size: int) -> None:
    numbers = slow_adamw.Numbers(7, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    p, g, m = (values(seed, size, -20, 0)[:size] for seed in (7, 8, 9))
    v = np.square(m)
    plain = MOMENT_FORMATS["float32"]
    new = adamw_state(
        AdamState(p, StoredMoment(plain, m), StoredMoment(plain, v)),
        g,
        order=name,
        decoupled=decoupled,
        **vars(numbers),
    )
    found = slow_adamw.new_values(
        ORDERS[name],
        decoupled,
        numbers,
        p.astype(np.float64),
        g.astype(np.float64),
        m.astype(np.float64),
        v.astype(np.float64),
        np.arange(size),
        size,
    )
    wanted = (new.param, new.exp_avg.codes, new.exp_avg_sq.codes)
    for one, two in zip(found, wanted, strict=True):
        assert_bits_equal(one.astype(np.float32), two)


@pytest.mark.parametrize("name", MOMENT_FORMATS)
def test_moments(name: str) -> None:
    fmt = MOMENT_FORMATS[name]
    moment = values(10, 300, -60, 4)[:300]
    moment[::9], moment[5], moment[200] = 0, np.nan, np.inf
    grad = np.where(np.arange(300) % 4 == 0, 0, moment).astype(np.float32)
    stored = store_moment(moment, fmt, grad=grad)
    codes, scale, power = slow_moments.store(
        fmt, moment.astype(np.float64), grad.astype(np.float64), range(300)
    )
    assert_bits_equal(codes, stored.codes)
    for one, two in ((scale, stored.scale), (power, stored.power)):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert_bits_equal(one, two)
    read = slow_moments.read(fmt, stored.codes, stored.scale, stored.power)
    assert_bits_equal(read.astype(np.float32), read_moment(stored))


def test_masters() -> None:
    x = values(11, 300)
    weight, remainder = split_master(x)
    with np.errstate(invalid="ignore"):
        found = slow_adamw.split(x.astype(np.float64))
    assert_bits_equal(found[0], weight)
    assert_bits_equal(found[1], remainder)
    assert_bits_equal(
        slow_adamw.join(weight, remainder).astype(np.float32), join_master(weight, remainder)
    )
    words = philox_words(5, len(x), offset=9)
    assert [slow_adamw.random_word(5, 36 + i) for i in range(len(x))] == words.tolist()
    rounded = slow_adamw.round_stochastically(slow.floats(x), words.tolist())
    assert_bits_equal(rounded, round_master(x, words))


@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 3), (64, 16), (100, 7), (5, 9)])
def test_every_element_is_drawn_once_in_a_period(size: int, count: int) -> None:
    sampler = Sampler(3)
    for _ in range(3):
        seen: list[int] = []
        period = 1
        while len(seen) < size:
            places, period = sampler.elements("x", size, count)
            assert len(places) <= count
            seen += places.tolist()
        assert sorted(seen) == list(range(size))
    assert period == max(1, -(-size // count))


def test_every_crossing_is_drawn_once_in_a_period() -> None:
    sampler, seen = Sampler(0), np.zeros((13, 9), int)
    draws = [sampler.grid("y", seen.shape, (4, 2)) for _ in range(20)]
    assert {draw.period for draw in draws} == {20}
    for draw in draws:
        seen[np.ix_(draw.rows, draw.columns)] += 1
    assert (seen == 1).all()


def test_draws_follow_from_seed_and_name() -> None:
    def first(seed: int, name: str) -> list[int]:
        places: list[int] = Sampler(seed).elements(name, 1000, 10)[0].tolist()
        return places

    assert first(1, "a") == first(1, "a")
    assert len({tuple(first(seed, name)) for seed in (1, 2) for name in "ab"}) == 4


def test_which_sums_no_order_changes() -> None:
    ones = np.ones((1, 64), np.float32)
    mixed = ones.copy()
    mixed[0, 0] = 2.0**-7
    assert in_any_order(ones.astype(E4M3.dtype), ones.astype(E4M3.dtype)).all()
    assert in_any_order(mixed.astype(E4M3.dtype), ones.astype(E4M3.dtype)).all()
    assert not in_any_order(mixed.astype(E4M3.dtype), mixed.astype(E4M3.dtype)).any()
    assert in_any_order((0 * ones).astype(E4M3.dtype), ones.astype(E4M3.dtype)).all()
