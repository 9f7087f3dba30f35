"""Counting what casts did, on torch tensors: the oracle for the CPU, the kernel for a GPU.

On a GPU counts stay in a table on the device until they are read, all in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fp8lab.bridge import to_numpy, to_torch
from fp8lab.emulation import telemetry as oracle
from fp8lab.emulation.telemetry import BINS, CastCounts
from fp8lab.ops_linear import computed_by_kernel
from fp8lab.ops_operands import Codes

Words = npt.NDArray[np.int64]


class CastTable:
    """Counts of several casts, a row each.

    Args:
        count: How many rows.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._tables: dict[torch.device, Tensor] = {}
        self._counts: dict[int, CastCounts] = {}

    def clear(self) -> None:
        """Forget all counts; the tables on devices stay where they are."""
        self._counts = {}
        for table in self._tables.values():
            table.zero_()

    def add(self, row: int, x: Tensor, codes: Codes | None, *, sums: bool = True) -> None:
        """Add what a cast did to a row; see `fp8lab.emulation.telemetry.count_cast`.

        On a GPU it is one launch, and nothing waits.

        Args:
            row: Which one.
            x: (rows, columns), float32, bfloat16 or float16: what was cast.
            codes: What became of it; None for BF16.
            sums: Whether signal and noise are summed.
        """
        x = x.detach()
        if computed_by_kernel(x):
            from fp8lab.kernels.telemetry import count_cast_

            count_cast_(
                self._table(x.device)[row],
                x.contiguous(),
                None if codes is None else codes.codes.contiguous(),
                inverse_scale=None if codes is None else codes.inverse,
                scale=None if codes is None else codes.scale,
                block=None if codes is None else codes.block,
                sums=sums,
            )
            return
        found = oracle.count_cast(
            to_numpy(x),
            None if codes is None else to_numpy(codes.codes),
            inverse_scale=None if codes is None else to_numpy(codes.inverse),
            scale=None if codes is None or codes.scale is None else to_numpy(codes.scale),
            block=None if codes is None else codes.block,
            sums=sums,
        )
        self._counts[row] = self._counts.get(row, CastCounts()) + found

    def tensors(self) -> list[Tensor]:
        """The tables on devices, int64: what `counts` wants on the host."""
        return list(self._tables.values())

    def counts(self, tables: Sequence[Words]) -> list[CastCounts]:
        """The counts of every row.

        Args:
            tables: `tensors`, brought to the host.
        """
        found = [self._counts.get(row, CastCounts()) for row in range(self._count)]
        for table in tables:
            for row, words in enumerate(table):
                if words.any():
                    found[row] += counts_of(words)
        return found

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            from fp8lab.kernels.telemetry import COLUMNS

            shape = (self._count, COLUMNS)
            self._tables[device] = torch.zeros(shape, dtype=torch.int64, device=device)
        return self._tables[device]


def count_cast(x: Tensor, codes: Codes | None, *, sums: bool = True) -> CastCounts:
    """What one cast did, at once: it waits for a GPU. Arguments as for `CastTable.add`."""
    table = CastTable(1)
    table.add(0, x, codes, sums=sums)
    return table.counts(to_host(table.tensors()))[0]


def counts_of(words: Words) -> CastCounts:
    """The counts that a row of a device's table holds."""
    from fp8lab.kernels import telemetry_device as layout

    def number(column: object) -> int:
        return int(words[int(column)])  # type: ignore[call-overload]

    def long_integer(column: object) -> int:
        first = int(column)  # type: ignore[call-overload]
        parts = words[first : first + int(layout.WORDS)].tolist()
        return sum(int(part) << (32 * place) for place, part in enumerate(parts))

    scale = number(layout.SCALE)
    return CastCounts(
        elements=number(layout.ELEMENTS),
        zeros=number(layout.ZEROS),
        nonfinite=number(layout.NONFINITE),
        overflow=number(layout.OVERFLOW),
        underflow=number(layout.UNDERFLOW),
        amax_bits=number(layout.AMAX),
        scale_bits=(1 << 31) - scale if scale else None,
        signal=long_integer(layout.SIGNAL),
        noise=long_integer(layout.NOISE),
        noise_special=number(layout.SPECIAL),
    )


def magnitude_bins(tensors: Sequence[Tensor]) -> list[Tensor]:
    """64 counts of each tensor, int64, where it lies; see `emulation.telemetry.magnitude_bins`."""
    counted = [own for own in tensors if computed_by_kernel(own)]
    tables = {
        device: iter(torch.zeros((len(counted), BINS), dtype=torch.int64, device=device))
        for device in dict.fromkeys(own.device for own in counted)
    }
    found = []
    for own in tensors:
        values = own.detach().float().contiguous()
        if computed_by_kernel(values):
            from fp8lab.kernels.telemetry import magnitude_bins_

            bins = next(tables[values.device])
            magnitude_bins_(bins, values)
        else:
            bins = to_torch(oracle.magnitude_bins(to_numpy(values)))
        found.append(bins)
    return found


def to_host(tensors: Sequence[Tensor]) -> list[Words]:
    """Tensors of 8-byte elements as int64 arrays of their shapes; one copy for each device."""
    found: list[Words | None] = [None] * len(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        places = [place for place, own in enumerate(tensors) if own.device == device]
        flat = torch.cat([tensors[place].view(torch.int64).reshape(-1) for place in places])
        words = flat.cpu().numpy()
        for place in places:
            size = tensors[place].numel()
            found[place] = words[:size].reshape(tuple(tensors[place].shape))
            words = words[size:]
    return [words for words in found if words is not None]
