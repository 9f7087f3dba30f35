"""Faults that few inputs show: other memory, late sizes, a second call; where a search ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.emulation.adamw import adamw
from fp8lab.emulation.casting import quantize
from fp8lab.emulation.scaling import DelayedScalingState, update_delayed
from fp8lab.formats import E4M3
from fp8lab.testing import (
    PROFILES,
    KernelFault,
    check_adamw,
    check_cast,
    check_scale_from_amax,
    check_scale_update,
    to_numpy,
    to_torch,
)
from fp8lab.testing.checking import fault_in, find_fault
from fp8lab.testing.contracts.base import Contract, contract_from
from fp8lab.testing.running import Outcome


def right(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The oracle's codes."""
    return to_torch(quantize(to_numpy(x), E4M3, scale=scale))


def test_results_in_the_memory_of_an_input_are_a_change_of_it() -> None:
    def codes_in_x(x: torch.Tensor, scale: float) -> torch.Tensor:
        codes = right(x, scale).view(torch.uint8)
        return x.view(torch.uint8)[..., : x.shape[-1]].copy_(codes) if x.ndim else codes

    def moment_in_grad(param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, **numbers: Any) -> Any:
        arrays = [to_numpy(tensor) for tensor in (param, grad, exp_avg, exp_avg_sq)]
        p, m, v = (to_torch(array) for array in adamw(*arrays, **numbers))
        return p, grad.copy_(m), v

    with pytest.raises(KernelFault, match=r"changed its input x: .* became"):
        check_cast(codes_in_x, E4M3, device="cpu")
    with pytest.raises(KernelFault, match="changed its input grad"):
        check_adamw(moment_in_grad, device="cpu")


def test_nothing_in_place_of_a_vector_is_a_wrong_shape() -> None:
    with pytest.raises(KernelFault, match=r"gave scale of shape \(0,\); accepted: \(\d+,\)"):
        check_scale_from_amax(lambda amax: torch.empty(0), E4M3, device="cpu")


def oracle_with(
    contract: Contract, fails: Callable[[Mapping[str, Any]], bool]
) -> Callable[..., dict[str, Any]]:
    """The oracle's outputs; where `fails` says so of the inputs, the last bit of all is flipped."""

    def outputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: np.array(array) for name, array in contract.expected(inputs).items()}
        last = list(found.values())[-1]
        if last.size and fails(inputs):
            last.reshape(-1)[-1:].view(f"u{last.itemsize}")[...] ^= 1
        return found

    return outputs


LATE_FAULTS: dict[str, tuple[str, dict[str, Any], Callable[[Mapping[str, Any]], bool]]] = {
    "whole parts of 512": ("cast", {"fmt": E4M3}, lambda given: given["x"].size % 512 == 0),
    "whole parts of 1024": ("adamw", {}, lambda given: given["param"].size == 1024),
    "four dimensions": ("dequantize", {"fmt": E4M3}, lambda given: given["codes"].ndim == 4),
    "many tensors": ("scale_update", {"fmt": E4M3}, lambda given: given["scale"].size > 1024),
    "a long history": (
        "scale_update",
        {"fmt": E4M3},
        lambda given: len(given["amax_history"]) > 64,
    ),
    "many rows": ("block_quantize", {"fmt": E4M3}, lambda given: len(given["x"]) > 128),
    "many blocks": ("block_quantize", {"fmt": E4M3}, lambda given: given["x"].shape[1] > 2048),
    "many whole rows": (
        "block_quantize",
        {"fmt": E4M3, "ragged": False},
        lambda given: len(given["x"]) > 128,
    ),
    "many rows of MX": ("mx_quantize", {"fmt": E4M3}, lambda given: len(given["x"]) > 128),
    "many gradients": ("norm", {}, lambda given: len(given) > 128),
    "many rows of a product": ("matmul", {}, lambda given: given["a"].shape[0] > 1024),
    "many columns": ("matmul", {}, lambda given: given["b"].shape[1] > 1024),
    "a long sum": ("matmul", {"exact_sums": True}, lambda given: given["a"].shape[1] > 4096),
    "one scale that is 1": (
        "matmul",
        {},
        lambda given: given["inverse_scale_a"] == 1 != given["inverse_scale_b"],
    ),
}


@pytest.mark.parametrize("name", LATE_FAULTS)
def test_faults_that_only_some_sizes_show_are_found(name: str) -> None:
    kind, settings, fails = LATE_FAULTS[name]
    contract = contract_from(kind, settings)
    outputs = oracle_with(contract, fails)

    class Flipped:
        device, name, traits = "cpu", "flipped", frozenset[str]()

        def run(self, contract: Contract, inputs: Mapping[str, Any]) -> Outcome:
            return Outcome("returned", outputs=outputs(inputs))

        def sweep(self, contract: Any) -> Any:
            raise NotImplementedError

    quick = replace(PROFILES["quick"], examples=1, minimise_calls=0)
    assert find_fault(contract, Flipped(), quick) is not None


def test_values_kept_from_a_call_before_are_found() -> None:
    kept: dict[Any, torch.Tensor] = {}

    def stale(x: torch.Tensor, scale: float) -> torch.Tensor:
        return kept.setdefault((x.shape, scale), right(x, scale))

    with pytest.raises(KernelFault, match="gives other bits in codes"):
        check_cast(stale, E4M3, profile=replace(PROFILES["quick"], examples=1), device="cpu")


def test_a_history_is_not_cut_to_nothing() -> None:
    def misses_nan(scale: torch.Tensor, history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = DelayedScalingState(to_numpy(scale), to_numpy(history))
        after = update_delayed(state, E4M3)
        doubled = to_torch(after.scale) * 2
        seen = torch.isnan(history).any(0)
        return torch.where(seen, doubled, to_torch(after.scale)), to_torch(after.amax_history)

    with pytest.raises(KernelFault) as caught:
        check_scale_update(misses_nan, E4M3, device="cpu")
    assert caught.value.finding.case.inputs["amax_history"].shape == (1, 1)


def test_a_hang_is_not_waited_for_more_often_than_need_be() -> None:
    calls = []

    class Hangs:
        device, name, traits = "cpu", "hangs", frozenset[str]()

        def run(self, contract: Contract, inputs: Mapping[str, Any]) -> Outcome:
            calls.append(inputs["x"].size)
            return Outcome("hung", "did not return within 30 s")

        def sweep(self, contract: Any) -> Any:
            raise NotImplementedError

    contract = contract_from("cast", {"fmt": E4M3})
    inputs = {"x": np.ones(100, np.float32), "scale": np.asarray(1.0)}
    finding = fault_in(contract, inputs, Hangs(), PROFILES["quick"])
    assert finding is not None
    assert finding.steady
    assert calls == [100, 1]
    assert finding.verdict.expected["codes"].shape == (1,)


def test_numbers_have_their_fault_where_that_of_nan_is_not_known() -> None:
    def ties_away_and_odd_nan(x: torch.Tensor, scale: float) -> torch.Tensor:
        scaled = to_numpy(x) * np.float32(scale)
        word = scaled.view(np.uint32) & np.uint32(0x7FFFFFFF)
        halfway = (word & np.uint32(0xFFFFF)) == np.uint32(0x80000)
        up = np.where(halfway & (word >= 0x3C800000), word + np.uint32(1), word)
        # Below 2**-6 the codes are multiples of 2**-9.
        half = np.abs(scaled) * np.float32(512) % 1 == np.float32(0.5)
        up = np.where(half & (word < 0x3C800000), word + np.uint32(1), up)
        codes = quantize(np.copysign(up.view(np.float32), scaled), E4M3).view(np.uint8)
        return to_torch(np.where(np.isnan(scaled), np.uint8(60), codes))

    with pytest.raises(KernelFault) as caught:
        check_cast(ties_away_and_odd_nan, E4M3, device="cpu")
    guess = caught.value.finding.guess
    assert guess is not None
    assert guess.fault == "ties-away"
    assert "NaN gives wrong codes too" in guess.sentence
