"""The fast matrix product for sm_90: when it applies, and how it is launched."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fp8lab.kernels.descriptors import DescriptorKind
from fp8lab.kernels.launch import cdiv, launch
from fp8lab.kernels.matmul_gluon_device import matmul_kernel
from fp8lab.kernels.matmul_gluon_plan import GluonPlan
from fp8lab.kernels.matmul_gluon_scales import SideScales, by_block, by_stage
from fp8lab.kernels.matmul_product import (
    ALIGNMENT,
    Product,
    aligned,
    by_description,
    multiprocessors,
)
from fp8lab.kernels.matmul_scales import BLOCK, MX_BLOCK
from fp8lab.kernels.matmul_settings import SHARED_MEMORY, GluonSettings

_CAPABILITY = (9, 0)
_GLUON_DTYPES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}


def applies(product: Product) -> bool:
    """Whether this kernel takes a product; the plain one takes every other."""
    return (
        _is_hopper(product.a.device)
        # What is not in slices is not decoded on its way into the ring.
        and (product.scales.block_k == MX_BLOCK or not _has_e8m0(product))
        and product.sizes[1] * product.out.element_size() % ALIGNMENT == 0
    )


def takes(product: Product, settings: GluonSettings) -> bool:
    """Whether a product that `applies` can be launched with these settings."""
    blocks = product.scales.kind == "blocks"
    return settings.takes(promote=product.promote, blocks=blocks, matrices=product.matrices)


def _has_e8m0(product: Product) -> bool:
    return product.scales.a_e8m0 or product.scales.b_e8m0


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _CAPABILITY


class _Side(NamedTuple):
    """An operand with its scales.

    Attributes:
        codes: Row-major, K along the rows.
        scales: As a table of rows by blocks of K.
        stride, stride_k: Of the scales, along the rows and along K.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    stride: int
    stride_k: int

    @property
    def of_blocks(self) -> SideScales:
        """The scales alone, where there are any."""
        assert self.scales is not None
        return SideScales(self.scales, self.stride, self.stride_k, self.codes.shape[0])


def _sides(product: Product) -> tuple[_Side, _Side]:
    """a and b."""
    scales = product.scales
    a_stride, a_stride_k, b_stride_k, b_stride = scales.strides
    return (
        _Side(aligned(product.a), scales.a, a_stride, a_stride_k),
        _Side(aligned(product.b), scales.b, b_stride, b_stride_k),
    )


def gluon_plan(product: Product, settings: GluonSettings) -> GluonPlan:
    """The compile-time part of a launch, with as many stages as fit.

    Raises:
        ValueError: Settings that do not `take` the product.
    """
    if not takes(product, settings):
        raise ValueError(
            f"settings are {settings}, but 256 of wgmma's rows leave too few registers for this"
            " product; accepted: 64, 128, 192"
        )
    scales, length = product.scales, product.promote
    promoted = length is not None
    own = scales.by_row, scales.by_column
    if settings.swap:
        own = own[::-1]
    depth = settings.block_k if length is None else BLOCK
    length = depth if length is None else length
    slices = depth // length
    blocks = scales.kind == "blocks"
    plan = GluonPlan(
        rows=settings.tile[0],
        columns=settings.tile[1],
        depth=depth,
        stages=1,
        group=settings.group,
        length=length,
        drain=max(1, settings.drain // slices) if promoted else 0,
        swap=settings.swap,
        scaling=scales.kind,
        # Where there are slices each row has its own, so that there are some beyond K, too.
        by_row=own[0] or (blocks and slices > 1),
        by_column=own[1] or (blocks and slices > 1),
        squares=BLOCK in (scales.rows_per_entry, scales.columns_per_entry),
        start=product.start is not None,
        bias=product.bias_kind,
        bfloat16=product.out.dtype == torch.bfloat16,
    )
    if promoted and (plan.partials == 1 or plan.parts > 1):
        # With one partial sum there is nothing to gain, and with several parts too little.
        plan = replace(plan, drain=1)
    result = 2 * plan.groups * math.prod(plan.piece) * product.out.element_size()
    # Barriers, and gaps between what is aligned, take less than 1 KiB.
    room = (SHARED_MEMORY - result - 1024) // plan.bytes_of_a_stage
    return replace(plan, stages=min(settings.most_stages, room))


_kept_plan = by_description(gluon_plan)


def launch_fast(product: Product, settings: GluonSettings) -> None:
    """Compute a product that `applies` to."""
    m, n, k = product.sizes
    out = product.out
    plan = _kept_plan(product, settings)
    left, right = _sides(product)
    if plan.swap:
        left, right = right, left
    left_table, right_table = _tables(plan, left, right, k)
    tiles = cdiv(left.codes.shape[0], plan.rows)
    tiles *= cdiv(right.codes.shape[0], plan.columns)
    launch(
        matmul_kernel,
        (min(multiprocessors(out.device), tiles),),
        _descriptor(left.codes, plan.box, plan.depth),
        _descriptor(right.codes, plan.columns, plan.depth),
        _descriptor(out, *plan.piece),
        # What is not there is never read, but must be something: a pointer costs the host nothing.
        out if left_table is None else _scale_kind(plan.slices, plan.box)(left_table),
        out if right_table is None else _scale_kind(plan.slices, plan.scale_columns)(right_table),
        _pointer(left.scales, left_table, out),
        _pointer(right.scales, right_table, out),
        out if product.bias is None else product.bias,
        out if product.start is None else product.start,
        m,
        n,
        k,
        left.stride,
        left.stride_k,
        right.stride,
        right.stride_k,
        PLAN=plan,
        num_warps=4,
        launch_pdl=True,
    )


def _pointer(
    scales: torch.Tensor | None, table: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """What stands for scales that are read from global memory; nothing is where a table is."""
    if table is not None:
        # Always float32, for fewer compilations.
        return table
    return out if scales is None else scales


def _tables(
    plan: GluonPlan, left: _Side, right: _Side, k: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The scales that the copy engine brings, as (blocks of K, rows); None for others."""
    blocks = cdiv(k, plan.length)
    if plan.by_row and plan.slices > 1:
        return by_stage(left.of_blocks, right.of_blocks, blocks, plan.slices)
    return (
        by_block(left.of_blocks, blocks) if plan.by_row else None,
        by_block(right.of_blocks, blocks) if plan.by_column else None,
    )


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """For the copy engine, in the layout that wgmma reads."""
    return _kind(matrix.dtype, rows, columns)(matrix)


@lru_cache
def _kind(dtype: torch.dtype, rows: int, columns: int) -> DescriptorKind:
    types = _GLUON_DTYPES | {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], types[dtype])
    return DescriptorKind(TensorDescriptor, dtype, (rows, columns), layout)


@lru_cache
def _scale_kind(height: int, width: int) -> DescriptorKind:
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return DescriptorKind(TensorDescriptor, torch.float32, (height, width), flat)
