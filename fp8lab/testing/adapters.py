"""Adapters: a kernel with another signature, seen as one that a contract calls.

They compose: `writes_output(takes_tensor_scale(kernel), torch.uint8)`. Each returns a callable;
what it can pass on of all that a contract tries (only powers of two as scales, ...) it says itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8lab.testing.contracts.base import Kernel
from fp8lab.testing.running import (
    MARGIN,
    MARGIN_BYTE,
    KernelProblem,
    changed_margin,
)

if TYPE_CHECKING:
    import torch

_POISONS = (0xA5, 0x5A)  # no byte is equal to both

Shapes = Callable[..., Any]


def writes_output(
    kernel: Kernel,
    dtype: torch.dtype | Sequence[torch.dtype],
    *,
    shape: Shapes | None = None,
    place: int | str | Sequence[str] | None = None,
) -> Kernel:
    """A kernel that writes into outputs that it is given.

    It is called twice, each time with outputs that are filled with another poison and lie between
    margins. What holds the poison after both calls was not written; a margin that has changed shows
    a write past an end. Both are reported as such.

    Args:
        kernel: Called with the contract's arguments and the outputs.
        dtype: Of the output, or of each where there are several.
        shape: From the contract's arguments to the output's shape, or to a list of shapes; None
            gives each the shape of the first argument.
        place: Where the outputs go among the arguments: an index, a keyword (or one for each), or
            None to come last.

    Returns:
        A kernel that returns the output, or the tuple of them.

    >>> import torch
    >>> def double(x, out):
    ...     out.copy_(2 * x)
    >>> writes_output(double, torch.float32)(torch.ones(2))
    tensor([2., 2.])
    """
    import torch

    dtypes = [dtype] if isinstance(dtype, torch.dtype) else list(dtype)

    @functools.wraps(kernel)
    def returning(*args: Any, **keywords: Any) -> Any:
        shapes = _shapes(shape, args, keywords, len(dtypes))
        written: list[list[_Output]] = []
        for poison in _POISONS:
            device = _device_of(args)
            outputs = [
                _Output(size, kind, device, poison)
                for size, kind in zip(shapes, dtypes, strict=True)
            ]
            tensors = [output.tensor for output in outputs]
            own_args, own_keywords = _with_outputs(list(args), keywords, tensors, place)
            kernel(*own_args, **own_keywords)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            written.append(outputs)
        for number, (first, second) in enumerate(zip(*written, strict=True)):
            which = "its output" if len(dtypes) == 1 else f"output {number}"
            _check_written(first, second, which)
        results = tuple(output.tensor for output in written[-1])
        return results[0] if isinstance(dtype, torch.dtype) else results

    return _with_traits(returning, kernel)


def takes_inverse_scale(kernel: Kernel) -> Kernel:
    """A cast kernel(x, inverse_scale) that divides by inverse_scale, or multiplies by 1 over it.

    Only powers of two are tried: there both give what multiplying by the scale gives, bit for bit.
    """

    @functools.wraps(kernel)
    def cast(x: Any, scale: float, *more: Any) -> Any:
        return kernel(x, 1.0 / scale, *more)

    return _with_traits(cast, kernel, "power_of_two_scales")


def takes_tensor_scale(kernel: Kernel, *, shape: tuple[int, ...] = ()) -> Kernel:
    """A kernel whose scales (each Python float after the first argument) are float32 tensors on the
    device of the first argument.

    Args:
        kernel: The kernel.
        shape: Of each scale, with one element: () or (1,).
    """
    import torch

    @functools.wraps(kernel)
    def called(x: Any, *scales: Any, **keywords: Any) -> Any:
        tensors = [
            torch.full(shape, scale, dtype=torch.float32, device=x.device)
            if isinstance(scale, float)
            else scale
            for scale in scales
        ]
        return kernel(x, *tensors, **keywords)

    return _with_traits(called, kernel)


def transposed_output(kernel: Kernel) -> Kernel:
    """A kernel whose output is the transpose of what the contract wants, row-major.

    Inputs with fewer than two dimensions come back as they are.
    """

    @functools.wraps(kernel)
    def called(*args: Any, **keywords: Any) -> Any:
        result = kernel(*args, **keywords)
        return result.transpose(-2, -1) if getattr(result, "ndim", 0) >= 2 else result

    return _with_traits(called, kernel)


def flat_input(kernel: Kernel) -> Kernel:
    """A kernel on tensors of one dimension: the tensors it is given are flat, the result gets the
    shape of the first of them.
    """
    import torch

    @functools.wraps(kernel)
    def called(*args: Any, **keywords: Any) -> Any:
        shape = args[0].shape
        flat = [arg.reshape(-1) if isinstance(arg, torch.Tensor) else arg for arg in args]
        return kernel(*flat, **keywords).reshape(shape)

    return _with_traits(called, kernel)


def on_cupy(kernel: Kernel) -> Kernel:
    """A kernel on CuPy arrays, on the GPU: tensors are passed without a copy, both ways.

    CuPy has no FP8 type: codes are uint8 arrays. Its stream is torch's during the call.

    Raises:
        ModuleNotFoundError: CuPy is not installed.
    """
    from importlib import import_module

    import torch
    from torch.utils.dlpack import from_dlpack

    cupy = import_module("cupy")

    def crossed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_code = value.element_size() == 1
        return cupy.from_dlpack(value.view(torch.uint8) if is_code else value)

    @functools.wraps(kernel)
    def called(*args: Any, **keywords: Any) -> Any:
        with _cupy_stream(cupy, torch.cuda.current_stream().cuda_stream):
            result = kernel(*map(crossed, args), **keywords)
        if isinstance(result, tuple | list):
            return type(result)(from_dlpack(part) for part in result)
        return None if result is None else from_dlpack(result)

    return _with_traits(called, kernel)


@dataclass(frozen=True)
class _Stream:
    """A CUDA stream by its handle, as the protocol of `__cuda_stream__` shows it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle  # 0 is the version of the protocol


def _cupy_stream(cupy: Any, handle: int) -> Any:
    """CuPy's stream for a handle; CuPy 14 warns of the older class."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Stream(handle))
    return cupy.cuda.ExternalStream(handle)


class _Output:
    """An output filled with a poison, between margins."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, poison: int
    ) -> None:
        import torch

        size = torch.empty((), dtype=dtype).element_size()
        self.itemsize = size
        self.poison = poison
        self.bytes = int(np.prod(shape)) * size
        self.buffer = torch.full(
            (2 * MARGIN + self.bytes,), MARGIN_BYTE, dtype=torch.uint8, device=device
        )
        self._inside = self.buffer[MARGIN : MARGIN + self.bytes]
        self._inside.fill_(poison)
        self.tensor = self._inside.view(dtype).view(tuple(shape))

    def poisoned(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which elements hold the poison still."""
        return np.asarray(
            (self._inside.cpu().numpy() == self.poison).reshape(-1, self.itemsize).all(axis=1)
        )


def _check_written(first: _Output, second: _Output, which: str) -> None:
    for output in (first, second):
        if where := changed_margin(output.buffer, output.bytes):
            raise KernelProblem("outside", f"wrote outside of {which}, {where}")
    unwritten = np.flatnonzero(first.poisoned() & second.poisoned())
    if unwritten.size:
        total = first.bytes // first.itemsize
        raise KernelProblem(
            "unwritten",
            f"did not write {unwritten.size} of {total} elements of {which},"
            f" the first at {int(unwritten[0])}",
        )


def _shapes(
    shape: Shapes | None, args: Sequence[Any], keywords: dict[str, Any], count: int
) -> list[Sequence[int]]:
    if shape is None:
        return [tuple(args[0].shape)] * count
    found = shape(*args, **keywords)
    several = len(found) > 0 and not isinstance(found[0], int)
    return list(found) if several else [found]


def _with_outputs(
    args: list[Any],
    keywords: dict[str, Any],
    outputs: list[torch.Tensor],
    place: int | str | Sequence[str] | None,
) -> tuple[list[Any], dict[str, Any]]:
    if place is None:
        return [*args, *outputs], keywords
    if isinstance(place, int):
        return [*args[:place], *outputs, *args[place:]], keywords
    names = [place] if isinstance(place, str) else list(place)
    return args, {**keywords, **dict(zip(names, outputs, strict=True))}


def _device_of(args: Sequence[Any]) -> torch.device:
    import torch

    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device
        if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor):
            return arg[0].device
    return torch.device("cpu")


def _with_traits(adapted: Kernel, kernel: Kernel, *traits: str) -> Kernel:
    """The adapted kernel, saying what it and the kernel inside it can pass on."""
    inner: frozenset[str] = getattr(kernel, "fp8lab_traits", frozenset())
    adapted.fp8lab_traits = frozenset(traits) | inner  # type: ignore[attr-defined]
    return adapted
