"""Checkpoints: every bit comes back; what was changed, cut, lost or of another run is refused."""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8lab import checkpoint_manifest
from fp8lab.checkpoint import CheckpointError, load, read_manifest, save, verify
from fp8lab.checkpoint_tree import bytes_of, leaves, same_leaf, take

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.complex64),
]
FINGERPRINT = {"recipe": {"name": "delayed", "input": {"history": 16}}, "betas": (0.9, 0.95)}


def all_bits(dtype: torch.dtype) -> torch.Tensor:
    """Every byte, in each place of an element: signalling NaNs, -0 and all 256 codes."""
    count = torch.empty((), dtype=dtype).element_size()
    bytes_ = torch.arange(256 * count, dtype=torch.int64) * 257 // count % 256
    return bytes_.to(torch.uint8).view(dtype).reshape(2, -1)


def small_state() -> dict[str, Any]:
    """A state with every kind of leaf."""
    quiet, signalling = 0x7FF8000000000001, 0xFFF0000000000001
    floats = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (quiet, signalling)]
    return {
        "model": {str(dtype): all_bits(dtype) for dtype in DTYPES} | {"flag": torch.tensor(True)},
        "optimizer": {
            "state": {0: {"step": 300, "exp_avg": torch.tensor(-0.0)}, 1: {}},
            "betas": (0.9, 0.95),
            "remainder": torch.tensor([-(2**15), -1, 0, 1, 2**15 - 1], dtype=torch.int16),
        },
        "random": {"pcg": 2**127 + 1, "python": (3, (1, 2), None), "a/b": 1, "$": []},
        "numbers": [0.1, -0.0, 5e-324, math.inf, -math.inf, *floats, 1, 1.0, True, None, "Ä\n"],
        "empty": {"x": torch.empty(0, 3, dtype=torch.float8_e8m0fnu), "y": [], "z": {}, "t": ()},
    }


def assert_same(one: Any, other: Any) -> None:
    """Both trees have the same paths, in the same order, with the same bits."""
    ours, theirs = list(leaves(one)), list(leaves(other))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, left), (_, right) in zip(ours, theirs, strict=True):
        assert same_leaf(left, right), path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "step-000005"
    save(folder, small_state(), step=5, fingerprint=FINGERPRINT, metric=2.5)
    return folder


def test_every_bit_and_every_dtype_comes_back(saved: Path) -> None:
    found = load(saved, fingerprint=FINGERPRINT)
    assert_same(found.state, small_state())
    assert type(found.state["optimizer"]["betas"]) is tuple
    assert (found.manifest.step, found.manifest.metric) == (5, 2.5)
    assert verify(saved) == read_manifest(saved) == found.manifest


def test_the_same_state_gives_the_same_files(saved: Path, tmp_path: Path) -> None:
    save(tmp_path / "again", small_state(), step=5, fingerprint=FINGERPRINT, metric=2.5)
    ours = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert ours == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}


def test_a_comparison_of_bits_sees_what_equality_does_not() -> None:
    for one, other in [(0.0, -0.0), (1, 1.0), (True, 1), ((), []), (None, 0)]:
        assert not same_leaf(one, other)
    zeros = torch.zeros(2), -torch.zeros(2)
    assert not same_leaf(*zeros)
    assert not same_leaf(zeros[0], zeros[0].reshape(2, 1))
    assert not same_leaf(zeros[0], zeros[0].to(torch.int32))
    assert same_leaf(math.nan, math.nan)
    assert same_leaf(torch.tensor(math.nan), torch.tensor(math.nan))


def test_bytes_of_any_strides() -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    for view in (whole[:, 1], whole[:1, 3], whole[0, ::2][:1], whole.t(), whole[2, 3], whole[:0]):
        expected = view.reshape(-1).clone().numpy().tobytes()
        assert bytes_of(view).numpy().tobytes() == expected


def test_a_checkpoint_may_be_moved(saved: Path, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere" / "kept"
    there.parent.mkdir()
    shutil.move(saved, there)
    assert_same(load(there).state, small_state())


def test_what_is_taken_does_not_change_later() -> None:
    weights, numbers = torch.zeros(4), [1]
    taken = take({"w": weights, "half": weights[:2], "n": numbers})
    weights.fill_(1)
    numbers.append(2)
    assert not taken.tensors["w"].any()
    assert json.loads(taken.json)["n"] == [1]
    assert taken.bytes == 24


def damaged_places(folder: Path, count: int) -> list[tuple[str, int, int | None]]:
    """(file, byte, bit) for a flipped bit, (file, length, None) for a cut; every file has some."""
    rng = random.Random(0)
    files = sorted(path.name for path in folder.iterdir())
    places: list[tuple[str, int, int | None]] = []
    for number in range(count):
        file = files[number % len(files)]
        place = rng.randrange((folder / file).stat().st_size)
        places.append((file, place, None if number % 5 == 0 else rng.randrange(8)))
    return places


def test_one_flipped_bit_or_a_cut_anywhere_is_refused(saved: Path) -> None:
    places = damaged_places(saved, 500)
    assert len({file for file, _, _ in places}) == 6
    for file, place, bit in places:
        whole = (saved / file).read_bytes()
        if bit is None:
            changed = whole[:place]
        else:
            flipped = bytes([whole[place] ^ (1 << bit)])
            changed = whole[:place] + flipped + whole[place + 1 :]
        (saved / file).write_bytes(changed)
        with pytest.raises(CheckpointError, match="damaged") as caught:
            load(saved)
        assert "\n" not in str(caught.value)
        (saved / file).write_bytes(whole)
    verify(saved)


def test_bytes_after_the_end_are_refused(saved: Path) -> None:
    for path in saved.iterdir():
        whole = path.read_bytes()
        path.write_bytes(whole + b"\n")
        with pytest.raises(CheckpointError, match="damaged"):
            load(saved)
        path.write_bytes(whole)


def test_a_missing_file_is_named(saved: Path) -> None:
    for path in sorted(saved.iterdir()):
        away = path.rename(saved.parent / path.name)
        with pytest.raises(CheckpointError, match=f"lacks {path.name}"):
            load(saved)
        away.rename(path)
    with pytest.raises(CheckpointError, match="no such folder"):
        load(saved / "nowhere")


def test_two_checkpoints_files_do_not_mix(saved: Path, tmp_path: Path) -> None:
    state = small_state()
    state["optimizer"]["remainder"][0] += 1
    save(tmp_path / "other", state, step=6, fingerprint=FINGERPRINT)
    for file in ("optimizer.safetensors", "manifest.json"):
        whole = (saved / file).read_bytes()
        shutil.copy(tmp_path / "other" / file, saved / file)
        with pytest.raises(CheckpointError, match=rf"{file} is damaged"):
            load(saved)
        (saved / file).write_bytes(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": {"name": "delayed", "input": {"history": 64}}}, "recipe.input.history 16, but"),
        ({"recipe": {"name": "delayed"}}, 'recipe.input {"history": 16}, but'),
        ({"corpus": "f00d"}, 'corpus "\\(nothing\\)", but this run has "f00d"'),
        ({"betas": (0.9, 0.999)}, "betas"),
    ],
)
def test_another_recipe_or_model_is_refused(
    saved: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(saved, fingerprint=FINGERPRINT | change)


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    """A manifest with other values, and a sum that fits: what another version would write."""
    text = checkpoint_manifest.canonical(
        json.loads((folder / "manifest.json").read_bytes()) | changes
    )
    (folder / "manifest.json").write_bytes(text)
    (folder / "manifest.sha256").write_bytes(checkpoint_manifest.sum_line(text))


def test_another_version_is_refused(saved: Path) -> None:
    rewrite_manifest(saved, version=3, fp8lab="0.9")
    with pytest.raises(CheckpointError, match=r"version 3; .* up to 2: install fp8lab 0.9"):
        load(saved)
    rewrite_manifest(saved, version=0)
    with pytest.raises(CheckpointError, match="version 0, which this fp8lab reads no more"):
        load(saved)
    rewrite_manifest(saved, format="something")
    with pytest.raises(CheckpointError, match="no checkpoint of fp8lab"):
        load(saved)


def test_an_older_version_is_migrated(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def split_numbers(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "numbers": {"old": state["numbers"]}}

    monkeypatch.setattr(checkpoint_manifest, "VERSION", 4)
    monkeypatch.setitem(checkpoint_manifest.MIGRATIONS, 2, split_numbers)
    with pytest.raises(CheckpointError, match="version 2, which this fp8lab reads no more"):
        load(saved)  # the way from 3 to 4 is missing
    monkeypatch.setitem(checkpoint_manifest.MIGRATIONS, 3, lambda state: state | {"added": 0})
    found = load(saved).state
    assert_same(found["numbers"]["old"], small_state()["numbers"])
    assert found["added"] == 0


def test_manifest_and_files_must_tell_the_same(saved: Path) -> None:
    """Sums that fit do not make a dtype true: what a faulty writer would leave is refused."""
    tensors = json.loads((saved / "manifest.json").read_bytes())["tensors"]
    tensors["optimizer"]["remainder"]["dtype"] = "float16"
    rewrite_manifest(saved, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors cannot be used: remainder"):
        load(saved)
    del tensors["optimizer"]["remainder"]
    rewrite_manifest(saved, tensors=tensors)
    with pytest.raises(CheckpointError, match="differ in remainder"):
        load(saved)


def test_what_needs_pickle_is_refused(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"a": {"f": print}}, "f is a builtin_function_or_method"),
        ({"a": {"s": torch.zeros(2).to_sparse()}}, "s is no dense tensor"),
        ({"a": {1.5: 0}}, "key 1.5"),
    ]
    for bad, message in refused:
        with pytest.raises(TypeError, match=message):
            save(tmp_path / "x", bad, step=1)
    with pytest.raises(ValueError, match="spelled alike"):
        save(tmp_path / "x", {"a": {0: 1, "0": 2}}, step=1)
    with pytest.raises(ValueError, match="part 'A/b'"):
        save(tmp_path / "x", {"A/b": {}}, step=1)
    assert list(tmp_path.iterdir()) == []
