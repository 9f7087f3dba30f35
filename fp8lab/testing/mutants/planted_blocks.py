"""What can be planted in block scales."""

from __future__ import annotations

from typing import Any

import torch

from fp8lab.formats import E4M3, E5M2
from fp8lab.testing.mutants.blocks import BlockQuantize, MxQuantize, Tensor
from fp8lab.testing.mutants.planted_casts import FlushesSubnormals, TiesAway
from fp8lab.testing.mutants.planted_scales import ScaleRoundedUp
from fp8lab.testing.mutants.registry import Choices, mutant

_ROWS: dict[str, Any] = {"fmt": E4M3, "power_of_two": True}


_PLAIN: dict[str, Any] = {"fmt": E4M3, "power_of_two": False}


_SQUARES: dict[str, Any] = {"fmt": E5M2, "block": (128, 128), "power_of_two": True}


@mutant("block_quantize", "scales-transposed", **_ROWS)
class ScalesTransposed(BlockQuantize):
    """Inverse scales are written column after column."""

    def kept(self, scale: Tensor, amax: Tensor) -> Tensor:
        return super().kept(scale, amax).T.contiguous().view(scale.shape)


@mutant("block_quantize", "wrong-extent", **_ROWS)
class ScaleOfWholeRow(BlockQuantize):
    """Every block of a row has the row's amax."""

    def amaxes(self, x: Tensor) -> Tensor:
        amax = super().amaxes(x)
        if amax.numel() == 0:
            return amax
        return amax.view(torch.int32).amax(1, keepdim=True).view(torch.float32).expand_as(amax)


@mutant("block_quantize", "wrong-extent", **_ROWS)
class ScaleOfHalfBlock(BlockQuantize):
    """The reduction covers the first half of a block."""

    def whole(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1]) % self.columns
        return super().whole(torch.where(place < self.columns // 2, x, 0.0))


@mutant("block_quantize", "wrong-extent", **_SQUARES)
class RowForSquare(BlockQuantize):
    """Only the first row of a 128x128 block counts."""

    def whole(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[0])[:, None] % self.rows
        return super().whole(torch.where(place < 1, x, 0.0))


@mutant("block_quantize", "edge-block-wrong", **_ROWS)
class EdgeBlockIgnored(BlockQuantize):
    """The smaller block at the end of a row is not reduced."""

    def whole(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        inside = place < x.shape[1] // self.columns * self.columns
        return super().whole(torch.where(inside, x, 0.0))


@mutant("block_quantize", "power-of-two-up", **_ROWS)
class BlockScaleUp(BlockQuantize):
    """Scales are rounded up to powers of two."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.rule = ScaleRoundedUp(choices)


@mutant("block_quantize", "power-of-two-forgotten", **_ROWS)
class BlockScaleUnrounded(BlockQuantize):
    """Scales keep their mantissa."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.rule.power_of_two = False


@mutant("block_quantize", "scale-kept-for-inverse", **_ROWS)
class KeepsScale(BlockQuantize):
    """The scale is stored, not its inverse."""

    def kept(self, scale: Tensor, amax: Tensor) -> Tensor:
        return scale


@mutant("block_quantize", "inverse-from-amax", **_PLAIN)
class InverseFromAmax(BlockQuantize):
    """The inverse scale is amax / max_finite."""

    def kept(self, scale: Tensor, amax: Tensor) -> Tensor:
        usable = torch.isfinite(amax) & (amax > 0)
        return torch.where(usable, amax / self.rule.top(), scale.reciprocal())


@mutant("block_quantize", "scale-inverted-twice", **_PLAIN)
class BlockDividesByInverse(BlockQuantize):
    """Elements are divided by the inverse scale."""

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return x / self.spread(scale.reciprocal(), x)


@mutant("block_quantize", "amax-in-16-bits", **_PLAIN)
class BlockAmaxInBfloat16(BlockQuantize):
    """The amax is rounded to bfloat16."""

    def amaxes(self, x: Tensor) -> Tensor:
        return super().amaxes(x).bfloat16().float()


@mutant("block_quantize", "nan-lost", **_ROWS)
class BlockDropsNan(BlockQuantize):
    """A maximum that drops NaN: a block that holds one is scaled as if it did not."""

    def amaxes(self, x: Tensor) -> Tensor:
        return super().amaxes(torch.where(torch.isnan(x), 0.0, x))


@mutant("block_quantize", "amax-raised", **_ROWS)
class BlockAmaxRaised(BlockQuantize):
    """The amax is raised to 1e-4, which hides small blocks."""

    def amaxes(self, x: Tensor) -> Tensor:
        amax = super().amaxes(x)
        return torch.where(amax < 1e-4, torch.tensor(1e-4), amax)


@mutant("block_quantize", "ties-away", **_ROWS)
class BlockTiesAway(BlockQuantize):
    """Elements round ties away from zero."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.cast = TiesAway(choices)


@mutant("mx_quantize", "scale-rounded-otherwise", fmt=E4M3)
class MxRoundsUp(MxQuantize):
    """The shared exponent is rounded up under the floor rule."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.rounding = "up"


@mutant("mx_quantize", "scale-exponent-off", fmt=E5M2)
class MxExponentOff(MxQuantize):
    """E4M3's largest exponent is subtracted, one less than its own: 7 for 8."""

    def emax(self) -> int:
        return super().emax() - 1


@mutant("mx_quantize", "exponent-from-logarithm", fmt=E4M3)
class MxByLogarithm(MxQuantize):
    """floor(log2(amax)) in float32 (torchao 4725)."""

    def shared(self, amax: Tensor) -> Tensor:
        exponent = torch.floor(torch.log2(amax)).clamp(-200, 200)
        return exponent.nan_to_num(0).long() + 127 - self.emax()


@mutant("mx_quantize", "amax-in-16-bits", fmt=E4M3)
class MxAmaxInBfloat16(MxQuantize):
    """The amax passes through bfloat16, which rounds up to a power of two."""

    def amaxes(self, x: Tensor) -> Tensor:
        return super().amaxes(x).bfloat16().float()


@mutant("mx_quantize", "zero-block-scale", fmt=E4M3)
class MxZeroBlock(MxQuantize):
    """A block of zeros has scale 1."""

    def guarded(self, code: Tensor, amax: Tensor) -> Tensor:
        return torch.where(amax == 0, 127, super().guarded(code, amax))


@mutant("mx_quantize", "smallest-scale", fmt=E4M3)
class MxSmallestScale(MxQuantize):
    """Code 0 is not used: tiny blocks have 2**-126."""

    def smallest(self) -> int:
        return 1


@mutant("mx_quantize", "nan-lost", fmt=E4M3)
class MxNanAsInfinity(MxQuantize):
    """A block with NaN has the scale of one with Inf."""

    def guarded(self, code: Tensor, amax: Tensor) -> Tensor:
        return super().guarded(code, amax).clamp(max=254)


@mutant("mx_quantize", "wrong-extent", fmt=E4M3)
class MxHalfBlock(MxQuantize):
    """The reduction covers 16 of the 32 elements."""

    def whole(self, x: Tensor) -> Tensor:
        return super().whole(torch.where(torch.arange(x.shape[1]) % 32 < 16, x, 0.0))


@mutant("mx_quantize", "subnormals-flushed", fmt=E4M3, scale_rounding="up")
class MxFlushes(MxQuantize):
    """Elements below the smallest normal code become zero."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.cast = FlushesSubnormals(choices)
