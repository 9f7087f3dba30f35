"""Which linear layers tolerate FP8? Each alone in FP8, the rest in BF16, on the same batches.

    python -m fp8lab.experiments.layer_tolerance [--recipes A,B] [--layers PATTERN] [--roles]
                  [--warm N | --checkpoint PATH] [--batches N] [--large] [--device cuda]
                  [--out FILE] [--document FILE]

A model trains N steps in BF16 (0: it is fresh), or comes from a checkpoint of `fp8lab train`. Then
each layer takes each recipe alone, and loss and gradients of a fixed set of held-out batches are
compared with those of the model in BF16. Layers are ranked by the magnitude of the loss difference
and by the relative error of the gradients. Delayed scaling, which needs amaxes of earlier steps,
has them from one pass over the same batches; the default recipe, tensorwise, needs none.

Rows go beside the figure, a row a (layer, recipe, role), each as it is measured; given again, the
command trains to the same bits and measures what is missing. --out names either file. --redraw
draws the rows that are there. `docs/watching.md` shows what was found.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from fp8lab.checkpoint import load, read_manifest
from fp8lab.checkpoint_store import find_checkpoint
from fp8lab.data import Corpus, load_corpus, sample_batch
from fp8lab.errors import UserError
from fp8lab.experiments.commands import (
    Parser,
    check_at_least,
    check_distinct,
    exit_code,
    listed,
    made_by,
    rows_and_figure,
)
from fp8lab.experiments.documents import check_document, fill
from fp8lab.experiments.large_model import LARGE, LARGE_TRAINING
from fp8lab.experiments.plot_tolerance import check_rows, draw, ranked, table
from fp8lab.experiments.sittings import Sitting
from fp8lab.experiments.tolerance_scan import (
    BF16,
    Scan,
    check_recipe,
    chosen_layers,
    roles_of,
)
from fp8lab.models import TransformerConfig, build_model
from fp8lab.recipes import Recipe, recipe_named
from fp8lab.records import Row, environment, read_rows
from fp8lab.resume_config import config_from_dict
from fp8lab.training import TrainingRun, check_device
from fp8lab.training_config import TrainingConfig

SMALL = TransformerConfig(layers=4)  # of the plays, on a CPU


@dataclass(frozen=True)
class Plan:
    """What is scanned.

    Attributes:
        config: Of the run in BF16 that gives the model; its length is the warm-up.
        warm: Steps that it trains.
        recipes: What each layer takes.
        patterns: Which layers, by `fnmatch` on their names.
        roles: Whether each operand is scanned alone as well.
        batches: How many are compared.
        checkpoint: Where the weights come from in place of the warm-up.
    """

    config: TrainingConfig
    warm: int
    recipes: tuple[Recipe, ...]
    patterns: tuple[str, ...] = ("*",)
    roles: bool = False
    batches: int = 4
    checkpoint: Path | None = None


def configuration(
    warm: int, *, seed: int = 0, device: str = "cpu", products: str = "decoded", large: bool = False
) -> TrainingConfig:
    """The run in BF16: the small model, or the large one of 122M parameters."""
    sizes: dict[str, Any] = LARGE_TRAINING if large else {"model": SMALL}
    return TrainingConfig(
        BF16,
        seed=seed,
        steps=max(warm, 1),
        device=device,
        products=products,
        autocast=device == "cuda",
        observe_every=10**9,
        validate_every=10**9,
        **sizes,
    )


def config_of(checkpoint: Path, corpus: Corpus, *, device: str, products: str) -> TrainingConfig:
    """The configuration of the run that a checkpoint is of, in BF16.

    Raises:
        CheckpointError: There is none, or it is damaged. UserError: It is of another text.
    """
    said = read_manifest(checkpoint).fingerprint
    if not {"recipe", "model", "training", "corpus_sha256"} <= said.keys():
        raise UserError(f"{checkpoint} is no checkpoint of fp8lab train; name one of its runs")
    if said["corpus_sha256"] != corpus.sha256:
        raise UserError(
            f"the run of {checkpoint} trained on another text than {corpus.name}; give it as --text"
        )
    described = {**said["training"], "recipe": said["recipe"], "model": said["model"]}
    config = config_from_dict(described, str(checkpoint))
    plain: dict[str, Any] = {"fallback": None, "keep": (), "compile": False}
    autocast = device == "cuda"
    return replace(
        config, recipe=BF16, device=device, products=products, autocast=autocast, **plain
    )


def trained(plan: Plan, corpus: Corpus) -> TrainingRun:
    """The run whose model is scanned."""
    run = TrainingRun(plan.config, corpus)
    if plan.checkpoint is None:
        for _ in tqdm(range(plan.warm), unit="step", desc="bf16"):
            run.advance()
        return run
    saved = load(plan.checkpoint).state["model"]
    weights = {name: saved[name] for name in run.model.state_dict() if name in saved}
    run.model.load_state_dict(weights)  # all of them: a model in BF16 has no other state
    return run


def layers_of(plan: Plan) -> list[str]:
    """The layers that will be scanned, without the weights that they will have."""
    model = build_model(plan.config.model, BF16, products=plan.config.products)
    return chosen_layers(model, plan.patterns, plan.config.products)


def begun(plan: Plan, corpus: Corpus) -> tuple[Row, Scan]:
    """What BF16 gives, and the scan that goes on from there."""
    run = trained(plan, corpus)
    rng = np.random.default_rng(0)
    size = {"batch": plan.config.batch, "context": plan.config.model.context}
    batches = [sample_batch(corpus.validation, rng=rng, **size) for _ in range(plan.batches)]

    def gradients(place: int) -> Tensor:
        return run.gradients(batches[place])

    scan = Scan.begin(
        run.model,
        gradients,
        plan.batches,
        patterns=plan.patterns,
        products=plan.config.products,
    )
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    return {"loss": scan.loss, "gradient_norm": scan.norm, "parameters": parameters}, scan


def do_missing(sitting: Sitting, plan: Plan, corpus: Corpus, layers: list[str]) -> None:
    """Scan what has no row yet, and give all rows their ranks."""
    roles = roles_of(plan.roles)
    done = {(row["recipe"], row["layer"], row["role"]) for row in sitting.rows}
    wanted = {(own.name, name, role) for own in plan.recipes for name in layers for role in roles}
    # The head does not tell one checkpoint from another: what BF16 gives does.
    if wanted - done or plan.checkpoint is not None:
        base, scan = begun(plan, corpus)
        sitting.know(base)
        with tqdm(total=len(wanted - done), unit="layer", desc="scan") as bar:
            for recipe in plan.recipes:
                for row in scan.rows(recipe, roles=plan.roles, done=done):
                    sitting.add(row)
                    bar.update()
    sitting.replace(ranked(sitting.rows))


def main(arguments: list[str] | None = None) -> None:
    """Train, scan, write rows and figure, and the table into a document."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--recipes", default="tensorwise", metavar="A,B", help="(default %(default)s)"
    )
    parser.add_argument(
        "--layers", default="*", metavar="PATTERNS", help="with commas (default all)"
    )
    parser.add_argument("--roles", action="store_true", help="each operand alone as well")
    parser.add_argument("--warm", type=int, default=300, metavar="N", help="steps (default 300)")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="in place of the warm-up")
    parser.add_argument("--batches", type=int, default=4, metavar="N", help="(default 4)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(default 0)")
    parser.add_argument("--large", action="store_true", help="122M parameters")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(default cpu)")
    parser.add_argument("--products", choices=("codes", "decoded"), help="as fp8lab train")
    parser.add_argument("--text", type=Path, metavar="FILE", help="in place of the plays")
    parser.add_argument("--out", type=Path, metavar="FILE", help="figure, or rows")
    parser.add_argument("--document", type=Path, metavar="FILE", help="put the table there, too")
    parser.add_argument("--redraw", action="store_true", help="from the rows that are there")
    given = parser.parse_args(arguments)
    out = given.out or Path("figures/h200" if given.large else "figures") / "layer-tolerance.png"
    path, figure = rows_and_figure(out)
    if not given.redraw:
        _sit(given, path, made_by("layer_tolerance", arguments))
    head, *rows = check_rows(read_rows(path), path)
    rows = [head, *ranked(rows)]
    if given.document is not None:
        check_document(given.document, section_of(head["layer_tolerance"]))
    draw(rows, figure)
    text = table(rows)
    print(text)
    if given.document is not None:
        fill(given.document, section_of(head["layer_tolerance"]), text)


def _sit(given: argparse.Namespace, path: Path, made: Row) -> None:
    """Scan what is missing."""
    corpus = load_corpus(given.text)
    plan = _plan(given, corpus)
    head = _head(plan, corpus, made)
    if given.document is not None:
        check_document(given.document, section_of(head["layer_tolerance"]))
    layers = layers_of(plan)
    with Sitting(path, head, check=check_rows, late="bf16") as sitting:
        do_missing(sitting, plan, corpus, layers)


def section_of(settings: Row) -> str:
    """Which section of a document the table fills: the large model has one of its own."""
    large = settings["training"].get("model") == asdict(LARGE)
    return "layer tolerance, large" if large else "layer tolerance"


def _plan(given: argparse.Namespace, corpus: Corpus) -> Plan:
    check_device(given.device)
    if given.warm < 0:
        raise UserError(f"--warm is {given.warm}; accepted: 0 (a fresh model) and up")
    check_at_least(given.batches, 1, "--batches")
    recipes = tuple(recipe_named(name) for name in listed(given.recipes, "--recipes"))
    check_distinct(tuple(recipe.name for recipe in recipes), "--recipes")
    for recipe in recipes:
        check_recipe(recipe)
    patterns = listed(given.layers, "--layers")
    products = given.products or ("codes" if given.device == "cuda" else "decoded")
    options = {"device": given.device, "products": products}
    checkpoint = None
    if given.checkpoint is not None:
        if given.large:
            raise UserError("--large beside --checkpoint, which says its own sizes; leave it out")
        checkpoint = find_checkpoint(given.checkpoint)
        config = config_of(checkpoint, corpus, **options)
    else:
        config = configuration(given.warm, seed=given.seed, large=given.large, **options)
    return Plan(config, given.warm, recipes, patterns, given.roles, given.batches, checkpoint)


def _head(plan: Plan, corpus: Corpus, made: Row) -> Row:
    """The first row; what BF16 gives is known later."""
    settings = {
        "training": plan.config.to_dict(),
        "warm": plan.warm if plan.checkpoint is None else None,
        "checkpoint": plan.checkpoint is not None,
        "recipes": [recipe.name for recipe in plan.recipes],
        "batches": plan.batches,
        "products": plan.config.products,
    }
    return {
        "layer_tolerance": settings,
        "bf16": None,
        "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        "environment": environment(plan.config.device) | made,
    }


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
