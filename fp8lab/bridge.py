"""Between NumPy and torch without losing a bit, for the types that NumPy itself does not have.

torch's float8 and bfloat16 tensors have no `.numpy()`, and torch does not know ml_dtypes' arrays;
both hold the same bytes. The two directions here go through integers of the same width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]

# The names are the same in ml_dtypes and torch; a torch that lacks one refuses it by name.
_ML_DTYPES_NAMES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
_ML_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES_NAMES
}
_SIGNED_WORDS: dict[int, np.dtype[Any]] = {1: np.dtype(np.int8), 2: np.dtype(np.int16)}


def to_torch(array: npt.ArrayLike, *, device: torch.device | str | None = None) -> torch.Tensor:
    """A torch tensor with the bits of an array.

    Args:
        array: NumPy or ml_dtypes array of any shape, bool, integer or floating.
        device: Where the tensor goes; the CPU when None.

    Returns:
        A tensor of the same dtype and shape. On the CPU it shares the memory of an array that is
        writable and has no negative strides; otherwise it is a copy.

    Raises:
        TypeError: torch has no such dtype.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> to_torch(np.uint8([0x7E]).view(E4M3.dtype))
    tensor([448.], dtype=torch.float8_e4m3fn)
    """
    import torch

    values = np.asarray(array)
    name = values.dtype.name
    if name in _ML_DTYPES and not hasattr(torch, name):
        raise TypeError(f"array has dtype {name}, which torch {torch.__version__} does not have")
    if not values.flags.writeable or any(stride < 0 for stride in values.strides):
        values = values.copy()
    if name not in _ML_DTYPES:
        tensor = torch.from_numpy(values)
    else:
        words = values.view(_SIGNED_WORDS[values.dtype.itemsize])
        tensor = torch.from_numpy(words).view(getattr(torch, name))
    return tensor if device is None else tensor.to(device)


def to_numpy(tensor: torch.Tensor) -> Array:
    """An array with the bits of a tensor.

    Args:
        tensor: Any dense tensor, on any device, with or without a gradient.

    Returns:
        An array of the same dtype (ml_dtypes' where NumPy has none) and shape. It shares the
        memory of a tensor on the CPU.

    Raises:
        TypeError: Neither NumPy nor ml_dtypes has such a dtype.

    >>> import torch
    >>> to_numpy(torch.tensor([-0.0], dtype=torch.bfloat16)).view(np.uint16).tolist()
    [32768]
    """
    import torch

    dense = tensor.detach().resolve_conj().resolve_neg().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _ML_DTYPES:
        return np.asarray(dense.numpy())
    width = torch.int8 if tensor.element_size() == 1 else torch.int16
    return np.asarray(dense.view(width).numpy().view(_ML_DTYPES[name]))
