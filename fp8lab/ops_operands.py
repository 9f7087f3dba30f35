"""Operands of products: matrices as FP8 codes, and those that are made only as they are cast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8lab import ops
from fp8lab.formats import Float8Format
from fp8lab.observe import observed
from fp8lab.recipes import BlockScaling

Block = tuple[int | None, int | None]


@dataclass(frozen=True)
class Codes:
    """A matrix as FP8 codes, with what decodes them.

    Attributes:
        codes: (rows, columns), rows in order in memory.
        inverse: float32 inverse scales, or E8M0 scales: one element, or one a block.
        block: (rows, columns) of a block, None for a whole dimension; None is one scale for all.
        scale: What the matrix was multiplied by, where that is one scale.
    """

    codes: Tensor
    inverse: Tensor
    block: Block | None = None
    scale: Tensor | None = None

    @observed("dequantize")
    def decoded(self) -> Tensor:
        """float32 (rows, columns): code times inverse scale, rounded to nearest even."""
        if self.block is None:
            return ops.dequantize(self.codes.contiguous(), inverse_scale=self.inverse)
        return ops.dequantize(self.codes.contiguous()) * self.expanded_inverse()

    def expanded_inverse(self) -> Tensor:
        """The inverse scale of every element."""
        shape = self.codes.shape
        if self.block is None:
            return self.inverse.expand(shape)
        rows, columns = (
            shape[side] if size is None else size for side, size in enumerate(self.block)
        )
        inverse = self.inverse
        if inverse.dtype == torch.float8_e8m0fnu:
            inverse = _powers_of_two(inverse)
        return ops.expand_blocks(inverse, (max(rows, 1), max(columns, 1)), shape)


@dataclass(frozen=True)
class Layouts:
    """An operand as it is, and transposed: (rows, columns) and (columns, rows)."""

    plain: Codes | None
    transposed: Codes | None


class Unwritten(ABC):
    """An operand that is made as it is cast, so that it need not be written and read again.

    It stands where a cast takes a matrix; whoever needs the matrix itself gets it from `tensor`.

    Attributes:
        shape: (rows, columns).
        dtype, device: As a tensor's.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def tensor(self) -> Tensor:
        """The operand, written."""

    @abstractmethod
    def codes(
        self, fmt: Float8Format, scale: Tensor, *, transposed: bool, amax_out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What `tensor_codes` makes of the operand, by a kernel."""

    @abstractmethod
    def block_codes(self, fmt: Float8Format, policy: BlockScaling) -> tuple[Tensor, ...] | None:
        """Codes, inverse scales, and both transposed, by a kernel; None where it has none."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def detach(self) -> Unwritten:
        return self

    def stride(self, _: int) -> int:
        return 1  # neighbours in a row lie side by side

    def contiguous(self) -> Tensor:
        return self.tensor().contiguous()

    def to(self, dtype: torch.dtype) -> Tensor:
        return self.tensor().to(dtype)


def _powers_of_two(e8m0: Tensor) -> Tensor:
    """float32 of E8M0 codes, from bits: code c is 2**(c - 127), and 255 NaN."""
    words = e8m0.view(torch.uint8).to(torch.int32)
    bits = torch.where(words == 0, 0x00400000, words << 23)
    return torch.where(words == 255, 0x7FFFFFFF, bits).view(torch.float32)
