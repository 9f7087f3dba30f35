"""Calling somebody's kernel so that what goes wrong inside it surfaces here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def run_kernel(kernel: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a kernel, under the Triton interpreter or on a GPU, and wait for it.

    The interpreter computes with NumPy and turns NumPy's warnings about NaN and overflow into
    errors, so they are off during the call. A GPU reports a fault at the next synchronisation: it
    happens before this returns, so a fault is charged to the kernel that made it.

    Args:
        kernel: Anything callable.
        args, kwargs: Passed on.

    Returns:
        What the kernel returned.
    """
    with np.errstate(all="ignore"):
        result = kernel(*args, **kwargs)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return result
