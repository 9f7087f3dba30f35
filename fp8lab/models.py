"""A small decoder-only transformer over bytes, for experiments that must run anywhere.

Pre-norm blocks with learned positions, in float32 but for what a recipe does to the linear layers
inside the blocks (four a block: qkv, proj, up, down). The embedding and the head stay in float32,
as FP8 recipes leave them. Attention is written out, so that its gradients are deterministic on
every device.

Letters in names: B batch, T time (context), D width, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8lab.errors import UserError
from fp8lab.linear import Fp8Linear
from fp8lab.recipes import Recipe

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of the transformer.

    Attributes:
        context: Bytes a sequence, T.
        width: Width of the residual stream, D.
        layers: Number of blocks.
        heads: Attention heads a block; must divide width.
    """

    context: int = 64
    width: int = 128
    layers: int = 2
    heads: int = 4

    def __post_init__(self) -> None:
        limits = {"context": 65536, "width": 16384, "layers": 256, "heads": 256}
        for name, largest in limits.items():
            value = getattr(self, name)
            if not 1 <= value <= largest:
                raise UserError(f"model {name} is {value}; accepted: 1 to {largest}")
        if self.width % self.heads:
            raise UserError(
                f"model width {self.width} is not a multiple of its {self.heads} heads; choose one"
            )


class Block(nn.Module):
    """Attention, then a GELU network, each on a normalised input and added to the stream."""

    def __init__(self, config: TransformerConfig, recipe: Recipe) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = Fp8Linear(width, 3 * width, recipe)
        self.proj = Fp8Linear(width, width, recipe)
        self.norm2 = nn.LayerNorm(width)
        self.up = Fp8Linear(width, 4 * width, recipe)
        self.down = Fp8Linear(4 * width, width, recipe)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.proj(self._attention(self.norm1(x_BTD)))
        hidden = functional.gelu(self.up(self.norm2(x_BTD)))
        down: Tensor = self.down(hidden)
        return x_BTD + down

    def _attention(self, x_BTD: Tensor) -> Tensor:
        batch, time, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        future = torch.ones(time, time, dtype=torch.bool, device=x_BTD.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed: Tensor = (weights @ v).transpose(1, 2).reshape(batch, time, width)
        return mixed


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: TransformerConfig, recipe: Recipe, *, seed: int = 0) -> None:
        """Build with weights drawn from a generator of its own: normal, 0.02 wide.

        The two layers that write to the residual stream are narrower by sqrt(2 * layers) (GPT-2).
        """
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, recipe) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norms keep their ones and zeros, biases their zeros
            narrow = name.endswith(("proj.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * self.config.layers) if narrow else 0.02
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, 256), float32, for int64 bytes (B, T) with T at most the context."""
        time = tokens_BT.shape[1]
        places = torch.arange(time, device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions(places)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits: Tensor = self.head(self.norm(x_BTD))
        return logits
