"""Train a small model on bytes under a recipe: one run, as a stream of rows."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8lab.conversion import keep_in_bf16
from fp8lab.data import Corpus, sample_batch, validation_windows
from fp8lab.errors import UserError
from fp8lab.fallback_run import Fallback
from fp8lab.gradients import GradientSummary, LossScaler, UpdateStep
from fp8lab.graphs import GraphedStep
from fp8lab.models import build_model
from fp8lab.optimizer import AdamW
from fp8lab.records import Row, number, short_float32
from fp8lab.telemetry import Telemetry
from fp8lab.training_config import TrainingConfig, learning_rate

_VALIDATION_TOKENS = 1 << 16  # that a GPU takes at a time


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
    steps `casts`, by name; on validation steps `validation_loss`; where the fallback moved roles,
    `events`. A loss that is not finite ends the run with that row, see `ends`.

    Raises:
        UserError: The corpus is shorter than a context, or there is no such device.
    """
    run = TrainingRun(config, corpus)
    while run.step < config.steps:
        row = run.advance()
        yield row
        if ends(row, config):
            return


def ends(row: Row, config: TrainingConfig) -> bool:
    """Whether a run goes no further: its loss is not finite, and no fallback has it go on after a
    step that was skipped, which changed nothing.
    """
    skipped = config.fallback is not None and row.get("skipped", False)
    return not (math.isfinite(number(row["loss"])) or skipped)


class TrainingRun:
    """The live objects of a run, and its next step.

    Attributes:
        config: What it is.
        step: Steps done.
        model, optimizer, update, rng: What the steps change: the model with its scaling state, the
            optimizer with its moments, the loss scale (`update.scaler`), the batches to come.
        fallback: What moves roles to BF16; None where the configuration has none.
        telemetry: What watches the casts on observed steps.
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
        if config.keep:
            keep_in_bf16(self.model, config.keep)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        if config.compile:
            for part in getattr(self.model, "blocks", [self.model]):
                part.compile(dynamic=False)
        self.optimizer = _optimizer(self.model, config)
        scaler = LossScaler(config.loss_scale, dynamic=config.dynamic_loss_scale)
        self.update = UpdateStep(
            self.model, self.optimizer, scaler=scaler, clip_norm=config.clip_norm
        )
        self._graphed: GraphedStep | None = None
        if config.device == "cuda" and config.graph:
            # Not a reference to itself: a run's memory goes with the run.
            this = weakref.proxy(self)
            self._graphed = GraphedStep(
                lambda *part: this._loss(part), self.update, microbatches=config.microbatches
            )
        self.rng = np.random.default_rng(config.seed)
        self.telemetry = Telemetry(
            self.model,
            self.optimizer,
            config.observe_every,
            sqnr=config.telemetry,
            parameters=config.telemetry,
            scaler=scaler,
        )
        self.fallback = None if config.fallback is None else Fallback(self.model, config.fallback)

    def advance(self) -> Row:
        """Do the next step; return its row, see `training_rows`."""
        config = self.config
        self.step += 1
        last = self.step == config.steps
        observe = self.step == 1 or self.step % config.observe_every == 0 or last
        self.telemetry.begin_step(observe)
        lr = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        batch = sample_batch(
            self._train, batch=config.batch, context=config.model.context, rng=self.rng
        )
        loss, summary = self._taken(batch)
        events = [] if self.fallback is None else self.fallback.advance(self.step)
        found = (loss, summary.norm, summary.skip, self.update.scaler.scale)
        # Together: the device is waited for once.
        numbers = torch.stack([own.reshape(()).float() for own in found]).tolist()
        row: Row = {
            "step": self.step,
            "loss": short_float32(numbers[0]),
            "lr": lr,
            "grad_norm": short_float32(numbers[1]),
        }
        if numbers[2]:
            row["skipped"] = True
        if events:
            row["events"] = events
        if config.dynamic_loss_scale:
            row["loss_scale"] = numbers[3]
        watched = self.telemetry.end_step()
        if watched is not None:
            row |= {key: own for key, own in watched.items() if key != "step"}
        if math.isfinite(row["loss"]) and (last or self.step % config.validate_every == 0):
            row["validation_loss"] = self._validate()
        return row

    def eager_now(self) -> bool:
        """Whether this step does something of its own in Python, so that no CUDA graph has it."""
        return False

    def fixed_batch(self) -> tuple[Any, ...]:
        """A batch of validation windows, over and over where they are few: always the same."""
        places = np.arange(self.config.batch) % len(self._validation[0])
        return tuple(side[places] for side in self._validation)

    def gradients(self, batch: tuple[Any, ...]) -> Tensor:
        """Gradients of a batch of `config.batch`, in microbatches; returns the batch's loss."""
        placed = self._placed(batch)
        return self.update.accumulate(
            lambda *part: self._loss(part), placed, self.config.microbatches
        )

    def _taken(self, batch: tuple[Any, ...]) -> tuple[Tensor, GradientSummary]:
        """The step of a batch: its loss before, and the summary of its gradients."""
        watched = self.fallback is not None and self.fallback.watches_next
        if self._graphed is not None and not watched:
            return self._graphed(*self._placed(batch), eager=self.eager_now())
        with nullcontext() if self.fallback is None else self.fallback.watching(self.update.scaler):
            loss = self.gradients(batch)
        return loss, self.update()

    def _placed(self, batch: tuple[Any, ...]) -> tuple[Tensor, ...]:
        tensors = tuple(torch.from_numpy(side) for side in batch)
        if self.config.device == "cpu":
            return tensors
        # From pinned memory, so that the host need not wait.
        return tuple(own.pin_memory().to("cuda", non_blocking=True) for own in tensors)

    def _loss(self, batch: tuple[Any, ...]) -> Tensor:
        """The loss of a part of a batch: tensors on the device."""
        inputs, targets = batch
        narrow: Any = nullcontext()
        if self.config.autocast:
            narrow = torch.autocast(self.config.device, torch.bfloat16)
        with narrow:
            logits = self.model(inputs)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def _validate(self) -> float:
        self.model.eval()
        windows = self._validation
        count = len(windows[0])
        size = self.config.batch
        if self.config.device == "cuda":  # a CPU's rows keep the sums that they have
            size = max(size, _VALIDATION_TOKENS // self.config.model.context)
        sizes, losses = [], []
        for start in range(0, count, size):
            part = self._placed(tuple(w[start : start + size] for w in windows))
            losses.append(self._loss(part))
            sizes.append(len(part[0]))
        self.model.train()
        total = 0.0
        for loss, own in zip(torch.stack(losses).tolist(), sizes, strict=True):
            total += loss * own
        return total / count


def summary_of(rows: list[Row]) -> dict[str, Any]:
    """How a run ended: its last losses, whether it diverged, what its casts lost on average.

    A run counts as diverged when a loss was not finite, or when its last validation loss is more
    than one nat a byte above its own best.
    """
    validated = [number(row["validation_loss"]) for row in rows if "validation_loss" in row]
    finite = math.isfinite(number(rows[-1]["loss"]))
    final = validated[-1] if finite and validated else math.nan
    observed = [cast for row in rows for cast in (row.get("casts") or {}).values()]
    return {
        "steps": rows[-1]["step"],
        "loss": rows[-1]["loss"],
        "validation_loss": final,
        "diverged": not (finite and math.isfinite(final) and final <= min(validated) + 1),
        "overflow": float(np.mean([number(cast["overflow"]) for cast in observed] or [0.0])),
        "underflow": float(np.mean([number(cast["underflow"]) for cast in observed] or [0.0])),
        "skipped": sum("skipped" in row for row in rows),
    }


def _make_deterministic(device: str) -> None:
    torch.set_num_threads(1)  # sums change with the number of threads
    torch.backends.cuda.matmul.allow_tf32 = False
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory before it is written, and filling all of it takes time.
        fills: Any = torch.utils.deterministic
        fills.fill_uninitialized_memory = False


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
