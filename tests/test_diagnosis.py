"""Guessing faults: hypotheses that fit to the last bit, for every contract, and nothing besides."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0
from fp8lab.testing.contracts.base import Contract, contract_from
from fp8lab.testing.diagnosis import Guess, fitting_hypotheses, guess_fault
from fp8lab.testing.faults import FAULTS, hypotheses_of
from fp8lab.testing.profiles import QUICK

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]

ONE = np.asarray(1, np.float32)

# Every contract that has hypotheses, with each choice that changes them.
CONTRACTS: list[tuple[str, dict[str, Any]]] = [
    *(("cast", {"fmt": fmt}) for fmt in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)),
    ("cast", {"fmt": E4M3, "rounding": "toward_zero"}),
    ("cast", {"fmt": E4M3, "overflow": "ieee", "dtypes": ("float64",)}),
    ("cast", {"fmt": E5M2, "overflow": "torch_2_13_cpu", "dtypes": ("float16",)}),
    ("cast", {"fmt": E5M2, "rounding": "stochastic"}),
    *(("dequantize", {"fmt": fmt}) for fmt in (E4M3, E5M2, E4M3FNUZ, E8M0)),
    ("requantize", {"source": E5M2, "target": E4M3}),
    ("amax", {}),
    ("block_quantize", {"fmt": E4M3}),
    ("block_quantize", {"fmt": E5M2, "block": (128, 128), "power_of_two": False}),
    ("block_quantize", {"fmt": E4M3, "block": (1, None)}),
    ("block_quantize", {"fmt": E4M3, "block": (None, 1)}),
    *(("mx_quantize", {"fmt": E4M3, "scale_rounding": r}) for r in ("floor", "up", "nearest")),
    ("mx_quantize", {"fmt": E5M2}),
    ("scale_from_amax", {"fmt": E4M3, "margin": 3}),
    ("scale_from_amax", {"fmt": E5M2, "power_of_two": True}),
    ("scale_update", {"fmt": E4M3, "margin": 1}),
    ("scale_update", {"fmt": E5M2, "algorithm": "most_recent", "power_of_two": True}),
    ("matmul", {}),
    ("matmul", {"promote_every": 128}),
    *(("adamw", {"order": order}) for order in ("plain", "torch", "torch_cuda", "apex")),
    ("norm", {}),
    ("clip", {}),
    ("unscale", {}),
]
IDS = [str(contract_from(name, choices)) for name, choices in CONTRACTS]
EVERY = pytest.mark.parametrize(("name", "choices"), CONTRACTS, ids=IDS)


def some_cases(contract: Contract) -> list[Arrays]:
    """The first case of a contract, and its two smallest ones: empty, where there is one."""
    return _cases_of(IDS.index(str(contract)))


@cache
def _cases_of(index: int) -> list[Arrays]:
    contract = contract_from(*CONTRACTS[index])
    every = list(islice(contract.fixed(QUICK, frozenset()), 80))
    size = [sum(array.size for array in case.values()) for case in every]
    return [every[0], *(every[int(i)] for i in np.argsort(size, kind="stable")[:2])]


def bytes_of(array: Array) -> Array:
    return array.view(np.uint8) if array.dtype.itemsize == 1 and array.dtype != bool else array


def hypotheses(contract: Contract, inputs: Arrays) -> Iterator[tuple[str, Any]]:
    expected = {k: bytes_of(v) for k, v in contract.expected(inputs).items()}
    with np.errstate(all="ignore"):
        yield from hypotheses_of(contract.name, contract.choices, inputs, expected)


@EVERY
def test_hypotheses_compute_on_any_case_and_are_always_the_same_ones(
    name: str, choices: dict[str, Any]
) -> None:
    contract = contract_from(name, choices)
    seen = set()
    for inputs in some_cases(contract):
        expected = {k: bytes_of(v) for k, v in contract.expected(inputs).items()}
        faults = []
        for fault, outputs in hypotheses(contract, inputs):
            assert set(outputs) == set(expected), fault
            for key, array in outputs.items():
                assert np.shape(array) == expected[key].shape, (fault, key)
                assert bytes_of(np.asarray(array)).dtype == expected[key].dtype, (fault, key)
            faults.append(fault)
        seen.add(tuple(faults))
    assert len(seen) == 1  # or which of a fault's hypotheses fits could not be told between cases


def test_every_fault_has_a_hypothesis_and_every_hypothesis_a_name() -> None:
    found: set[str] = set()
    for name, choices in CONTRACTS:
        contract = contract_from(name, choices)
        found |= {fault for fault, _ in hypotheses(contract, some_cases(contract)[-1])}
    assert found == set(FAULTS)


@EVERY
def test_right_results_and_random_ones_get_no_guess(name: str, choices: dict[str, Any]) -> None:
    contract = contract_from(name, choices)
    inputs = some_cases(contract)[0]
    expected = contract.expected(inputs)
    assert guess_fault(name, contract.choices, inputs, expected, expected) is None
    random = np.random.default_rng(1)
    noise = {
        key: random.integers(0, 256, array.nbytes, np.uint8).view(array.dtype).reshape(array.shape)
        for key, array in expected.items()
        if array.dtype != bool
    }
    if name != "norm":  # one number, which a wrong sum might give
        wrong = {**expected, **noise}
        assert guess_fault(name, contract.choices, inputs, expected, wrong) is None


def test_other_shapes_dtypes_and_names_get_no_guess() -> None:
    inputs = {"x": np.array([1.0625], np.float32), "scale": ONE}
    expected = {"codes": np.array([0x38], np.uint8)}
    for wrong in (np.array([0x39, 0x39], np.uint8), np.array([0x39], np.int32)):
        assert guess_fault("cast", {"fmt": E4M3}, inputs, expected, {"codes": wrong}) is None
    named = {"other": np.array([0x39], np.uint8)}
    assert guess_fault("cast", {"fmt": E4M3}, inputs, expected, named) is None
    right = {"codes": np.array([0x39], np.uint8)}
    assert guess_fault("no such contract", {}, inputs, expected, right) is None


def test_the_narrowest_fault_that_fits_is_named() -> None:
    def guess(x: float, wrong: int, **options: Any) -> Guess | None:
        inputs = {"x": np.array([x], np.float32), "scale": ONE}
        contract = contract_from("cast", {"fmt": E4M3})
        return guess_fault(
            "cast",
            contract.choices,
            inputs,
            contract.expected(inputs),
            {"codes": np.array([wrong], np.uint8)},
            **options,
        )

    tie = guess(1.0625, 0x39)
    assert tie is not None
    assert tie.fault == "ties-away"
    assert tie.sentence == FAULTS["ties-away"].sentence
    assert guess(1.0625, 0x39, sure=True) is None  # rounding up fits this one value, too
    # Another call says that it is not ties alone.
    inputs = {"x": np.array([1.01, -1.01], np.float32), "scale": ONE}
    more = [
        (
            inputs,
            {"codes": np.array([0x38, 0xB8], np.uint8)},
            {"codes": np.array([0x39, 0xB9], np.uint8)},
        )
    ]
    away = guess(1.0625, 0x39, more=more)
    assert away is not None
    assert away.fault == "rounds-away"
    # A call that nothing explains changes no guess.
    strange = [
        (
            inputs,
            {"codes": np.array([0x38, 0xB8], np.uint8)},
            {"codes": np.array([0x01, 0x02], np.uint8)},
        )
    ]
    assert guess(1.0625, 0x39, more=strange) == tie
    # A right call counts: here a value between two codes was rounded as it should be.
    passed = [
        (
            inputs,
            {"codes": np.array([0x38, 0xB8], np.uint8)},
            {"codes": np.array([0x38, 0xB8], np.uint8)},
        )
    ]
    assert guess(1.0625, 0x39, more=passed) == tie


def test_numbers_and_nan_may_have_a_fault_each() -> None:
    nan = np.uint32(0xFFC00000).view(np.float32)
    inputs = {"x": np.array([1.0625, nan, 3.0], np.float32), "scale": ONE}
    expected = {"codes": np.array([0x38, 0x7F, 0x44], np.uint8)}

    def guess(*codes: int, **options: Any) -> Guess | None:
        actual = {"codes": np.array(codes, np.uint8)}
        return guess_fault("cast", {"fmt": E4M3}, inputs, expected, actual, **options)

    both = guess(0x39, 0xFF, 0x44)
    assert both is not None
    assert both.fault == "ties-away"
    assert "And wrong-nan-sign: " in both.sentence
    assert FAULTS["wrong-nan-sign"].sentence in both.sentence
    assert guess(0x39, 0xFF, 0x44, sure=True) is None
    odd = guess(0x39, 0x11, 0x44)  # nothing makes such a NaN
    assert odd is not None
    assert odd.fault == "ties-away"
    assert "NaN gives wrong codes too" in odd.sentence
    assert guess(0x11, 0xFF, 0x44) is None


def test_settings_of_a_saved_case_give_the_same_hypotheses() -> None:
    for name, choices in CONTRACTS:
        contract = contract_from(name, choices)
        plain = json.loads(json.dumps(contract.settings))
        inputs = some_cases(contract)[1]
        expected = {k: bytes_of(v) for k, v in contract.expected(inputs).items()}
        with np.errstate(all="ignore"):
            first = hypotheses_of(name, contract.choices, inputs, expected)
            second = hypotheses_of(name, plain, inputs, expected)
            for (fault, outputs), (other, others) in zip(first, second, strict=True):
                assert fault == other
                for key in outputs:
                    assert np.asarray(outputs[key]).tobytes() == np.asarray(others[key]).tobytes()


def test_a_large_case_is_sampled() -> None:
    x = np.tile(np.array([1.0625, 1.125, -3.2, 0.3], np.float32), 1 << 16)
    contract = contract_from("cast", {"fmt": E4M3})
    inputs = {"x": x, "scale": ONE}
    expected = contract.expected(inputs)
    wrong = expected["codes"].view(np.uint8).copy()
    wrong[4 * 12345] += 1  # one tie of many goes away: that is no rule
    actual = {"codes": wrong.view(E4M3.dtype)}
    assert guess_fault("cast", contract.choices, inputs, expected, actual) is None
    wrong[x == 1.0625] = 0x39
    found = guess_fault("cast", contract.choices, inputs, expected, actual)
    assert found is not None
    assert found.fault == "ties-away"


@settings(max_examples=30)
@given(data=st.data())
def test_a_hypothesis_recognises_itself(data: st.DataObject) -> None:
    """What a hypothesis computes is explained by it, and the guess explains it to the last bit."""
    name, choices = data.draw(st.sampled_from([c for c in CONTRACTS if c[0] != "matmul"]))
    contract = contract_from(name, choices)
    inputs = some_cases(contract)[0]
    expected = contract.expected(inputs)
    every = list(hypotheses(contract, inputs))
    index = data.draw(st.integers(0, len(every) - 1))
    fault, outputs = every[index]
    actual = {key: np.asarray(array) for key, array in outputs.items()}
    suspect = fault, Counter(other for other, _ in every[:index])[fault]
    fitting = fitting_hypotheses(name, contract.choices, inputs, expected, actual, among=[suspect])
    assert fitting == [suspect]


def test_faults_speak_in_whole_sentences() -> None:
    for name, fault in FAULTS.items():
        assert fault.sentence[0].isupper(), name
        assert fault.sentence.endswith("."), name
        assert not fault.sentence.endswith(".."), name
        assert "|" not in fault.sentence, name  # it stands in a table
