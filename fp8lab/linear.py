"""A linear layer whose three products take FP8 operands.

    forward          y  = x w^T     sums over K
    data gradient    dx = dy w      sums over N
    weight gradient  dw = dy^T x    sums over the rows (tokens)

x is (rows, K), w is (N, K), dy is (rows, N). Each operand is cast by its recipe, decoded, and the
products are float32 products of the decoded operands (`torch.matmul`; TF32 stays off).

Tensor-wise policies cast an operand once for both of its products. Block scaling casts it twice
from high precision, once along each dimension, since a block must lie along the summed dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8lab import ops
from fp8lab.recipes import (
    OPERANDS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    NoScaling,
    Operand,
    Recipe,
    StaticScaling,
)


@dataclass(frozen=True)
class CastStatistics:
    """What one cast of one tensor did.

    Attributes:
        amax: The largest magnitude of the tensor (NaN and Inf are shown when present).
        scale: The scale it was multiplied by; for blocks, the smallest of them.
        overflow: Share of all elements that are finite, but whose scaled value rounds past the
            largest finite code (so that it was clipped).
        underflow: Share of the elements that are not zero whose code is a zero.
    """

    amax: float
    scale: float
    overflow: float
    underflow: float


class OperandCast(nn.Module):
    """How one operand of one layer is cast, with the state that this needs.

    For delayed scaling `scale` and `amax_history` are buffers: they are training state, and
    `state_dict` carries them.
    """

    scale: Tensor
    amax_history: Tensor

    def __init__(self, operand: Operand) -> None:
        super().__init__()
        self.operand = operand
        self.observe = False
        self.statistics: CastStatistics | None = None
        scaling = operand.scaling
        if isinstance(scaling, StaticScaling):
            self.register_buffer("scale", torch.tensor(scaling.scale, dtype=torch.float32))
        elif isinstance(scaling, DelayedScaling):
            self.register_buffer("scale", torch.ones((), dtype=torch.float32))
            self.register_buffer("amax_history", torch.zeros(scaling.history))

    def forward(self, x: Tensor, *, both: bool = True) -> tuple[Tensor, Tensor]:
        """Cast a float32 matrix and decode it again.

        Args:
            x: (rows, columns), float32.
            both: Whether the second result is needed.

        Returns:
            The decoded float32 operand for a product that sums over its columns, and the one for a
            product that sums over its rows (the same tensor unless blocks differ; when `both` is
            False the first one twice).
        """
        x = x.detach().contiguous()
        scaling = self.operand.scaling
        if isinstance(scaling, NoScaling):
            rounded = x.to(torch.bfloat16).to(torch.float32)
            if self.observe:
                self._record(x, torch.ones_like(x), rounded)
            return rounded, rounded
        if isinstance(scaling, BlockScaling):
            along_columns = self._cast_blocks(x, scaling)
            if not both:
                return along_columns, along_columns
            return along_columns, self._cast_blocks(x.t().contiguous(), scaling, False).t()
        decoded = self._cast_tensor(x, scaling)
        return decoded, decoded

    def advance(self) -> None:
        """Move delayed scaling's history on by one step; nothing for other policies."""
        scaling = self.operand.scaling
        if isinstance(scaling, DelayedScaling):
            ops.update_delayed_(
                self.scale,
                self.amax_history,
                self.operand.float8,
                margin=scaling.margin,
                algorithm=scaling.algorithm,
                power_of_two=scaling.power_of_two,
            )

    def _cast_tensor(
        self, x: Tensor, scaling: StaticScaling | CurrentScaling | DelayedScaling
    ) -> Tensor:
        fmt = self.operand.float8
        amax_out = None
        if isinstance(scaling, CurrentScaling):
            scale = ops.scale_from_amax(
                ops.amax(x), fmt, margin=scaling.margin, power_of_two=scaling.power_of_two
            )
        else:
            # A copy: the cast of this step must not change when the state moves on.
            scale = self.scale.clone()
            if isinstance(scaling, DelayedScaling) and self.training:
                amax_out = self.amax_history[:1]
        codes = ops.quantize(x, fmt, scale=scale, amax_out=amax_out)
        decoded = ops.dequantize(codes, inverse_scale=1.0 / scale)
        if self.observe:
            self._record(x, scale.expand_as(x), decoded)
        return decoded

    def _cast_blocks(self, x: Tensor, scaling: BlockScaling, record: bool = True) -> Tensor:
        block = (1, scaling.length)
        codes, inverse_scale = ops.quantize_blocks(
            x, self.operand.float8, block=block, power_of_two=scaling.power_of_two
        )
        wide = ops.expand_blocks(inverse_scale, block, x.shape)
        decoded = ops.dequantize(codes) * wide
        if self.observe and record:
            self._record(x, 1.0 / wide, decoded)
        return decoded

    def _record(self, x: Tensor, scale: Tensor, decoded: Tensor) -> None:
        """Note what a cast did; `scale` has x's shape."""
        clipped = torch.zeros_like(x, dtype=torch.bool)
        if not isinstance(self.operand.scaling, NoScaling):  # BF16 reaches as far as float32
            fmt = self.operand.float8
            y = (x * scale).abs()
            beyond = y >= fmt.overflow_edge if fmt.max_code % 2 else y > fmt.overflow_edge
            clipped = x.isfinite() & beyond
        filled = x != 0
        lost = filled & (decoded == 0)
        self.statistics = CastStatistics(
            amax=float(ops.amax(x)),
            # Blocks of zeros have scale 1, which says nothing.
            scale=float(scale[filled].min()) if bool(filled.any()) else 1.0,
            overflow=float(clipped.sum()) / max(x.numel(), 1),
            underflow=float(lost.sum()) / max(float(filled.sum()), 1.0),
        )


class Fp8Linear(nn.Module):
    """`y = x w^T + bias` with each operand cast as a recipe says.

    Args:
        in_features, out_features: K and N.
        recipe: How input, weight and output gradient are cast.
        bias: Whether there is a bias (float32, added after the product).

    The weight and bias are float32: they are the master weights.
    """

    def __init__(
        self, in_features: int, out_features: int, recipe: Recipe, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.casts = nn.ModuleDict({role: OperandCast(recipe.operand(role)) for role in OPERANDS})

    def forward(self, x: Tensor) -> Tensor:
        """x is (..., K), float32; the result is (..., N), float32.

        Raises:
            TypeError: x is not float32.
            ValueError: Its last dimension is not K.
        """
        if x.dtype != torch.float32:
            raise TypeError(f"x has dtype {x.dtype}; accepted: float32 (call .float() first)")
        if x.dim() == 0 or x.shape[-1] != self.weight.shape[1]:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; accepted: (..., {self.weight.shape[1]})"
            )
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = _Products.apply(rows, self.weight, self)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            y = y + self.bias
        return y.reshape(*x.shape[:-1], self.weight.shape[0])


class _Products(torch.autograd.Function):
    """The three products. Backward uses the operands as its own forward cast them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Fp8Linear) -> Tensor:
        need_backward = any(ctx.needs_input_grad)
        x_forward, x_weight_grad = layer.casts["input"](x, both=need_backward)
        w_forward, w_data_grad = layer.casts["weight"](weight, both=need_backward)
        ctx.save_for_backward(x_weight_grad, w_data_grad)
        ctx.layer = layer
        y: Tensor = x_forward @ w_forward.t()
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dy_data_grad, dy_weight_grad = ctx.layer.casts["grad_output"](grad_outputs[0])
        return dy_data_grad @ weight, dy_weight_grad.t() @ x, None


def operand_casts(model: nn.Module) -> Iterator[tuple[str, OperandCast]]:
    """Every cast of a model with its name: `blocks.0.qkv.input` and so on."""
    for name, module in model.named_modules():
        if isinstance(module, OperandCast):
            yield name.replace(".casts.", "."), module


def advance_scaling(model: nn.Module) -> None:
    """Move every delayed scaling state on by one step (once a microbatch)."""
    for _, cast in operand_casts(model):
        cast.advance()
