"""Options that `fp8lab sweep` and `fp8lab train` share, and the settings they stand for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8lab.errors import UserError
from fp8lab.recipes import Recipe

if TYPE_CHECKING:
    from fp8lab.training_config import TrainingConfig


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a training run."""
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default 160)")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where it runs (default cpu)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="train on this text instead of the plays"
    )
    parser.add_argument("--context", type=int, metavar="N", help="bytes a sequence (default 64)")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences a step (default 16)")
    parser.add_argument("--width", type=int, metavar="N", help="width of the model (default 128)")
    parser.add_argument("--layers", type=int, metavar="N", help="blocks of the model (default 2)")
    parser.add_argument("--heads", type=int, metavar="N", help="attention heads (gpt; default 4)")
    parser.add_argument("--warmup", type=int, metavar="N", help="warm-up steps (default 40)")
    parser.add_argument("--peak-lr", type=float, metavar="LR", help="(default 0.003)")
    parser.add_argument(
        "--model", default="gpt", choices=("gpt", "mlp"), help="which model (default gpt)"
    )
    parser.add_argument(
        "--products",
        choices=("codes", "decoded"),
        help="multiply FP8 codes with the card's bits, or decoded operands in float32 (default:"
        " codes on cuda; decoded on cpu, where codes take the oracle about 20 times as long)",
    )
    parser.add_argument(
        "--microbatches", type=int, metavar="N", help="parts that a batch is cut into (default 1)"
    )
    parser.add_argument(
        "--loss-scale",
        metavar="S|dynamic",
        help="a factor on the loss; dynamic starts at 65536 and adapts (default 1)",
    )
    parser.add_argument(
        "--exp-avg",
        metavar="NAME",
        help="format of AdamW's first moments: float32, bfloat16, e4m3_128_settle, ... (default"
        " float32)",
    )
    parser.add_argument(
        "--exp-avg-sq",
        metavar="NAME",
        help="of its second moments: float32, e4m3_128_keep, ... (default float32)",
    )
    parser.add_argument(
        "--master",
        metavar="NAME",
        help="master weights: float32, bfloat16_remainder, ... (default float32)",
    )
    parser.add_argument("--autocast", action="store_true", help="bfloat16 outside the FP8 layers")


def add_out(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the folder that a command writes."""
    parser.add_argument(
        "--out", type=Path, default=Path(default), metavar="FOLDER", help=f"(default {default})"
    )


def training_config(given: argparse.Namespace, recipe: Recipe, seed: int) -> TrainingConfig:
    """The settings of a run; what was not given has its default."""
    from fp8lab.models import MlpConfig, TransformerConfig
    from fp8lab.training_config import TrainingConfig

    sizes = stated(given, ("context", "width", "layers", "heads"))
    if given.model == "mlp" and "heads" in sizes:
        raise UserError("--heads is given with --model mlp, which has none; leave it out")
    names = ("steps", "batch", "device", "products", "microbatches", "autocast")
    states = ("exp_avg", "exp_avg_sq", "master")
    settings = stated(given, (*names, *states, "warmup", "peak_lr"))
    settings.setdefault("products", "codes" if given.device == "cuda" else "decoded")
    settings |= _loss_scale(given.loss_scale)
    model = replace(MlpConfig() if given.model == "mlp" else TransformerConfig(), **sizes)
    return TrainingConfig(recipe, seed=seed, model=model, **settings)


def _loss_scale(given: str | None) -> dict[str, Any]:
    """The settings that `--loss-scale` stands for."""
    if given is None:
        return {}
    if given == "dynamic":
        return {"loss_scale": 65536.0, "dynamic_loss_scale": True}
    try:
        return {"loss_scale": float(given)}
    except ValueError:
        raise UserError(f"--loss-scale is {given!r}; accepted: a number, or dynamic") from None


def stated(given: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of some options that were given."""
    return {name: value for name in names if (value := getattr(given, name)) is not None}
