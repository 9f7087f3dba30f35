"""Train a small model on bytes under a recipe: one run, as a stream of rows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8lab.data import Corpus, sample_batch, validation_windows
from fp8lab.errors import UserError
from fp8lab.gradients import LossScaler, UpdateStep
from fp8lab.linear import MODES, OperandCast, operand_casts
from fp8lab.models import ModelConfig, TransformerConfig, build_model
from fp8lab.optimizer import AdamW
from fp8lab.optimizer_formats import MASTER_FORMATS, MOMENT_FORMATS
from fp8lab.recipes import Recipe
from fp8lab.records import Row, short_float32

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
        return {**asdict(self), "recipe": self.recipe.to_dict()}


def check_device(device: str) -> None:
    """Raise where a GPU is asked for and none is there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device cuda was asked for, but torch finds no CUDA device; use --device cpu"
            f" (torch {torch.__version__})"
        )


def training_rows(config: TrainingConfig, corpus: Corpus) -> Iterator[Row]:
    """Train, yielding a row after each step.

    A row has step, loss (of the batch before the update, nats a byte), lr, grad_norm (unscaled,
    before clipping); `skipped` where the step was; `loss_scale` where that adapts; on observed
    steps `casts`, by name; on validation steps `validation_loss`. A loss that is not finite ends
    the run with that row.

    Raises:
        UserError: The corpus is shorter than a context, or there is no such device.
    """
    run = TrainingRun(config, corpus)
    while run.step < config.steps:
        row = run.advance()
        yield row
        if not math.isfinite(row["loss"]):
            return


class TrainingRun:
    """The live objects of a run, and its next step.

    Attributes:
        config: What it is.
        step: Steps done.
        model, optimizer, update, rng: What the steps change: the model with its scaling state, the
            optimizer with its moments, the loss scale (`update.scaler`), the batches to come.
    """

    def __init__(self, config: TrainingConfig, corpus: Corpus) -> None:
        """Build everything; errors are those of `training_rows`."""
        check_device(config.device)
        corpus.check_context(config.model.context)
        _make_deterministic(config.device)
        self.config, self.step = config, 0
        self._train = corpus.train
        self._validation = validation_windows(
            corpus.validation, config.model.context, config.validation_count
        )
        dtype = torch.float32 if config.master == "float32" else torch.bfloat16
        self.model = build_model(
            config.model, config.recipe, seed=config.seed, products=config.products
        ).to(config.device)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.optimizer = _optimizer(self.model, config)
        scaler = LossScaler(config.loss_scale, dynamic=config.dynamic_loss_scale)
        self.update = UpdateStep(
            self.model, self.optimizer, scaler=scaler, clip_norm=config.clip_norm
        )
        self.rng = np.random.default_rng(config.seed)

    def advance(self) -> Row:
        """Do the next step; return its row, see `training_rows`."""
        config = self.config
        self.step += 1
        last = self.step == config.steps
        observe = self.step == 1 or self.step % config.observe_every == 0 or last
        casts = dict(operand_casts(self.model))
        for cast in casts.values():
            cast.observe = observe
        lr = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        batch = sample_batch(
            self._train, batch=config.batch, context=config.model.context, rng=self.rng
        )
        loss = self.gradients(batch)
        summary = self.update()
        row: Row = {
            "step": self.step,
            "loss": short_float32(loss.item()),
            "lr": lr,
            "grad_norm": short_float32(summary.norm.item()),
        }
        if int(summary.skip):
            row["skipped"] = True
        if config.dynamic_loss_scale:
            row["loss_scale"] = self.update.scaler.scale.item()
        if observe:
            row["casts"] = {name: _observation(cast) for name, cast in casts.items()}
            for cast in casts.values():
                cast.observe = False
        if math.isfinite(row["loss"]) and (last or self.step % config.validate_every == 0):
            row["validation_loss"] = self._validate()
        return row

    def fixed_batch(self) -> tuple[Any, ...]:
        """A batch of validation windows, over and over where they are few: always the same."""
        places = np.arange(self.config.batch) % len(self._validation[0])
        return tuple(side[places] for side in self._validation)

    def gradients(self, batch: tuple[Any, ...]) -> Tensor:
        """Gradients of a batch of `config.batch`, in microbatches; returns the batch's loss."""
        config = self.config
        self.update.zero_grad()
        losses = []
        size = config.batch // config.microbatches
        for start in range(0, config.batch, size):
            part = tuple(side[start : start + size] for side in batch)
            loss = self._loss(part)
            self.update.backward(loss / config.microbatches)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def _loss(self, batch: tuple[Any, ...]) -> Tensor:
        inputs, targets = (torch.from_numpy(part).to(self.config.device) for part in batch)
        narrow: Any = nullcontext()
        if self.config.autocast:
            narrow = torch.autocast(self.config.device, torch.bfloat16)
        with narrow:
            logits = self.model(inputs)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def _validate(self) -> float:
        self.model.eval()
        total = 0.0
        windows = self._validation
        count = len(windows[0])
        for start in range(0, count, self.config.batch):
            part = tuple(w[start : start + self.config.batch] for w in windows)
            total += self._loss(part).item() * len(part[0])
        self.model.train()
        return total / count


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Linear warm-up to the peak, then a cosine down to `final_lr` times the peak."""
    if step <= config.warmup:
        return config.peak_lr * step / config.warmup
    progress = (step - config.warmup) / max(config.steps - config.warmup, 1)
    share = config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * progress)) / 2
    return config.peak_lr * share


def summary_of(rows: list[Row]) -> dict[str, Any]:
    """How a run ended: its last losses, whether it diverged, what its casts lost on average.

    A run counts as diverged when a loss was not finite, or when its last validation loss is more
    than one nat a byte above its own best.
    """
    validated = [row["validation_loss"] for row in rows if "validation_loss" in row]
    finite = math.isfinite(rows[-1]["loss"])
    final = validated[-1] if finite and validated else math.nan
    observed = [cast for row in rows for cast in row.get("casts", {}).values()]
    return {
        "steps": rows[-1]["step"],
        "loss": rows[-1]["loss"],
        "validation_loss": final,
        "diverged": not (finite and math.isfinite(final) and final <= min(validated) + 1),
        "overflow": float(np.mean([cast["overflow"] for cast in observed] or [0.0])),
        "underflow": float(np.mean([cast["underflow"] for cast in observed] or [0.0])),
        "skipped": sum("skipped" in row for row in rows),
    }


def _make_deterministic(device: str) -> None:
    torch.set_num_threads(1)  # sums change with the number of threads
    torch.backends.cuda.matmul.allow_tf32 = False
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _optimizer(model: nn.Module, config: TrainingConfig) -> AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(
        groups,
        lr=config.peak_lr,
        betas=config.betas,
        eps=config.eps,
        exp_avg=config.exp_avg,
        exp_avg_sq=config.exp_avg_sq,
        master=config.master,
        capturable=config.device == "cuda",
    )


def _observation(cast: OperandCast) -> dict[str, float]:
    seen = cast.statistics
    assert seen is not None
    return {
        "amax": short_float32(seen.amax),
        "scale": short_float32(seen.scale),
        "overflow": round(seen.overflow, 9),
        "underflow": round(seen.underflow, 9),
    }
