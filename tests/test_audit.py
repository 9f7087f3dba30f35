"""The audit: clean runs of every preset, one planted wrong bit in every operation, what it refuses.

On the CPU the oracle computes, and is held to its slow form; `gpu` tests hold kernels to the
oracle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8lab
from fp8lab import audit_product, observe, ops, ops_adamw_steppers, ops_gradients, ops_linear
from fp8lab.audit_names import Names
from fp8lab.auditing import AuditError
from fp8lab.bridge import to_numpy
from fp8lab.emulation import scaling
from fp8lab.emulation.matmul import matmul
from fp8lab.errors import UserError
from fp8lab.gradients import LossScaler, UpdateStep, accumulate_in_float32
from fp8lab.linear import Fp8Linear, advance_scaling
from fp8lab.ops_adamw import AdamFormats, StepNumbers, WeightCopies, fresh_state
from fp8lab.ops_linear import Layouts
from fp8lab.optimizer import AdamW
from fp8lab.recipes import PRESETS, PRODUCTS, STACK_RECIPES, recipe_named

ROWS, K, N, M = 8, 16, 32, 48  # no two matrices of a step have one shape, but y and dx of K or N
EVERY_PRESET = [name for name in (*PRESETS, *STACK_RECIPES) if name != "bf16"]
MOMENTS = {"exp_avg": "e4m3_128", "exp_avg_sq": "e4m3_128_keep"}


def network(spec: str = "tensorwise", products: str = "codes", device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, M, bias=False))
    return fp8lab.convert(model, spec, products=products).to(device)


class Loop:
    """Steps of a small network; each step's batch is its own."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.update = UpdateStep(
            model,
            AdamW(model.parameters(), lr=0.01, **{**MOMENTS, **options}),
            scaler=LossScaler(16.0),
            clip_norm=0.5,
        )
        self.done = 0

    def steps(self, count: int, *, update: bool) -> None:
        for _ in range(count):
            self.step(update=update)

    def step(self, microbatches: int = 1, *, update: bool = True) -> None:
        self.update.zero_grad()
        for _ in range(microbatches):
            self.done += 1
            generator = torch.Generator().manual_seed(self.done)
            x = torch.randn(ROWS, K, generator=generator).to(self.device)
            x.requires_grad_()  # so that the first layer has a data gradient, too
            self.update.backward(self.model(x).square().mean())
        if update:
            self.update()


@pytest.mark.parametrize("products", ["codes", "decoded"])
@pytest.mark.parametrize("spec", EVERY_PRESET)
def test_the_oracle_holds_to_its_slow_form(spec: str, products: str) -> None:
    loop = Loop(network(spec, products))
    with fp8lab.audit(sample=2) as report:
        for _ in range(2):
            loop.step()
    assert (report.steps, report.audited, report.differences) == (2, 2, 0)
    seen = {operation.partition(",")[0] for _, operation in report.lines}
    wanted = {"cast of input", "cast of weight", "cast of grad_output", "norm", "optimizer"}
    wanted |= {"dequantize"} if products == "decoded" else {"forward product", "data_grad product"}
    assert wanted <= seen
    assert ("weight_grad product" in seen) == (products == "codes" and not spec.endswith("gw_hp"))
    assert ("scale update" in seen) == ("delayed" in spec or spec == "hybrid")


@pytest.mark.parametrize("spec", ["tensorwise", "delayed", "rowwise", "blockwise", "mx"])
def test_interpreted_kernels_hold_to_the_oracle_and_to_its_slow_form(
    spec: str, device: str
) -> None:
    loop = Loop(network(spec, "kernels", device), exp_avg="float32", exp_avg_sq="float32")
    with fp8lab.audit(sample=4, slow=True) as report:
        loop.step()
    assert report.differences == 0
    assert report.checked > 50


SPECIAL: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda x: x.index_fill(1, torch.tensor([3]), float("nan")),
    "inf": lambda x: x.index_fill(1, torch.tensor([3]), -float("inf")),
    "negative zeros": lambda x: x * -0.0,
    "tiny": lambda x: x * 1e-38,
    "huge": lambda x: x * 3e38,
    "one row": lambda x: x[:1],
    "no rows": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("spec", ["tensorwise", "delayed", "rowwise", "mx"])
def test_special_values_are_no_false_alarm(spec: str, kind: str, dtype: torch.dtype) -> None:
    layer = Fp8Linear(K, N, recipe_named(spec), dtype=dtype)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(5, size, generator=generator) for size in (K, N))
    with fp8lab.audit(sample=4) as report:
        given = SPECIAL[kind](x).to(dtype).requires_grad_()
        layer(given).backward(SPECIAL[kind](dy).to(dtype))
        advance_scaling(layer)
    assert report.differences == 0


def test_a_batch_of_nan_is_audited_as_any_other() -> None:
    loop = Loop(network("delayed"))
    with fp8lab.audit(sample=4) as report:
        loop.step()
        with torch.no_grad():
            weight: Any = loop.model.get_submodule("0").weight
            weight[1, 1] = float("nan")
        loop.step()
        loop.step()
    assert report.differences == 0
    assert int(loop.update.scaler.skipped_steps) == 2


# What is planted: where, the layer that has it, the operation, the element.

Plant = Callable[[pytest.MonkeyPatch], None]
Planted = tuple[str, str, Plant, str, str, tuple[int, ...]]


def flipped(tensor: Any, place: tuple[int, ...]) -> Any:
    """With the lowest bit of one element flipped, in place."""
    if isinstance(tensor, Tensor):
        words: Any = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        tensor.view(words)[place] ^= 1
        return tensor
    changed = np.array(tensor)
    changed.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[changed.itemsize])[place] ^= 1
    return changed


def after(home: Any, name: str, change: Callable[[Any], Any]) -> Plant:
    """Replace a function by one whose result is changed."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        plain = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *a, **o: change(plain(*a, **o)))

    return plant


def of_shape(shape: tuple[int, ...], place: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda found: flipped(found, place) if found.shape == shape else found


def transposed(found: Layouts) -> Layouts:
    if found.transposed is not None and found.transposed.codes.shape == (K, ROWS):
        flipped(found.transposed.codes, (5, 3))
    return found


def both_of(shape: tuple[int, ...], part: int, place: tuple[int, ...]) -> Callable[[Any], Any]:
    def change(found: tuple[Any, Any]) -> tuple[Any, Any]:
        parts = list(found)
        if parts[0].shape == shape:
            parts[part] = flipped(parts[part], place)
        return parts[0], parts[1]

    return change


def moment(name: str) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        if state.param.shape != (N, K):
            return state
        own = getattr(state, name)
        if name == "param":
            return replace(state, param=flipped(own, (7, 2)))
        return replace(state, **{name: replace(own, codes=flipped(own.codes, (7, 2)))})

    return change


PLANTED: dict[str, Planted] = {
    "cast": (
        "tensorwise",
        "codes",
        after(ops, "quantize", of_shape((ROWS, K), (3, 5))),
        "0",
        "cast of input, codes",
        (3, 5),
    ),
    "transpose": (
        "tensorwise",
        "codes",
        after(ops_linear, "Layouts", transposed),
        "0",
        "cast of input, transposed codes",
        (5, 3),
    ),
    "amax of the cast": (
        "delayed",
        "codes",
        after(ops, "amax", lambda found: flipped(found, ())),
        "0",
        "cast of weight, amax",
        (0,),
    ),
    "amax": (
        "tensorwise",
        "codes",
        after(scaling, "amax", lambda found: flipped(found, ())),
        "0",
        "amax of weight",
        (0,),
    ),
    "scale": (
        "tensorwise",
        "codes",
        after(ops, "scale_from_amax", lambda found: flipped(found, ())),
        "0",
        "scale of weight",
        (0,),
    ),
    "scale update": (
        "delayed",
        "codes",
        after(
            scaling,
            "update_delayed",
            lambda state: replace(state, scale=flipped(state.scale, (1,))),
        ),
        "0.weight",
        "scale update, scale",
        (1,),
    ),
    "history": (
        "delayed",
        "codes",
        after(
            scaling,
            "update_delayed",
            lambda state: replace(state, amax_history=flipped(state.amax_history, (15, 1))),
        ),
        "0.weight",
        "scale update, amax history",
        (15, 1),
    ),
    "codes of rows": (
        "rowwise",
        "codes",
        after(scaling, "quantize_blocks", both_of((ROWS, K), 0, (6, 1))),
        "0",
        "cast of input, codes",
        (6, 1),
    ),
    "scales of rows": (
        "rowwise",
        "codes",
        after(scaling, "quantize_blocks", both_of((K, ROWS), 1, (9, 0))),
        "0",
        "cast of input, transposed scales",
        (9, 0),
    ),
    "scales of MX": (
        "mx",
        "codes",
        after(scaling, "quantize_mx", both_of((N, K), 1, (30, 0))),
        "0",
        "cast of weight, scales",
        (30, 0),
    ),
    "decoded": (
        "tensorwise",
        "decoded",
        after(ops, "dequantize", of_shape((ROWS, K), (2, 9))),
        "0",
        "dequantize, values",
        (2, 9),
    ),
    "forward": (
        "tensorwise",
        "codes",
        after(ops_linear, "oracle_matmul", of_shape((ROWS, M), (4, 17))),
        "2",
        "forward product",
        (4, 17),
    ),
    "data gradient": (
        "blockwise",
        "codes",
        after(ops_linear, "oracle_matmul", of_shape((ROWS, K), (4, 11))),
        "0",
        "data_grad product",
        (4, 11),
    ),
    "weight gradient": (
        "mx",
        "codes",
        after(ops_linear, "oracle_matmul", of_shape((N, K), (20, 11))),
        "0",
        "weight_grad product",
        (20, 11),
    ),
    "norm": (
        "tensorwise",
        "codes",
        after(
            ops_gradients, "oracle", lambda found: replace(found, norm=flipped(found.norm, ())[()])
        ),
        "-",
        "norm",
        (0,),
    ),
    "factor": (
        "tensorwise",
        "codes",
        after(
            ops_gradients,
            "oracle",
            lambda found: replace(found, factor=flipped(found.factor, ())[()]),
        ),
        "-",
        "norm, factor",
        (0,),
    ),
    **{
        name: (
            "tensorwise",
            "codes",
            after(ops_adamw_steppers, "adamw_state", moment(name)),
            "0.weight",
            f"optimizer, {name}",
            (7, 2),
        )
        for name in ("param", "exp_avg", "exp_avg_sq")
    },
}


@pytest.mark.parametrize("name", PLANTED)
def test_one_wrong_bit_is_named_within_its_sampling_period(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, products, plant, layer, operation, element = PLANTED[name]
    loop = Loop(network(spec, products))
    of_layer = operation.startswith(("cast", "amax", "scale of", "dequantize", *PRODUCTS))
    update = not of_layer or " of weight" in operation  # which is cast once a step
    with fp8lab.audit(sample=16) as report:
        loop.step(update=update)
    period = max(line.period for (_, what), line in report.lines.items() if what == operation)
    plant(monkeypatch)
    with pytest.raises(AuditError) as error, fp8lab.audit(sample=16) as report:
        loop.steps(period, update=update)
    found = error.value.difference
    assert (found.layer, found.operation, found.element) == (layer, operation, element)
    assert found.form == "slow form"
    bits = [
        np.asarray(v).view({1: "u1", 2: "u2", 4: "u4"}[np.asarray(v).itemsize])
        for v in (found.expected, found.actual)
    ]
    assert int(bits[0] ^ bits[1]) == 1
    assert report.differences == found.count


def test_the_message_names_layer_operation_element_and_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    PLANTED["forward"][2](monkeypatch)
    loop = Loop(network())
    with fp8lab.audit(sample=ROWS * M * 2, on_difference="count") as report:
        loop.step()
    assert (report.differences, len(report.found)) == (1, 1)
    text = str(report.found[0])
    assert "step 1, 2, forward product: element (4, 17) differs (1 of 384 compared)" in text
    for word in ("a  ", "b  ", "inverse_scale_a", "expected", "actual", "0x"):
        assert word in text
    assert text in str(report)
    assert "audited 1 of 1 steps" in str(report)


@pytest.mark.parametrize("spec", ["tensorwise", "blockwise", "mx"])
def test_of_a_products_operands_only_drawn_rows_come_to_the_host(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each element has its own: the wrong ones are shown with the rows that they come from."""
    operands: dict[tuple[int, ...], tuple[Any, Any]] = {}
    taken: list[tuple[int, ...]] = []
    multiply, take = matmul, to_numpy

    def wrong(a: Any, b: Any, **options: Any) -> Any:
        found = np.array(multiply(a, b, **options))
        operands[found.shape] = a, b.T
        found.view(np.uint32)[...] ^= 1
        return found

    def noted(tensor: Tensor) -> Any:
        if tensor.dtype == torch.float8_e4m3fn:
            taken.append(tuple(tensor.shape))
        return take(tensor)

    monkeypatch.setattr(ops_linear, "oracle_matmul", wrong)
    monkeypatch.setattr(audit_product, "to_numpy", noted)
    layer = Fp8Linear(K, N, recipe_named(spec), bias=False)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(2))
    with fp8lab.audit(sample=6, on_difference="count") as report:
        for _ in range(4):
            layer(x)
            advance_scaling(layer)
    assert taken == [(2, K), (3, K)] * 4
    assert len(report.found) == 4
    left, right = operands[ROWS, N]
    for difference in report.found:
        row, column = difference.element
        assert difference.count == 6
        assert np.array_equal(difference.inputs["a"].view(np.uint8), left[row].view(np.uint8))
        assert np.array_equal(difference.inputs["b"].view(np.uint8), right[column].view(np.uint8))


def test_a_parameter_has_its_name_after_its_memory_was_anothers() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 3), "two": nn.Linear(2, 3)})
    weights = list(model.parameters())[::2]
    names = Names()
    names.note_model(model)
    for _ in range(2):
        assert [names.parameter(own, 0) for own in weights] == ["one.weight", "two.weight"]
        first, second = (own.data for own in weights)
        weights[0].data, weights[1].data = second, first
    assert names.parameter(torch.zeros(2, 3), 7) == "parameter 7 (2, 3)"


def test_a_step_is_an_optimizers_and_every_counts_them() -> None:
    loop = Loop(network("delayed"))
    with fp8lab.audit(every=3, sample=1) as report:
        for _ in range(7):
            loop.step(microbatches=2)
    assert (report.steps, report.audited) == (7, 3)
    checks = {line.checks for (_, what), line in report.lines.items() if what == "forward product"}
    assert checks == {6}


def test_without_an_optimizer_advance_scaling_ends_a_step() -> None:
    model = network("delayed")
    with fp8lab.audit(sample=1) as report, torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, K))
            model(torch.ones(2, K))
            advance_scaling(model)
    assert report.steps == 2


def test_torchs_own_optimizer_ends_a_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8lab.audit(sample=1, every=2) as report:
        for _ in range(3):
            model(torch.ones(2, K)).sum().backward()
            optimizer.step()
    assert (report.steps, report.audited) == (3, 2)


def test_what_is_changed_in_place_is_read_before() -> None:
    model = network()
    accumulate_in_float32(model)
    loop = Loop(model)
    with fp8lab.audit(sample=64) as report:
        loop.step(microbatches=3)
    assert report.differences == 0
    key = ("0", "weight_grad product")
    assert report.lines[key].checks == 3


@pytest.mark.parametrize("master", ["bfloat16_remainder", "bfloat16_stochastic"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "e4m3_tensor", "e4m3_128_expanded"])
def test_every_state_of_the_optimizer(master: str, moments: str) -> None:
    loop = Loop(network().bfloat16(), master=master, exp_avg=moments, exp_avg_sq=moments)
    with fp8lab.audit(sample=2) as report:
        loop.step()
        loop.step()
    assert report.differences == 0


def test_a_skipped_step_of_a_device_that_counts_leaves_everything() -> None:
    loop = Loop(network(), capturable=True)
    with fp8lab.audit(sample=2) as report:
        loop.step()
        for param in loop.model.parameters():
            assert param.grad is not None
            param.grad.fill_(float("nan"))
        loop.update()
    assert report.differences == 0
    assert int(loop.update.scaler.skipped_steps) == 1
    assert report.lines["0.weight", "optimizer, param"].checks == 2


def test_copies_that_a_step_writes_are_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    loop = Loop(model)
    optimizer, weight = loop.update.optimizer, model.get_submodule("0").weight
    assert isinstance(optimizer, AdamW)
    assert isinstance(weight, nn.Parameter)
    codes = torch.zeros(N, K, dtype=torch.float8_e4m3fn)
    optimizer.also_write(
        weight,
        weight=torch.zeros(N, K, dtype=torch.bfloat16),
        codes=codes,
        scale=torch.full((1,), 64.0),
        amax=torch.zeros(1),
    )
    with fp8lab.audit(sample=64) as report:
        loop.step()
    assert report.differences == 0
    after(ops_adamw_steppers, "quantize", lambda found: flipped(found, (1, 1)))(monkeypatch)
    where = r"0.weight, optimizer, weight copy: element \(1, 1\)"
    with pytest.raises(AuditError, match=where), fp8lab.audit(sample=64):
        loop.step()


def test_a_frozen_layer_is_audited() -> None:
    model = network()
    loop = Loop(model)
    loop.step()
    fp8lab.freeze(model)
    with fp8lab.audit(sample=4) as report:
        model(torch.ones(ROWS, K))
    assert ("0", "forward product") in report.lines


def test_names_without_convert() -> None:
    layer = Fp8Linear(K, N, recipe_named("tensorwise"))
    with fp8lab.audit(sample=1) as report:
        layer(torch.ones(2, K))
    assert {name for name, _ in report.lines} == {f"layer 0 ({K} to {N})"}
    model = nn.ModuleDict({"own": layer})
    with fp8lab.audit(sample=1, model=model) as report:
        layer(torch.ones(2, K))
    assert {name for name, _ in report.lines} == {"own"}


def test_audits_are_nested_and_closed() -> None:
    model = network()
    with fp8lab.audit(sample=1) as outer:
        with fp8lab.audit(sample=1) as inner:
            model(torch.ones(2, K))
        between = outer.checked
        assert inner.checked == between > 0
        model(torch.ones(2, K))
    assert outer.checked > between
    assert inner.checked == between
    assert observe._open == ()


def test_another_threads_operations_are_its_own() -> None:
    """A backward pass on the CPU runs in the thread that calls it."""
    here, there = network(), network()

    def elsewhere() -> None:
        there(torch.ones(2, K)).sum().backward()

    with fp8lab.audit(sample=1) as report:
        here(torch.ones(2, K)).sum().backward()
        before = report.checked
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert there.get_submodule("0").weight.grad is not None
    assert report.checked == before


def test_an_audit_changes_no_bit() -> None:
    plain, audited = Loop(network("delayed")), Loop(network("delayed"))
    with fp8lab.audit(sample=1):
        audited.step()
        audited.step()
    plain.step()
    plain.step()
    for one, two in zip(
        plain.model.state_dict().values(), audited.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0; accepted: an integer, 1 and up"),
        ({"sample": 0}, "sample is 0; accepted: an integer, 1 and up, or None"),
        ({"sample": -3}, "sample is -3; accepted"),
        ({"every": 1.5}, "every is 1.5; accepted"),
        ({"on_difference": "log"}, "on_difference is 'log'; accepted: raise, count"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message), fp8lab.audit(**options):
        pytest.fail("not reached")


def test_no_fp8_operation_inside_is_an_error() -> None:
    loop = Loop(network("bf16"), exp_avg="float32", exp_avg_sq="float32")
    with pytest.raises(UserError, match="no FP8 operation ran inside the audit"), fp8lab.audit():
        loop.step()
    with pytest.raises(ZeroDivisionError), fp8lab.audit():
        raise ZeroDivisionError


def test_a_compiled_model_is_refused() -> None:
    model = network()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with pytest.raises(UserError, match=r"without torch\.compile"), fp8lab.audit():
        compiled(torch.ones(ROWS, K))
    compiled(torch.ones(ROWS, K))


def codes_of(layout: int) -> Callable[[Any], Any]:
    """Of the casts of the first layer's input, (ROWS, K)."""

    def change(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if found[0].shape == (ROWS, K):
            flipped(found[layout], (3, 5))
        return found

    return change


@pytest.mark.parametrize(
    ("layout", "operation"),
    [(0, "cast of input, codes"), (1, "cast of input, transposed codes")],
)
def test_a_wrong_bit_of_a_cast_kernel(
    layout: int, operation: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8lab.kernels import casting

    after(casting, "quantize_with_transpose", codes_of(layout))(monkeypatch)
    loop = Loop(network("delayed", "kernels", device), exp_avg="float32", exp_avg_sq="float32")
    with pytest.raises(AuditError) as error, fp8lab.audit():
        loop.step()
    found = error.value.difference
    assert (found.layer, found.operation, found.element) == ("0", operation, (3, 5))
    assert found.form == "oracle"


FP8_MOMENTS = ("e4m3_128", "e4m3_128_keep")


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    ("moments", "master"),
    [
        (("float32", "float32"), "float32"),
        (FP8_MOMENTS, "bfloat16_remainder"),
        (("e4m3_tensor", "e5m2_256"), "bfloat16_stochastic"),
    ],
)
def test_the_optimizers_kernel_is_held_to_the_oracle(
    moments: tuple[str, str],
    master: str,
    counted: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the interpreter, too: a large parameter in runs of blocks, with its random words."""
    formats = AdamFormats.named("plain", True, *moments, master)
    dtype = torch.float32 if master == "float32" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in ((50, 31), (7,))]
    grads = [torch.randn(param.shape, generator=generator).to(device) for param in params]
    params = [param.to(device) for param in params]
    states = [fresh_state(param, formats) for param in params]
    stepper = ops_adamw_steppers.make_stepper(
        params, states, formats, [0, 0], [0, 388], [WeightCopies()] * 2, kernel=True
    )
    row = [1e-2, 0.9, 0.95, 1e-8, 0.1]
    counts = torch.zeros(2, dtype=torch.int64, device=device)

    def steps(count: int) -> None:
        for step in range(count):
            if counted:
                table = torch.tensor([row, row], dtype=torch.float64, device=device)
                stepper.counted_step(grads, table, counts, seed=7)
            else:
                own = StepNumbers(step + 1, row[0], (row[1], row[2]), *row[3:])
                stepper.step(grads, [own], seed=7 + step)

    with fp8lab.audit(sample=32, on_difference="count") as report:
        layer = Fp8Linear(K, N, recipe_named("tensorwise"))
        layer(torch.ones(1, K))  # so that there is an FP8 operation in any case
        steps(2)
    assert report.differences == 0, str(report)
    period = report.lines["parameter 0 (50, 31)", "optimizer, param"].period
    assert period == (1 if "e4m3_tensor" in moments else 4)  # one scale for all needs all

    plain = ops_adamw_steppers.KernelStepper._changed

    def changed(self: Any) -> None:
        plain(self)
        flipped(params[0], (40, 3))

    monkeypatch.setattr(ops_adamw_steppers.KernelStepper, "_changed", changed)
    where = r"parameter 0 \(50, 31\), optimizer, param: element \(40, 3\)"
    with pytest.raises(AuditError, match=where), fp8lab.audit(sample=32):
        steps(period)


def wrong_update(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8lab.kernels import scaling as kernels

    plain = kernels.update_delayed_

    def update(state: Any, *args: Any, **options: Any) -> None:
        plain(state, *args, **options)
        flipped(state.scale, (1,))

    monkeypatch.setattr(kernels, "update_delayed_", update)


def wrong_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8lab.kernels.gradients import GradientPlan

    def change(found: Any) -> Any:
        flipped(found.norm, (0,))
        return found

    after(GradientPlan, "run", change)(monkeypatch)


def wrong_product(shape: tuple[int, int]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        from fp8lab.kernels import matmul

        after(matmul, "matmul", of_shape(shape, (4, 11)))(monkeypatch)

    return plant


def wrong_step(name: str) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        stepper = ops_adamw_steppers.KernelStepper
        plain = stepper._changed

        def changed(self: Any) -> None:
            plain(self)
            tensor = self._params[0] if name == "param" else self._states[0][name]
            flipped(tensor, (7, 2))

        monkeypatch.setattr(stepper, "_changed", changed)

    return plant


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("plant", "layer", "operation", "element"),
    [
        (wrong_product((ROWS, M)), "2", "forward product", (4, 11)),
        (wrong_product((ROWS, K)), "0", "data_grad product", (4, 11)),
        (wrong_product((N, K)), "0", "weight_grad product", (4, 11)),
        (wrong_update, "0.weight", "scale update, scale", (1,)),
        (wrong_norm, "-", "norm", (0,)),
        *((wrong_step(n), "0.weight", f"optimizer, {n}", (7, 2)) for n in ("param", *MOMENTS)),
    ],
)
def test_a_wrong_bit_of_a_kernel_on_the_card(
    plant: Plant,
    layer: str,
    operation: str,
    element: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    loop = Loop(network("delayed", "codes", "cuda"))
    with pytest.raises(AuditError) as error, fp8lab.audit():
        loop.step()
    found = error.value.difference
    assert (found.layer, found.operation, found.element) == (layer, operation, element)


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("spec", EVERY_PRESET)
def test_kernels_hold_to_the_oracle_on_the_card(spec: str, capturable: bool) -> None:
    loop = Loop(network(spec, "codes", "cuda"), capturable=capturable)
    with fp8lab.audit(slow=True) as report:
        for _ in range(3):
            loop.step()
    assert (report.steps, report.differences, report.unchecked) == (3, 0, {})
    assert ("0", "data_grad product") in report.lines  # the backward pass has a thread of its own
