"""A matrix product whose arguments are checked, as the kernels that compute it take it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Literal, NamedTuple, TypeVar

import torch

from fp8lab.kernels.launch import cdiv, interpreted
from fp8lab.kernels.matmul_scales import Scales

# The copy engine takes rows that start at multiples of this many bytes.
ALIGNMENT = 16
_MOST_KEPT = 4096  # shapes times settings are few; should they not be, they are made anew

T = TypeVar("T")


class Product(NamedTuple):
    """The arguments of one product.

    Attributes:
        a: (M, K) codes, row-major.
        b: (N, K) codes, row-major.
        out: (M, N), contiguous.
        start: The accumulator.
        promote: k after which a partial sum is promoted, or None.
        scales: The inverse scales.
        bias: (N,) or (M, N).
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    start: torch.Tensor | None
    promote: int | None
    scales: Scales
    bias: torch.Tensor | None

    @property
    def bias_kind(self) -> Literal["none", "vector", "matrix"]:
        """Of what shape the bias is."""
        if self.bias is None:
            return "none"
        return "vector" if self.bias.dim() == 1 else "matrix"

    @property
    def matrices(self) -> int:
        """How many (M, N) are added: an accumulator before, a bias after."""
        return (self.start is not None) + (self.bias_kind == "matrix")

    @property
    def key(self) -> Hashable:
        """What decides how long it takes: products of one key are alike."""
        given = self.start is not None, self.bias_kind, self.promote
        types = self.a.dtype, self.b.dtype, self.out.dtype
        return (self.a.device, self.sizes, self.scales[3:], given, types)

    @property
    def description(self) -> Hashable:
        """Everything but where tensors lie: what a launch's compile-time part may depend on."""
        types = self.a.dtype, self.b.dtype, self.out.dtype
        given = self.start is not None, self.bias_kind, self.promote
        return (self.a.device, self.a.shape, self.b.shape, types, given, self.scales[2:])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.a.shape[0], self.b.shape[0], self.a.shape[1]


def by_description(make: Callable[..., T]) -> Callable[..., T]:
    """Keep what a function makes of a product and other arguments, by the product's description."""
    kept: dict[Hashable, T] = {}

    @wraps(make)
    def call(product: Product, *args: Hashable) -> T:
        key = product.description, args
        found = kept.get(key)
        if found is None:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            found = kept[key] = make(product, *args)
        return found

    return call


def aligned(codes: torch.Tensor) -> torch.Tensor:
    """Row-major codes in rows that the copy engine can read: themselves, or a copy with zeros."""
    rows, k = codes.shape
    along_rows, along_k = codes.stride()
    if k and along_k == 1 and (along_rows | codes.data_ptr()) % ALIGNMENT == 0:
        return codes
    width = max(1, cdiv(k, ALIGNMENT)) * ALIGNMENT
    copy = torch.zeros((rows, width), dtype=torch.uint8, device=codes.device)
    copy[:, :k] = codes.view(torch.uint8)
    return copy.view(codes.dtype)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at a time; 4 under the interpreter, so that a program gets tiles."""
    if interpreted():
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
