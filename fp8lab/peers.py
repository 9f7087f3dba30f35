"""Other libraries' casts, called the same way: for conformance tests, benchmarks and the docs.

Each takes a NumPy array and gives codes. None is needed by the lab itself; what is not installed is
reported as such, and never counts as agreement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.formats import E4M3, E5M2, E8M0, FORMATS, FloatFormat, OverflowPolicy
from fp8lab.testing import to_numpy, to_torch

Array = npt.NDArray[Any]

# torchao clamps to the largest finite values, which keeps NaN, and then casts with torch.
TORCHAO = OverflowPolicy("torchao", "max_finite", "max_finite", "canonical", "kept")
FP8 = tuple(fmt.name for fmt in FORMATS.values() if fmt is not E8M0)


@dataclass(frozen=True)
class Peer:
    """One way in which another library casts.

    Attributes:
        name: What tables and reports call it.
        package: The distribution that must be installed.
        version: The version that the preset describes; None where any does.
        formats: The names of the formats that it casts to.
        overflow: The policy under which `quantize` gives the same bits, for float32 and narrower
            inputs; None where no policy does.
        cast: From an array and a format to codes of `fmt.dtype`.
    """

    name: str
    package: str
    version: str | None
    formats: tuple[str, ...]
    overflow: str | OverflowPolicy | None
    cast: Callable[[Array, FloatFormat], Array]

    def lacking(self) -> str | None:
        """Why it cannot be asked, or None: it is not installed, or another version is."""
        try:
            found = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return f"{self.package} is not installed"
        release = ".".join(found.split("+")[0].split(".")[:2])
        if self.version is not None and release != self.version:
            return f"{self.package} is {found}, its preset describes {self.version}"
        return None


def _by_ml_dtypes(x: Array, fmt: FloatFormat) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(x.astype(fmt.dtype))


def _by_torch(x: Array, fmt: FloatFormat) -> Array:
    import torch

    return to_numpy(to_torch(x).to(getattr(torch, fmt.dtype_name)))


def _by_torchao(x: Array, fmt: FloatFormat) -> Array:
    import torch
    from torchao.float8.float8_utils import to_fp8_saturated

    # It picks the limits by the dtype of a tensor with at least one dimension.
    codes = to_fp8_saturated(to_torch(np.atleast_1d(x)), getattr(torch, fmt.dtype_name))
    return to_numpy(codes).reshape(x.shape)


def _by_gfloat(saturate: bool) -> Callable[[Array, FloatFormat], Array]:
    def cast(x: Array, fmt: FloatFormat) -> Array:
        from gfloat import RoundMode, encode_ndarray, formats, round_ndarray

        info = getattr(formats, f"format_info_ocp_{fmt.name.lower()}")
        with np.errstate(all="ignore"):
            values = round_ndarray(info, x.astype(np.float64), RoundMode.TiesToEven, saturate)
            # Computed in the type it is given; 64-bit codes come back, of 8 bits each.
            codes = encode_ndarray(info, values)
        return np.asarray(codes).astype(np.uint8).view(fmt.dtype)

    return cast


_OCP = (E4M3.name, E5M2.name)

ML_DTYPES = Peer("ml_dtypes", "ml_dtypes", None, tuple(FORMATS), "ml_dtypes", _by_ml_dtypes)
TORCH_CPU = Peer("torch CPU", "torch", "2.13", tuple(FORMATS), "torch_2_13_cpu", _by_torch)
TORCHAO_SATURATED = Peer("torchao", "torchao", None, FP8, TORCHAO, _by_torchao)
GFLOAT = Peer("gfloat", "gfloat", None, _OCP, None, _by_gfloat(saturate=False))
GFLOAT_SATURATED = Peer("gfloat sat", "gfloat", None, _OCP, None, _by_gfloat(saturate=True))

PEERS = (ML_DTYPES, TORCH_CPU, TORCHAO_SATURATED, GFLOAT, GFLOAT_SATURATED)
