"""Sensitive layers by name, in any model: "first", "last", "head", "embeddings".

A model's blocks are the children of one `ModuleList` or `Sequential`: the one that holds the most
linear layers, among those whose children with linear layers are all of one class (of equals, the
first in the order of modules). Where there is none, every linear layer is a block of its own.

    first       the linear layers of the first block
    last        those of the last block
    head        the linear layers outside the blocks that come after the first of them; where there
                are none, the model's last linear layer
    embeddings  linear layers that share the weight of an embedding (a tied head). Embeddings are
                no linear layers and are never FP8; a model without one has no such name.

Every other name is a pattern of `fnmatch` on the names of `model.named_modules()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from fp8lab.errors import UserError

SENSITIVE = ("first", "last", "head", "embeddings")


def sensitive_layers(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The names of the linear layers that these names and patterns mean, in the model's order.

    Raises:
        UserError: A name or pattern that matches nothing.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    chosen: set[str] = set()
    for name in names:
        if name == "embeddings":
            chosen.update(_tied(model, layers))
        elif name in SENSITIVE:
            if not layers:
                raise UserError(nothing_matched(name, layers))
            chosen.update(_of_blocks(model, list(layers), name))
        else:
            matching = [own for own in layers if fnmatchcase(own, name)]
            if not matching:
                raise UserError(
                    f"{nothing_matched(name, layers)}; by position: {', '.join(SENSITIVE)}"
                )
            chosen.update(matching)
    return [name for name in layers if name in chosen]


def nothing_matched(pattern: str, layers: Mapping[str, object]) -> str:
    """What to say of a pattern that matches no linear layer."""
    if not layers:
        return f"pattern {pattern!r} matches nothing: the model has no linear layer"
    names = list(layers)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"pattern {pattern!r} matches no linear layer; there are: {shown}"


def blocks_of(model: nn.Module) -> list[list[str]]:
    """The linear layers of each block, by name; see above."""
    found: list[list[str]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        prefix = f"{name}." if name else ""
        inside = {
            child: _linear_names(below, f"{prefix}{child}")
            for child, below in module.named_children()
        }
        filled = {child: own for child, own in inside.items() if own}
        classes = {type(module.get_submodule(child)) for child in filled}
        size = sum(map(len, filled.values()))
        if len(classes) == 1 and size > sum(map(len, found)):
            found = list(filled.values())
    return found or [[name] for name in _linear_names(model, "")]


def _linear_names(module: nn.Module, prefix: str) -> list[str]:
    return [
        ".".join(part for part in (prefix, name) if part)
        for name, own in module.named_modules()
        if isinstance(own, nn.Linear)
    ]


def _of_blocks(model: nn.Module, layers: list[str], name: str) -> list[str]:
    blocks = blocks_of(model)
    if name == "first":
        return blocks[0]
    if name == "last":
        return blocks[-1]
    inside = {own for block in blocks for own in block}
    after = layers[layers.index(blocks[0][0]) :]
    return [own for own in after if own not in inside] or layers[-1:]


def _tied(model: nn.Module, layers: Mapping[str, nn.Linear]) -> list[str]:
    weights = {id(own.weight) for own in model.modules() if isinstance(own, nn.Embedding)}
    if not weights:
        raise UserError(
            "'embeddings' matches nothing: the model has no torch.nn.Embedding; leave it out, or"
            " name a layer"
        )
    return [name for name, layer in layers.items() if id(layer.weight) in weights]
