"""Train the small transformer on bytes under a recipe: one run, as a stream of rows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8lab.data import Corpus, sample_batch, validation_windows
from fp8lab.errors import UserError
from fp8lab.linear import OperandCast, advance_scaling, operand_casts
from fp8lab.models import Transformer, TransformerConfig
from fp8lab.optimizer import AdamW
from fp8lab.recipes import Recipe
from fp8lab.records import Row, short_float32

_RANGES = {
    "seed": (0, 2**63 - 1),  # what torch's generators take
    "steps": (1, 10**9),
    "batch": (1, 65536),
    "observe_every": (1, 10**9),
    "validate_every": (1, 10**9),
    "validation_count": (1, 10**6),
}


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides a run's rows, but for the corpus and the backend.

    Attributes:
        recipe: How the linear layers' operands are cast.
        seed: Of the initial weights and of the batches.
        steps: Optimizer steps; the length of the learning-rate schedule too.
        batch: Sequences a step.
        model: Sizes of the transformer.
        peak_lr: Learning rate after warm-up.
        warmup: Steps of linear warm-up; then a cosine down to `final_lr` times the peak.
        final_lr: See warmup; 0 to 1.
        betas, eps, weight_decay: AdamW's; decay is for matrices only.
        clip_norm: Gradients are scaled down to this global norm.
        observe_every: Steps between observations of the casts (amax, scale, overflow, underflow).
        validate_every: Steps between validations; the last step validates as well.
        validation_count: Validation windows, evenly spread over the validation part.
        device: "cpu" (the oracle) or "cuda" (the kernels).
    """

    recipe: Recipe
    seed: int = 0
    steps: int = 160
    batch: int = 16
    model: TransformerConfig = field(default_factory=TransformerConfig)
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

    def __post_init__(self) -> None:
        for name, (smallest, largest) in _RANGES.items():
            value = getattr(self, name)
            if not smallest <= value <= largest:
                raise UserError(f"{name} is {value}; accepted: {smallest} to {largest}")
        if self.device not in ("cpu", "cuda"):
            raise UserError(f"device is {self.device!r}; accepted: cpu, cuda")

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

    A row has step, loss (of the batch before the update, nats a byte), lr, grad_norm (before
    clipping); on observed steps `casts`, by name; on validation steps `validation_loss`. A loss
    that is not finite ends the run with that row.

    Raises:
        UserError: The corpus is shorter than a context, or there is no such device.
    """
    check_device(config.device)
    corpus.check_context(config.model.context)
    _make_deterministic(config.device)
    model = Transformer(config.model, config.recipe, seed=config.seed).to(config.device)
    optimizer = _optimizer(model, config)
    rng = np.random.default_rng(config.seed)
    validation = validation_windows(
        corpus.validation, config.model.context, config.validation_count
    )

    for step in range(1, config.steps + 1):
        last = step == config.steps
        observe = step == 1 or step % config.observe_every == 0 or last
        casts = dict(operand_casts(model))
        for cast in casts.values():
            cast.observe = observe
        lr = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr

        batch = sample_batch(
            corpus.train, batch=config.batch, context=config.model.context, rng=rng
        )
        loss = _loss(model, batch, config.device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        advance_scaling(model)

        row: Row = {
            "step": step,
            "loss": short_float32(loss.item()),
            "lr": lr,
            "grad_norm": short_float32(grad_norm.item()),
        }
        if observe:
            row["casts"] = {name: _observation(cast) for name, cast in casts.items()}
        diverged = not math.isfinite(row["loss"])
        if not diverged and (last or step % config.validate_every == 0):
            row["validation_loss"] = _validate(model, validation, config)
        yield row
        if diverged:
            return


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
        "overflow": float(np.mean([cast["overflow"] for cast in observed])),
        "underflow": float(np.mean([cast["underflow"] for cast in observed])),
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
    return AdamW(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps)


def _loss(model: nn.Module, batch: tuple[Any, Any], device: str) -> Tensor:
    inputs, targets = (torch.from_numpy(part).to(device) for part in batch)
    logits = model(inputs)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def _validate(model: nn.Module, windows: tuple[Any, Any], config: TrainingConfig) -> float:
    model.eval()
    total = 0.0
    count = len(windows[0])
    for start in range(0, count, config.batch):
        part = tuple(w[start : start + config.batch] for w in windows)
        total += _loss(model, (part[0], part[1]), config.device).item() * len(part[0])
    model.train()
    return total / count


def _observation(cast: OperandCast) -> dict[str, float]:
    seen = cast.statistics
    assert seen is not None
    return {
        "amax": short_float32(seen.amax),
        "scale": short_float32(seen.scale),
        "overflow": round(seen.overflow, 9),
        "underflow": round(seen.underflow, 9),
    }
