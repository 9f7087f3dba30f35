"""Descriptors for the copy engine, made quickly: a step makes hundreds, of a few kinds.

What Triton's constructor looks at is the same for all descriptors of a dtype, block and layout, but
for the matrix. A `DescriptorKind` stands for those, so that it need not be looked at again.
"""

from __future__ import annotations

from typing import Any

import torch

_ALIGNMENT = 16  # bytes, of the first element and of the distance between rows


class DescriptorKind:
    """What descriptors of matrices of one dtype, block and layout have in common.

    Call it with a matrix to make one. Its own attributes are never changed.

    Args:
        of: Triton's class of descriptors, or Gluon's.
        dtype: Of the matrices.
        block: Rows and columns that are copied at a time.
        layout: Gluon's layout of a block in shared memory; None for Triton's class, which has none.
    """

    def __init__(
        self, of: Any, dtype: torch.dtype, block: tuple[int, int], layout: Any = None
    ) -> None:
        self._of, self._dtype = of, dtype
        self._how: tuple[Any, ...] = (list(block),) if layout is None else (list(block), layout)
        # Of every descriptor but for its matrix: taken from the first one that Triton made.
        self._common: dict[str, Any] | None = None

    def __call__(self, matrix: torch.Tensor) -> Any:
        """The descriptor of a matrix.

        Raises:
            AssertionError: From Triton, for a matrix that the copy engine cannot take.
        """
        shape, strides = matrix.shape, matrix.stride()
        usual = (
            self._common is not None
            and matrix.dtype == self._dtype
            and len(shape) == 2
            and shape[0] > 0
            and shape[1] > 0
            and strides[1] == 1
            and (strides[0] * matrix.element_size() | matrix.data_ptr()) % _ALIGNMENT == 0
        )
        if not usual:
            return self._checked(matrix)
        descriptor = object.__new__(self._of)
        descriptor.__dict__.update(self._common, base=matrix, shape=shape, strides=strides)
        return descriptor

    def _checked(self, matrix: torch.Tensor) -> Any:
        """The same by Triton's constructor, which checks everything."""
        descriptor = self._of.from_tensor(matrix, *self._how)
        # Another rank or dtype has other things in common.
        if matrix.dtype == self._dtype and matrix.dim() == 2:
            self._common = {
                name: value
                for name, value in vars(descriptor).items()
                if name not in ("base", "shape", "strides")
            }
        return descriptor
