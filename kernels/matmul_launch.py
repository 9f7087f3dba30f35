"""Which kernel computes a product, and with which settings."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8lab.formats import BFLOAT16, E4M3, E5M2, Float8Format
from fp8lab.kernels.descriptors import DescriptorKind
from fp8lab.kernels.float_device import ElementCode
from fp8lab.kernels.launch import cdiv, interpreted, launch
from fp8lab.kernels.matmul_choice import fast_settings, plain_settings
from fp8lab.kernels.matmul_device import ProductPlan, matmul_kernel
from fp8lab.kernels.matmul_product import (
    ALIGNMENT,
    Product,
    aligned,
    by_description,
    multiprocessors,
)
from fp8lab.kernels.matmul_scales import BLOCK
from fp8lab.kernels.matmul_settings import (
    FAST_NATIVE_CANDIDATES,
    FAST_PROMOTED_CANDIDATES,
    NATIVE_CANDIDATES,
    PROMOTED_CANDIDATES,
    GluonSettings,
    MatmulSettings,
    fits,
)

FORMATS: dict[torch.dtype, Float8Format] = {
    getattr(torch, fmt.dtype_name): fmt for fmt in (E4M3, E5M2)
}

Settings = MatmulSettings | GluonSettings

# Products that were tuned, and what was fastest.
_TUNED: dict[Hashable, Settings] = {}
_OUT_CODE = ElementCode.of(BFLOAT16, saturate=False)


def fastest(product: Product) -> Settings:
    """Time the candidates on a product, and let those alike take the fastest from now on."""
    candidates = candidates_for(product)
    times = {
        candidate: triton.testing.do_bench(
            lambda candidate=candidate: launch_product(product, candidate),
            warmup=5,
            rep=20,
            return_mode="median",
        )
        for candidate in candidates
    }
    _TUNED[product.key] = min(candidates, key=times.__getitem__)
    return _TUNED[product.key]


def candidates_for(product: Product) -> list[Settings]:
    """The frozen settings that a product can be launched with."""
    native = product.promote is None
    plain = [
        candidate
        for candidate in (NATIVE_CANDIDATES if native else PROMOTED_CANDIDATES)
        if fits(candidate, wide=_wide(product))
    ]
    if not _is_fast(product):
        return [*plain]
    fast = FAST_NATIVE_CANDIDATES if native else FAST_PROMOTED_CANDIDATES
    return [*plain, *(candidate for candidate in fast if _fast().takes(product, candidate))]


def launch_product(product: Product, settings: Settings | None) -> None:
    """Launch one of the kernels, as told, as tuned, or as the shape decides."""
    fast = _is_fast(product)
    if settings is None and _TUNED:
        settings = _TUNED.get(product.key)
    if settings is None:
        settings = _chosen(product, fast)
    if isinstance(settings, MatmulSettings):
        _launch_plain(product, settings)
    elif fast:
        _fast().launch_fast(product, settings)
    else:
        raise ValueError(
            f"settings are {settings}, but the fast kernel does not take this product; accepted:"
            " MatmulSettings, or None"
        )


def _chosen(product: Product, fast: bool) -> Settings:
    m, n, k = product.sizes
    promoted, count = product.promote is not None, multiprocessors(product.a.device)
    if fast:
        scales = product.scales
        return _fast_settings(
            m,
            n,
            k,
            promote=product.promote,
            blocks=scales.kind == "blocks",
            by_row=scales.by_row,
            by_column=scales.by_column,
            multiprocessors=count,
            matrices=product.matrices,
        )
    wide = _wide(product)
    return _plain_settings(m, n, promoted=promoted, wide=wide, multiprocessors=count)


_fast_settings = lru_cache(fast_settings)
_plain_settings = lru_cache(plain_settings)


def _is_fast(product: Product) -> bool:
    return not interpreted() and bool(_fast().applies(product))


def _wide(product: Product) -> bool:
    """Whether a tile of float32 passes through shared memory at the end."""
    return product.out.dtype == torch.float32 or product.bias_kind == "matrix"


@lru_cache
def _fast() -> Any:
    """The module of the fast kernel: loaded on a card only, where it can run."""
    return import_module("fp8lab.kernels.matmul_gluon")


def _launch_plain(product: Product, settings: MatmulSettings) -> None:
    m, n, k = product.sizes
    programs = multiprocessors(product.a.device)
    if product.promote is not None:
        scaled = product.scales.kind == "blocks" and product.promote < BLOCK
        settings = settings.with_block_k(product.promote, scaled=scaled)
    bfloat16 = product.out.dtype == torch.bfloat16
    out: Any = product.out.view(torch.int16) if bfloat16 else product.out
    by_descriptor = bfloat16 and n * out.element_size() % ALIGNMENT == 0
    plan = _kept_plan(product, settings, by_descriptor)
    tiles = cdiv(m, settings.block_m) * cdiv(n, settings.block_n)
    scales = product.scales
    launch(
        matmul_kernel,
        (min(programs, tiles),),
        _descriptor(product.a, settings.block_m, settings.block_k),
        _descriptor(product.b, settings.block_n, settings.block_k),
        _kind(out.dtype, settings.block_m, settings.block_n)(out) if by_descriptor else out,
        scales.a,
        scales.b,
        product.bias,
        product.start,
        m,
        n,
        k,
        *scales.strides,
        PLAN=plan,
        A_CODE=_code(product.a.dtype),
        B_CODE=_code(product.b.dtype),
        OUT_CODE=_OUT_CODE,
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
        **({"launch_pdl": True} if plan.overlap else {}),
    )


@by_description
def _kept_plan(product: Product, settings: MatmulSettings, by_descriptor: bool) -> ProductPlan:
    return product_plan(product, settings, out_descriptor=by_descriptor)


def product_plan(
    product: Product, settings: MatmulSettings, *, out_descriptor: bool
) -> ProductPlan:
    """The compile-time part of a launch."""
    scales = product.scales
    return ProductPlan(
        block_m=settings.block_m,
        block_n=settings.block_n,
        block_k=settings.block_k,
        group_m=settings.group_m,
        promote=product.promote is not None,
        scaling=scales.kind,
        rows_per_scale=scales.rows_per_entry,
        columns_per_scale=scales.columns_per_entry,
        scale_a_e8m0=scales.a_e8m0,
        scale_b_e8m0=scales.b_e8m0,
        start=product.start is not None,
        bias=product.bias_kind,
        bfloat16=product.out.dtype == torch.bfloat16,
        out_descriptor=out_descriptor,
        hardware=not interpreted(),
        warp_specialize=settings.warp_specialize,
        swap=settings.swap,
        overlap=_overlaps(product.a.device),
    )


@lru_cache
def _overlaps(device: torch.device) -> bool:
    """Whether the device can start a kernel before the one before has ended: from sm_90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def _code(dtype: torch.dtype) -> ElementCode:
    return ElementCode.of(FORMATS[dtype], saturate=True)


def _descriptor(codes: torch.Tensor, rows: int, columns: int) -> Any:
    ready = aligned(codes)
    if interpreted():
        ready = ready.view(torch.uint8)
    return _kind(ready.dtype, rows, columns)(ready)


@lru_cache
def _kind(dtype: torch.dtype, rows: int, columns: int) -> DescriptorKind:
    return DescriptorKind(TensorDescriptor, dtype, (rows, columns))
