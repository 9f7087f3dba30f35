"""The scan of each layer alone in FP8: what is planted ranks first, and nothing is left changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8lab import convert
from fp8lab.checkpoint import CheckpointError
from fp8lab.checkpoint_store import CheckpointStore
from fp8lab.data import load_corpus
from fp8lab.errors import UserError
from fp8lab.experiments import layer_tolerance
from fp8lab.experiments.commands import command_of
from fp8lab.experiments.layer_tolerance import configuration, main
from fp8lab.experiments.plot_tolerance import draw, ranked, table
from fp8lab.experiments.sittings import Sitting
from fp8lab.experiments.tolerance_scan import ALL, BF16, Scan, operand_alone
from fp8lab.linear import Fp8Linear
from fp8lab.models import MlpConfig, TransformerConfig
from fp8lab.recipes import OPERANDS, Recipe, recipe_named
from fp8lab.records import Row, read_rows
from fp8lab.resume import state_of
from fp8lab.resume_config import fingerprint_of
from fp8lab.training import TrainingRun
from tests.unstamped import rows_of as unstamped

TEXT = Path(__file__).parent.parent / "CONTRIBUTING.md"
WIDTH = 32


class Planted(nn.Module):
    """Three layers, of which "second" has an input with one channel 1e6 times the others.

    Its weight takes nothing from that channel, so that in BF16 it does no harm; in FP8 by one scale
    all the others become zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)
        with torch.no_grad():
            self.second.weight[:, 0] = 0
        self.boost = torch.ones(WIDTH)
        self.boost[0] = 1e6

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.boost
        out: Tensor = self.third(torch.tanh(self.second(hidden)))
        return out


def scan_of(model: nn.Module, batches: int = 2, patterns: str = "*") -> Scan:
    data = torch.randn(batches, 48, WIDTH, generator=torch.Generator().manual_seed(2))

    def gradients(place: int) -> Tensor:
        model.zero_grad()
        loss: Tensor = (model(data[place]) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Scan.begin(model, gradients, batches, patterns=patterns)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_the_planted_layer_ranks_first(recipe: str) -> None:
    rows = ranked(list(scan_of(Planted()).rows(recipe_named(recipe), roles=True)))
    worst = {(row["role"], row["layer"]) for row in rows if row["loss_rank"] == 1}
    assert {(ALL, "second"), ("input", "second")} <= worst
    by_gradient = {(row["role"], row["layer"]) for row in rows if row["gradient_rank"] == 1}
    assert {(ALL, "second"), ("input", "second")} <= by_gradient
    sizes = {(row["role"], row["layer"]): row["gradient_error"] for row in rows}
    # The others tolerate it, and so does this one's weight.
    assert sizes[ALL, "second"] > 10 * max(sizes[ALL, "first"], sizes[ALL, "third"])
    assert sizes["weight", "second"] < sizes["input", "second"] / 10


def test_a_scan_leaves_the_model_as_it_was() -> None:
    model = Planted()
    scan = scan_of(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rows = list(scan.rows(recipe_named("delayed"), roles=True))
    assert {row["role"] for row in rows} == {ALL, *OPERANDS}
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert float(scan.gradients(0)) == scan._losses[0]
    assert list(scan.rows(recipe_named("delayed"), roles=True)) == rows


def test_measures_are_what_they_are_said_to_be() -> None:
    """One batch, against the definitions written out."""
    scan = scan_of(Planted(), batches=1)
    base = [grad.double() for grad in scan._base[0]]
    row = next(iter(scan.rows(recipe_named("tensorwise"))))
    convert(scan.model, "tensorwise", include="first")
    loss = float(scan.gradients(0))
    grads = [p.grad.double() for p in scan.model.parameters() if p.grad is not None]
    both = torch.cat([(a - b).flatten() for a, b in zip(grads, base, strict=True)])
    norm = torch.cat([b.flatten() for b in base]).norm()
    assert row["loss"] == pytest.approx(loss)
    assert row["loss_difference"] == pytest.approx(loss - scan.loss, abs=1e-6)
    assert row["gradient_error"] == pytest.approx(float(both.norm() / norm), rel=1e-5)
    own = (grads[0] - base[0]).norm() / base[0].norm()
    assert row["own_gradient_error"] == pytest.approx(float(own), rel=1e-5)
    assert scan.norm == pytest.approx(float(norm), rel=1e-6)


def test_an_operand_alone_is_decoded_where_it_enters() -> None:
    layer = nn.Linear(16, 16)
    convert(layer, BF16, products="decoded")
    assert isinstance(layer, Fp8Linear)
    recipe = recipe_named("static:scale=1")
    # 1.1 is no E4M3 value (1.125 is), and no E5M2 one (1 is); both are BF16 values.
    x = torch.full((16, 16), 1.1, requires_grad=True)
    with torch.no_grad():
        layer.weight.zero_().fill_diagonal_(1.1)
        assert layer.bias is not None
        layer.bias.zero_()
    rounded = float(torch.tensor(1.1).bfloat16())
    for role, forward, backward in (
        ("input", 1.125 * rounded, rounded * rounded),
        ("weight", rounded * 1.125, rounded * 1.125),
        ("grad_output", rounded * rounded, rounded),
    ):
        x.grad = None
        with operand_alone(layer, recipe, role, lambda _: None):
            y = layer(x)
            y.backward(torch.full_like(y, 1.1))
        assert float(y.detach()[0, 0]) == pytest.approx(forward, rel=1e-6), role
        assert x.grad is not None
        assert float(x.grad[0, 0]) == pytest.approx(backward, rel=1e-6), role


def test_operands_alone_add_up_to_the_recipe() -> None:
    """Decoded by powers of two, codes are BF16 values: together they are the recipe, in bits."""
    recipe = recipe_named("tensorwise:power_of_two=true")
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
    layer = nn.Linear(32, 16)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(4))
    found: list[tuple[Tensor, ...]] = []
    for whole in (False, True):
        convert(layer, recipe if whole else BF16, products="decoded")
        assert isinstance(layer, Fp8Linear)
        layer.zero_grad()
        x.grad = None
        with ExitStack() as roles:
            for role in () if whole else OPERANDS:
                roles.enter_context(operand_alone(layer, recipe, role, lambda _: None))
            y = layer(x)
            (y * y).sum().backward()
        assert x.grad is not None
        assert layer.weight.grad is not None
        found.append((y.detach(), x.grad.clone(), layer.weight.grad.clone()))
    assert all(torch.equal(alone, together) for alone, together in zip(*found, strict=True))


def test_what_is_not_a_number_ranks_first() -> None:
    def row(layer: str, size: float | str) -> Row:
        measures = dict.fromkeys(("loss_difference", "gradient_error", "own_gradient_error"), size)
        return {"layer": layer, "recipe": "r", "role": ALL, "loss": 1.0, **measures}

    rows = ranked([row("a", -3.0), row("b", 2.0), row("c", float("nan")), row("d", "inf")])
    assert {r["layer"]: r["loss_rank"] for r in rows} in (
        {"c": 1, "d": 2, "a": 3, "b": 4},
        {"d": 1, "c": 2, "a": 3, "b": 4},
    )
    assert "| r | 3 | `a` |" in table(rows)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    small = TransformerConfig(context=16, width=16, layers=2, heads=2)
    monkeypatch.setattr(layer_tolerance, "SMALL", small)


def options(folder: Path, name: str = "x.png") -> list[str]:
    return ["--text", str(TEXT), "--batches", "1", "--out", str(folder / name)]


def test_the_command(tmp_path: Path, tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "a\n<!-- layer tolerance: begin -->\nold\n<!-- layer tolerance: end -->\nb\n"
    )
    command = [*options(tmp_path), "--warm", "1", "--recipes", "tensorwise,mx"]
    main([*command, "--document", str(document)])
    printed = capsys.readouterr().out
    head, *rows = read_rows(tmp_path / "x.jsonl")
    given = [*command, "--document", str(document)]
    assert head["environment"]["command"] == command_of("layer_tolerance", given)
    assert "date" in head["environment"]
    assert head["layer_tolerance"]["products"] == "decoded"
    assert head["bf16"]["loss"] > 0
    assert len(rows) == 2 * 9  # two blocks of four, and the head
    for recipe in ("tensorwise", "mx"):
        own = [row for row in rows if row["recipe"] == recipe]
        assert sorted(row["gradient_rank"] for row in own) == list(range(1, 10))
        errors = [row["gradient_error"] for row in sorted(own, key=lambda r: r["gradient_rank"])]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] > 0
    assert printed.strip() in document.read_text()
    assert "old" not in document.read_text()
    draw([head, *rows], tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "x.png").read_bytes()
    main([*command, "--redraw"])
    assert capsys.readouterr().out == printed


def test_a_checkpoint_is_what_it_was_trained_to(tmp_path: Path, tiny: None) -> None:
    """The scan of a BF16 run's checkpoint is that of the same warm-up."""
    corpus = load_corpus(TEXT)
    config = configuration(2)
    run = TrainingRun(config, corpus)
    run.advance()
    run.advance()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.save(state_of(run).capture(), step=2, fingerprint=fingerprint_of(config, corpus))
    main([*options(tmp_path), "--warm", "2", "--layers", "blocks.0.*"])
    trained = unstamped(tmp_path / "x.jsonl")
    checkpoint = ["--checkpoint", str(tmp_path / "run"), "--layers", "blocks.0.*"]
    main([*options(tmp_path, "y.png"), *checkpoint])
    loaded = unstamped(tmp_path / "y.jsonl")
    assert loaded == trained
    assert len(loaded) == 4
    main([*options(tmp_path, "z.png"), "--warm", "0", "--layers", "blocks.0.*"])
    assert unstamped(tmp_path / "z.jsonl") != trained
    run.advance()
    store.save(state_of(run).capture(), step=3, fingerprint=fingerprint_of(config, corpus))
    with pytest.raises(UserError, match="holds rows of another bf16"):
        main([*options(tmp_path, "y.png"), *checkpoint])
    other = tmp_path / "other.txt"
    other.write_text(json.dumps(list(range(3000))))
    with pytest.raises(UserError, match="trained on another text"):
        main(["--text", str(other), "--checkpoint", str(tmp_path / "run")])


def test_a_run_in_fp8_can_be_scanned(tmp_path: Path, tiny: None) -> None:
    """Its scales are no part of the model in BF16."""
    corpus = load_corpus(TEXT)
    config = replace(configuration(1), recipe=recipe_named("delayed"))
    run = TrainingRun(config, corpus)
    run.advance()
    store = CheckpointStore(tmp_path / "checkpoints")
    place = store.save(state_of(run).capture(), step=1, fingerprint=fingerprint_of(config, corpus))
    main([*options(tmp_path), "--checkpoint", str(place), "--layers", "head"])
    head, row = read_rows(tmp_path / "x.jsonl")
    assert head["layer_tolerance"]["training"]["recipe"]["name"] == "bf16"
    assert row["layer"] == "head"
    foreign = CheckpointStore(tmp_path / "foreign").save({"model": {}}, step=1)
    with pytest.raises(UserError, match="is no checkpoint of fp8lab train"):
        main([*options(tmp_path), "--checkpoint", str(foreign)])


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (["--layers", "blocks.9.*"], UserError, "matches no linear layer; there are: blocks.0.qkv"),
        (["--recipes", "bf16"], UserError, "'bf16' has no product in FP8"),
        (["--recipes", "fp4"], UserError, "unknown policy 'fp4'"),
        (["--recipes", ","], UserError, "--recipes names none; accepted: at least one, each once"),
        (["--batches", "0"], UserError, "batches is 0; accepted: 1 and up"),
        (["--layers", "head,head"], UserError, "--layers names head, head; accepted"),
        (["--recipes", "mx,mx"], UserError, "--recipes names mx, mx; accepted"),
        (["--document", "nowhere.md"], UserError, "cannot read nowhere.md"),
        (["--document", str(TEXT)], UserError, "lacks the markers <!-- layer tolerance: begin"),
        (["--out", "x.xyz"], UserError, "--out is 'x.xyz'; accepted: a file in .jsonl, .png"),
        (["--warm", "-1"], UserError, "--warm is -1"),
        (["--checkpoint", "nowhere"], CheckpointError, "no checkpoint in nowhere"),
        (["--checkpoint", "x", "--large"], UserError, "--large beside --checkpoint"),
    ],
)
def test_mistakes_are_said(
    tmp_path: Path,
    tiny: None,
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    error: type[Exception],
    said: str,
) -> None:
    """Before any work: nothing is trained."""
    monkeypatch.setattr(layer_tolerance, "trained", None)
    with pytest.raises(error, match=said):
        main([*options(tmp_path), "--warm", "0", *given])
    assert not (tmp_path / "x.jsonl").exists()


def test_a_scan_that_was_killed_goes_on(
    tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*options(tmp_path), "--warm", "1", "--recipes", "tensorwise,delayed"]
    main(command)
    path = tmp_path / "x.jsonl"
    whole, rows = path.read_bytes(), unstamped(path)
    path.unlink()
    rows_of = Scan.rows

    def some(scan: Scan, recipe: Recipe, **how: Any) -> Iterator[Row]:
        for place, row in enumerate(rows_of(scan, recipe, **how)):
            if (recipe.name, place) == ("delayed", 2):
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(Scan, "rows", some)
    with pytest.raises(KeyboardInterrupt):
        main(command)
    assert len(read_rows(path)) == 1 + 9 + 2
    main([*command, "--redraw"])  # ranks of those that are there
    monkeypatch.setattr(Scan, "rows", rows_of)
    main(command)
    assert unstamped(path) == rows
    monkeypatch.setattr(layer_tolerance, "trained", None)
    main(command)  # nothing is missing
    assert unstamped(path) == rows
    path.write_bytes(whole.splitlines(keepends=True)[0])
    with pytest.raises(UserError, match="no layer is scanned yet"):
        main([*command, "--redraw"])
    with pytest.raises(UserError, match="holds rows of another layer_tolerance"):
        main([*command, "--warm", "2"])


def test_layers_that_fp8_does_not_fit() -> None:
    with pytest.raises(UserError, match="FP8 fits none of the chosen layers"):
        scan_of(nn.Sequential(nn.Linear(WIDTH, 7)))
    with pytest.raises(UserError, match="nothing to compare with"):
        scan_of(_Flat())


class _Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * 0
        return out


def test_the_mlp_has_a_picture_too(tmp_path: Path) -> None:
    corpus = load_corpus(TEXT)
    config = replace(configuration(1), model=MlpConfig(16, 16, 2, 4), batch=2)
    plan = layer_tolerance.Plan(config, 0, (recipe_named("rowwise"),), batches=1)
    with Sitting(
        tmp_path / "x.jsonl", layer_tolerance._head(plan, corpus, {}), late="bf16"
    ) as sitting:
        layers = layer_tolerance.layers_of(plan)
        layer_tolerance.do_missing(sitting, plan, corpus, layers)
    assert {row["layer"] for row in sitting.rows} == {"hidden.0", "hidden.1", "head"}
    draw([sitting.head, *sitting.rows], tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


@pytest.mark.gpu
def test_the_scan_on_the_card(tmp_path: Path, tiny: None) -> None:
    main([*options(tmp_path), "--warm", "6", "--device", "cuda", "--recipes", "tensorwise,delayed"])
    head, *rows = read_rows(tmp_path / "x.jsonl")
    assert head["layer_tolerance"]["products"] == "codes"
    assert all(row["gradient_error"] > 0 for row in rows)
