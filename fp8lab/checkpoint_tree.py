"""State as a tree of plain values and tensors, taken to host memory and to JSON and back.

A tree is made of mappings, lists and tuples; its leaves are tensors, numbers, texts, True, False
and None. Nothing else is taken: what is not named here would need pickle. JSON keeps all of it:
keys that are integers, tuples and floats that JSON lacks are written as tables marked with "$".
Tensors become references, and their bytes are kept apart, as they are.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tree = Any  # mappings, lists, tuples and leaves, as above


@dataclass(frozen=True)
class Taken:
    """One part of the state at one moment; later steps do not change it.

    Attributes:
        json: Its values as JSON text, with references to the tensors.
        tensors: Its tensors by their paths in the tree ("blocks.0/exp_avg"): dense copies in host
            memory, of the dtypes and shapes they had.
    """

    json: str
    tensors: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def take(tree: Tree) -> Taken:
    """Copy a tree to host memory, bit for bit.

    Tensors that share memory (tied weights, views of one buffer) become copies of their own.

    Raises:
        TypeError: Something is neither a leaf nor a container that is accepted; with its path.
        ValueError: Two paths are spelled alike (a key 0 beside a key "0").
    """
    tensors: dict[str, Tensor] = {}
    plain = _to_plain(tree, (), tensors)
    copies = {name: _to_host(tensor) for name, tensor in tensors.items()}
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()  # the copies are queued; what they read may change after this
    return Taken(json.dumps(plain, allow_nan=False, separators=(",", ":")), copies)


def rebuild(text: str, tensors: Mapping[str, Tensor]) -> Tree:
    """The tree that `take` took.

    Raises:
        ValueError: The text is not what `take` writes, or names a tensor that is not there.
    """
    return _from_plain(json.loads(text), tensors)


def leaves(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path; an empty container counts as a leaf, so that it is not lost."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, spelled(key)))
    elif isinstance(tree, list | tuple) and tree:
        for place, value in enumerate(tree):
            yield from leaves(value, (*path, str(place)))
    else:
        yield "/".join(path), tree


def same_leaf(one: Any, other: Any) -> bool:
    """Whether two leaves are the same bits: dtype, shape and payload, the sign of 0, NaN's bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(bytes_of(one), bytes_of(other))
        )
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return type(one) is type(other) and bool(one == other)


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes: uint8 on the CPU, one dimension."""
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    if dense.stride(-1) != 1:  # of a single element torch calls any stride contiguous
        dense = dense.clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8) if dense.numel() else torch.empty(0, dtype=torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module: float8_e4m3fn."""
    return str(dtype).removeprefix("torch.")


def _to_host(tensor: Tensor) -> Tensor:
    source = tensor.detach()
    if not source.is_cuda or not source.numel():
        return source.cpu().clone(memory_format=torch.contiguous_format)
    # Page-locked memory is filled at the bus's speed, all tensors in one go. It is made as bytes:
    # deterministic torch fills what is empty, and not every dtype can be filled.
    host = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
    return host.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)


def spelled(key: Any) -> str:
    """A key as a part of a path: "/" in it separates nothing."""
    return str(key).replace("%", "%25").replace("/", "%2F")


def _to_plain(value: Tree, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return _reference(value, path, tensors)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return {"$": "float", "bits": struct.pack(">d", value).hex()}
    if isinstance(value, list | tuple):
        items = [_to_plain(v, (*path, str(i)), tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, tensors)
    raise TypeError(
        f"{'/'.join(path) or 'the state'} is a {type(value).__name__}; accepted: tensors, numbers,"
        " texts, True, False, None, and mappings, lists and tuples of them"
    )


def _plain_mapping(
    value: Mapping[Any, Any], path: tuple[str, ...], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    if len({spelled(key) for key in value}) < len(value):
        raise ValueError(f"{'/'.join(path) or 'the state'} has two keys that are spelled alike")
    for key in value:
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise TypeError(f"{'/'.join(path)} has the key {key!r}; accepted: texts and integers")
    items = [(key, _to_plain(v, (*path, spelled(key)), tensors)) for key, v in value.items()]
    if all(isinstance(key, str) for key in value) and "$" not in value:
        return dict(items)
    return {"$": "items", "items": [list(item) for item in items]}


def _reference(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Any]:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError(f"{'/'.join(path)} is no dense tensor with data; accepted: dense tensors")
    name = "/".join(path)
    tensors[name] = tensor
    return {"$": "tensor", "name": name}


def _from_plain(value: Any, tensors: Mapping[str, Tensor]) -> Tree:
    if isinstance(value, list):
        return [_from_plain(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: _from_plain(item, tensors) for key, item in value.items()}
    if kind == "tensor":
        if value["name"] not in tensors:
            raise ValueError(f"the tensor {value['name']} is not there")
        return tensors[value["name"]]
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(value["bits"]))[0]
    items = value["items"]
    if kind == "tuple":
        return tuple(_from_plain(item, tensors) for item in items)
    if kind == "items":
        return {key: _from_plain(item, tensors) for key, item in items}
    raise ValueError(f"unknown mark {kind!r}")
