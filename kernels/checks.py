"""Checks of a kernel's tensors before it is launched: a wrong pointer is a crash, not an error."""

from __future__ import annotations

import operator
from collections.abc import Collection
from itertools import pairwise
from typing import Any

import torch

from fp8lab.kernels.launch import interpreted


def check_tensor(
    name: str, tensor: torch.Tensor, dtypes: Collection[torch.dtype], *, contiguous: bool = True
) -> None:
    """Refuse what no kernel here can read.

    Args:
        contiguous: Whether the tensor has to be.

    Raises:
        TypeError: Not a dense tensor, or of a dtype that is not among `dtypes`.
        ValueError: On a device that kernels do not run on, or not contiguous.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; accepted: a torch tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; accepted: dense tensors")
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {names}")
    if not tensor.is_cuda and not (interpreted() and tensor.device.type == "cpu"):
        raise ValueError(
            f"{name} is on {tensor.device}; accepted: a CUDA device, or the CPU in a process that"
            " was started with TRITON_INTERPRET=1"
        )
    if contiguous and not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; accepted:"
            " contiguous tensors (call .contiguous() first)"
        )


def as_integer(value: Any) -> int | None:
    """The Python integer that a value is (NumPy's count too), or None; booleans are none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_like(name: str, tensor: torch.Tensor, first_name: str, first: torch.Tensor) -> None:
    """Refuse a tensor whose device or shape is not that of the first one.

    Raises:
        ValueError: The device or the shape differs.
    """
    if tensor.device != first.device:
        raise ValueError(f"{name} is on {tensor.device}; {first_name} is on {first.device}")
    if tensor.shape != first.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; {first_name} has {tuple(first.shape)}"
        )


def check_one_element(
    name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype = torch.float32
) -> None:
    """Refuse anything but one element of that dtype on that device.

    Raises:
        TypeError: Not a tensor of that dtype.
        ValueError: Another number of elements, or another device.
    """
    check_tensor(name, tensor, (dtype,))
    if tensor.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: one element")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; accepted: {device}, where the data is")


def check_apart(tensors: dict[str, torch.Tensor]) -> None:
    """Refuse contiguous tensors that share memory: an in-place kernel would overwrite its inputs.

    Raises:
        ValueError: Two of them overlap.
    """
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in tensors.items()
        if tensor.numel()
    )
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ValueError(f"{name} and {other} share memory; accepted: separate tensors")
