"""Between NumPy arrays with ml_dtypes' types and torch tensors: the same bits, no conversion.

torch's float8 and bfloat16 tensors have no `.numpy()`, and torch does not know ml_dtypes' types, so
the bytes cross as integers and are viewed again on the other side.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

# torch's name of the type: (NumPy's type, the integer that carries its bits across).
_TYPES: dict[str, tuple[npt.DTypeLike, npt.DTypeLike]] = {
    "bfloat16": (ml_dtypes.bfloat16, np.int16),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, np.uint8),
    "float8_e5m2": (ml_dtypes.float8_e5m2, np.uint8),
    "float8_e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, np.uint8),
    "float8_e5m2fnuz": (ml_dtypes.float8_e5m2fnuz, np.uint8),
    "float8_e8m0fnu": (ml_dtypes.float8_e8m0fnu, np.uint8),
}
_TO_NUMPY = {getattr(torch, name): kinds for name, kinds in _TYPES.items() if hasattr(torch, name)}
_TO_TORCH = {np.dtype(kinds[0]): (dtype, kinds[1]) for dtype, kinds in _TO_NUMPY.items()}


def to_numpy(tensor: Tensor) -> Array:
    """The tensor as a NumPy array of the matching type, bit for bit.

    Args:
        tensor: Any dtype that NumPy or ml_dtypes has, on any device, strided or not.

    Returns:
        An array of the same shape. It shares memory with a tensor on the CPU.

    Raises:
        TypeError: Neither NumPy nor ml_dtypes has the dtype.
    """
    tensor = tensor.detach().cpu()
    if tensor.dtype in _TO_NUMPY:
        array, carrier = _TO_NUMPY[tensor.dtype]
        carried: Array = tensor.view(_torch_integer(carrier)).numpy()
        return carried.view(np.dtype(array))
    try:
        plain: Array = tensor.numpy()
    except TypeError:
        raise TypeError(f"NumPy and ml_dtypes have no type for {tensor.dtype}") from None
    return plain


def to_torch(array: Array, *, device: str | torch.device = "cpu") -> Tensor:
    """The array as a torch tensor of the matching type, bit for bit.

    Args:
        array: Any dtype that torch has.
        device: Where the tensor shall live.

    Returns:
        A tensor of the same shape. It shares memory with the array where torch can (CPU, writable).

    Raises:
        TypeError: torch has no such dtype.
    """
    array = np.asarray(array)
    if not array.flags.writeable or any(step < 0 for step in array.strides):
        array = array.copy()
    if array.dtype in _TO_TORCH:
        dtype, carrier = _TO_TORCH[array.dtype]
        return torch.from_numpy(array.view(carrier)).view(dtype).to(device)
    try:
        return torch.from_numpy(array).to(device)
    except TypeError:
        raise TypeError(f"torch has no type for {array.dtype}") from None


def _torch_integer(carrier: npt.DTypeLike) -> torch.dtype:
    return torch.int16 if carrier is np.int16 else torch.uint8
