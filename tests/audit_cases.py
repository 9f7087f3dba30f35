"""What the tests of the audit share: a small network, its steps, and wrong bits to plant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8lab
from fp8lab.gradients import LossScaler, UpdateStep
from fp8lab.optimizer import AdamW
from fp8lab.recipes import PRESETS, STACK_RECIPES

ROWS, K, N, M = 8, 16, 32, 48  # no two matrices of a step have one shape, but y and dx of K or N
EVERY_PRESET = [name for name in (*PRESETS, *STACK_RECIPES) if name != "bf16"]
MOMENTS = {"exp_avg": "e4m3_128", "exp_avg_sq": "e4m3_128_keep"}

Plant = Callable[[pytest.MonkeyPatch], None]


def network(spec: str = "tensorwise", products: str = "codes", device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, M, bias=False))
    return fp8lab.convert(model, spec, products=products).to(device)


class Loop:
    """Steps of a small network; each step's batch is its own."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.update = UpdateStep(
            model,
            AdamW(model.parameters(), lr=0.01, **{**MOMENTS, **options}),
            scaler=LossScaler(16.0),
            clip_norm=0.5,
        )
        self.done = 0

    def steps(self, count: int, *, update: bool) -> None:
        for _ in range(count):
            self.step(update=update)

    def step(self, microbatches: int = 1, *, update: bool = True) -> None:
        self.update.zero_grad()
        for _ in range(microbatches):
            self.done += 1
            generator = torch.Generator().manual_seed(self.done)
            x = torch.randn(ROWS, K, generator=generator).to(self.device)
            x.requires_grad_()  # so that the first layer has a data gradient, too
            self.update.backward(self.model(x).square().mean())
        if update:
            self.update()


def flipped(tensor: Any, place: tuple[int, ...]) -> Any:
    """With the lowest bit of one element flipped, in place."""
    if isinstance(tensor, Tensor):
        words: Any = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        tensor.view(words)[place] ^= 1
        return tensor
    changed = np.array(tensor)
    changed.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[changed.itemsize])[place] ^= 1
    return changed


def after(home: Any, name: str, change: Callable[[Any], Any]) -> Plant:
    """Replace a function by one whose result is changed."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        plain = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *a, **o: change(plain(*a, **o)))

    return plant


def of_shape(shape: tuple[int, ...], place: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda found: flipped(found, place) if found.shape == shape else found
