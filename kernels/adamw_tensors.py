"""What one parameter of AdamW is made of on the device, and whether the parts fit each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton

from fp8lab.formats import Float8Format
from fp8lab.kernels.checks import check_apart, check_like, check_one_element, check_tensor
from fp8lab.optimizer_formats import MIN_INVERSE_SCALE, MomentFormat, moment_format_named

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
Named = Iterator[tuple[str, torch.Tensor, tuple[torch.dtype, ...]]]


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

    def written(self) -> list[torch.Tensor]:
        """The tensors that a step writes in place."""
        found = [self.param, self.remainder, self.weight, self.codes, self.codes_amax]
        for moment in (self.exp_avg, self.exp_avg_sq):
            found += [moment.codes, moment.scale, moment.power]
        return [tensor for tensor in found if tensor is not None]


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


def check_parameters(
    tensors: Sequence[AdamTensors],
    formats: tuple[MomentFormat, MomentFormat],
    master: str,
    codes: Float8Format | None,
) -> None:
    """Refuse tensors that do not fit each other, or what a step is to keep.

    Args:
        tensors: At least one.
        formats: Of the moments.
        master: One of `MASTER_FORMATS`.
        codes: The format of the FP8 codes, or None.

    Raises:
        TypeError: A tensor of the wrong dtype, or a sparse one.
        ValueError: Shapes differ, a tensor is not contiguous or on another device, two share
            memory, or a part is missing or one too many.
    """
    dtype = torch.float32 if master == "float32" else torch.bfloat16
    first = tensors[0]
    apart: dict[str, torch.Tensor] = {}
    for index, t in enumerate(tensors):
        for name, tensor, dtypes in _named(t, formats):
            shown = f"{name} of tensor {index}" if len(tensors) > 1 else name
            accepted = (dtype,) if name == "param" else dtypes
            if name == "grad" and index:
                accepted = (first.grad.dtype,)
            if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
                raise TypeError(f"{shown} has layout {tensor.layout}; accepted: dense tensors")
            check_tensor(shown, tensor, accepted)
            if name in ("codes_scale", "codes_amax"):
                check_one_element(shown, tensor, first.param.device)
            elif "scale" not in name and "power" not in name:
                check_like(shown, tensor, "param", t.param)
            if name != "codes_scale":  # several may share it: it is only read
                apart[shown] = tensor
        if t.param.device != first.param.device:
            raise ValueError(
                f"tensor {index} is on {t.param.device}; the first on {first.param.device}"
            )
        _check_master(index, t, master)
        _check_codes(index, t, codes)
        for name, moment, fmt in zip(
            ("exp_avg", "exp_avg_sq"), (t.exp_avg, t.exp_avg_sq), formats, strict=True
        ):
            _check_moment(f"tensor {index}: {name}", moment, fmt, t.param.numel())
    check_apart(apart)


def _check_master(index: int, t: AdamTensors, master: str) -> None:
    if (t.remainder is not None) != (master == "bfloat16_remainder"):
        raise ValueError(f"tensor {index}: a remainder goes with master bfloat16_remainder")
    if t.weight is not None and master != "float32":
        raise ValueError(
            f"tensor {index}: a weight goes with float32 masters; the master is {master}"
        )


def _check_codes(index: int, t: AdamTensors, codes: Float8Format | None) -> None:
    parts = [part is not None for part in (t.codes, t.codes_scale, t.codes_amax)]
    if any(parts) and not (all(parts) and codes is not None):
        raise ValueError(f"tensor {index}: codes come with a format, codes_scale and codes_amax")
    if codes is not None and t.codes is not None:
        dtype = getattr(torch, codes.dtype_name)
        if t.codes.dtype != dtype:
            raise TypeError(f"tensor {index}: codes has dtype {t.codes.dtype}; accepted: {dtype}")


def _check_moment(shown: str, moment: MomentTensors, fmt: MomentFormat, size: int) -> None:
    blocks = 1 if fmt.block is None else triton.cdiv(size, fmt.block)
    for part, wanted in (("scale", fmt.scaled), ("power", fmt.expanded)):
        tensor = getattr(moment, part)
        if (tensor is not None) != wanted or (wanted and tensor.numel() != blocks):
            raise ValueError(
                f"{shown}.{part} does not fit {fmt.name}: it takes"
                f" {blocks if wanted else 'no'} values"
            )


def _named(t: AdamTensors, formats: tuple[MomentFormat, MomentFormat]) -> Named:
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
    return ((name, tensor, dtypes) for name, tensor, dtypes in named if tensor is not None)
