"""Tensor cores as frozen data: which terms one step adds, what is cut where, and who says so.

One step adds up to `step_k` products to an accumulator C, in fixed point:

1. A product is the exact product of two significands with the sum of their exponents; it is not
   normalised. A subnormal has its format's smallest exponent and a significand below 1.
2. emax is the largest exponent of the products that are not zero, of C if it is not zero, and
   `min_exponent`.
3. Every term, C included, is cut toward zero to a multiple of 2**(emax - fraction_bits). The sum of
   those is exact.
4. The sum is rounded to `significand_bits` bits in the accumulator's type, as `rounding` says.

A product over K walks the steps in `order` and feeds each result in as the next C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FLOAT8_OPERANDS = ("float8_e4m3fn", "float8_e5m2")

MMA_SIM = "read in MMA-Sim 2.1.1 (Xie et al., https://github.com/microsoft/MMA-Sim)"
MATLAB_MODELS = (
    "read in MATLAB-tensor-core (Khattak and Mikaitis, arXiv:2512.07004,"
    " https://github.com/north-numerical-computing/MATLAB-tensor-core)"
)


@dataclass(frozen=True)
class Source:
    """Where some parameters of a core come from.

    Attributes:
        parameters: Which ones.
        kind: "measured" on the hardware by this lab, "read" in published work, or "defined" where a
            standard leaves no choice.
        where: What was compared with what, or the work.
    """

    parameters: str
    kind: Literal["measured", "read", "defined"]
    where: str


@dataclass(frozen=True)
class TensorCore:
    """The arithmetic of one matrix instruction (see the module's text for the steps).

    Attributes:
        name: What it is called in reports.
        step_k: Products that one step adds to the accumulator.
        fraction_bits: Bits kept below 2**emax when terms are aligned; None keeps all.
        significand_bits: Bits of a step's result, the hidden one included.
        sources: Where these numbers come from.
        rounding: How a step's result is rounded.
        accumulator: The type of C and of a step's result, "float32" or "float16".
        operands: The dtypes that the instruction takes, by NumPy or ml_dtypes name.
        read_as: The type that operands are converted to (exactly) before they are multiplied, or
            None where they are taken as they are. It decides from where on an operand counts as
            subnormal.
        order: The order in which the k of a block of len(order) are taken; () is their own order.
        min_exponent: emax is never below it.
    """

    name: str
    step_k: int
    fraction_bits: int | None
    significand_bits: int
    sources: tuple[Source, ...]
    rounding: Literal["toward_zero", "nearest_even"] = "toward_zero"
    accumulator: Literal["float32", "float16"] = "float32"
    operands: tuple[str, ...] = FLOAT8_OPERANDS
    read_as: str | None = None
    order: tuple[int, ...] = ()
    min_exponent: int = -133

    def __post_init__(self) -> None:
        if self.step_k < 1 or self.significand_bits < 1:
            raise ValueError(f"{self.name}: step_k and significand_bits must be at least 1")
        if sorted(self.order) != list(range(len(self.order))) or len(self.order) % self.step_k:
            raise ValueError(f"{self.name}: order must hold each k of whole steps once")

    @property
    def block_k(self) -> int:
        """K is padded with zeros to a multiple of it, which changes no bit."""
        return max(self.step_k, len(self.order))

    @property
    def exact(self) -> bool:
        """Whether every parameter was measured here or follows from a standard."""
        return all(source.kind != "read" for source in self.sources)


_H200 = "H200, torch 2.11, Triton 3.6: no differing bit in"

HOPPER_FP8 = TensorCore(
    "hopper_fp8",
    step_k=32,
    fraction_bits=13,
    significand_bits=14,
    sources=(
        Source(
            "all",
            "measured",
            f"{_H200} 893,000 outputs of wgmma: E4M3, E5M2 and mixed; C zero, normal, wide,"
            " subnormal, near overflow; NaN and Inf included",
        ),
    ),
)

HOPPER_FP8_F16 = TensorCore(
    "hopper_fp8_f16",
    step_k=32,
    fraction_bits=13,
    significand_bits=11,
    rounding="nearest_even",
    accumulator="float16",
    min_exponent=-21,
    sources=(
        Source("all", "measured", f"{_H200} 524,288 outputs of wgmma with float16 accumulators"),
    ),
)

# Triton turns FP8 into f16 where it cannot use wgmma. Of each 32 of k one mma.sync m16n8k16 takes
# those with k % 4 < 2, the next one the rest: that is how the fragments of the FP8 layout fall.
HOPPER_FP8_VIA_F16 = TensorCore(
    "hopper_fp8_via_f16",
    step_k=16,
    fraction_bits=25,
    significand_bits=24,
    read_as="float16",
    order=tuple(k for half in (0, 2) for k in range(32) if k % 4 // 2 * 2 == half),
    sources=(Source("all", "measured", f"{_H200} outputs of tl.dot with M = 16, K = 32 and 128"),),
)

HOPPER_BF16 = TensorCore(
    "hopper_bf16",
    step_k=16,
    fraction_bits=25,
    significand_bits=24,
    operands=("bfloat16",),
    sources=(
        Source("all but min_exponent", "measured", f"{_H200} 49,000 outputs of wgmma"),
        Source("min_exponent, overflow to Inf", "read", MMA_SIM),
    ),
)

HOPPER_F16 = TensorCore(
    "hopper_f16",
    step_k=16,
    fraction_bits=25,
    significand_bits=24,
    operands=("float16",),
    sources=(
        Source("all but min_exponent", "measured", f"{_H200} 12,288 outputs of wgmma"),
        Source("min_exponent, overflow to Inf", "read", MMA_SIM),
    ),
)

ADA_FP8 = TensorCore(
    "ada_fp8",
    step_k=16,
    fraction_bits=13,
    significand_bits=14,
    sources=(Source("all", "read", f"{MMA_SIM} and {MATLAB_MODELS}"),),
)

BLACKWELL_FP8 = TensorCore(
    "blackwell_fp8",
    step_k=32,
    fraction_bits=25,
    significand_bits=24,
    sources=(Source("all", "read", f"{MMA_SIM}: tcgen05.mma of sm_100"),),
)

# For comparison: no tensor core, but a chain of IEEE 754 fused multiply-adds over k.
IEEE_FLOAT32 = TensorCore(
    "ieee_float32",
    step_k=1,
    fraction_bits=None,
    significand_bits=24,
    rounding="nearest_even",
    operands=(*FLOAT8_OPERANDS, "bfloat16", "float16"),
    sources=(Source("all", "defined", "IEEE 754-2019, fusedMultiplyAdd"),),
)

TENSOR_CORES: dict[str, TensorCore] = {
    core.name: core
    for core in (
        HOPPER_FP8,
        HOPPER_FP8_F16,
        HOPPER_FP8_VIA_F16,
        HOPPER_BF16,
        HOPPER_F16,
        ADA_FP8,
        BLACKWELL_FP8,
        IEEE_FLOAT32,
    )
}


@dataclass(frozen=True)
class Lowering:
    """What a dot product becomes: a core, and how often its partial sums are promoted.

    Attributes:
        core: The arithmetic of the instruction.
        promote_every: k after which a partial sum is added to a float32 total; None for one chain.
    """

    core: TensorCore
    promote_every: int | None


def lowering(
    block_m: int,
    block_n: int,
    block_k: int,
    num_warps: int,
    max_num_imprecise_acc: int | None = None,
    capability: int = 90,
) -> Lowering:
    """Which arithmetic Triton 3.6 gives `acc = tl.dot(a, b, acc)` on FP8 blocks.

    `matmul(..., core=found.core, promote_every=found.promote_every)` then computes its bits. What
    is written `acc += tl.dot(a, b)` is promoted every block_k where this gives a single chain.

    Args:
        block_m, block_n, block_k: The block's sizes, powers of two, at least 16, 8 and 32.
        num_warps: Warps of the program, a power of two.
        max_num_imprecise_acc: As given to tl.dot; None where it is not.
        capability: 90 for sm_90, the only one measured.

    Raises:
        ValueError: A combination that the compiler refuses or that was not measured.

    Source: measured on an H200 (Triton 3.6).

    >>> lowering(128, 128, 128, 8).core.name
    'hopper_fp8'
    >>> lowering(16, 128, 128, 4).core.name
    'hopper_fp8_via_f16'
    """
    if capability != 90:
        raise ValueError(f"capability is {capability}; known: 90 (others were not measured)")
    for name, value, least in (
        ("block_m", block_m, 16),
        ("block_n", block_n, 8),
        ("block_k", block_k, 32),
        ("num_warps", num_warps, 1),
    ):
        if value < least or value & (value - 1):
            raise ValueError(f"{name} is {value}; accepted: powers of two from {least}")
    promote = max_num_imprecise_acc
    if promote is not None and not 0 <= promote <= block_k:
        raise ValueError(
            f"max_num_imprecise_acc is {promote}; the compiler accepts 0 to block_k ({block_k})"
        )
    if block_m % 64 or num_warps % 4 or promote == 0:
        return Lowering(HOPPER_FP8_VIA_F16, None)
    if promote is not None and promote % HOPPER_FP8.step_k:
        raise ValueError(
            f"max_num_imprecise_acc is {promote}; known: multiples of {HOPPER_FP8.step_k}"
        )
    return Lowering(HOPPER_FP8, promote)
