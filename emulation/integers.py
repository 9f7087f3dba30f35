"""Integers of any kind as Python's: NumPy's count too, and booleans do not."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def as_integer(value: Any) -> int | None:
    """The Python integer that a value is, or None where it is none.

    >>> import numpy as np
    >>> as_integer(3), as_integer(np.int64(3)), as_integer(3.0), as_integer(True)
    (3, 3, None, None)
    """
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
