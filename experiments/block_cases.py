"""What `bench_blocks` times: Llama-shaped blocks in BF16, and in FP8 by several stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8lab
from fp8lab.gradients import UpdateStep
from fp8lab.graphs import GraphedStep, captured_call
from fp8lab.linear import advance_scaling, forget_weights
from fp8lab.optimizer import AdamW
from fp8lab.swiglu import swiglu_linear

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Shape:
    """Sizes of a stack of blocks, and of what goes through it.

    Attributes:
        layers, hidden, ffn, heads, kv_heads: Of the blocks; as Llama 3 8B, but for the layers.
        batch, length: Sequences, and tokens in each.
    """

    layers: int = 4
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    batch: int = 2
    length: int = 4096

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.length


class Block(nn.Module):
    """RMSNorm, grouped-query attention with rotary positions, RMSNorm, SwiGLU.

    Query, key and value are one layer, and so are gate and up, as Megatron and TransformerEngine
    have them: an input that several layers share is cast once.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.size = shape.hidden // shape.heads
        self.norm1 = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.qkv = nn.Linear(shape.hidden, (shape.heads + 2 * shape.kv_heads) * self.size, False)
        self.out = nn.Linear(shape.hidden, shape.hidden, False)
        self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, False)
        self.down = nn.Linear(shape.ffn, shape.hidden, False)
        self.fused = False  # SwiGLU with the casts around it
        rates = 500000.0 ** -(torch.arange(0, self.size, 2) / self.size)
        angles = torch.outer(torch.arange(shape.length), rates)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result are (batch, length, hidden)."""
        x = x + self.out(self._attention(self.qkv(self.norm1(x))))
        return x + self._feed_forward(self.norm2(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return swiglu_linear(self.gate_up, self.down, x)
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(functional.silu(gate) * up)
        return y

    def _attention(self, qkv: Tensor) -> Tensor:
        batch, length, _ = qkv.shape
        shape = self.shape
        heads = qkv.view(batch, length, shape.heads + 2 * shape.kv_heads, self.size)
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        q, k, v = torch.split(heads.transpose(1, 2), sizes, 1)
        mixed = functional.scaled_dot_product_attention(
            self._turned(q), self._turned(k), v, is_causal=True, enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(batch, length, shape.hidden)

    def _turned(self, x: Tensor) -> Tensor:
        """Rotary positions, in float32."""
        one, two = x.float().chunk(2, -1)
        cos, sin = self.cosines, self.sines
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)


class Model(nn.Module):
    """A byte model of such blocks."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, VOCABULARY, False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for int64 tokens (batch, length)."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Variant:
    """One way to compute the linear layers.

    Attributes:
        stack: "torch" (BF16), "torchao" or "fp8lab".
        recipe: That stack's name of it.
        fused: Whether SwiGLU is fused with the casts around it; fp8lab's.
    """

    stack: str
    recipe: str
    fused: bool = False

    @property
    def name(self) -> str:
        """What rows call it."""
        return f"{self.stack} {self.recipe}{' fused' if self.fused else ''}"

    def missing(self) -> str | None:
        """Why it cannot be timed here; None where it can."""
        if self.stack == "torchao" and find_spec("torchao") is None:
            return "torchao is not installed"
        return None

    def apply(self, model: nn.Module) -> None:
        """Turn the linear layers of a model's blocks into its own."""
        if self.stack == "fp8lab":
            fp8lab.convert(model, self.recipe, include="*blocks.*")
            for module in model.modules():
                if isinstance(module, Block):
                    module.fused = self.fused
        elif self.stack == "torchao":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(
                model,
                config=Float8LinearConfig.from_recipe_name(self.recipe),
                module_filter_fn=lambda layer, name: "blocks" in name,
            )


VARIANTS = (
    Variant("torch", "bf16"),
    Variant("torchao", "tensorwise"),
    Variant("torchao", "rowwise"),
    Variant("fp8lab", "tensorwise"),
    Variant("fp8lab", "delayed"),
    Variant("fp8lab", "blockwise"),
    Variant("fp8lab", "delayed", fused=True),
    Variant("fp8lab", "blockwise", fused=True),
)


def blocks_step(
    variant: Variant,
    shape: Shape,
    *,
    device: str = "cuda",
    compiled: bool = True,
    graph: bool = False,
    pool: Any = None,
) -> Callable[[], Any]:
    """Forward and backward of the blocks alone, bfloat16; weights are cast anew in every step.

    The step returns the input's gradient. With `graph` it replays a CUDA graph of itself, whose
    memory is of the pool `pool`.
    """
    _, step = blocks_and_step(variant, shape, device=device, compiled=compiled)
    return captured_call(step, pool=pool) if graph else step


def blocks_and_step(
    variant: Variant, shape: Shape, *, device: str = "cuda", compiled: bool = True
) -> tuple[nn.Module, Callable[[], Any]]:
    """The blocks, and the step of `blocks_step` without a graph."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.ModuleDict({"blocks": nn.ModuleList(Block(shape) for _ in range(shape.layers))})
        model = model.to(torch.bfloat16)
        x = torch.randn(shape.batch, shape.length, shape.hidden, dtype=torch.bfloat16)
        dy = torch.randn_like(x) * 1e-3
    variant.apply(model)
    blocks: Any = model["blocks"]
    if compiled:
        _compile(blocks)
    x.requires_grad_()
    ours = variant.stack == "fp8lab"

    def step() -> Tensor | None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        y = x
        for block in blocks:
            y = block(y)
        y.backward(dy)  # type: ignore[no-untyped-call]
        if ours:
            advance_scaling(model)
            forget_weights(model)  # as after an optimizer's step
        return x.grad

    return model, step


def model_step(
    variant: Variant,
    shape: Shape,
    *,
    device: str = "cuda",
    compiled: bool = True,
    graph: bool = False,
    pool: Any = None,
) -> Callable[[], Any]:
    """A whole step of a byte model, float32 masters under autocast, clip and AdamW included.

    The step returns the loss before it; `graph` and `pool` are as for `blocks_step`.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(shape)
        tokens = torch.randint(VOCABULARY, (shape.batch, shape.length))
    variant.apply(model)
    if compiled:
        _compile(model.blocks)

    def loss(tokens: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens)
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    if variant.stack == "fp8lab":
        optimizer: Any = AdamW(model.parameters(), lr=1e-4, capturable=True)
        update = UpdateStep(model, optimizer, clip_norm=1.0)
        graphed = GraphedStep(loss, update, pool=pool) if graph else None
        return partial(_our_step, loss, update, tokens, graphed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=graph)
    step = partial(_torch_step, partial(loss, tokens), optimizer, list(model.parameters()))
    return captured_call(step, pool=pool) if graph else step


def _our_step(
    loss: Callable[[Tensor], Tensor],
    update: UpdateStep,
    tokens: Tensor,
    graphed: GraphedStep | None,
) -> Tensor:
    if graphed is not None:
        return graphed(tokens)[0]
    before = update.accumulate(loss, [tokens])
    update()
    return before


def _torch_step(
    loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, params: list[nn.Parameter]
) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    before = loss()
    before.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    return before.detach()


def _compile(blocks: Any) -> None:
    """Compile every block: they share one graph."""
    for block in blocks:
        block.compile(dynamic=False)
