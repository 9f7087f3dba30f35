"""The fast promoted matrix product for sm_90: when it applies, and how it is launched."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fp8lab.kernels.launch import launch
from fp8lab.kernels.matmul_gluon_device import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    GluonPlan,
    matmul_kernel,
)
from fp8lab.kernels.matmul_product import Product, aligned, multiprocessors

_CAPABILITY = (9, 0)
_GROUP_M = 8
_DRAIN = 8
# With fewer rows half of a tile is wasted, and the plain kernel's small tiles are faster.
_FEWEST_ROWS = 65
_GLUON_DTYPES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}


def applies(product: Product) -> bool:
    """Whether this kernel takes a product; the plain one takes every other."""
    m, n, _ = product.sizes
    scales = product.scales
    blocks = (
        scales.rows_per_entry == 1
        and scales.columns_per_entry == BLOCK_N
        and scales.strides[0] != 0
        and not (scales.a_e8m0 or scales.b_e8m0)
    )
    return (
        _is_hopper(product.a.device)
        and product.promote == BLOCK_K
        and (scales.kind != "blocks" or blocks)
        and m >= _FEWEST_ROWS
        and n * product.out.element_size() % 16 == 0
    )


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _CAPABILITY


def launch_promoted(product: Product) -> None:
    """Compute a product that `applies` to."""
    m, n, k = product.sizes
    scales, out = product.scales, product.out
    wide = out.dtype == torch.float32
    plan = GluonPlan(
        stages=5 if wide or scales.kind == "blocks" else 6,
        group_m=_GROUP_M,
        drain=_DRAIN,
        scaling=scales.kind,
        start=product.start is not None,
        bias=product.bias_kind,
        bfloat16=not wide,
    )
    layout = gl.NVMMASharedLayout.get_default_for
    a, b = aligned(product.a), aligned(product.b)
    a_desc = TensorDescriptor.from_tensor(
        a, [BLOCK_M, BLOCK_K], layout([BLOCK_M, BLOCK_K], _GLUON_DTYPES[a.dtype])
    )
    b_desc = TensorDescriptor.from_tensor(
        b, [BLOCK_N, BLOCK_K], layout([BLOCK_N, BLOCK_K], _GLUON_DTYPES[b.dtype])
    )
    half = [BLOCK_M // 2, BLOCK_N]
    out_desc = TensorDescriptor.from_tensor(
        out, half, layout(half, gl.float32 if wide else gl.bfloat16)
    )
    scale_desc = a_desc
    if scales.kind == "blocks":
        assert scales.a is not None
        flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        scale_desc = TensorDescriptor.from_tensor(_by_block(scales.a), [1, BLOCK_M], flat)
    tiles = triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N)
    a_stride_m, _, b_stride_k, b_stride_n = scales.strides
    launch(
        matmul_kernel,
        (min(multiprocessors(a.device), tiles),),
        a_desc,
        b_desc,
        out_desc,
        scale_desc,
        # What is not there is never read, but must be a pointer.
        out if scales.a is None else scales.a,
        out if scales.b is None else scales.b,
        out if product.bias is None else product.bias,
        out if product.start is None else product.start,
        m,
        n,
        k,
        a_stride_m,
        b_stride_k,
        b_stride_n,
        PLAN=plan,
        num_warps=4,
    )


def _by_block(scales: torch.Tensor) -> torch.Tensor:
    """Scales (M, blocks of K) as (blocks, M), in rows that the copy engine can read."""
    table = scales.t()
    ready = table.stride(1) == 1 and table.stride(0) % 4 == 0 and table.data_ptr() % 16 == 0
    if ready and table.shape[1] >= 4:
        return table
    blocks, rows = table.shape
    copy = torch.zeros((max(blocks, 1), -(-rows // 4) * 4), device=scales.device)
    copy[:blocks, :rows] = table
    return copy
