"""What the optimizer's benchmark runs: parameter lists, states, and the bytes a step must move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fp8lab.kernels.adamw_plan import AdamPlan
from fp8lab.kernels.adamw_settings import AdamSettings
from fp8lab.kernels.adamw_tensors import AdamTensors, empty_moment
from fp8lab.optimizer_formats import moment_format_named

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class StateCase:
    """A way to keep the state of a step.

    Attributes:
        name: What the rows call it.
        exp_avg, exp_avg_sq, master: As for `AdamPlan`.
        grad: The gradients' dtype: "float32" or "bfloat16".
        weight: Whether a bfloat16 weight is written beside a float32 master.
        order: The order of operations.
    """

    name: str
    exp_avg: str = "float32"
    exp_avg_sq: str = "float32"
    master: str = "float32"
    grad: str = "float32"
    weight: bool = False
    order: str = "plain"

    @property
    def bytes_moved(self) -> float:
        """Bytes that one step reads and writes for each parameter, scales included."""
        moments = 0.0
        for name in (self.exp_avg, self.exp_avg_sq):
            fmt = moment_format_named(name)
            size = fmt.bits_per_element / 8
            # A scale of the whole tensor costs a reading pass of its own.
            passes = 3 if fmt.scaled and fmt.block is None else 2
            moments += passes * size
        by_tensor = any(
            fmt.scaled and fmt.block is None
            for fmt in map(moment_format_named, (self.exp_avg, self.exp_avg_sq))
        )
        grad = (4 if self.grad == "float32" else 2) * (2 if by_tensor else 1)
        master = {"float32": 8, "bfloat16_remainder": 8, "bfloat16_stochastic": 4}[self.master]
        return moments + grad + master + (2 if self.weight else 0)


FLOAT32 = StateCase("float32")
EIGHT_BIT = StateCase(
    "e4m3_128, bf16 + remainder", "e4m3_128", "e4m3_128", "bfloat16_remainder", "bfloat16"
)
BFLOAT16_MOMENTS = StateCase(
    "bf16 moments", "bfloat16", "bfloat16", "bfloat16_remainder", "bfloat16"
)
REMAINDER = StateCase("float32, bf16 + remainder", master="bfloat16_remainder", grad="bfloat16")
STATE_CASES = (
    FLOAT32,
    replace(FLOAT32, name="float32, bf16 gradient and weight", grad="bfloat16", weight=True),
    REMAINDER,
    StateCase("float32, bf16 stochastic", master="bfloat16_stochastic", grad="bfloat16"),
    BFLOAT16_MOMENTS,
    StateCase(
        "f16 scaled", "float16_scaled", "float16_scaled_keep", "bfloat16_remainder", "bfloat16"
    ),
    EIGHT_BIT,
    replace(
        EIGHT_BIT, name="e4m3_128 guarded", exp_avg="e4m3_128_settle", exp_avg_sq="e4m3_128_keep"
    ),
    replace(EIGHT_BIT, name="e4m3_256", exp_avg="e4m3_256", exp_avg_sq="e4m3_256"),
    replace(EIGHT_BIT, name="e4m3_tensor", exp_avg="e4m3_tensor", exp_avg_sq="e4m3_tensor"),
    replace(
        EIGHT_BIT,
        name="e4m3_128 expanded",
        exp_avg="e4m3_128_expanded",
        exp_avg_sq="e4m3_128_expanded",
    ),
    replace(EIGHT_BIT, name="e4m3_128, bf16 stochastic", master="bfloat16_stochastic"),
)


def transformer_shapes(
    layers: int, width: int, inner: int, vocabulary: int, key_values: int
) -> list[tuple[int, ...]]:
    """The parameters of a decoder: embedding, norms, attention, gated inner layers, head.

    Args:
        layers, width, inner, vocabulary: As usual.
        key_values: Columns of the key and the value projection.
    """
    shapes: list[tuple[int, ...]] = [(vocabulary, width)]
    for _ in range(layers):
        shapes += [(width,), (width, width), (key_values, width), (key_values, width)]
        shapes += [(width, width), (width,), (inner, width), (inner, width), (width, inner)]
    return [*shapes, (width,), (vocabulary, width)]


MODELS: dict[str, list[tuple[int, ...]]] = {
    "one tensor of 2^28": [(1 << 28,)],
    "1.3B (24 layers of 2048)": transformer_shapes(24, 2048, 5504, 32000, 2048),
    "8B shapes (8 of 32 layers)": transformer_shapes(8, 4096, 14336, 128256, 1024),
}


def sharded(shapes: Shapes, ranks: int) -> list[tuple[int, ...]]:
    """One rank's part of each parameter, as FSDP2 cuts them: along the first dimension."""
    return [(-(-shape[0] // ranks), *shape[1:]) for shape in shapes]


def make_plan(shapes: Shapes, case: StateCase, settings: AdamSettings | None = None) -> AdamPlan:
    """A plan over fresh tensors of those shapes on the GPU, with ordinary random values."""
    torch.manual_seed(0)
    tensors = []
    offset = 0
    for shape in shapes:
        param = torch.randn(shape, device="cuda").mul_(0.02)
        if case.master != "float32":
            param = param.bfloat16()
        remainder = None
        if case.master == "bfloat16_remainder":
            remainder = torch.zeros(shape, dtype=torch.int16, device="cuda")
        grad = torch.randn(shape, device="cuda", dtype=getattr(torch, case.grad)).mul_(1e-3)
        tensors.append(
            AdamTensors(
                param,
                grad,
                empty_moment(param, case.exp_avg),
                empty_moment(param, case.exp_avg_sq),
                remainder,
                torch.empty_like(param, dtype=torch.bfloat16) if case.weight else None,
                random_offset=offset,
            )
        )
        offset += -(-param.numel() // 4)
    return AdamPlan(
        tensors,
        case.order,
        exp_avg=case.exp_avg,
        exp_avg_sq=case.exp_avg_sq,
        master=case.master,
        settings=settings,
    )
