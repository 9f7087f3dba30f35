"""What decides a training run: its settings, and the learning rate that follows from them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from fp8lab.errors import UserError
from fp8lab.fallback_run import FallbackConfig
from fp8lab.linear import MODES
from fp8lab.models import ModelConfig, TransformerConfig
from fp8lab.optimizer_formats import MASTER_FORMATS, MOMENT_FORMATS
from fp8lab.recipes import Recipe

# Settings that a run's config.json lacks where they are these.
LATER = {"fallback": None, "keep": (), "graph": True, "compile": False, "telemetry": False}
_RANGES = {
    "seed": (0, 2**63 - 1),  # what torch's generators take
    "steps": (1, 10**9),
    "batch": (1, 65536),
    "observe_every": (1, 10**9),
    "validate_every": (1, 10**9),
    "validation_count": (1, 10**6),
    "microbatches": (1, 65536),
    "warmup": (0, 10**9),
    "peak_lr": (0.0, 1e30),
}


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides a run's rows, but for the corpus and the backend.

    Attributes:
        recipe: How the linear layers' operands are cast.
        seed: Of the initial weights and of the batches.
        steps: Optimizer steps; the length of the learning-rate schedule too.
        batch: Sequences a step.
        model: Sizes of the model, and which one it is.
        peak_lr: Learning rate after warm-up.
        warmup: Steps of linear warm-up; then a cosine down to `final_lr` times the peak.
        final_lr: See warmup; 0 to 1.
        betas, eps, weight_decay: AdamW's; decay is for matrices only.
        clip_norm: Gradients are scaled down to this global norm.
        observe_every: Steps between observations of the casts (amax, scale, overflow, underflow).
        validate_every: Steps between validations; the last step validates as well.
        validation_count: Validation windows, evenly spread over the validation part.
        device: "cpu" (the oracle) or "cuda" (the kernels).
        products: How layers compute their products, see `fp8lab.linear.Fp8Linear`. "decoded", the
            default, multiplies decoded operands in float32: as fast as torch on a CPU. "codes" has
            the card's bits, and takes the oracle about a second a step at the default sizes.
        microbatches: How many parts a batch is cut into, their gradients accumulated.
        loss_scale: A factor on the loss, or the first one where `dynamic_loss_scale`.
        dynamic_loss_scale: Whether it adapts; see `fp8lab.gradients.LossScaler`.
        exp_avg, exp_avg_sq: What the optimizer keeps its moments in, by
            `fp8lab.optimizer_formats.MOMENT_FORMATS`.
        master: What the optimizer keeps of weights: "float32", or bfloat16 weights with one of the
            other master formats.
        autocast: Whether layers outside FP8 compute in bfloat16 (`torch.autocast`).
        fallback: When a layer's role leaves FP8; None for never.
        keep: Sensitive layers that are in BF16 from the start, as `keep` of `fp8lab.convert`.
        graph: Whether steps on a GPU replay CUDA graphs (`fp8lab.graphs`); the bits are the same.
        compile: Whether the model's blocks are compiled (`torch.compile`): other bits where it
            fuses what is not in FP8, and no audit.
        telemetry: Whether rows of observed steps also have SQNR, zeros and values that are not
            finite of each cast, and norms and histograms of each parameter (`fp8lab.telemetry`).
    """

    recipe: Recipe
    seed: int = 0
    steps: int = 160
    batch: int = 16
    model: ModelConfig = field(default_factory=TransformerConfig)
    peak_lr: float = 3e-3
    warmup: int = 40
    final_lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    observe_every: int = 10
    validate_every: int = 20
    validation_count: int = 64
    device: str = "cpu"
    products: str = "decoded"
    microbatches: int = 1
    loss_scale: float = 1.0
    dynamic_loss_scale: bool = False
    exp_avg: str = "float32"
    exp_avg_sq: str = "float32"
    master: str = "float32"
    autocast: bool = False
    fallback: FallbackConfig | None = None
    keep: tuple[str, ...] = ()
    graph: bool = True
    compile: bool = False
    telemetry: bool = False

    def __post_init__(self) -> None:
        for name, (smallest, largest) in _RANGES.items():
            value = getattr(self, name)
            if not smallest <= value <= largest:
                raise UserError(f"{name} is {value}; accepted: {smallest} to {largest}")
        for name, accepted in (
            ("device", ("cpu", "cuda")),
            ("products", MODES),
            ("exp_avg", MOMENT_FORMATS),
            ("exp_avg_sq", MOMENT_FORMATS),
            ("master", MASTER_FORMATS),
        ):
            if getattr(self, name) not in accepted:
                shown = ", ".join(accepted)
                raise UserError(f"{name} is {getattr(self, name)!r}; accepted: {shown}")
        if self.batch % self.microbatches:
            raise UserError(
                f"batch is {self.batch}, which {self.microbatches} microbatches do not divide"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the records."""
        table = {**asdict(self), "recipe": self.recipe.to_dict()}
        # Settings that came later are left out where they are not used: what was written before
        # them stays as it was.
        return {n: value for n, value in table.items() if n not in LATER or value != LATER[n]}


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Linear warm-up to the peak, then a cosine down to `final_lr` times the peak."""
    if step <= config.warmup:
        return config.peak_lr * step / config.warmup
    progress = (step - config.warmup) / max(config.steps - config.warmup, 1)
    share = config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * progress)) / 2
    return config.peak_lr * share
