"""One function for each contract. Each raises an AssertionError at the first difference, with the
smallest input that shows it.

They all take, besides the contract's own choices:

    device: "cpu" or "cuda", where the tensors are; None is the GPU where there is one.
    profile: How much is tried: "quick", "ci", "thorough", or a `Profile` of your own;
        "exhaustive" also tries a cast on every input that there is (all 2**32 of float32).
    bound: For a kernel that promises less than equality: one of `fp8lab.testing.bounds`.

and they raise `KernelFault`, an AssertionError, when the kernel does not hold the contract: other
bits, another dtype or shape, an exception, a changed input, no end within the profile's time limit.
What each contract computes is said by the function of the oracle that its text names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8lab.emulation.matmul import HOPPER_FP8, TensorCore
from fp8lab.formats import E4M3, Float8Format, FloatFormat, OverflowPolicy
from fp8lab.optimizer_formats import AdamOrder
from fp8lab.testing import contracts
from fp8lab.testing.checking import check
from fp8lab.testing.contracts.base import Kernel
from fp8lab.testing.contracts.blocks import Block
from fp8lab.testing.contracts.products import Sizes
from fp8lab.testing.profiles import Profile

if TYPE_CHECKING:
    from fp8lab.testing.bounds import Bound


def check_cast(
    kernel: Kernel,
    fmt: Float8Format,
    *,
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    dtypes: tuple[str, ...] = ("float32",),
    strided: bool = False,
    device: str | None = None,
    profile: str | Profile = "quick",
    bound: Bound | None = None,
) -> None:
    """kernel(x, scale) -> codes, held to `fp8lab.emulation.casting.quantize`.

    For "stochastic" it is kernel(x, scale, random_bits). x is a tensor of any shape, scale a Python
    float that float32 holds, random_bits int64 words from 0 to 2**32 - 1; codes are of the format's
    torch dtype or uint8, in x's shape.

    Args:
        kernel: The kernel.
        fmt, rounding, overflow: As for `quantize`.
        dtypes: The types that x comes in: float32, float16, bfloat16, float64.
        strided: Whether x may be something else than contiguous.
        device, profile, bound: See the module.
    """
    __tracebackhide__ = True
    contract = contracts.Cast(fmt, rounding, overflow, dtypes, strided)
    check(contract, kernel, device=device, profile=profile, bound=bound)


def check_dequantize(
    kernel: Kernel,
    fmt: Float8Format,
    *,
    device: str | None = None,
    profile: str | Profile = "quick",
    bound: Bound | None = None,
) -> None:
    """kernel(codes, inverse_scale) -> float32, held to `fp8lab.emulation.casting.dequantize`.

    codes are of the format's torch dtype, inverse_scale a Python float that float32 holds.

    Args:
        kernel: The kernel.
        fmt: The format of the codes.
        device, profile, bound: See the module.
    """
    __tracebackhide__ = True
    check(contracts.Dequantize(fmt), kernel, device=device, profile=profile, bound=bound)


def check_requantize(
    kernel: Kernel,
    source: Float8Format,
    target: Float8Format,
    *,
    overflow: str | OverflowPolicy = "saturate",
    device: str | None = None,
    profile: str | Profile = "quick",
    bound: Bound | None = None,
) -> None:
    """kernel(codes, inverse_scale, scale) -> codes of another format, held to
    `fp8lab.emulation.casting.requantize`.

    The code's value times inverse_scale times scale, exact, is rounded once, to nearest even. Both
    scales are Python floats that float32 holds.

    Args:
        kernel: The kernel.
        source, target: The formats.
        overflow: As for `quantize`.
        device, profile, bound: See the module.
    """
    __tracebackhide__ = True
    contract = contracts.Requantize(source, target, overflow)
    check(contract, kernel, device=device, profile=profile, bound=bound)


def check_amax(
    kernel: Kernel,
    *,
    dtypes: tuple[str, ...] = ("float32",),
    strided: bool = False,
    device: str | None = None,
    profile: str | Profile = "quick",
) -> None:
    """kernel(x) -> 0-d float32, held to `fp8lab.emulation.scaling.amax`.

    Args:
        kernel: The kernel.
        dtypes, strided: As for `check_cast`.
        device, profile: See the module.
    """
    __tracebackhide__ = True
    check(contracts.Amax(dtypes, strided), kernel, device=device, profile=profile)


def check_block_quantize(
    kernel: Kernel,
    fmt: Float8Format,
    *,
    block: Block = (1, 128),
    power_of_two: bool = True,
    dtypes: tuple[str, ...] = ("float32",),
    ragged: bool = True,
    strided: bool = False,
    device: str | None = None,
    profile: str | Profile = "quick",
    bound: Bound | None = None,
) -> None:
    """kernel(x) -> (codes, inverse_scales), held to `fp8lab.emulation.scaling.quantize_blocks`.

    Args:
        kernel: The kernel. x is (M, N); inverse_scales float32 (ceil(M / rows), ceil(N / columns)).
        fmt, block, power_of_two: As for `quantize_blocks`.
        dtypes, strided: As for `check_cast`.
        ragged: Whether M and N may be no multiples of the block.
        device, profile, bound: See the module.
    """
    __tracebackhide__ = True
    contract = contracts.BlockQuantize(fmt, block, power_of_two, dtypes, ragged, strided)
    check(contract, kernel, device=device, profile=profile, bound=bound)


def check_mx_quantize(
    kernel: Kernel,
    fmt: Float8Format,
    *,
    scale_rounding: str = "floor",
    dtypes: tuple[str, ...] = ("float32",),
    ragged: bool = True,
    strided: bool = False,
    device: str | None = None,
    profile: str | Profile = "quick",
) -> None:
    """kernel(x) -> (codes, scales), held to `fp8lab.emulation.scaling.quantize_mx`.

    Args:
        kernel: The kernel. x is (M, N); scales are E8M0 codes (M, ceil(N / 32)), of torch's
            float8_e8m0fnu or uint8.
        fmt, scale_rounding: As for `quantize_mx`.
        dtypes, ragged, strided: As for `check_block_quantize`.
        device, profile: See the module.
    """
    __tracebackhide__ = True
    contract = contracts.MxQuantize(fmt, scale_rounding, dtypes, ragged, strided)
    check(contract, kernel, device=device, profile=profile)


def check_scale_from_amax(
    kernel: Kernel,
    fmt: Float8Format,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    device: str | None = None,
    profile: str | Profile = "quick",
    bound: Bound | None = None,
) -> None:
    """kernel(amax) -> scale, held to `fp8lab.emulation.scaling.scale_from_amax`.

    Args:
        kernel: The kernel. amax is a float32 tensor, 0-d or (n,); scale has its shape.
        fmt, margin, power_of_two: As for `scale_from_amax`.
        device, profile, bound: See the module.
    """
    __tracebackhide__ = True
    contract = contracts.ScaleFromAmax(fmt, margin, power_of_two)
    check(contract, kernel, device=device, profile=profile, bound=bound)


def check_scale_update(
    kernel: Kernel,
    fmt: Float8Format,
    *,
    margin: int = 0,
    algorithm: str = "max",
    power_of_two: bool = False,
    device: str | None = None,
    profile: str | Profile = "quick",
) -> None:
    """kernel(scale, amax_history) -> both, held to `fp8lab.emulation.scaling.update_delayed`.

    Args:
        kernel: The kernel. scale is (n,) and amax_history (L, n), float32, slot 0 holding the
            present step's amax. It returns both, or None when it works in place.
        fmt, margin, algorithm, power_of_two: As for `update_delayed`.
        device, profile: See the module.
    """
    __tracebackhide__ = True
    contract = contracts.ScaleUpdate(fmt, margin, algorithm, power_of_two)
    check(contract, kernel, device=device, profile=profile)


def check_matmul(
    kernel: Kernel,
    *,
    formats: tuple[FloatFormat, FloatFormat] = (E4M3, E4M3),
    core: TensorCore = HOPPER_FP8,
    promote_every: int | None = None,
    exact_sums: bool = False,
    multiple_of: Sizes = (1, 1, 1),
    device: str | None = None,
    profile: str | Profile = "quick",
    bound: Bound | None = None,
) -> None:
    """kernel(a, b, inverse_scale_a, inverse_scale_b) -> float32, held to
    `fp8lab.emulation.matmul.matmul`.

    a is (M, K) row-major, b is (K, N) column-major, the inverse scales are 0-d float32 tensors.

    Args:
        kernel: The kernel.
        formats: Of a and b.
        core, promote_every: As for `matmul`: the bits are those of this tensor core.
        exact_sums: Only operands that no order of accumulation can round, and scales that are
            powers of two: for kernels that do not run on such a core, as under the interpreter.
        multiple_of: What M, N and K are multiples of.
        device, profile, bound: See the module.
    """
    __tracebackhide__ = True
    contract = contracts.Matmul(formats, core, promote_every, exact_sums, multiple_of)
    check(contract, kernel, device=device, profile=profile, bound=bound)


def check_adamw(
    kernel: Kernel,
    *,
    order: str | AdamOrder = "plain",
    device: str | None = None,
    profile: str | Profile = "quick",
) -> None:
    """kernel(param, grad, exp_avg, exp_avg_sq, *, step, lr, betas, eps, weight_decay), held to
    `fp8lab.emulation.adamw.adamw`.

    Args:
        kernel: The kernel. Tensors are float32 (n,), the keywords Python numbers. It returns the
            new (param, exp_avg, exp_avg_sq), or None when it works in place.
        order: As for `adamw`.
        device, profile: See the module.
    """
    __tracebackhide__ = True
    check(contracts.AdamW(order), kernel, device=device, profile=profile)


def check_norm(
    kernel: Kernel,
    *,
    device: str | None = None,
    profile: str | Profile = "quick",
    bound: Bound | None = None,
) -> None:
    """kernel(gradients) -> 0-d float32, held to `fp8lab.emulation.gradients.gradient_norm`.

    Args:
        kernel: The kernel. gradients is a list of float32 tensors of any shapes.
        device, profile, bound: See the module.
    """
    __tracebackhide__ = True
    check(contracts.Norm(), kernel, device=device, profile=profile, bound=bound)


def check_clip(
    kernel: Kernel, *, device: str | None = None, profile: str | Profile = "quick"
) -> None:
    """kernel(gradients, max_norm) -> gradients, or None in place, held to
    `fp8lab.emulation.gradients`: `gradient_norm`, `clip_coefficient`, one product an element.

    Args:
        kernel: The kernel. gradients is a list of float32 tensors, max_norm a Python float.
        device, profile: See the module.
    """
    __tracebackhide__ = True
    check(contracts.Clip(), kernel, device=device, profile=profile)


def check_unscale(
    kernel: Kernel, *, device: str | None = None, profile: str | Profile = "quick"
) -> None:
    """kernel(gradients, inverse_loss_scale) -> (gradients, found_inf): one product an element,
    rounded to nearest even, and whether any of them is Inf or NaN.

    Args:
        kernel: The kernel. gradients is a list of float32 tensors; the returned one may be None
            when it works in place. found_inf is a bool, or a number that is 0 or not.
        device, profile: See the module.
    """
    __tracebackhide__ = True
    check(contracts.Unscale(), kernel, device=device, profile=profile)
