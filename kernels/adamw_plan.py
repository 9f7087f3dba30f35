"""AdamW over many tensors in one launch: the table that the kernel reads, made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from fp8lab.formats import BFLOAT16, E4M3, E5M2, Float8Format
from fp8lab.kernels import adamw_device as device_code
from fp8lab.kernels.adamw_constants_device import CONSTANTS, constants_kernel
from fp8lab.kernels.adamw_settings import AdamSettings, settings_for
from fp8lab.kernels.adamw_tensors import AdamTensors, check_parameters
from fp8lab.kernels.checks import check_like, check_one_element, check_tensor
from fp8lab.kernels.float_device import ElementCode
from fp8lab.kernels.launch import interpreted, launch
from fp8lab.kernels.moments_device import MomentCode
from fp8lab.optimizer_formats import (
    MASTER_FORMATS,
    AdamOrder,
    MomentFormat,
    moment_format_named,
    order_named,
)

_HARDWARE_CAPABILITY = (9, 0)
_ALIGNMENT = 16
_HYPERPARAMETERS = 5  # lr, beta1, beta2, eps, weight_decay


@dataclass(eq=False)
class AdamPlan:
    """A list of parameters, checked and laid out for one launch.

    Every tensor must stay where it is while the plan is used; `set_grads` takes new gradients.

    Args:
        tensors: The parameters, all of one device and the same formats; empty ones too.
        order, decoupled: As for `fp8lab.emulation.adamw.adamw`.
        exp_avg, exp_avg_sq: The moments' formats.
        master: One of `MASTER_FORMATS`.
        codes: The format of the FP8 codes, where tensors have them.
        settings: How the kernel is launched; `block` is at least 16 and that of the moments. None
            takes what `settings_for` has for the formats.
        hardware: Whether the card's conversions and fused multiply-add are used: by default where
            there is a card of sm_90 or newer. Both give the same bits.

    Raises:
        TypeError: A tensor of the wrong dtype, or a sparse one.
        ValueError: Lists or shapes do not match, tensors are not contiguous, lie on several
            devices or share memory, or a setting is unknown. Nothing has been written then.
    """

    tensors: Sequence[AdamTensors]
    order: str | AdamOrder = "plain"
    decoupled: bool = True
    exp_avg: str | MomentFormat = "float32"
    exp_avg_sq: str | MomentFormat = "float32"
    master: str = "float32"
    codes: Float8Format | None = None
    settings: AdamSettings | None = None
    hardware: bool | None = None
    _chunks: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("no tensors given; accepted: at least one")
        if self.master not in MASTER_FORMATS:
            accepted = ", ".join(MASTER_FORMATS)
            raise ValueError(f"unknown master {self.master!r}; accepted: {accepted}")
        if self.codes not in (None, E4M3, E5M2):
            raise ValueError(f"codes is {self.codes}; accepted: E4M3, E5M2, None")
        self._order = order_named(self.order)
        self._formats = (moment_format_named(self.exp_avg), moment_format_named(self.exp_avg_sq))
        least = max(16, *(fmt.block or 0 for fmt in self._formats))
        if self.settings is not None and self.settings.block < least:
            raise ValueError(f"block is {self.settings.block}; accepted here: {least} and up")
        self._moments = tuple(MomentCode.of(fmt) for fmt in self._formats)
        check_parameters(self.tensors, self._formats, self.master, self.codes)
        self.device = self.tensors[0].param.device
        self._launched = self.settings or self._fastest()
        self._has_weight = any(t.weight is not None for t in self.tensors)
        self._has_codes = any(t.codes is not None for t in self.tensors)
        if self.hardware is None:
            self.hardware = not interpreted() and (
                torch.cuda.get_device_capability(self.device) >= _HARDWARE_CAPABILITY
            )
        self._lay_out()

    @property
    def constants_per_group(self) -> int:
        """Columns of the constants."""
        return int(CONSTANTS)

    def set_grads(self, grads: Sequence[torch.Tensor]) -> None:
        """Take other gradients, of the same shapes, dtype and device.

        Raises:
            TypeError, ValueError: They do not fit.
            RuntimeError: They lie elsewhere than the last ones, while a CUDA graph is captured.
        """
        if len(grads) != len(self.tensors):
            raise ValueError(f"{len(grads)} gradients given; the plan has {len(self.tensors)}")
        for grad, tensors in zip(grads, self.tensors, strict=True):
            check_tensor("grad", grad, (self.tensors[0].grad.dtype,))
            check_like("grad", grad, "param", tensors.param)
        self._grads = list(grads)
        addresses = torch.tensor([grad.data_ptr() for grad in grads], dtype=torch.int64)
        column = self._rows[:, int(device_code.GRAD)]
        if torch.equal(column, addresses):
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the gradients moved since the last step, and a CUDA graph repeats addresses; take"
                " a step with the graph's own gradients before it is captured"
            )
        column.copy_(addresses)
        # A copy of its own: the device may still be reading the last one.
        staged = self._rows.pin_memory() if self.device.type == "cuda" else self._rows
        self._table.copy_(staged, non_blocking=True)
        self._aligned = self._is_aligned()

    def launch(
        self,
        constants: torch.Tensor,
        *,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
        seed: torch.Tensor | None = None,
    ) -> None:
        """Take one step of every parameter, without waiting for the device.

        Args:
            constants: float32, (groups, 9), as `step_constants` or `advance` makes them.
            factor: One float32: multiplies the gradients.
            skip: One int32: everything stays as it is unless it is 0.
            seed: One int64: of the random words, for the master "bfloat16_stochastic".

        Raises:
            TypeError, ValueError: One of them is of another dtype, shape or device, or there is no
                row for a group. Nothing has been written then.
        """
        self._check_table("constants", constants, torch.float32, int(CONSTANTS))
        if factor is not None:
            check_one_element("factor", factor, self.device)
        if skip is not None:
            check_one_element("skip", skip, self.device, torch.int32)
        if self.master == "bfloat16_stochastic":
            if seed is None:
                raise ValueError("master bfloat16_stochastic needs a seed: one int64 tensor")
            check_one_element("seed", seed, self.device, torch.int64)
        step = device_code.StepCode(
            grad=str(self._grads[0].dtype).removeprefix("torch."),
            master=self.master,
            weight=ElementCode.of(BFLOAT16, saturate=False) if self._has_weight else None,
            codes=ElementCode.of(self.codes, saturate=True)
            if self.codes is not None and self._has_codes
            else None,
            decoupled=self.decoupled,
            hardware=bool(self.hardware),
            aligned=self._aligned,
            block=self._launched.block,
        )
        first, second = self._moments
        by_tensor = first.by_tensor or second.by_tensor
        for only_tops in (True, False) if by_tensor else (False,):
            launch(
                device_code.adamw_kernel,
                (self._chunks,),
                self._table,
                self._chunk_tensor,
                constants,
                factor,
                skip,
                seed,
                self._tops,
                ORDER=self._order,
                M=first,
                V=second,
                STEP=step,
                ONLY_TOPS=only_tops,
                num_warps=self._launched.num_warps,
                maxnreg=self._launched.max_registers,
            )
        if by_tensor:
            launch(
                device_code.scales_kernel,
                (len(self.tensors),),
                self._table,
                self._tops,
                skip,
                M=first,
                V=second,
            )

    def advance(
        self,
        hyperparameters: torch.Tensor,
        steps: torch.Tensor,
        constants: torch.Tensor,
        *,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Count a step and make its constants on the device: what a CUDA graph can repeat.

        Args:
            hyperparameters: float64, (groups, 5): lr, beta1, beta2, eps, weight_decay.
            steps: int64, (groups,): steps taken; each grows by one.
            constants: float32, (groups, 9); overwritten.
            skip: One int32: nothing changes unless it is 0.

        Raises:
            TypeError, ValueError: As for `launch`.
        """
        self._check_table("hyperparameters", hyperparameters, torch.float64, _HYPERPARAMETERS)
        self._check_table("constants", constants, torch.float32, int(CONSTANTS))
        check_tensor("steps", steps, (torch.int64,))
        rows = (steps.numel(), hyperparameters.shape[0], constants.shape[0])
        if len(set(rows)) > 1 or steps.device != self.device:
            raise ValueError(
                f"steps has {rows[0]} values on {steps.device}, hyperparameters {rows[1]} rows,"
                f" constants {rows[2]}; accepted: one a group for each, on {self.device}"
            )
        if skip is not None:
            check_one_element("skip", skip, self.device, torch.int32)
        launch(
            constants_kernel,
            (steps.numel(),),
            hyperparameters,
            steps,
            constants,
            skip,
            ORDER=self._order,
            DECOUPLED=self.decoupled,
            HARDWARE=bool(self.hardware),
            num_warps=1,
        )

    def written(self) -> list[torch.Tensor]:
        """The tensors that a step writes in place."""
        return [tensor for t in self.tensors for tensor in t.written()]

    def _check_table(
        self, name: str, table: torch.Tensor, dtype: torch.dtype, columns: int
    ) -> None:
        """Refuse a table that lacks a row that the kernel will read."""
        check_tensor(name, table, (dtype,))
        fits = table.dim() == 2 and table.shape[0] >= self._groups and table.shape[1] == columns
        if not fits or table.device != self.device:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)} on {table.device}; accepted:"
                f" ({self._groups} or more groups, {columns}) on {self.device}"
            )

    def _fastest(self) -> AdamSettings:
        first = self.tensors[0]
        read = (first.param, first.grad, first.exp_avg.codes, first.exp_avg_sq.codes)
        return settings_for(
            {8 * tensor.element_size() for tensor in read},
            expanded=any(fmt.expanded for fmt in self._formats),
        )

    def _lay_out(self) -> None:
        block = self._launched.block
        rows = torch.zeros((len(self.tensors), int(device_code.COLUMNS)), dtype=torch.int64)
        chunk_tensor: list[torch.Tensor] = []
        self._chunks = 0
        for index, t in enumerate(self.tensors):
            chunks = triton.cdiv(t.param.numel(), block)
            rows[index] = torch.tensor(_row(t, self._chunks), dtype=torch.int64)
            chunk_tensor.append(torch.full((chunks,), index, dtype=torch.int32))
            self._chunks += chunks
        self._rows = rows
        self._table = rows.to(self.device, copy=True)
        self._chunk_tensor = torch.cat(chunk_tensor).to(self.device)
        self._groups = 1 + max(t.group for t in self.tensors)
        self._tops = torch.zeros(2 * len(self.tensors), dtype=torch.int32, device=self.device)
        self._grads = [t.grad for t in self.tensors]
        self._aligned = self._is_aligned()

    def _is_aligned(self) -> bool:
        first = int(device_code.PARAM)
        addresses = self._rows[:, first:]
        scalars = [int(device_code.CODES_SCALE) - first, int(device_code.CODES_AMAX) - first]
        kept = [column for column in range(addresses.shape[1]) if column not in scalars]
        return bool((addresses[:, kept] % _ALIGNMENT == 0).all())


def _row(t: AdamTensors, first_chunk: int) -> list[int]:
    """The table's row, in the order of its columns."""
    row: list[Any] = [t.param.numel(), first_chunk, t.group, t.random_offset]
    row += [t.param, t.grad, t.remainder]
    for moment in (t.exp_avg, t.exp_avg_sq):
        row += [moment.codes, moment.scale, moment.power]
    row += [t.weight, t.codes, t.codes_scale, t.codes_amax, 0]
    return [value.data_ptr() if isinstance(value, torch.Tensor) else (value or 0) for value in row]
