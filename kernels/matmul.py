"""FP8 matrix products on the GPU: the Triton twins of `fp8lab.emulation.matmul`.

Here is what a caller sees, with its checks. The readable kernel is in
`fp8lab.kernels.matmul_device`; on sm_90 large products take the faster one in
`fp8lab.kernels.matmul_gluon`. Both give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8lab.kernels.checks import as_integer, check_tensor
from fp8lab.kernels.matmul_launch import FORMATS, Settings, fastest, launch_product
from fp8lab.kernels.matmul_product import Product
from fp8lab.kernels.matmul_scales import Scales, scales_from

PROMOTIONS = (32, 64, 128)
OUT_DTYPES = (torch.float32, torch.bfloat16)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    accumulator: torch.Tensor | None = None,
    promote_every: int | None = None,
    inverse_scale_a: torch.Tensor | None = None,
    inverse_scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    settings: Settings | None = None,
) -> torch.Tensor:
    """The product of two matrices of FP8 codes, accumulated as Hopper's wgmma does.

    Order. Without promotion, one chain of steps of 32 over all of K, started from the accumulator
    (or zero). With `promote_every` = P, a chain from zero for each P of k; each partial is added to
    a float32 total, rounded to nearest even, which starts from the accumulator. Then, in float32,
    each operation rounded to nearest even, none fused: result * (scale_a * scale_b); + bias; the
    cast to `out_dtype`. Scales of blocks take part in the sum instead: total = fma(partial,
    scale_a * scale_b, total). Bit for bit `fp8lab.emulation.matmul.matmul` with core HOPPER_FP8.

    Args:
        a: (M, K), float8_e4m3fn or float8_e5m2, row-major (stride 1 along K).
        b: (K, N), either of them, column-major (stride 1 along K): the transpose of a row-major
            (N, K). The tensor core takes FP8 in no other order.
        accumulator: float32 (M, N), contiguous.
        promote_every: None, 32, 64 or 128.
        inverse_scale_a: float32 or float8_e8m0fnu: one element, (M, 1), or one a block of K:
            (M, K/128), (M, K/32) or (M/128, K/128), rounded up; of any strides.
        inverse_scale_b: One element, (1, N), (K/128, N), (K/32, N) or (K/128, N/128), likewise.
        bias: float32 (N,), or (M, N): a gradient that the product is added to. Contiguous.
        out_dtype: float32 or bfloat16.
        out: Where the result goes: (M, N), contiguous, of `out_dtype`. May be the bias itself.
        settings: How it is launched: `MatmulSettings` mean the plain kernel, `GluonSettings` the
            fast one; None lets the shape decide.

    Returns:
        (M, N) of `out_dtype`: `out` where it is given. A NaN operand, Inf times 0, or Inf minus Inf
        gives NaN; a sum that is zero is +0. With K = 0 the accumulator stays, or zeros. Where rows
        of K bytes are no multiples of 16, operands are first copied to rows that are.

    Raises:
        TypeError: A dtype that is not accepted, or something that is not a tensor.
        ValueError: Shapes that do not fit, a memory order that the kernel cannot read, tensors on
            several devices, or a promotion that is not among those above.

    Source: see `fp8lab.emulation.matmul`.
    """
    product = checked_product(
        a,
        b,
        accumulator=accumulator,
        promote_every=promote_every,
        inverse_scale_a=inverse_scale_a,
        inverse_scale_b=inverse_scale_b,
        bias=bias,
        out_dtype=out_dtype,
        out=out,
    )
    if product.out.numel():
        launch_product(product, settings)
    return product.out


def tune(a: torch.Tensor, b: torch.Tensor, **options: Any) -> Settings:
    """Time the candidates on these arguments, and let products alike take the fastest from now on.

    Args:
        a, b, options: As for `matmul`, without settings. What `out` names is overwritten.

    Returns:
        The fastest settings.
    """
    return fastest(checked_product(a, b, **options))


def checked_product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    accumulator: torch.Tensor | None = None,
    promote_every: int | None = None,
    inverse_scale_a: torch.Tensor | None = None,
    inverse_scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> Product:
    """The arguments of `matmul`, checked; it says what they are and what it raises."""
    b_t = _checked_operands(a, b)
    (m, k), n = a.shape, b_t.shape[0]
    scales = scales_from(inverse_scale_a, inverse_scale_b, m, k, n, a.device, promote_every)
    promote = _checked_promotion(promote_every, scales, k)
    if accumulator is not None:
        check_tensor("accumulator", accumulator, (torch.float32,))
        _check_place("accumulator", accumulator, ((m, n),), a.device)
    if bias is not None:
        check_tensor("bias", bias, (torch.float32,))
        _check_place("bias", bias, ((n,), (m, n)), a.device)
    result = _checked_out(out, out_dtype, (m, n), a.device)
    return Product(a, b_t, result, accumulator, promote, scales, bias)


def _checked_operands(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """b.t(), (N, K)."""
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; accepted: a torch tensor")
        if tensor.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: two dimensions")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; accepted: (M, K) and (K, N) of"
            " one K"
        )
    b_t = b.t()
    for name, tensor, given, order in (
        ("a", a, a, "row-major (M, K)"),
        ("b", b_t, b, "column-major (K, N)"),
    ):
        rows, k = tensor.shape
        along_rows, along_k = tensor.stride()
        if not ((k <= 1 or along_k == 1) and (rows <= 1 or along_rows >= k)) and tensor.numel():
            raise ValueError(
                f"{name} has strides {given.stride()}; accepted: {order}, with stride 1 along K"
            )
        check_tensor(name, tensor, FORMATS, contiguous=False)
    if a.device != b.device:
        raise ValueError(f"b is on {b.device}; a is on {a.device}")
    return b_t


def _checked_promotion(promote_every: int | None, scales: Scales, k: int) -> int | None:
    if promote_every is None:
        return scales.block_k
    length = as_integer(promote_every)
    # With K = 0 no shape tells how long blocks are, of which there are none.
    if k and scales.block_k not in (None, length):
        raise ValueError(
            f"promote_every is {promote_every!r}, but the scales have blocks of {scales.block_k}"
            " along K; accepted: that number, or None"
        )
    if length not in PROMOTIONS:
        accepted = ", ".join(str(known) for known in PROMOTIONS)
        raise ValueError(f"promote_every is {promote_every!r}; accepted: None, {accepted}")
    return length if scales.block_k is None else scales.block_k


def _check_place(
    name: str, tensor: torch.Tensor, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> None:
    if tuple(tensor.shape) not in shapes:
        accepted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: {accepted}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; a is on {device}")


def _checked_out(
    out: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    if dtype not in OUT_DTYPES:
        accepted = ", ".join(str(known) for known in OUT_DTYPES)
        raise TypeError(f"out_dtype is {dtype}; accepted: {accepted}")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    check_tensor("out", out, (dtype,))
    _check_place("out", out, (shape,), device)
    return out
