"""Sensitive layers by name, in any model: "first", "last", "head", "embeddings".

A model's blocks are the children of one `ModuleList` or `Sequential`: the one that holds the most
linear layers, among those whose children with linear layers are all of one class (of equals, the
first in the order of modules). Where there is none, every linear layer is a block of its own.

    first       the linear layers of the first block
    last        those of the last block
    head        the linear layers outside the blocks that come after the first of them; where there
                are none, the model's last linear layer
    embeddings  linear layers that share the weight of an embedding (a tied head). Embeddings are
                no linear layers and are never FP8; where none is tied, there is no such name.

Every other name is a pattern of `fnmatch` on the names of `model.named_modules()`: the first one
that each layer has, where it has several. A layer that is itself named "first" is meant by a
pattern that is not that word: "[f]irst".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
            chosen.update(_of_blocks(model, name))
        else:
            matching = [own for own in layers if fnmatchcase(own, name)]
            if not matching:
                raise UserError(
                    f"{nothing_matched(name, layers)}; by position: {', '.join(SENSITIVE)}"
                )
            chosen.update(matching)
    return [name for name in layers if name in chosen]


def patterns_of(given: object, argument: str) -> tuple[str, ...]:
    """One pattern or several, as an argument gives them.

    Args:
        given: What the caller gave.
        argument: What it is called, for the message.

    Raises:
        UserError: It is neither a text nor a sequence of texts.
    """
    if not isinstance(given, str | Sequence):
        raise UserError(f"{argument} is {given!r}; accepted: a pattern, or a list of patterns")
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UserError(f"{argument} holds {pattern!r}; accepted: patterns, as texts")
    return patterns


def is_matched(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_fp8_patterns(names: Iterable[str], patterns: Iterable[str], who: str) -> None:
    """Refuse a pattern that matches no FP8 layer.

    Args:
        names: Of the FP8 layers.
        patterns: The patterns.
        who: Whose they are, for the message: "telemetry".

    Raises:
        UserError: With the names that there are.
    """
    layers = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise UserError(
                f"{who}: pattern {pattern!r} matches no FP8 layer; there are:"
                f" {_shown(layers) or 'none'}"
            )


def nothing_matched(pattern: str, layers: Mapping[str, object]) -> str:
    """What to say of a pattern that matches no linear layer."""
    if not layers:
        return f"pattern {pattern!r} matches nothing: the model has no linear layer"
    return f"pattern {pattern!r} matches no linear layer; there are: {_shown(list(layers))}"


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def blocks_of(model: nn.Module) -> tuple[nn.Module, list[list[nn.Linear]]]:
    """What holds the blocks, and the linear layers of each; see above."""
    holder, found = model, [[layer] for layer in _linear_layers(model)]
    most = 0
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        filled = {child: own for child in module.children() if (own := _linear_layers(child))}
        classes = {type(child) for child in filled}
        size = sum(map(len, filled.values()))
        if len(classes) == 1 and size > most:
            holder, found, most = module, list(filled.values()), size
    return holder, found


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [own for own in module.modules() if isinstance(own, nn.Linear)]


def _of_blocks(model: nn.Module, name: str) -> list[str]:
    """The names of the layers that "first", "last" or "head" means."""
    # A layer or a block may have several names: objects are compared, and named at the end.
    holder, blocks = blocks_of(model)
    if name == "first":
        chosen = blocks[0]
    elif name == "last":
        chosen = blocks[-1]
    else:
        inside = {id(own) for block in blocks for own in block}
        visits = list(_visits(model))
        start = next(place for place, own in enumerate(visits) if own is holder)
        after = [own for own in visits[start:] if isinstance(own, nn.Linear)]
        chosen = [own for own in after if id(own) not in inside] or _linear_layers(model)[-1:]
    wanted = {id(own) for own in chosen}
    return [own for own, layer in model.named_modules() if id(layer) in wanted]


def _visits(module: nn.Module, above: tuple[nn.Module, ...] = ()) -> Iterator[nn.Module]:
    """Every place of a model in order, so that what stands in two places comes twice."""
    if any(module is own for own in above):
        return
    yield module
    for child in module._modules.values():  # `children` names each one once
        if child is not None:
            yield from _visits(child, (*above, module))


def _tied(model: nn.Module, layers: Mapping[str, nn.Linear]) -> list[str]:
    weights = {id(own.weight) for own in model.modules() if isinstance(own, nn.Embedding)}
    if not weights:
        raise UserError(
            "'embeddings' matches nothing: the model has no torch.nn.Embedding; leave it out, or"
            " name a layer"
        )
    tied = [name for name, layer in layers.items() if id(layer.weight) in weights]
    if not tied:
        raise UserError(
            "'embeddings' matches nothing: no linear layer shares the weight of an embedding, and"
            " embeddings themselves are never FP8; leave it out, or name a layer"
        )
    return tied
