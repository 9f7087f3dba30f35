"""What the audit calls layers, casts and parameters: the names that they have in their model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8lab.linear_casts import OperandCast
from fp8lab.linear_state import operand_casts


class Names:
    """Names of what was noted; a number where nothing gives a name."""

    def __init__(self) -> None:
        self._layers: dict[int, nn.Module] = {}  # kept alive, so that identities stay theirs
        self._models: list[nn.Module] = []
        self._known: dict[int, str] = {}
        self._parameters: dict[tuple[int, torch.Size], tuple[Tensor, str]] = {}

    def note_model(self, model: nn.Module) -> None:
        """A model, whose names come first."""
        if any(own is model for own in self._models):
            return
        self._models.append(model)
        self._parameters.clear()
        for name, module in model.named_modules():
            self._known.setdefault(id(module), name or type(module).__name__)

    def note_layer(self, layer: nn.Module) -> None:
        """A layer that runs; it may have a label from `fp8lab.convert`."""
        self._layers.setdefault(id(layer), layer)

    def layer(self, layer: nn.Module) -> str:
        """The name of a layer that was noted."""
        known = self._known.get(id(layer)) or getattr(layer, "label", "")
        if known:
            return str(known)
        number = list(self._layers).index(id(layer))
        return f"layer {number} ({layer.in_features} to {layer.out_features})"

    def cast(self, cast: OperandCast) -> str:
        """The name of a cast, as `operand_casts` gives it."""
        for model in self._models:
            for name, own in operand_casts(model):
                if own is cast:
                    return name
        for layer in self._layers.values():
            for name, own in operand_casts(layer):
                if own is cast:
                    return f"{self.layer(layer)}.{name}"
        return "a delayed cast"

    def parameter(self, param: Tensor, place: int) -> str:
        """The name of a parameter, found by where its elements lie."""
        key = param.data_ptr(), param.shape
        own, name = self._parameters.get(key, (None, ""))
        if own is None or not _same(own, param):  # new, or its memory was another's
            found = self._search(param)
            if found is None:
                return f"parameter {place} {tuple(param.shape)}"
            own, name = self._parameters[key] = found
        return name

    def _search(self, param: Tensor) -> tuple[Tensor, str] | None:
        for model in self._models:
            for name, own in model.named_parameters():
                if _same(own, param):
                    return own, name
        for layer in self._layers.values():
            for name, own in layer.named_parameters():
                if _same(own, param):
                    return own, f"{self.layer(layer)}.{name}"
        return None


def _same(one: Tensor, two: Tensor) -> bool:
    return one.data_ptr() == two.data_ptr() and one.shape == two.shape
