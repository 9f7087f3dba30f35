"""What differs between two states, bit by bit: a row for each tensor and value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8lab.checkpoint_tree import Tree, bytes_of, dtype_name, leaves, same_leaf


@dataclass(frozen=True)
class LeafDifference:
    """One tensor or value that is not the same in two states.

    Attributes:
        path: Part and name.
        elements: How many elements differ, and how many there are; None for plain values, and
            where dtype or shape differ.
        first: The first that differs: its place in row-major order and both values with their bits;
            or what the two are.
    """

    path: str
    elements: tuple[int, int] | None
    first: str


def differences(one: Mapping[str, Tree], other: Mapping[str, Tree]) -> Iterator[LeafDifference]:
    """Every leaf that differs, in the order of the first state, then what only the second has."""
    ours, theirs = dict(leaves(dict(one))), dict(leaves(dict(other)))
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        if path not in theirs or path not in ours:
            where = "first" if path in ours else "second"
            yield LeafDifference(path, None, f"only in the {where}")
        elif not same_leaf(ours[path], theirs[path]):
            yield _difference(path, ours[path], theirs[path])


def _difference(path: str, one: Any, other: Any) -> LeafDifference:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return LeafDifference(path, None, f"{_shown(one)} and {_shown(other)}")
    if one.dtype != other.dtype or one.shape != other.shape:
        return LeafDifference(path, None, f"{_shown(one)} and {_shown(other)}")
    unlike = bytes_of(one) != bytes_of(other)
    elements = unlike.reshape(one.numel(), -1).any(dim=1)
    place = int(elements.nonzero()[0])
    values = " and ".join(_element(tensor, place) for tensor in (one, other))
    return LeafDifference(path, (int(elements.sum()), one.numel()), f"[{place}] {values}")


def _element(tensor: Tensor, place: int) -> str:
    size = tensor.element_size()
    word = bytes_of(tensor)[place * size : (place + 1) * size]
    bits = int.from_bytes(bytes(word.tolist()), "little")
    value = word.view(tensor.dtype)[0]
    number = complex(value) if tensor.is_complex() else value.to(torch.float64).item()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        number = int(value.item())
    return f"{number!r} (0x{bits:0{2 * size}x})"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
