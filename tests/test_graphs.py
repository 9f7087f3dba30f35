"""A step as a CUDA graph: when it is captured and replayed; the bits are those of a plain loop."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8lab
from fp8lab import graphs, graphs_captured, linear_casts
from fp8lab.data import Corpus, load_corpus
from fp8lab.errors import UserError
from fp8lab.gradients import LossScaler, UpdateStep, accumulate_in_float32
from fp8lab.graphs import GraphedStep
from fp8lab.linear import operand_casts
from fp8lab.models import Transformer, TransformerConfig
from fp8lab.optimizer import AdamW
from fp8lab.recipes import PRESETS, recipe_named
from fp8lab.records import Row, to_json
from fp8lab.resume_config import config_from_dict, fingerprint_of
from fp8lab.telemetry import Telemetry
from fp8lab.testing import to_numpy
from fp8lab.training import TrainingRun
from fp8lab.training_config import TrainingConfig

STEPS = 12
TINY = TransformerConfig(context=32, width=64, layers=2, heads=2)
CONFIG = TrainingConfig(
    recipe_named("delayed"),
    steps=STEPS,
    batch=8,
    model=TINY,
    warmup=3,
    observe_every=10**9,
    validate_every=6,
    validation_count=8,
    products="codes",
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """The project's own prose: real text that is always there."""
    return load_corpus(Path(__file__).parent.parent / "CONTRIBUTING.md")


class Machine:
    """A small transformer with its step, in a loop or as a graph."""

    def __init__(
        self,
        preset: str = "delayed",
        *,
        device: str = "cuda",
        graph: bool = True,
        microbatches: int = 1,
        scaler: LossScaler | None = None,
        compiled: bool = False,
        main_grad: bool = False,
        **formats: Any,
    ) -> None:
        self.model: Any = Transformer(TINY, recipe_named(preset), seed=5).to(device)
        if main_grad:
            accumulate_in_float32(self.model)
        if compiled:
            for block in self.model.blocks:
                block.compile(dynamic=False)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01, capturable=True, **formats)
        self.update = UpdateStep(self.model, self.optimizer, scaler=scaler, clip_norm=1.0)
        self.microbatches = microbatches
        self.device = device
        self.step: Any = self.looped
        if graph:
            self.step = GraphedStep(self.loss, self.update, microbatches=microbatches)
        self.seen: list[list[bytes]] = []

    def loss(self, tokens: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(tokens)
        found = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return found * weight.mean()

    def looped(self, *inputs: Tensor, eager: bool = False) -> Any:
        return self.update.accumulate(self.loss, inputs, self.microbatches), self.update()

    def take(self, number: int, *, batch: int = 8, weight: float = 1.0, **options: Any) -> None:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(256, (batch, 33), generator=generator).to(self.device)
        self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
        factor = torch.full((batch,), weight, device=self.device)
        loss, summary = self.step(tokens[:, :-1], tokens[:, 1:], factor, **options)
        found = (loss, summary.norm, summary.skip)
        self.seen.append([to_numpy(own.detach().cpu()).tobytes() for own in found])

    def state(self) -> dict[str, Any]:
        """Everything that a step changes, as bytes."""
        named = {**self.model.state_dict(), **self.update.scaler.state_dict()}
        for place, own in self.optimizer.state_dict()["state"].items():
            named |= {f"{place}.{name}": value for name, value in own.items()}
        return {
            name: to_numpy(value.cpu()).tobytes() if isinstance(value, Tensor) else value
            for name, value in named.items()
        }


def telemetry_of(machine: Machine) -> Telemetry:
    """Every third step; its rows are part of what the machine has seen."""
    return Telemetry(
        machine.model,
        machine.optimizer,
        every=3,
        scaler=machine.update.scaler,
        sinks=[lambda row: machine.seen.append([to_json(row).encode()])],
    )


def watched_step(
    machine: Machine, telemetry: Telemetry, number: int, *, watch: bool | None = None
) -> None:
    telemetry.begin_step(watch)
    machine.take(number)
    telemetry.end_step()


# Without a card: who decides what, with a capture that only writes down what happens.


class Fake:
    """In place of `CapturedStep`: replays take the step as a loop does."""

    made: list[Fake]
    pool = "its own"

    def __init__(
        self, loss: Any, update: UpdateStep, microbatches: int, inputs: Any, *rest: Any
    ) -> None:
        self.loss, self.update, self.microbatches = loss, update, microbatches
        self.inputs, self.bound = inputs, graphs_captured.Bound(update)
        self.given = rest
        Fake.made.append(self)

    def takes(self, inputs: Any) -> bool:
        return [own.shape for own in inputs] == [own.shape for own in self.inputs]

    def holds(self) -> bool:
        return self.bound.holds()

    def replay(self, inputs: Any) -> Any:
        return self.update.accumulate(self.loss, inputs, self.microbatches), self.update()


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    @contextmanager
    def nowhere(stream: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(graphs, "CapturedStep", Fake)
    monkeypatch.setattr(graphs, "side_stream", lambda device: None)
    monkeypatch.setattr(graphs, "beside", nowhere)
    Fake.made = []
    return Fake


def test_steps_before_the_capture_and_after(faked: type[Fake]) -> None:
    plain = Machine(device="cpu", graph=False)
    machine = Machine(device="cpu")
    step = machine.step
    counts = []
    for number in range(7):
        for own in (plain, machine):
            own.take(number, eager=number == 5)
        counts.append((step.captures, step.replays))
    assert counts == [(0, 0), (0, 0), (0, 0), (1, 1), (1, 2), (1, 2), (1, 3)]
    assert machine.seen == plain.seen
    assert machine.state() == plain.state()


def test_what_is_taken_without_the_graph(faked: type[Fake]) -> None:
    machine = Machine(device="cpu")
    step = machine.step
    for number in range(4):
        machine.take(number)
    assert (step.captures, step.replays) == (1, 1)
    machine.take(4, batch=4)  # inputs of another shape
    cast = next(own for _, own in operand_casts(machine.model))
    cast.observe = True
    machine.take(5)
    cast.observe = False
    with fp8lab.audit() as report:
        machine.take(6)
    assert report.audited == 1
    assert (step.captures, step.replays) == (1, 1)
    machine.take(7)
    assert (step.captures, step.replays) == (1, 2)


def change_mode(machine: Machine) -> None:
    machine.model.blocks[0].eval()


def change_roles(machine: Machine) -> None:
    machine.model.blocks[1].up.set_bf16_roles(["input"])


def freeze_a_weight(machine: Machine) -> None:
    machine.model.blocks[0].down.weight.requires_grad_(False)


def replace_the_state(machine: Machine) -> None:
    parameter = machine.model.head.weight
    machine.optimizer.state[parameter]["exp_avg"] = parameter.detach().clone()


def move_a_weight(machine: Machine) -> None:
    parameter = machine.model.head.weight
    parameter.data = parameter.data.clone()


def replace_a_scale(machine: Machine) -> None:
    cast = machine.model.blocks[0].up.cast_of("input")
    cast.scale = cast.scale.clone()


def forget(machine: Machine) -> None:
    machine.step.forget()


@pytest.mark.parametrize(
    "change",
    [
        change_mode,
        change_roles,
        freeze_a_weight,
        replace_the_state,
        move_a_weight,
        replace_a_scale,
        forget,
    ],
)
def test_what_a_graph_is_bound_to(change: Callable[[Machine], None], faked: type[Fake]) -> None:
    """After a change one step is taken without a graph, and the next one captures anew."""
    machine = Machine(device="cpu")
    step = machine.step
    for number in range(5):
        machine.take(number)
    change(machine)
    counts = []
    for number in range(5, 8):
        machine.take(number)
        counts.append((step.captures, step.replays))
    assert counts == [(1, 2), (2, 3), (2, 4)]


def test_watched_steps_are_graphs_of_their_own(faked: type[Fake]) -> None:
    plain, machine = Machine(device="cpu", graph=False), Machine(device="cpu")
    seen = []
    for own in (plain, machine):
        telemetry = telemetry_of(own)
        for number in range(STEPS):
            watched_step(own, telemetry, number)
            if own is machine:
                seen.append((own.step.captures, own.step.replays))
    # Watched are 1, 3, 6, 9 and 12.
    assert seen[:6] == [(0, 0), (0, 0), (0, 0), (1, 1), (1, 2), (2, 3)]
    assert seen[-1] == (2, STEPS - 3)
    assert [own.given[1] for own in Fake.made] == [None, "its own"]  # the second shares its memory
    assert machine.seen == plain.seen
    assert machine.state() == plain.state()


@pytest.mark.parametrize("change", [change_roles, forget])
def test_a_change_drops_both_graphs(change: Callable[[Machine], None], faked: type[Fake]) -> None:
    machine = Machine(device="cpu")
    telemetry = telemetry_of(machine)
    counts = []
    for number in range(STEPS):
        if number == 7:
            change(machine)
        watched_step(machine, telemetry, number)
        counts.append((machine.step.captures, machine.step.replays))
    assert counts[6:] == [(2, 4), (2, 4), (2, 4), (3, 5), (3, 6), (4, 7)]


def test_a_change_is_seen_before_the_first_watched_capture(faked: type[Fake]) -> None:
    """The step that was watched without a graph is too long ago to be of use."""
    machine = Machine(device="cpu")
    telemetry = telemetry_of(machine)
    for number in range(5):
        watched_step(machine, telemetry, number)
    change_roles(machine)
    watched_step(machine, telemetry, 5)
    assert (machine.step.captures, machine.step.replays) == (1, 2)


def test_one_telemetry_has_a_graph_at_a_time(faked: type[Fake]) -> None:
    machine = Machine(device="cpu")
    one, other = telemetry_of(machine), telemetry_of(machine)
    counts = []
    for number, telemetry in enumerate((one, one, one, one, other, other, one, one)):
        watched_step(machine, telemetry, number, watch=True)
        counts.append(machine.step.captures)
    assert counts == [0, 0, 0, 1, 1, 2, 2, 3]
    assert len(machine.step._captured) == 1


def test_a_meter_that_python_must_see_is_no_graph(faked: type[Fake]) -> None:
    machine = Machine(device="cpu")
    for number in range(4):
        machine.take(number)
    cast = next(own for _, own in operand_casts(machine.model))
    told: list[Any] = []
    cast.observe, cast.meter = True, lambda x, codes: told.append(codes)
    for number in range(4, 7):
        machine.take(number)
    assert len(told) == 3
    assert (machine.step.captures, machine.step.replays) == (1, 1)


def test_a_captured_call_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def replay(self) -> None:
            pass

    monkeypatch.setattr(graphs, "side_stream", lambda device: None)
    monkeypatch.setattr(graphs, "beside", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *given, **options: nullcontext())
    weight = torch.ones(4)
    seen = weakref.ref(weight)
    replay = graphs.captured_call(partial(torch.mul, weight, 2.0))
    del weight
    gc.collect()
    assert seen() is not None
    assert torch.equal(replay(), torch.full((4,), 2.0))
    del replay
    gc.collect()
    assert seen() is None


def test_errors(faked: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(device="cpu", microbatches=3)
    with pytest.raises(UserError, match="first dimensions are 8, 8, 8; accepted: one for all that"):
        machine.take(0)
    with pytest.raises(UserError, match="no inputs given"):
        machine.step()
    with pytest.raises(UserError, match="microbatches is 0; accepted: an integer, 1 and up"):
        Machine(device="cpu", microbatches=0)
    with pytest.raises(UserError, match="warm_up is 0"):
        GraphedStep(machine.loss, machine.update, warm_up=0)
    for optimizer in (
        AdamW(machine.model.parameters()),
        torch.optim.SGD(machine.model.parameters(), 0.1),
    ):
        update = UpdateStep(machine.model, optimizer)
        with pytest.raises(UserError, match=r"counts steps on the host; .*capturable=True"):
            GraphedStep(machine.loss, update)
    monkeypatch.undo()
    with pytest.raises(UserError, match="the model is on cpu; a CUDA graph needs a CUDA device"):
        Machine(device="cpu")


def test_within_a_capture_a_weight_is_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = fp8lab.convert(nn.Linear(32, 32), "delayed")
    x = torch.randn(4, 32)
    cast_anew: list[Any] = []
    real = layer._cast_weight

    def counting(*given: Any) -> Any:
        cast_anew.append(given)
        return real(*given)

    monkeypatch.setattr(layer, "_cast_weight", counting)
    layer(x)
    layer(x)
    assert len(cast_anew) == 1
    monkeypatch.setattr(linear_casts, "captured", lambda tensor: True)
    inverse = layer.cast_of("input")._inverse
    for count in (2, 3):
        with graphs.one_capture():
            layer(x)
            own = layer.cast_of("input")._inverse
            layer(x).sum().backward()
            assert layer.cast_of("input")._inverse is own
        assert len(cast_anew) == count
        assert own is not inverse
    layer(x)  # a capture of somebody else's
    layer(x)
    assert len(cast_anew) == 5
    monkeypatch.setattr(linear_casts, "captured", lambda tensor: False)
    layer(x)
    assert len(cast_anew) == 6


def test_a_run_on_the_cpu_has_no_graph(corpus: Corpus) -> None:
    run = TrainingRun(replace(CONFIG, products="decoded"), corpus)
    assert run._graphed is None
    assert run.advance()["step"] == 1


class EveryThird(TrainingRun):
    """A run whose every third step does something of its own."""

    def eager_now(self) -> bool:
        return self.step % 3 == 0


def test_a_run_says_which_steps_are_no_graphs(corpus: Corpus) -> None:
    config = replace(CONFIG, products="decoded", steps=6, microbatches=2)
    run = EveryThird(config, corpus)
    seen = []

    def graphed(*inputs: Tensor, eager: bool) -> Any:
        seen.append(eager)
        return run.update.accumulate(lambda *part: run._loss(part), inputs, 2), run.update()

    run._graphed = graphed  # type: ignore[assignment]
    rows = [run.advance() for _ in range(6)]
    assert seen == [False, False, True] * 2
    plain = TrainingRun(config, corpus)
    assert rows == [plain.advance() for _ in range(6)]


def test_the_settings_of_older_runs(corpus: Corpus) -> None:
    """A config.json from before them is that of a run with them at their defaults."""
    assert not {"graph", "compile"} & CONFIG.to_dict().keys()
    for config in (CONFIG, replace(CONFIG, graph=False), replace(CONFIG, compile=True)):
        assert config_from_dict(config.to_dict(), "config.json") == config
    before = fingerprint_of(CONFIG, corpus)
    assert fingerprint_of(replace(CONFIG, graph=False), corpus) == before
    assert fingerprint_of(replace(CONFIG, compile=True), corpus) != before


# On the card.


def same_in_both(
    drive: Callable[[Machine], None], captures: int | None = 1, **options: Any
) -> Machine:
    """Drive a loop and a graph alike; every loss, norm, skip and bit of state must be the same."""
    plain, machine = Machine(graph=False, **options), Machine(**options)
    for own in (plain, machine):
        drive(own)
    assert machine.seen == plain.seen
    assert machine.state() == plain.state()
    if captures is not None:
        assert machine.step.captures == captures
        assert machine.step.replays > 0
    return machine


def twelve_steps(machine: Machine) -> None:
    for number in range(STEPS):
        machine.take(number)


def on_the_card(test: Callable[..., None]) -> Callable[..., None]:
    """With deterministic algorithms, and whatever the compiler warns of."""
    for mark in (
        pytest.mark.gpu,
        pytest.mark.filterwarnings("ignore"),
        pytest.mark.usefixtures("deterministic"),
    ):
        test = mark(test)
    return test


@on_the_card
@pytest.mark.parametrize("preset", PRESETS)
def test_a_replay_has_the_bits_of_a_loop(preset: str) -> None:
    same_in_both(twelve_steps, preset=preset)


@on_the_card
@pytest.mark.parametrize("preset", ["delayed", "blockwise", "bf16"])
@pytest.mark.parametrize("main_grad", [False, True])
def test_microbatches(preset: str, main_grad: bool) -> None:
    same_in_both(twelve_steps, preset=preset, microbatches=2, main_grad=main_grad)


@on_the_card
@pytest.mark.parametrize("preset", ["delayed", "tensorwise", "rowwise"])
def test_a_step_is_skipped_inside_the_graph(preset: str) -> None:
    def drive(machine: Machine) -> None:
        for number in range(STEPS):
            machine.take(number, weight=float("inf") if number in (6, 9) else 1.0)
        assert int(machine.update.scaler.skipped_steps) == 2

    scaler = partial(LossScaler, 1024.0, dynamic=True, interval=3)
    plain = Machine(preset, graph=False, scaler=scaler())
    machine = Machine(preset, scaler=scaler(), exp_avg="e4m3_128", exp_avg_sq="e4m3_128_keep")
    other = Machine(
        preset, graph=False, scaler=scaler(), exp_avg="e4m3_128", exp_avg_sq="e4m3_128_keep"
    )
    for own in (plain, machine, other):
        drive(own)
    assert machine.seen == other.seen
    assert machine.state() == other.state()
    assert machine.seen != plain.seen
    assert machine.step.replays == STEPS - 3


@on_the_card
@pytest.mark.parametrize("preset", ["delayed", "blockwise"])
def test_steps_without_the_graph_in_between(preset: str) -> None:
    """Of all kinds: asked for, of another shape, past the graph, and a forward pass alone."""

    def drive(machine: Machine) -> None:
        for number in range(5):
            machine.take(number)
        machine.take(5, eager=True)
        machine.take(6)
        machine.take(7, batch=4)
        machine.take(8)
        machine.model.eval()
        with torch.no_grad():
            tokens = torch.arange(64, device="cuda").view(2, 32)
            logits = machine.model(tokens)
        machine.seen.append([to_numpy(logits.cpu()).tobytes()])
        machine.model.train()
        machine.take(9)
        machine.looped(*inputs())
        machine.take(10)
        machine.take(11)

    def inputs() -> tuple[Tensor, ...]:
        tokens = torch.arange(8 * 33, device="cuda").view(8, 33) % 256
        return tokens[:, :-1], tokens[:, 1:], torch.ones(8, device="cuda")

    same_in_both(drive, preset=preset)


@on_the_card
def test_after_a_loaded_state() -> None:
    def drive(machine: Machine) -> None:
        for number in range(5):
            machine.take(number)
        kept = machine.model.state_dict()
        kept = {name: value.clone() for name, value in kept.items()}
        moments = machine.optimizer.state_dict()
        moments = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, moments)
        for number in range(5, 8):
            machine.take(number)
        machine.model.load_state_dict(kept)
        machine.optimizer.load_state_dict(moments)
        for number in range(5, STEPS):
            machine.take(number)
        assert machine.seen[5:8] == machine.seen[8:11]

    same_in_both(drive, captures=2)


@on_the_card
@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("delayed", {}),
        ("blockwise", {}),
        ("tensorwise", {}),
        ("rowwise", {"exp_avg": "e4m3_128", "exp_avg_sq": "e4m3_128_keep"}),
        ("delayed", {"microbatches": 2, "main_grad": True}),
        ("blockwise", {"microbatches": 2, "compiled": True}),
    ],
)
def test_telemetry_of_a_graph_is_that_of_a_loop(preset: str, options: dict[str, Any]) -> None:
    """All rows, totals, and what the steps leave; one step is skipped while it is watched."""

    def drive(machine: Machine) -> None:
        telemetry = telemetry_of(machine)
        for number in range(STEPS):
            telemetry.begin_step()
            machine.take(number, weight=float("inf") if number == 8 else 1.0)
            telemetry.end_step()
        machine.seen.append([repr(telemetry.state_dict()).encode()])
        assert telemetry.watched == 5
        assert telemetry.totals["blocks.0.up.input"]["elements"] == 5 * 8 * 32 * TINY.width

    torch.compiler.reset()
    machine = same_in_both(drive, preset=preset, captures=2, **options)
    assert machine.step.replays == STEPS - 3


@on_the_card
def test_roles_that_leave_fp8_drop_watched_graphs_too() -> None:
    def drive(machine: Machine) -> None:
        telemetry = telemetry_of(machine)
        for number in range(STEPS):
            if number == 7:
                change_roles(machine)
            watched_step(machine, telemetry, number)

    same_in_both(drive, captures=4)


@on_the_card
def test_what_a_captured_call_reads_is_not_freed() -> None:
    replay = graphs.captured_call(partial(torch.mul, torch.full((1 << 16,), 3.0).cuda(), 2.0))
    # They would lie where it was.
    others = [torch.full((1 << 16,), -1.0, device="cuda") for _ in range(64)]
    assert torch.equal(replay(), torch.full((1 << 16,), 6.0, device="cuda"))
    assert all(bool((own == -1.0).all()) for own in others)


@on_the_card
def test_roles_that_leave_fp8_are_captured_anew() -> None:
    def drive(machine: Machine) -> None:
        for number in range(STEPS):
            if number == 6:
                machine.model.blocks[0].up.set_bf16_roles(["grad_output"])
            machine.take(number)

    same_in_both(drive, captures=2)


@on_the_card
@pytest.mark.parametrize("preset", ["bf16", "delayed", "tensorwise", "blockwise"])
def test_compiled_blocks(preset: str) -> None:
    torch.compiler.reset()
    same_in_both(twelve_steps, preset=preset, compiled=True)


@on_the_card
@pytest.mark.parametrize("preset", ["delayed", "blockwise"])
def test_a_weight_is_cast_once_in_a_captured_step(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two microbatches, forward and backward: one cast for each weight."""
    seen: list[Any] = []
    real = fp8lab.linear.Fp8Linear._cast_weight

    def counting(layer: Any, *given: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            seen.append(layer)
        return real(layer, *given)

    monkeypatch.setattr(fp8lab.linear.Fp8Linear, "_cast_weight", counting)
    torch.compiler.reset()
    machine = Machine(preset, microbatches=2, compiled=True)
    for number in range(5):
        machine.take(number)
    assert len(seen) == len(set(seen)) == 4 * TINY.layers


@on_the_card
def test_a_step_that_waits_is_refused() -> None:
    """In a process of its own: a capture that broke may leave the device's state broken."""
    code = """
        import torch
        from fp8lab.errors import UserError
        from fp8lab.gradients import UpdateStep
        from fp8lab.graphs import GraphedStep
        from fp8lab.optimizer import AdamW

        model = torch.nn.Linear(16, 16).cuda()
        update = UpdateStep(model, AdamW(model.parameters(), capturable=True))

        def loss(x):
            found = model(x).square().mean()
            float(found)
            return found

        step = GraphedStep(loss, update)
        x = torch.ones(4, 16, device="cuda")
        for _ in range(3):
            step(x)
        try:
            step(x)
        except UserError as error:
            assert "cannot be captured in a CUDA graph (" in str(error), error
            assert len(str(error).splitlines()) == 1, error
            print("refused", step.captures, step.replays)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "refused 0 0", done.stdout + done.stderr


@on_the_card
@pytest.mark.parametrize("settings", [{}, {"autocast": True}, {"autocast": True, "compile": True}])
@pytest.mark.parametrize("preset", ["delayed", "bf16"])
def test_rows_of_a_run_are_those_without_graphs(
    preset: str, settings: dict[str, Any], corpus: Corpus
) -> None:
    found: list[list[Row]] = []
    for graph in (False, True):
        torch.compiler.reset()
        config = replace(
            CONFIG,
            recipe=recipe_named(preset),
            device="cuda",
            graph=graph,
            observe_every=8,
            microbatches=2,
            dynamic_loss_scale=True,
            loss_scale=1024.0,
            **settings,
        )
        run = TrainingRun(config, corpus)
        found.append([run.advance() for _ in range(STEPS)])
        if run._graphed is not None:
            # Observed: the first, the eighth and the last.
            assert run._graphed.captures == 2
            assert run._graphed.replays == STEPS - 3
    assert found[0] == found[1]
    assert "validation_loss" in found[0][5]
