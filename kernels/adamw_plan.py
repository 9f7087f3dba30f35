"""AdamW over many tensors in one launch: the table that the kernel reads, made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from fp8lab.formats import BFLOAT16, E4M3, E5M2, Float8Format
from fp8lab.kernels import adamw_device as device_code
from fp8lab.kernels.adamw_constants_device import constants_kernel
from fp8lab.kernels.checks import check_apart, check_like, check_one_element, check_tensor
from fp8lab.kernels.float_device import ElementCode
from fp8lab.kernels.launch import ElementwiseSettings, interpreted, launch
from fp8lab.kernels.moments_device import MomentCode
from fp8lab.optimizer_formats import (
    MASTER_FORMATS,
    MIN_INVERSE_SCALE,
    AdamOrder,
    MomentFormat,
    moment_format_named,
    order_named,
)

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
_HARDWARE_CAPABILITY = (9, 0)
_ALIGNMENT = 16


@dataclass(frozen=True)
class MomentTensors:
    """A stored moment on the device; see `fp8lab.emulation.moments.StoredMoment`."""

    codes: torch.Tensor
    scale: torch.Tensor | None = None
    power: torch.Tensor | None = None


@dataclass(frozen=True)
class AdamTensors:
    """Everything of one parameter that a step reads and writes.

    Attributes:
        param: float32, or the bfloat16 weight; contiguous.
        grad: float32, bfloat16 or float16, of param's shape; only read.
        exp_avg, exp_avg_sq: The moments.
        remainder: int16, the rest of a float32 master beside a bfloat16 param.
        weight: bfloat16, written beside a float32 param: it, rounded to nearest even.
        codes: FP8 codes of the new bfloat16 weight (of the float32 param where there is none),
            written for the next forward pass: quantised with `codes_scale`, one float32;
            `codes_amax`, one float32, takes the larger bit pattern of itself and the weight's amax.
        group: The row of constants that the parameter's step takes.
        random_offset: Where its random words begin; see `fp8lab.emulation.random.random_words`.
    """

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: MomentTensors
    exp_avg_sq: MomentTensors
    remainder: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    codes_scale: torch.Tensor | None = None
    codes_amax: torch.Tensor | None = None
    group: int = 0
    random_offset: int = 0


def empty_moment(param: torch.Tensor, fmt: str | MomentFormat) -> MomentTensors:
    """A moment of zeros for a parameter, as the oracle's `zero_moment` stores it."""
    chosen = moment_format_named(fmt)
    codes = torch.zeros(param.shape, dtype=moment_dtype(chosen), device=param.device)
    if not chosen.scaled:
        return MomentTensors(codes)
    blocks = 1 if chosen.block is None else triton.cdiv(param.numel(), chosen.block)
    scale = torch.full((blocks,), MIN_INVERSE_SCALE, dtype=torch.float32, device=param.device)
    if chosen.expanded:
        return MomentTensors(codes, torch.zeros_like(scale), torch.ones_like(scale))
    return MomentTensors(codes, scale)


def moment_dtype(fmt: MomentFormat) -> torch.dtype:
    """The dtype of a moment's elements."""
    if fmt.element is None:
        return torch.float32
    dtype: torch.dtype = getattr(torch, fmt.element.dtype_name)
    return dtype


@dataclass(eq=False)
class AdamPlan:
    """A list of parameters, checked and laid out for one launch.

    Every tensor must stay where it is while the plan is used; `set_grads` takes new gradients.

    Args:
        tensors: The parameters, all of one device and the same formats; empty ones too.
        order, decoupled: As for `fp8lab.emulation.adamw.adamw`.
        exp_avg, exp_avg_sq: The moments' formats.
        master: One of `MASTER_FORMATS`.
        codes: The format of the FP8 codes, where the tensors have them.
        settings: How the kernel is launched; `block` is at least 16 and that of
            the moments.
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
    settings: ElementwiseSettings = ElementwiseSettings()  # noqa: RUF009 (frozen)
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
        if self.settings.block < least:
            raise ValueError(f"block is {self.settings.block}; accepted here: {least} and up")
        self._moments = tuple(MomentCode.of(fmt) for fmt in self._formats)
        first = self.tensors[0]
        self.device = first.param.device
        self._has_weight = first.weight is not None
        self._check_all()
        if self.hardware is None:
            self.hardware = not interpreted() and (
                torch.cuda.get_device_capability(self.device) >= _HARDWARE_CAPABILITY
            )
        self._lay_out()

    def set_grads(self, grads: Sequence[torch.Tensor]) -> None:
        """Take other gradients, of the same shapes, dtype and device."""
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
        """
        check_tensor("constants", constants, (torch.float32,))
        if factor is not None:
            check_one_element("factor", factor, self.device)
        if skip is not None:
            check_tensor("skip", skip, (torch.int32,))
        if self.master == "bfloat16_stochastic":
            if seed is None:
                raise ValueError("master bfloat16_stochastic needs a seed: one int64 tensor")
            check_tensor("seed", seed, (torch.int64,))
        step = device_code.StepCode(
            grad=str(self._grads[0].dtype).removeprefix("torch."),
            master=self.master,
            weight=ElementCode.of(BFLOAT16, saturate=False) if self._has_weight else None,
            codes=None if self.codes is None else ElementCode.of(self.codes, saturate=True),
            decoupled=self.decoupled,
            hardware=bool(self.hardware),
            aligned=self._aligned,
            block=self.settings.block,
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
                num_warps=self.settings.num_warps,
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
        """
        check_tensor("hyperparameters", hyperparameters, (torch.float64,))
        check_tensor("steps", steps, (torch.int64,))
        check_tensor("constants", constants, (torch.float32,))
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
        found: list[torch.Tensor | None] = []
        for t in self.tensors:
            found += [t.param, t.remainder, t.weight, t.codes]
            for moment in (t.exp_avg, t.exp_avg_sq):
                found += [moment.codes, moment.scale, moment.power]
        return [tensor for tensor in found if tensor is not None]

    def _lay_out(self) -> None:
        block = self.settings.block
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
        self._tops = torch.zeros(2 * len(self.tensors), dtype=torch.int32, device=self.device)
        self._grads = [t.grad for t in self.tensors]
        self._aligned = self._is_aligned()

    def _is_aligned(self) -> bool:
        first = int(device_code.PARAM)
        addresses = self._rows[:, first:]
        scalars = [int(device_code.CODES_SCALE) - first, int(device_code.CODES_AMAX) - first]
        kept = [column for column in range(addresses.shape[1]) if column not in scalars]
        return bool((addresses[:, kept] % _ALIGNMENT == 0).all())

    def _check_all(self) -> None:
        dtype = torch.float32 if self.master == "float32" else torch.bfloat16
        everything: dict[str, torch.Tensor] = {}
        for index, t in enumerate(self.tensors):
            named = _named(t, self._formats)
            for name, tensor, dtypes in named:
                shown = f"{name} of tensor {index}" if len(self.tensors) > 1 else name
                accepted = (dtype,) if name == "param" else dtypes
                if name == "grad" and index:
                    accepted = (self.tensors[0].grad.dtype,)
                if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
                    raise TypeError(f"{shown} has layout {tensor.layout}; accepted: dense tensors")
                check_tensor(shown, tensor, accepted)
                if name in ("codes_scale", "codes_amax"):
                    check_one_element(shown, tensor, self.device)
                elif "scale" not in name and "power" not in name:
                    check_like(shown, tensor, "param", t.param)
                everything[shown] = tensor
            if t.param.device != self.device:
                raise ValueError(
                    f"tensor {index} is on {t.param.device}; the first on {self.device}"
                )
            self._check_parts(index, t)
        check_apart(
            {name: tensor for name, tensor in everything.items() if "codes_scale" not in name}
        )

    def _check_parts(self, index: int, t: AdamTensors) -> None:
        if (t.remainder is not None) != (self.master == "bfloat16_remainder"):
            raise ValueError(f"tensor {index}: a remainder goes with master bfloat16_remainder")
        if (t.weight is not None) != self._has_weight or (
            self._has_weight and self.master != "float32"
        ):
            raise ValueError(f"tensor {index}: a weight goes with float32 masters, all or none")
        parts = (t.codes, t.codes_scale, t.codes_amax)
        if any((part is not None) != (self.codes is not None) for part in parts):
            raise ValueError(
                f"tensor {index}: codes come with a format, codes_scale and codes_amax"
            )
        for name, moment, fmt in zip(
            ("exp_avg", "exp_avg_sq"), (t.exp_avg, t.exp_avg_sq), self._formats, strict=True
        ):
            blocks = 1 if fmt.block is None else triton.cdiv(t.param.numel(), fmt.block)
            for part, wanted in (("scale", fmt.scaled), ("power", fmt.expanded)):
                tensor = getattr(moment, part)
                if (tensor is not None) != wanted or (wanted and tensor.numel() != blocks):
                    raise ValueError(
                        f"tensor {index}: {name}.{part} does not fit {fmt.name}: it takes"
                        f" {blocks if wanted else 'no'} values"
                    )


def _named(
    t: AdamTensors, formats: tuple[MomentFormat, MomentFormat]
) -> list[tuple[str, torch.Tensor, tuple[torch.dtype, ...]]]:
    """Every tensor there is, with its name and the dtypes it may have (param's are by master)."""
    float32 = (torch.float32,)
    named: list[tuple[str, torch.Tensor | None, tuple[torch.dtype, ...]]] = [
        ("param", t.param, ()),
        ("grad", t.grad, GRADIENTS),
        ("remainder", t.remainder, (torch.int16,)),
        ("weight", t.weight, (torch.bfloat16,)),
        ("codes", t.codes, (torch.float8_e4m3fn, torch.float8_e5m2)),
        ("codes_scale", t.codes_scale, float32),
        ("codes_amax", t.codes_amax, float32),
    ]
    for name, moment, fmt in zip(
        ("exp_avg", "exp_avg_sq"), (t.exp_avg, t.exp_avg_sq), formats, strict=True
    ):
        named += [
            (name, moment.codes, (moment_dtype(fmt),)),
            (f"{name}.scale", moment.scale, float32),
            (f"{name}.power", moment.power, float32),
        ]
    return [(name, tensor, dtypes) for name, tensor, dtypes in named if tensor is not None]


def _row(t: AdamTensors, first_chunk: int) -> list[int]:
    """The table's row, in the order of its columns."""
    row: list[Any] = [t.param.numel(), first_chunk, t.group, t.random_offset]
    row += [t.param, t.grad, t.remainder]
    for moment in (t.exp_avg, t.exp_avg_sq):
        row += [moment.codes, moment.scale, moment.power]
    row += [t.weight, t.codes, t.codes_scale, t.codes_amax, 0]
    return [value.data_ptr() if isinstance(value, torch.Tensor) else (value or 0) for value in row]
