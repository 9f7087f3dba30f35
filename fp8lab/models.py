"""Small models over bytes, for experiments that must run anywhere: a transformer and an MLP.

The transformer is GPT-like: pre-norm blocks with learned positions, in float32 but for what a
recipe does to the linear layers inside the blocks (four a block: qkv, proj, up, down). The
embedding and the head stay in float32, as FP8 recipes leave them. Attention is written out, so that
its gradients are deterministic on every device; where it is in bfloat16 or float16 on a GPU it is
torch's fused one, whose gradients are with `torch.use_deterministic_algorithms(True)`. The MLP sees
the last few bytes, side by side.

Letters in names: B batch, T time (context), D width, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8lab.conversion import convert
from fp8lab.errors import UserError
from fp8lab.recipes import Recipe

VOCABULARY = 256  # bytes
_FLASH = (torch.bfloat16, torch.float16)


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


@dataclass(frozen=True)
class MlpConfig:
    """Sizes of the MLP.

    Attributes:
        context: Bytes a sequence, T.
        width: Width of a byte's embedding, D.
        layers: Hidden layers, each 8 D wide.
        window: How many bytes it sees, the newest among them.
    """

    context: int = 64
    width: int = 32
    layers: int = 2
    window: int = 8

    def __post_init__(self) -> None:
        limits = {"context": 65536, "width": 16384, "layers": 256, "window": 65536}
        for name, largest in limits.items():
            value = getattr(self, name)
            if not 1 <= value <= largest:
                raise UserError(f"model {name} is {value}; accepted: 1 to {largest}")


ModelConfig = TransformerConfig | MlpConfig


class Block(nn.Module):
    """Attention, then a GELU network, each on a normalised input and added to the stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = _linear(width, 3 * width)
        self.proj = _linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = _linear(width, 4 * width)
        self.down = _linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.proj(self._attention(self.norm1(x_BTD)))
        hidden = functional.gelu(self.up(self.norm2(x_BTD)))
        down: Tensor = self.down(hidden)
        return x_BTD + down

    def _attention(self, x_BTD: Tensor) -> Tensor:
        batch, time, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        if _has_flash(q):
            fused = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return fused.transpose(1, 2).reshape(batch, time, width)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        future = torch.ones(time, time, dtype=torch.bool, device=x_BTD.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed: Tensor = (weights @ v).transpose(1, 2).reshape(batch, time, width)
        return mixed


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(
        self, config: TransformerConfig, recipe: Recipe, *, seed: int = 0, products: str = "codes"
    ) -> None:
        """Build with weights drawn from a generator of its own: normal, 0.02 wide.

        The two layers that write to the residual stream are narrower by sqrt(2 * layers) (GPT-2).
        `products` as in `fp8lab.convert`.
        """
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = _linear(config.width, VOCABULARY, bias=False)
        narrow = ("proj.weight", "down.weight")
        _initialise(self, seed, narrow, 0.02 / math.sqrt(2 * config.layers))
        convert(self, recipe, include="blocks.*", products=products)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, 256), float32, for int64 bytes (B, T) with T at most the context."""
        time = tokens_BT.shape[1]
        places = torch.arange(time, device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions(places)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits: Tensor = self.head(self.norm(x_BTD))
        return logits


class Mlp(nn.Module):
    """Bytes in, logits of the next byte out, from the last `window` bytes alone."""

    def __init__(
        self, config: MlpConfig, recipe: Recipe, *, seed: int = 0, products: str = "codes"
    ) -> None:
        """Build as `Transformer` does; the hidden layers take the recipe."""
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        hidden = 8 * config.width
        sizes = [config.window * config.width] + [hidden] * config.layers
        self.hidden = nn.ModuleList(_linear(a, b) for a, b in pairwise(sizes))
        self.norm = nn.LayerNorm(hidden)
        self.head = _linear(hidden, VOCABULARY, bias=False)
        _initialise(self, seed, (), 0.02)
        convert(self, recipe, include="hidden.*", products=products)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, 256), float32, for int64 bytes (B, T)."""
        window = self.config.window
        x_BTD = functional.pad(self.tokens(tokens_BT), (0, 0, window - 1, 0))
        x_BTH = x_BTD.unfold(1, window, 1).transpose(2, 3).flatten(2)
        for layer in self.hidden:
            x_BTH = functional.gelu(layer(x_BTH))
        logits: Tensor = self.head(self.norm(x_BTH))
        return logits


def _has_flash(q: Tensor) -> bool:
    """Whether torch's flash attention takes queries (B, H, T, D / H) like these."""
    return q.is_cuda and q.dtype in _FLASH and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def build_model(
    config: ModelConfig, recipe: Recipe, *, seed: int = 0, products: str = "codes"
) -> Transformer | Mlp:
    """The model of those sizes."""
    if isinstance(config, MlpConfig):
        return Mlp(config, recipe, seed=seed, products=products)
    return Transformer(config, recipe, seed=seed, products=products)


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """A layer that draws nothing from torch's global generator; `_initialise` fills it."""
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def _initialise(model: nn.Module, seed: int, narrow: tuple[str, ...], narrow_std: float) -> None:
    """Matrices normal, 0.02 wide or `narrow_std` by their names' ends; norms and biases stay."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            std = narrow_std if narrow and name.endswith(narrow) else 0.02
            nn.init.normal_(parameter, std=std, generator=generator)
