"""What a linear layer asks of an FP8 backend: operands in two layouts, and products of codes.

A product sums along rows of both its operands: a is (M, K), b is (N, K), the result (M, N). So an
operand that enters two products is wanted as it is and transposed, and each layout has scales of
its own where they lie along what is summed. As in `fp8lab.ops`, where a tensor lives decides who
computes: the oracle for the CPU, the kernels for a GPU, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from fp8lab import ops
from fp8lab.bridge import to_numpy, to_torch
from fp8lab.emulation import scaling
from fp8lab.emulation.matmul import matmul as oracle_matmul
from fp8lab.formats import Float8Format
from fp8lab.observe import observed
from fp8lab.ops_operands import Block, Codes, Layouts, Unwritten
from fp8lab.recipes import BlockScaling, MxScaling, RowScaling

_MX: Block = (1, 32)

# Whether CPU tensors go to the kernels too, which then run in Triton's interpreter.
_THROUGH_KERNELS: ContextVar[bool] = ContextVar("through_kernels", default=False)


@contextmanager
def through_kernels(wanted: bool = True) -> Iterator[None]:
    """Inside, the kernels compute on the CPU too: a process with TRITON_INTERPRET=1 can."""
    token = _THROUGH_KERNELS.set(wanted)
    try:
        yield
    finally:
        _THROUGH_KERNELS.reset(token)


def _by_kernel(x: Tensor | Unwritten) -> bool:
    return x.is_cuda or _THROUGH_KERNELS.get()


def computed_by_kernel(
    x: Tensor, policy: RowScaling | BlockScaling | MxScaling | None = None
) -> bool:
    """Whether a kernel casts x by that policy (with None by one scale), or multiplies codes x."""
    return _by_kernel(x) and (policy is None or _in_a_tile(_block_of(policy)))


@observed("cast")
def tensor_codes(
    x: Tensor | Unwritten,
    fmt: Float8Format,
    scale: Tensor,
    inverse: Tensor,
    *,
    plain: bool = True,
    transposed: bool = True,
    amax_out: Tensor | None = None,
) -> Layouts:
    """Cast with one scale: the same codes in both layouts, from one read.

    Args:
        x: (rows, columns) float32, bfloat16 or float16; or what becomes it.
        fmt: E4M3, E5M2 or their FNUZ forms.
        scale: One float32 element on x's device.
        inverse: 1 / scale; kept beside the codes.
        plain, transposed: Which layouts are wanted.
        amax_out: As for `fp8lab.ops.quantize`.
    """
    if isinstance(x, Unwritten) and not _by_kernel(x):
        x = x.tensor()
    codes_t: Tensor | None
    if isinstance(x, Unwritten):
        codes, codes_t = x.codes(fmt, scale, transposed=transposed, amax_out=amax_out)
    elif _by_kernel(x):
        from fp8lab.kernels.casting import quantize, quantize_with_transpose

        if transposed:
            codes, codes_t = quantize_with_transpose(x, fmt, scale=scale, amax_out=amax_out)
        else:
            codes, codes_t = quantize(x.contiguous(), fmt, scale=scale, amax_out=amax_out), None
    else:
        codes = ops.quantize(x.contiguous(), fmt, scale=scale, amax_out=amax_out)
        codes_t = codes.view(torch.uint8).t().contiguous().view(codes.dtype) if transposed else None
    return Layouts(
        Codes(codes, inverse, scale=scale) if plain else None,
        None if codes_t is None else Codes(codes_t, inverse, scale=scale),
    )


@observed("block_cast")
def block_codes(
    x: Tensor | Unwritten,
    fmt: Float8Format,
    policy: RowScaling | BlockScaling | MxScaling,
    *,
    plain: bool = True,
    transposed: bool = True,
) -> Layouts:
    """Cast with one scale a row or block of each layout, each from x itself.

    Args:
        x, fmt, plain, transposed: As for `tensor_codes`.
        policy: Which blocks, and how their scales are made.
    """
    block = _block_of(policy)
    if isinstance(x, Unwritten):
        found = None
        if _by_kernel(x) and isinstance(policy, BlockScaling) and not policy.square and transposed:
            found = x.block_codes(fmt, policy)
        if found is not None:
            first = Codes(found[0], found[1], block) if plain else None
            return Layouts(first, Codes(found[2], found[3], block))
        x = x.tensor()
    if _by_kernel(x) and _in_a_tile(block):
        return _block_codes_by_kernel(x, fmt, policy, block, plain, transposed)
    first = _one_layout(x, fmt, policy, block) if plain else None
    second = _one_layout(x.t().contiguous(), fmt, policy, block) if transposed else None
    return Layouts(first, second)


@observed("product")
def matmul(
    a: Codes,
    b: Codes,
    *,
    promote_every: int | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    accumulate: Tensor | None = None,
) -> Tensor:
    """The product of two matrices of codes, summed along the rows of both.

    The contract is `fp8lab.emulation.matmul.matmul`'s of a and b^T, with Hopper's core.

    Args:
        a: (M, K). b: (N, K).
        promote_every: As there.
        bias: (N,) of any of the accepted floating types.
        out_dtype: float32 or bfloat16; of float16 the float32 result is rounded once more.
        accumulate: A float32 gradient (M, N), contiguous, that becomes itself plus the product.

    Returns:
        (M, N) of `out_dtype`; `accumulate` itself where it is given.
    """
    if accumulate is not None:
        out_dtype = torch.float32
    narrow = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    inverse_b = b.inverse.t() if b.inverse.dim() == 2 else b.inverse
    vector = None if bias is None else bias.detach().float()
    if _by_kernel(a.codes):
        from fp8lab.kernels.matmul import matmul as kernel

        out: Tensor = kernel(
            a.codes,
            b.codes.t(),
            promote_every=promote_every,
            inverse_scale_a=a.inverse,
            inverse_scale_b=inverse_b,
            bias=vector if accumulate is None else accumulate,
            out_dtype=narrow,
            out=accumulate,
        )
    else:
        added = vector if accumulate is None else accumulate
        out = to_torch(
            oracle_matmul(
                to_numpy(a.codes),
                to_numpy(b.codes).T,
                promote_every=promote_every,
                inverse_scale_a=to_numpy(a.inverse),
                inverse_scale_b=to_numpy(inverse_b),
                bias=None if added is None else to_numpy(added),
                out_dtype=ml_dtypes.bfloat16 if narrow == torch.bfloat16 else np.float32,
            )
        )
        if accumulate is not None:
            out = accumulate.copy_(out)
    return out if accumulate is not None else out.to(out_dtype)


def bfloat16_product(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    accumulate: Tensor | None = None,
) -> Tensor:
    """a b^T of operands rounded to BF16, as torch computes it: its bits are the backend's.

    On a GPU it is cuBLAS' BF16 product, whose sums are float32: with a bfloat16 result the bias is
    part of it; any other result is that of a float32 output, to which bias or `accumulate` is
    added, then the cast. On a CPU it is a float32 product of the rounded operands, finished so.
    Under autocast it is the same: one rounding, after the bias.

    Args:
        a, b, bias, out_dtype, accumulate: As for `matmul`, but tensors of values.
    """
    first, second = a.to(torch.bfloat16), b.to(torch.bfloat16)
    options: dict[str, Any] = {"bias": bias, "out_dtype": out_dtype, "accumulate": accumulate}
    if not first.is_cuda:
        return float32_product(first.float(), second.float(), **options)
    with _outside_autocast(a.device):
        if out_dtype == torch.bfloat16 and accumulate is None:
            shift = None if bias is None else bias.to(torch.bfloat16)
            return torch.nn.functional.linear(first, second, shift)
        # Tensor cores; products of BF16 operands are exact in float32 either way.
        return _finished(torch.mm(first, second.t(), out_dtype=torch.float32), **options)


def float32_product(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    accumulate: Tensor | None = None,
) -> Tensor:
    """a b^T of float32 values by torch, then bias, then the cast; arguments as for `matmul`.

    In float32 under autocast too.
    """
    with _outside_autocast(a.device):
        return _finished(a @ b.t(), bias=bias, out_dtype=out_dtype, accumulate=accumulate)


def _outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, torch rounds nothing but what it is told to."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _finished(
    product: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype, accumulate: Tensor | None
) -> Tensor:
    """A float32 product with what is added to it, in the dtype that is wanted."""
    if accumulate is not None:
        return accumulate.add_(product)
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype)


def _block_of(policy: RowScaling | BlockScaling | MxScaling) -> Block:
    if isinstance(policy, RowScaling):
        return (1, None)
    if isinstance(policy, MxScaling):
        return _MX
    return (policy.length if policy.square else 1, policy.length)


def _in_a_tile(block: Block) -> bool:
    """Whether the kernels take such blocks."""
    return block[1] is None or all(
        size is not None and size <= 128 and size != 2 and not size & (size - 1) for size in block
    )


def _one_layout(
    x: Tensor, fmt: Float8Format, policy: RowScaling | BlockScaling | MxScaling, block: Block
) -> Codes:
    """By the oracle, or on a GPU by torch for blocks that no tile holds."""
    if isinstance(policy, MxScaling):
        codes, scale = scaling.quantize_mx(to_numpy(x), fmt, scale_rounding=policy.rounding)
        return Codes(to_torch(codes), to_torch(scale), block)
    if isinstance(policy, BlockScaling):
        size = (block[0] or 1, block[1] or 1)
        found = ops.quantize_blocks(
            x.contiguous(), fmt, block=size, power_of_two=policy.power_of_two
        )
        return Codes(*found, block)
    rows, inverse = scaling.quantize_blocks(
        to_numpy(x), fmt, block=block, power_of_two=policy.power_of_two
    )
    return Codes(to_torch(rows), to_torch(inverse), block)


def _block_codes_by_kernel(
    x: Tensor,
    fmt: Float8Format,
    policy: RowScaling | BlockScaling | MxScaling,
    block: Block,
    plain: bool,
    transposed: bool,
) -> Layouts:
    from fp8lab.kernels import scaling as kernels

    options: dict[str, Any] = {"block": block}
    one: Any = kernels.quantize_blocks
    both: Any = kernels.quantize_blocks_with_transpose
    if isinstance(policy, MxScaling):
        options["scale_rounding"] = policy.rounding
        one, both = kernels.quantize_mx, kernels.quantize_mx_with_transpose
    else:
        options["power_of_two"] = policy.power_of_two
    if not transposed:
        codes, scales = one(x, fmt, **options)
        return Layouts(Codes(codes, scales, block), None)
    found = both(x, fmt, **options)
    second = Codes(found.codes_t, found.scales_t, block)
    return Layouts(Codes(found.codes, found.scales, block) if plain else None, second)
