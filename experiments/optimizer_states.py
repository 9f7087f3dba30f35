"""What an optimizer state in fewer bits does to a trajectory: every format on the same gradients.

    python -m fp8lab.experiments.optimizer_states [--steps N] [--text FILE] [--out FILE]

A small model is trained on the corpus with float32 states. Each format has a copy of the parameters
and takes the same gradients, so that what differs is its own doing. Rows go to OUT.jsonl, the
figure that is drawn from them to OUT.png; --redraw draws the rows that are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch

from fp8lab.bridge import to_numpy
from fp8lab.data import Corpus, load_corpus, sample_batch
from fp8lab.emulation.adamw_states import AdamState, adamw_state
from fp8lab.emulation.moments import read_moment, zero_moment
from fp8lab.errors import UserError
from fp8lab.experiments.commands import Parser, check_at_least, check_writable, exit_code, made_by
from fp8lab.experiments.new_rows import NewRows
from fp8lab.models import Transformer, TransformerConfig
from fp8lab.recipes import recipe_named
from fp8lab.records import Row, environment, read_rows

MODEL = TransformerConfig(context=32, width=64, layers=1, heads=2)
BATCH = 16
NUMBERS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
# name -> formats of the moments
FORMATS = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "e4m3_128": ("e4m3_128", "e4m3_128"),
    "e4m3_128 guarded": ("e4m3_128_settle", "e4m3_128_keep"),
    "e4m3_128 expanded": ("e4m3_128_expanded", "e4m3_128_expanded"),
    "e4m3_tensor": ("e4m3_tensor", "e4m3_tensor"),
    "e4m3_256, float16 v": ("e4m3_256", "float16_scaled_keep"),
}
COLOURS = ("#000000", "#56B4E9", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
PANELS = {
    "distance": "distance from float32, over how far float32 moved",
    "update_error": "error of a step, over the step",
    "weight_norm": "norm of the weights",
    "lost": "share of second moments that decode to 0",
    "bias": "mean of log2(v / float32's v)",
}


def main(arguments: list[str] | None = None) -> None:
    """Train, record, draw."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--text", type=Path, help="any file, in place of the plays")
    parser.add_argument("--out", type=Path, default=Path("figures/optimizer-states"))
    parser.add_argument("--redraw", action="store_true")
    options = parser.parse_args(arguments)
    rows_file = options.out.with_suffix(".jsonl")
    check_at_least(options.steps, 1, "--steps")
    check_writable(rows_file.with_suffix(".png"))
    if options.redraw:
        rows = check_rows(read_rows(rows_file), rows_file)
    else:
        corpus = load_corpus(options.text)
        corpus.check_context(MODEL.context)
        head = {
            "environment": environment("cpu"),
            **made_by("optimizer_states", arguments),
            "corpus": corpus.name,
            "steps": options.steps,
        }
        with NewRows(rows_file, head) as new:
            for row in trajectories(corpus, options.steps):
                new.add(row)
        rows, rows_file = new.rows, new.path
    draw(rows, rows_file.with_suffix(".png"))
    for row in [row for row in rows if row.get("step") == rows[0]["steps"]]:
        print(f"{row['format']:<22}" + "  ".join(f"{key} {row[key]:.3g}" for key in PANELS))


def check_rows(rows: list[Row], source: Path) -> list[Row]:
    """The rows of this experiment.

    Raises:
        UserError: They are something else, or there is none to draw.
    """
    keys = {"step", "format", "loss", *PANELS}
    if len(rows) < 2 or "steps" not in rows[0] or not all(keys <= set(row) for row in rows[1:]):
        raise UserError(f"{source} holds no rows of optimizer_states, or damaged ones")
    return rows


def trajectories(corpus: Corpus, steps: int) -> Iterator[Row]:
    """A row for each format every 2 % of the way."""
    torch.set_num_threads(1)
    model = Transformer(MODEL, recipe_named("bf16"))
    rng = np.random.default_rng(0)
    params = list(model.parameters())
    start = [param.detach().numpy().copy() for param in params]
    states = {
        name: [
            AdamState(value, zero_moment(value.shape, first), zero_moment(value.shape, second))
            for value in start
        ]
        for name, (first, second) in FORMATS.items()
    }
    for step in range(1, steps + 1):
        inputs, targets = sample_batch(corpus.train, batch=BATCH, context=MODEL.context, rng=rng)
        logits = model(torch.from_numpy(inputs))
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(targets).flatten()
        )
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [to_numpy(param.grad) for param in params if param.grad is not None]
        before = states
        states = {
            name: [
                adamw_state(state, grad, step=step, **NUMBERS)
                for state, grad in zip(kept, grads, strict=True)
            ]
            for name, kept in states.items()
        }
        with torch.no_grad():
            for param, state in zip(params, states["float32"], strict=True):
                param.copy_(torch.from_numpy(state.param))
        if step % max(steps // 50, 1) == 0 or step == steps:
            for name in states:
                row = {"step": step, "format": name, "loss": float(loss.detach())}
                yield row | _measures(name, states, before, start)


def _measures(
    name: str,
    states: dict[str, list[AdamState]],
    before: dict[str, list[AdamState]],
    start: list[Any],
) -> dict[str, float]:
    """How far a format is from float32, over all parameters."""
    param, exact = (_flat([s.param for s in states[n]]) for n in (name, "float32"))
    old, old_exact = (_flat([s.param for s in before[n]]) for n in (name, "float32"))
    step, wanted = param - old, exact - old_exact
    v, reference = (
        _flat([read_moment(s.exp_avg_sq) for s in states[n]]) for n in (name, "float32")
    )
    both = (v > 0) & (reference > 0)
    return {
        "distance": _ratio(param - exact, exact - _flat(start)),
        "update_error": _ratio(step - wanted, wanted),
        "weight_norm": float(np.linalg.norm(param)),
        "lost": float(((v == 0) & (reference > 0)).mean()),
        "bias": float(np.log2(v[both] / reference[both]).mean()),
    }


def _ratio(error: Any, whole: Any) -> float:
    return float(np.linalg.norm(error) / np.linalg.norm(whole))


def _flat(arrays: list[Any]) -> Any:
    return np.concatenate([array.reshape(-1) for array in arrays])


def draw(rows: list[Row], figure: Path) -> None:
    """One panel a measure, one line a format."""
    picture, axes = plt.subplots(2, 3, figsize=(14, 7.5), layout="constrained")
    measured = [row for row in rows if "step" in row]
    for axis, (key, title) in zip(axes.flat, PANELS.items(), strict=False):
        logarithmic = key in ("distance", "update_error", "weight_norm")
        for colour, name in zip(COLOURS, FORMATS, strict=True):
            own = [row for row in measured if row["format"] == name]
            values = [float(row[key]) for row in own]
            if logarithmic:  # float32 is at 0 from itself, which has no place there
                values = [value if value > 0 else float("nan") for value in values]
            axis.plot([row["step"] for row in own], values, color=colour, label=name)
        if logarithmic:
            axis.set_yscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    axes.flat[-1].axis("off")
    axes.flat[-1].legend(handles, labels, loc="center", fontsize=11)
    picture.suptitle("AdamW's state in fewer bits, on the gradients of one run")
    picture.savefig(figure, dpi=110, metadata={"Software": None})
    plt.close(picture)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
