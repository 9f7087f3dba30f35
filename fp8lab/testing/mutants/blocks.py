"""Block scales in plain torch: float32 scales, and MX."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from fp8lab.testing.mutants.casts import Cast
from fp8lab.testing.mutants.registry import Choices, right
from fp8lab.testing.mutants.scales import ScaleFromAmax

Tensor = torch.Tensor


class Blocks:
    """What both kinds share: a matrix is filled up with zeros to whole blocks and cut into them."""

    def __init__(self, choices: Choices) -> None:
        self.rows, self.columns = choices.block
        self.cast = Cast(choices)

    def amaxes(self, x: Tensor) -> Tensor:
        """One a block: magnitudes compared as integers."""
        words = self.whole(x).abs().view(torch.int32)
        down, across = words.shape[0] // self.rows, words.shape[1] // self.columns
        cut = words.view(down, self.rows, across, self.columns)
        if words.numel() == 0:
            return torch.zeros(down, across)
        return cut.amax((1, 3)).view(torch.float32)

    def whole(self, x: Tensor) -> Tensor:
        height, width = x.shape
        return pad(x, (0, -width % self.columns, 0, -height % self.rows)).contiguous()

    def spread(self, per_block: Tensor, x: Tensor) -> Tensor:
        """One value a block to one an element."""
        wide = per_block.repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)
        return wide[: x.shape[0], : x.shape[1]]


@right("block_quantize")
class BlockQuantize(Blocks):
    """kernel(x) -> (codes, inverse_scales)."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.rule = ScaleFromAmax(choices)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        amax = self.amaxes(x)
        scale = self.rule(amax)
        return self.cast.codes(self.scaled(x, scale)), self.kept(scale, amax)

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * self.spread(scale, x)

    def kept(self, scale: Tensor, amax: Tensor) -> Tensor:
        return scale.reciprocal()


@right("mx_quantize")
class MxQuantize(Blocks):
    """kernel(x) -> (codes, E8M0 codes as bytes)."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.rows, self.columns = 1, 32
        self.fmt, self.rounding = choices.fmt, choices.scale_rounding

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        amax = self.amaxes(x)
        code = self.guarded(self.shared(amax).clamp(min=self.smallest()), amax)
        # 2**(127 - code); the exponent of the smallest one is float32's subnormals'.
        factor = torch.exp2((127 - code).double()).float()
        factor = torch.where(code == 255, torch.nan, factor)
        codes = self.cast.codes(x * self.spread(factor, x))
        return codes, code.to(torch.uint8)

    def smallest(self) -> int:
        return 0

    def shared(self, amax: Tensor) -> Tensor:
        """The biased exponent, from the bits of amax."""
        words = amax.view(torch.int32).long()
        field, mantissa = words >> 23, words & 0x7FFFFF
        code = field - self.emax()
        if self.rounding == "up":
            top = int(torch.tensor(self.fmt.max_finite).view(torch.int32)) & 0x7FFFFF
            return code + (mantissa > top).long()
        if self.rounding == "nearest":
            return code + (mantissa >= 1 << 22).long()
        return code

    def emax(self) -> int:
        return 8 if self.fmt.exponent_bits == 4 else 15

    def guarded(self, code: Tensor, amax: Tensor) -> Tensor:
        code = torch.where(torch.isinf(amax), 254, code)
        return torch.where(torch.isnan(amax), 255, code)
