"""What an Adam step computes in which order, and in which formats its state is kept: frozen data.

The oracle and the kernels read these declarations and share no arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8lab.formats import BFLOAT16, E4M3, E5M2, FLOAT16, FloatFormat

Decay = Literal["subtract", "subtract_fused", "multiply", "inside"]
FirstMoment = Literal["weighted", "decay_fused", "lerp_fused", "nested_fused"]
SecondMoment = Literal["square", "weight_fused", "decay_fused", "square_fused", "nested_fused"]
Denominator = Literal["corrected_square", "corrected_root"]
Update = Literal["moment", "step_size", "step_size_fused", "inside_fused"]
Constants = Literal["double", "float32_betas", "float32"]
L2 = Literal["rounded", "fused", "first_rounded"]


@dataclass(frozen=True)
class AdamOrder:
    """One order of operations. Every operation is rounded; "fma" is one rounding.

    With b1, b2 the betas, w1 = 1 - b1, w2 = 1 - b2, wd the weight decay, t the step:

    Attributes:
        name: What it is called in reports.
        decay: Decoupled weight decay. "subtract": p - (lr*wd)*p; "subtract_fused":
            fma(-(lr*wd), p, p); "multiply": p * (1 - lr*wd); "inside": see `update`.
        first_moment: "weighted": b1*m + w1*g; "decay_fused": fma(b1, m, w1*g); "lerp_fused":
            fma(w1, g - m, m) where w1 < 1/2, else fma(w1 - 1, g - m, g); "nested_fused":
            fma(b1, m, fma(-b1, g, g)).
        second_moment: "square": b2*v + w2*(g*g); "weight_fused": fma(w2*g, g, b2*v);
            "decay_fused": fma(b2, v, (w2*g)*g); "square_fused": fma(w2, g*g, b2*v);
            "nested_fused": fma(b2, v, fma(-b2, g*g, g*g)).
        denominator: "corrected_square": d = sqrt(v/c2) + eps; "corrected_root":
            d = sqrt(v)/sqrt(c2) + eps, where c2 = 1 - b2**t.
        update: "moment": p - lr*((m/c1)/d); "step_size": p - ((lr/c1)*m)/d; "step_size_fused":
            fma(-(lr/c1), m/d, p); "inside_fused": u = fma(wd, p, (m/c1)/d), then fma(-lr, u, p).
        constants: In what the constants are made. "double": float64 from the Python floats, each
            rounded once to float32; "float32_betas": betas are float32 first, w1 and w2 are
            float32 differences, the powers are float64; "float32": everything is float32.
        l2: The gradient with L2 regularisation in place of decoupled decay. "rounded": g + wd*p;
            "fused": fma(wd, p, g); "first_rounded": "rounded" for the first of the four elements
            that a thread of torch's CUDA kernel takes at a time, "fused" for the other three. Of
            n elements, the first ones are those with i mod 4 = 0 where n mod 4 = 0, and those with
            (i div 512) mod 4 = 0 otherwise.
        skips_zero_decay: Whether a weight decay of 0 leaves the step out. Otherwise 0*p counts: it
            turns an infinite parameter into NaN, and -0 into +0.
        tail: The second moment of the last n mod 8 elements, where it is another.
    """

    name: str
    decay: Decay
    first_moment: FirstMoment
    second_moment: SecondMoment
    denominator: Denominator
    update: Update
    constants: Constants = "double"
    l2: L2 = "fused"
    skips_zero_decay: bool = True
    tail: SecondMoment | None = None


PLAIN = AdamOrder(
    "plain",
    decay="subtract",
    first_moment="weighted",
    second_moment="square",
    denominator="corrected_square",
    update="moment",
    l2="rounded",
    skips_zero_decay=False,
)
# torch.optim.AdamW(fused=True) on a CPU with AVX2 or AVX-512 (AVX-512 builds take the AVX2 kernel);
# measured with torch 2.13.
TORCH = AdamOrder(
    "torch",
    decay="multiply",
    first_moment="lerp_fused",
    second_moment="weight_fused",
    denominator="corrected_root",
    update="step_size",
    tail="decay_fused",
)
# torch.optim.AdamW(fused=True) on a GPU; measured with torch 2.11 on an H200. The power is CUDA's
# powf. The source asks for the same of all four elements of a thread; nvcc fuses g + wd*p in three.
TORCH_CUDA = AdamOrder(
    "torch_cuda",
    decay="subtract_fused",
    first_moment="nested_fused",
    second_moment="nested_fused",
    denominator="corrected_root",
    update="step_size",
    constants="float32",
    l2="first_rounded",
)
# torch.optim.AdamW(foreach=True), and foreach=False, on a CPU with AVX2; measured with torch 2.13.
# Its root there is MKL's, one unit off in 0.6 to 17 % of the elements by machine; here the nearest.
TORCH_FOREACH = AdamOrder(
    "torch_foreach",
    decay="multiply",
    first_moment="lerp_fused",
    second_moment="weight_fused",
    denominator="corrected_root",
    update="step_size",
)
# The same on a GPU; measured with torch 2.11 on an H200.
TORCH_FOREACH_CUDA = AdamOrder(
    "torch_foreach_cuda",
    decay="multiply",
    first_moment="lerp_fused",
    second_moment="square_fused",
    denominator="corrected_root",
    update="step_size_fused",
)
# apex, DeepSpeed and TransformerEngine on a GPU: one formula, read from their sources, with the
# products fused that nvcc fuses in their loop of four elements; measured with CUDA 13.0's compiler
# on an H200. All three are built with fast math, whose quotients are approximate; these are not.
APEX = AdamOrder(
    "apex",
    decay="inside",
    first_moment="decay_fused",
    second_moment="decay_fused",
    denominator="corrected_square",
    update="inside_fused",
    constants="float32_betas",
    skips_zero_decay=False,
)

ORDERS: dict[str, AdamOrder] = {
    order.name: order
    for order in (PLAIN, TORCH, TORCH_CUDA, TORCH_FOREACH, TORCH_FOREACH_CUDA, APEX)
}


def order_named(order: str | AdamOrder) -> AdamOrder:
    """The order of that name (an order is returned as it is), or a ValueError listing the names."""
    if isinstance(order, AdamOrder):
        return order
    try:
        return ORDERS[order]
    except (KeyError, TypeError):
        raise ValueError(f"unknown order {order!r}; accepted: {', '.join(ORDERS)}") from None


Guard = Literal["none", "settle", "keep"]


@dataclass(frozen=True)
class MomentFormat:
    """How a moment is stored between steps.

    Attributes:
        name: What it is called in reports and in a state dict.
        element: The format of an element; None is float32, stored as it is.
        scaled: Whether elements are multiplied by a float32 scale that brings the largest magnitude
            of a block to the format's largest value; its inverse is stored.
        block: Consecutive elements that share a scale; None is the whole tensor.
        expanded: Whether magnitudes are raised to a power of the block's own before they are
            coded, so that they fill the format's range (COAT's dynamic range expansion).
        guard: What keeps the format from making the update wrong. "settle" (first moments): an
            element whose gradient is zero is coded toward zero, so that it reaches 0; to nearest, a
            code of at most 4 repeats for ever under beta1 = 0.9, and the parameter drifts. "keep"
            (second moments): what is not zero is not coded as 0, because a zero denominator beside
            a first moment that is not zero makes a step of up to m/eps.
    """

    name: str
    element: FloatFormat | None
    scaled: bool = False
    block: int | None = None
    expanded: bool = False
    guard: Guard = "none"

    def __post_init__(self) -> None:
        if self.block not in (None, 128, 256):
            raise ValueError(f"block is {self.block}; accepted: None, 128, 256")
        if self.expanded and (self.element is None or self.block is None or not self.scaled):
            raise ValueError("an expanded moment is scaled by blocks and has an element format")
        if self.scaled and self.element is None:
            raise ValueError("a scaled moment has an element format")

    @property
    def bits_per_element(self) -> float:
        """What an element costs, its share of the block's numbers included."""
        bits = 32.0 if self.element is None else float(self.element.bits)
        if self.block is not None:
            bits += (64 if self.expanded else 32) / self.block
        return bits


def _moment_formats() -> dict[str, MomentFormat]:
    formats = [
        MomentFormat("float32", None),
        MomentFormat("bfloat16", BFLOAT16),
        MomentFormat("float16_scaled", FLOAT16, scaled=True),
        MomentFormat("float16_scaled_keep", FLOAT16, scaled=True, guard="keep"),
    ]
    guards: tuple[Guard, ...] = ("none", "settle", "keep")
    for guard in guards:
        suffix = "" if guard == "none" else f"_{guard}"
        for element in (E4M3, E5M2):
            for block in (None, 128, 256):
                where = "tensor" if block is None else block
                name = f"{element.name}_{where}{suffix}".lower()
                formats.append(MomentFormat(name, element, True, block, guard=guard))
        if guard != "keep":  # the expansion keeps every magnitude by itself
            name = f"e4m3_128_expanded{suffix}"
            formats.append(MomentFormat(name, E4M3, True, 128, True, guard))
    return {fmt.name: fmt for fmt in formats}


MOMENT_FORMATS = _moment_formats()
MASTER_FORMATS = ("float32", "bfloat16_remainder", "bfloat16_stochastic")

# The smallest inverse scale: a block of zeros has it, and its inverse is finite.
MIN_INVERSE_SCALE = 2.0**-126
# COAT's target: the ratio of the largest to the smallest magnitude that a block is expanded to, as
# its base-2 logarithm; E4M3's largest value squared, over 2. And the steps of the power.
EXPANDED_LOG2 = 16.614709844115207  # log2(448**2 / 2)
EXPANSION_STEPS = 16


def moment_format_named(name: str | MomentFormat) -> MomentFormat:
    """The format of that name (a format is returned as is), or a ValueError listing the names."""
    if isinstance(name, MomentFormat):
        return name
    try:
        return MOMENT_FORMATS[name]
    except (KeyError, TypeError):
        accepted = ", ".join(MOMENT_FORMATS)
        raise ValueError(f"unknown moment format {name!r}; accepted: {accepted}") from None
