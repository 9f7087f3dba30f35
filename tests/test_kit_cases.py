"""Saved cases: every bit and layout survives, and what is no case is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fp8lab.errors import UserError
from fp8lab.formats import FORMATS
from fp8lab.testing import assert_bits_equal, to_torch
from fp8lab.testing.cases import Case, layout_of, load_case, save_case, spaced
from fp8lab.testing.checking import saved
from fp8lab.testing.running import Placed
from fp8lab.testing.values import random_words

Array = np.ndarray[Any, Any]
DTYPES = [
    *(np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)),
    *(fmt.dtype for fmt in FORMATS.values()),
    *(np.dtype(t) for t in (np.bool_, np.int8, np.int64, np.uint8, np.uint32, np.uint64)),
]


def array_of(dtype: np.dtype[Any], size: int) -> Array:
    words = random_words(3, size)[:, 0].astype(f"u{dtype.itemsize}")
    return words % 2 == 1 if dtype == np.bool_ else words.view(dtype)


def case_of(**inputs: Array) -> Case:
    return Case("cast", {"fmt": "E4M3"}, inputs, {}, "a problem", "my_kernels.py:cast", "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_and_layout_survives(dtype: np.dtype[Any], tmp_path: Path) -> None:
    square = array_of(dtype, 35).reshape(5, 7)
    arrays = {
        "rows": square,
        "columns": np.asfortranarray(square),
        "spaced": spaced(square),
        "number": square[0, 0].reshape(()),
        "nothing": square[:0],
    }
    path = save_case(case_of(**arrays), tmp_path / "deep" / "folder")
    assert path is not None
    again = load_case(path)
    assert (again.contract, again.problem, again.device) == ("cast", "a problem", "cpu")
    for name, array in arrays.items():
        assert_bits_equal(again.inputs[name], array, compare_nan_bits=True)
        assert layout_of(again.inputs[name]) == layout_of(array)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, ml_dtypes.bfloat16], ids=str)
def test_tensors_have_the_strides_of_the_arrays(dtype: Any) -> None:
    square = array_of(np.dtype(dtype), 35).reshape(5, 7)
    for array in (square, np.asfortranarray(square), spaced(square), square[0, 0].reshape(())):
        placed = Placed(array, "cpu")
        steps = [step // array.dtype.itemsize for step in array.strides]
        assert list(placed.tensor.stride()) == steps
        assert_bits_equal(placed.tensor, array, compare_nan_bits=True)
        assert not placed.change()
        placed.tensor.fill_(7)
        assert placed.change()
        assert placed.margins_changed() is None


def test_the_same_case_is_saved_once(tmp_path: Path) -> None:
    first, second = (save_case(case_of(x=np.array([1, 2], np.float32)), tmp_path) for _ in range(2))
    assert first == second
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_where_cases_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FP8LAB_CASES", raising=False)
    path = save_case(case_of())
    assert path is not None
    assert path.parent == Path(".fp8lab/cases")
    monkeypatch.setenv("FP8LAB_CASES", str(tmp_path / "mine"))
    assert save_case(case_of()) == tmp_path / "mine" / path.name
    monkeypatch.setenv("FP8LAB_CASES", "")
    assert save_case(case_of()) is None
    monkeypatch.setenv("FP8LAB_CASES", str(path / "below"))
    assert "the case could not be saved: Not a directory" in str(saved(case_of()))


def test_a_case_is_readable(tmp_path: Path) -> None:
    path = save_case(case_of(x=np.array([1.5, -0.0], np.float32)), tmp_path)
    assert path is not None
    found = json.loads(path.read_text())
    assert found["inputs"]["x"]["bits"] == "3FC00000 80000000"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a saved case"),
        ("[]", "is not a saved case"),
        ('{"fp8lab_case": 2}', "is a case of version 2; accepted: 1"),
        ('{"fp8lab_case": 1}', "is not a saved case .KeyError: 'contract'"),
    ],
)
def test_what_is_no_case_is_said(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_case(path)


def test_damaged_arrays_are_said(tmp_path: Path) -> None:
    path = save_case(case_of(x=np.array([1.5, -0.0], np.float32)), tmp_path)
    assert path is not None
    whole = path.read_text()
    more = [("3FC00000", "13FC00000"), ('"rows"', '"diagonals"')]
    for old, new in [('"float32"', '"object"'), ("3FC00000", "XYZ"), ("3FC00000 ", ""), *more]:
        path.write_text(whole.replace(old, new))
        with pytest.raises(UserError, match="is not a saved case"):
            load_case(path)
    with pytest.raises(UserError, match="cannot read the case"):
        load_case(tmp_path / "missing.json")


def test_the_file_holds_no_pickle(tmp_path: Path) -> None:
    to_torch(np.zeros(1))  # a tensor is never what is saved
    path = save_case(case_of(x=np.zeros(3, np.float32)), tmp_path)
    assert path is not None
    assert path.read_bytes().isascii()
