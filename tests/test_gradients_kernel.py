"""The gradient kernels against the oracle, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation import gradients as oracle
from fp8lab.kernels.gradients import GradientSettings, gradient_norm
from fp8lab.testing import assert_bits_equal, compiled_ptx, run_kernel, to_torch
from fp8lab.testing.values import random_words, wide_floats

DTYPES = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16))


def check(grads: list[Any], device: str, **options: Any) -> None:
    """The kernel's norm, flag and factor are the oracle's."""
    tensors = [to_torch(grad, device=device) for grad in grads]
    found = run_kernel(gradient_norm, tensors, **options)
    expected = oracle.gradient_norm(grads, **{k: v for k, v in options.items() if k != "settings"})
    assert_bits_equal(found.norm, np.array([expected.norm]))
    assert_bits_equal(found.factor, np.array([expected.factor]))
    assert found.skip.item() == (not expected.finite)


def gradient(seed: int, size: int, low: int, high: int, dtype: Any) -> Any:
    with np.errstate(over="ignore"):
        return wide_floats(random_words(seed, size)[:, 1], low, high).astype(dtype)


@settings(max_examples=25)
@given(data=st.data())
def test_equals_the_oracle(data: st.DataObject, device: str) -> None:
    grads = []
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.sampled_from([0, 1, 5, 1023, 1025, 16384, 16385]))
        low = data.draw(st.integers(-149, 100))
        dtype = data.draw(st.sampled_from(DTYPES))
        grad = gradient(data.draw(st.integers(0, 2**32 - 1)), size, low, low + 27, dtype)
        if size and data.draw(st.integers(0, 3)) == 0:
            grad[size // 2] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        grads.append(grad)
    check(
        grads,
        device,
        inverse_scale=data.draw(st.sampled_from([1.0, 2.0**-16, 0.7, 3e38])),
        max_norm=data.draw(st.sampled_from([None, 1.0, 0.0, 1e30])),
    )


def test_launch_settings_change_nothing(device: str) -> None:
    grads = [gradient(seed, size, -30, 4, np.float32) for seed, size in enumerate((20000, 3))]
    for chosen in (GradientSettings(num_warps=1, final_block=16), GradientSettings(4, 64)):
        check(grads, device, max_norm=1.0, settings=chosen)


def test_bad_gradients_are_refused(device: str) -> None:
    good = torch.ones(4, 4, device=device)
    with pytest.raises(ValueError, match="no gradients given"):
        gradient_norm([])
    with pytest.raises(TypeError, match=r"gradient 1 has dtype torch.float64; accepted"):
        gradient_norm([good, good.double()])
    with pytest.raises(TypeError, match=r"gradient 0 has layout torch.sparse_coo; accepted: dense"):
        gradient_norm([good.to_sparse()])
    with pytest.raises(ValueError, match="contiguous"):
        gradient_norm([good[:, :2]])
    with pytest.raises(ValueError, match=r"inverse_scale is 0.0; accepted: finite, above 0"):
        gradient_norm([good], inverse_scale=0.0)
    with pytest.raises(ValueError, match=r"max_norm is -1.0; accepted: finite, at least 0"):
        gradient_norm([good], max_norm=-1.0)
    with pytest.raises(TypeError, match=r"max_norm is '1'; accepted: a number or a float32"):
        gradient_norm([good], max_norm="1")  # type: ignore[arg-type]


def test_compiled_with_wide_accesses_and_without_fusion() -> None:
    signature = {
        "table": "*i64",
        "leaf_tensor": "*i32",
        "leaves": "*fp64",
        "inverse_scale": "*fp32",
    }
    constants = {"INPUT": "bfloat16", "ALIGNED": True, "HARDWARE": True}
    ptx = compiled_ptx("fp8lab.kernels.gradients_device:leaf_kernel", signature, constants)
    assert "ld.global.v4.b32" in ptx
    assert "fma" not in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_large_gradients_on_the_card(dtype: np.dtype[Any]) -> None:
    sizes = ((1 << 20) + 3, 0, 1, 300_000, 16384)
    grads = [gradient(seed, size, -60, 10, dtype) for seed, size in enumerate(sizes)]
    check(grads, "cuda", inverse_scale=0.7, max_norm=1.0)
    grads[3][-1] = np.inf
    check(grads, "cuda", max_norm=1.0)
