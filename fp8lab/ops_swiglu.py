"""SwiGLU as an operation, and as an operand that is made while it is cast.

As in `fp8lab.ops_linear`, where a tensor lives decides who computes: the oracle for the CPU, the
kernels for a GPU, with the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fp8lab.bridge import to_numpy, to_torch
from fp8lab.emulation import swiglu as oracle
from fp8lab.formats import Float8Format
from fp8lab.ops_linear import computed_by_kernel
from fp8lab.ops_operands import Unwritten
from fp8lab.recipes import BlockScaling


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; see `fp8lab.emulation.swiglu.swiglu`.

    Args:
        gate_up: (rows, 2F) float32, bfloat16 or float16: gate in the first F columns.

    Returns:
        (rows, F) of its type.
    """
    if computed_by_kernel(gate_up):
        from fp8lab.kernels.swiglu import swiglu as kernel

        return kernel(gate_up)
    gate, up = np.split(to_numpy(gate_up), 2, axis=1)
    return to_torch(oracle.swiglu(gate, up))


def swiglu_grad(dh: Tensor, gate_up: Tensor) -> Tensor:
    """The gradients of gate and up side by side; see `fp8lab.emulation.swiglu.swiglu_grad`.

    Args:
        dh: (rows, F), of gate_up's type.
        gate_up: As for `swiglu`.
    """
    if computed_by_kernel(gate_up):
        from fp8lab.kernels.swiglu import swiglu_grad as kernel

        return kernel(dh, gate_up)
    gate, up = np.split(to_numpy(gate_up), 2, axis=1)
    return to_torch(np.concatenate(oracle.swiglu_grad(to_numpy(dh), gate, up), axis=1))


class SwiGluOperand(Unwritten):
    """`swiglu(gate_up)`, or with dh `swiglu_grad(dh, gate_up)`, as a cast takes it.

    Args:
        gate_up: (rows, 2F).
        dh: (rows, F), or None.
        keep: Whether the cast writes the operand as well, because `tensor` will be asked for it.
    """

    def __init__(self, gate_up: Tensor, dh: Tensor | None = None, *, keep: bool = False) -> None:
        self.gate_up, self.dh, self._keep = gate_up, dh, keep
        columns = gate_up.shape[1] // 2
        self.shape = torch.Size((gate_up.shape[0], columns if dh is None else 2 * columns))
        self.dtype, self.device = gate_up.dtype, gate_up.device
        self._tensor: Tensor | None = None

    def tensor(self) -> Tensor:
        """The operand, written once."""
        if self._tensor is None:
            gate_up, dh = self.gate_up, self.dh
            self._tensor = swiglu(gate_up) if dh is None else swiglu_grad(dh, gate_up)
        return self._tensor

    def codes(
        self, fmt: Float8Format, scale: Tensor, *, transposed: bool, amax_out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Codes and transposed codes with one scale."""
        from fp8lab.kernels.swiglu import quantize_swiglu

        return quantize_swiglu(
            self.gate_up,
            fmt,
            dh=self.dh,
            scale=scale,
            transposed=transposed,
            amax_out=amax_out,
            values_out=self._room(),
        )

    def block_codes(self, fmt: Float8Format, policy: BlockScaling) -> tuple[Tensor, ...] | None:
        """Codes and inverse scales of blocks, and transposed; None where no kernel has them."""
        from fp8lab.kernels.swiglu import fits_blocks, quantize_swiglu_blocks

        if not fits_blocks(self.shape[1], policy.length, gradients=self.dh is not None):
            return None
        return quantize_swiglu_blocks(
            self.gate_up,
            fmt,
            dh=self.dh,
            length=policy.length,
            power_of_two=policy.power_of_two,
            values_out=self._room(),
        )

    def _room(self) -> Tensor | None:
        if self._keep:
            self._tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self._tensor if self._keep else None
