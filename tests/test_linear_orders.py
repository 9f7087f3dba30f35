"""When casts, amaxes and scales happen: accumulation, recomputation, reuse, interleaving.

The lines of reported scaling faults are here as well, each with its source.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8lab import linear, linear_casts, linear_products
from fp8lab.emulation import casting, scaling
from fp8lab.formats import E4M3, E5M2
from fp8lab.linear import (
    Fp8Linear,
    OperandCast,
    advance_scaling,
    delayed_groups,
    forget_weights,
    operand_casts,
    recompute_contexts,
)
from fp8lab.ops_operands import Codes
from fp8lab.recipes import PRESETS, Operand, RowScaling, recipe_named
from fp8lab.testing import assert_bits_equal, to_numpy
from fp8lab.testing.linear_reference import reference, scaled

ROWS, SIZE = 8, 32


def layer_of(spec: str = "delayed:history=4", *, seed: int = 1) -> Fp8Linear:
    layer = Fp8Linear(SIZE, SIZE, recipe_named(spec), bias=False)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(seed))
    return layer


def batch(seed: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, SIZE, generator=generator) * factor
    return x.requires_grad_(), torch.randn(ROWS, SIZE, generator=generator)


def amaxes(module: nn.Module) -> dict[str, float]:
    return {name: float(cast.amax_history[0]) for name, cast in operand_casts(module)}


def magnitude(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def bits(module: nn.Module) -> list[bytes]:
    found = [to_numpy(value).tobytes() for value in module.state_dict().values()]
    for param in module.parameters():
        found.append(b"" if param.grad is None else to_numpy(param.grad).tobytes())
    return found


@contextmanager
def counted_casts() -> Iterator[list[str]]:
    """The roles that are cast inside, in order."""
    seen: list[str] = []
    plain = linear_products.sides

    def counting(*args: Any, **options: Any) -> Any:
        seen.append(args[3])
        return plain(*args, **options)

    homes: list[Any] = [linear_products, linear]
    for home in homes:
        home.sides = counting
    try:
        yield seen
    finally:
        for home in homes:
            home.sides = plain


def test_weights_are_cast_once_over_microbatches_and_amaxes_are_their_largest() -> None:
    layer = layer_of()
    sizes = (1.0, 4.0, 2.0)
    with counted_casts() as seen:
        for seed, factor in enumerate(sizes):
            x, dy = batch(seed, factor)
            layer(x).backward(dy * factor)
    assert seen.count("weight") == 1
    assert seen.count("input") == seen.count("grad_output") == 3
    inputs = [magnitude(batch(seed, factor)[0]) for seed, factor in enumerate(sizes)]
    gradients = [magnitude(batch(seed)[1] * factor) for seed, factor in enumerate(sizes)]
    assert amaxes(layer) == {
        "input": max(inputs),
        "weight": magnitude(layer.weight),
        "grad_output": max(gradients),
    }
    advance_scaling(layer)
    assert amaxes(layer) == {"input": 0, "weight": 0, "grad_output": 0}
    for role, fmt, largest in (("input", E4M3, max(inputs)), ("grad_output", E5M2, max(gradients))):
        expected = scaling.scale_from_amax(largest, fmt)
        assert_bits_equal(layer.cast_of(role).scale, expected)


def test_an_accumulated_gradient_is_the_sum_of_the_oracles() -> None:
    layer = layer_of("tensorwise")
    w = to_numpy(layer.weight)
    expected = np.zeros((SIZE, SIZE), np.float32)
    for seed in range(3):
        x, dy = batch(seed)
        layer(x).backward(dy)
        dw = reference("tensorwise", to_numpy(x), w, to_numpy(dy)).dw
        assert dw is not None
        expected = expected + dw
    assert_bits_equal(layer.weight.grad, expected)


def test_a_main_grad_adds_up_inside_the_product() -> None:
    layer = layer_of("rowwise").bfloat16()
    total = torch.full((SIZE, SIZE), 0.125)
    layer.weight.main_grad = total.clone()  # type: ignore[attr-defined]
    expected = total.numpy()
    for seed in range(2):
        x, dy = (side.detach().bfloat16() for side in batch(seed))
        layer(x).backward(dy)
        dw = reference("rowwise", to_numpy(x), to_numpy(layer.weight), to_numpy(dy)).dw
        assert dw is not None
        expected = expected + dw
    assert layer.weight.grad is None
    assert_bits_equal(layer.weight.main_grad, expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "edit",
    [
        lambda w: w.mul_(2),
        lambda w: w.copy_(w.flip(0)),
        lambda w: w[3].fill_(1.0),
        lambda w: w.detach().add_(1),
    ],
    ids=["mul", "copy", "row", "detached"],
)
def test_an_edit_in_place_is_seen(edit: Callable[[Tensor], Tensor]) -> None:
    layer = layer_of("tensorwise")
    x, dy = batch(0)
    layer(x)
    with torch.no_grad():
        edit(layer.weight)
    y = layer(x)
    expected = reference("tensorwise", to_numpy(x), to_numpy(layer.weight), to_numpy(dy))
    assert_bits_equal(y, expected.y)


class ThroughData(torch.optim.SGD):
    """An optimizer whose writes torch does not count."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad)


def edit_unseen(layer: Fp8Linear) -> None:
    layer.weight.data.add_(1)
    forget_weights(layer)


def test_an_optimizer_a_loaded_state_and_forgetting_are_seen() -> None:
    layer = layer_of("tensorwise")
    x, dy = batch(0)
    for change in (
        lambda: torch.optim.SGD([layer.weight], 0.1).step(),
        lambda: ThroughData([layer.weight], 0.1).step(),
        lambda: layer.load_state_dict(layer_of("tensorwise", seed=9).state_dict()),
        lambda: edit_unseen(layer),
    ):
        layer(x).backward(dy)
        change()
        expected = reference("tensorwise", to_numpy(x), to_numpy(layer.weight), to_numpy(dy))
        assert_bits_equal(layer(x), expected.y)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_bits_and_records_once(preset: str, reentrant: bool) -> None:
    plain = nn.Sequential(layer_of(preset), nn.Tanh(), layer_of(preset, seed=2))
    again = copy.deepcopy(plain)
    for step in range(3):
        x, dy = batch(step, 2.0**step)
        plain(x).backward(dy)
        other = x.detach().clone().requires_grad_()
        checkpoint(again, other, use_reentrant=reentrant).backward(dy)
        assert_bits_equal(other.grad, x.grad)
        assert bits(plain) == bits(again)
        advance_scaling(plain)
        advance_scaling(again)


@pytest.mark.parametrize("contexts", [True, False])
def test_a_recomputation_after_the_state_moved_on(contexts: bool) -> None:
    """With the contexts it casts as the first forward did; without, nothing is recorded still."""
    plain, again = layer_of(), layer_of()
    x, dy = batch(0)
    y = plain(x)
    options: dict[str, Any] = {"context_fn": recompute_contexts} if contexts else {}
    other = x.detach().clone().requires_grad_()
    later = checkpoint(again, other, use_reentrant=False, **options)
    for layer in (plain, again):
        advance_scaling(layer)
        with torch.no_grad():
            layer.weight.mul_(3)
    y.backward(dy)
    later.backward(dy)
    assert x.grad is not None
    assert other.grad is not None
    same = torch.equal(other.grad, x.grad)
    assert same == contexts
    assert amaxes(again) == amaxes(plain)
    assert amaxes(again)["input"] == 0


def test_evaluation_and_layers_that_did_not_run_leave_the_state_alone() -> None:
    both = nn.ModuleDict({"used": layer_of(), "idle": layer_of()})
    x, dy = batch(0)
    both["used"](x).backward(dy)
    both["idle"](x).backward(dy)
    advance_scaling(both)
    before = bits(both)
    both.eval()
    with torch.no_grad():
        both["used"](x * 100)
    both["idle"](x * 100).sum().backward()
    assert bits(both)[:-2] == before[:-2]
    both.train()
    idle = copy.deepcopy(both["idle"].state_dict())
    both["used"](x).backward(dy)
    advance_scaling(both)
    for name, value in both["idle"].state_dict().items():
        assert_bits_equal(value, idle[name])


def test_a_weight_cast_in_evaluation_is_recorded_when_training_uses_it() -> None:
    layer = layer_of().eval()
    x, _ = batch(0)
    with counted_casts() as seen:
        with torch.no_grad():
            layer(x)
        assert amaxes(layer)["weight"] == 0
        layer.train()
        layer(x)
    assert seen.count("weight") == 1
    assert amaxes(layer)["weight"] == magnitude(layer.weight)


def test_what_a_cuda_graph_captures_is_derived_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay runs kernels alone: nothing that was cast before may be used."""
    layer = layer_of()
    (x, _), (second, _) = batch(0), batch(1)
    with counted_casts() as seen:
        layer(x)
        monkeypatch.setattr(linear_casts, "captured", lambda tensor: True)
        layer(x)
        layer(second)
        monkeypatch.undo()
        layer(x)
    assert seen.count("weight") == 4


def test_without_gradients_the_mode_decides_what_is_recorded() -> None:
    layer = layer_of()
    x, _ = batch(0)
    with torch.no_grad():
        layer(x)
    assert amaxes(layer)["input"] == magnitude(x)
    with torch.inference_mode():
        assert_bits_equal(layer(x), layer_of()(x))


def test_a_layer_used_twice_has_the_larger_amax() -> None:
    layer = layer_of()
    (x, dy), (second, _) = batch(0), batch(1, 5.0)
    with counted_casts() as seen:
        (layer(x) + layer(second)).backward(dy)
    assert seen.count("weight") == 1
    assert amaxes(layer)["input"] == magnitude(second)
    w = to_numpy(layer.weight)
    parts = [reference("delayed", to_numpy(side), w, to_numpy(dy)).dw for side in (second, x)]
    assert parts[0] is not None
    assert parts[1] is not None
    assert_bits_equal(layer.weight.grad, parts[0] + parts[1])


@pytest.mark.parametrize("preset", [p for p in PRESETS if p != "bf16"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_interleaved_passes_use_their_own_codes(preset: str, order: tuple[int, int]) -> None:
    """Forward, forward, backward, backward, with the state and the weight moved on in between."""
    layer = layer_of(preset)
    first = to_numpy(layer.weight).copy()
    batches = [batch(0), batch(1, 8.0)]
    outputs = [layer(batches[0][0])]
    advance_scaling(layer)
    with torch.no_grad():
        layer.weight.mul_(1.7)
    outputs.append(layer(batches[1][0]))
    scales = {name: float(cast.scale) for name, cast in operand_casts(layer) if cast.delayed}
    for place in order:
        outputs[place].backward(batches[place][1])
    # The first pass' weight is the one before the change.
    expected = reference(preset, to_numpy(batches[0][0]), first, to_numpy(batches[0][1]))
    assert_bits_equal(outputs[0], expected.y)
    assert_bits_equal(batches[0][0].grad, expected.dx)
    if "input" not in scales:
        x, dy = batches[1]
        expected = reference(preset, to_numpy(x), to_numpy(layer.weight), to_numpy(dy))
        assert_bits_equal(x.grad, expected.dx)
    else:
        x = batches[1][0]
        codes, inverse = scaled(to_numpy(x), E4M3, np.float32(scales["input"]))
        assert_bits_equal(casting.dequantize(codes, inverse_scale=inverse), _decoded(layer, x))


def _decoded(layer: Fp8Linear, x: Tensor) -> Tensor:
    plain = layer.cast_of("input").cast(x.detach()).plain
    assert plain is not None
    return plain.decoded()


def test_all_scales_move_in_one_flat_state_and_state_dicts_hold_copies() -> None:
    model = nn.Sequential(*(layer_of(seed=seed) for seed in range(3)))
    x, dy = batch(0)
    model(x).backward(dy)
    groups = delayed_groups(model)
    # E4M3 for inputs and weights, E5M2 for output gradients.
    assert sorted(len(group.casts) for group in groups) == [3, 6]
    kept = model.state_dict()
    before = {name: value.clone() for name, value in kept.items()}
    advance_scaling(model)
    assert delayed_groups(model) == groups
    assert len({cast.scale.untyped_storage().data_ptr() for _, cast in operand_casts(model)}) == 2
    for name, value in kept.items():
        assert_bits_equal(value, before[name])
    # One layer alone gives the same.
    alone = layer_of(seed=0)
    alone(x)
    advance_scaling(alone)
    assert_bits_equal(alone.cast_of("input").scale, model[0].cast_of("input").scale)  # type: ignore[operator]
    moved = copy.deepcopy(model).double().float()  # buffers are others now
    for layer in (model, moved):
        layer.zero_grad()
        layer(x).backward(dy)
        advance_scaling(layer)
    assert bits(moved) == bits(model)


def test_a_copy_and_a_pickle_are_layers_of_their_own() -> None:
    layer = layer_of()
    x, dy = batch(0)
    layer(x).backward(dy)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(layer), loaded):
        assert_bits_equal(other(x), layer(x))
        with torch.no_grad():
            other.weight.mul_(2)
        assert_bits_equal(layer(x), layer_of()(x))
        assert not torch.equal(other(x), layer(x))


@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_the_scales_of_a_copied_model_move_on(way: str) -> None:
    """A copy's buffers share memory with its flat state, but would count changes apart from it."""
    model = nn.Sequential(*(layer_of(seed=seed) for seed in range(2)))

    def step(module: nn.Module, seed: int) -> None:
        x, dy = batch(seed, 2.0**seed)
        module.zero_grad()
        module(x).backward(dy)
        advance_scaling(module)

    step(model, 0)
    step(model, 1)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    for seed in (2, 3, 4):
        for module in (model, other):
            step(module, seed)
        assert bits(other) == bits(model)
        for one, same in zip(model.parameters(), other.parameters(), strict=True):
            assert_bits_equal(same.grad, one.grad)


# Reported faults: source, input, right answer.


def cast_with(spec: str) -> OperandCast:
    return OperandCast(recipe_named(spec).input)


def test_te_786_a_tiny_amax() -> None:
    """TransformerEngine 786: amax 6e-37: the scale is FLT_MAX, codes are finite."""
    for spec in ("tensorwise", "delayed:history=1"):
        cast = cast_with(spec)
        x = torch.full((2, 16), 6e-37)
        cast(x)
        advance_scaling(cast)
        codes = cast.cast(x).plain
        assert codes is not None
        assert codes.scale is not None
        assert float(codes.scale) == np.finfo(np.float32).max
        assert bool(codes.decoded().isfinite().all())


def test_te_825_a_layer_that_stays_idle() -> None:
    """TransformerEngine 825: history of 3, amax 4, then five updates with amax 0: all unchanged."""
    cast = cast_with("delayed:history=3")
    cast(torch.full((1, 16), 4.0))
    advance_scaling(cast)
    before = bits(cast)
    for _ in range(5):
        advance_scaling(cast)
    assert bits(cast) == before
    assert float(cast.scale) == 112


def test_te_1047_cached_codes_keep_their_scale() -> None:
    """TransformerEngine 1047: quantise once, change the scale, decode: the same bits."""
    layer = layer_of()
    x, _ = batch(0)
    layer(x)
    side, codes = layer.weight_codes(layer.weight)
    assert codes is not None
    before = codes.decoded()
    advance_scaling(layer)
    assert float(layer.cast_of("weight").scale) != 1
    assert side.inverse is not None
    assert_bits_equal(Codes(side.values, side.inverse).decoded(), before)


def test_te_1723_kept_metadata_are_copies() -> None:
    """TransformerEngine 1723: keep, overwrite the live buffers, restore: what was kept is back."""
    layer = layer_of()
    x, dy = batch(0)
    layer(x).backward(dy)
    advance_scaling(layer)
    before = bits(layer)[:-1]
    kept = layer.state_dict()
    for _, cast in operand_casts(layer):
        cast.scale.fill_(7)
        cast.amax_history.fill_(9)
    layer.load_state_dict(kept)
    assert bits(layer)[:-1] == before


def test_te_123_a_loaded_scale_counts_at_once() -> None:
    """TransformerEngine 123: save at scale 64, load into a fresh model: inverse scale 2**-6."""
    saved = layer_of()
    for _, cast in operand_casts(saved):
        cast.scale.fill_(64)
    fresh = layer_of()
    x, _ = batch(0)
    fresh(x)
    fresh.load_state_dict(saved.state_dict())
    plain = fresh.cast_of("input").cast(x).plain
    side, _ = fresh.weight_codes(fresh.weight)
    assert plain is not None
    assert side.inverse is not None
    assert float(plain.inverse) == float(side.inverse) == 2.0**-6
    assert_bits_equal(fresh(x), saved(x))


def test_titan_698_the_scale_follows() -> None:
    """torchtitan 698: two steps, amax 1 then 8: the scale changes."""
    cast = cast_with("delayed:history=2")
    seen = []
    for largest in (1.0, 8.0):
        cast(torch.full((1, 16), largest))
        advance_scaling(cast)
        seen.append(float(cast.scale))
    assert seen == [448, 56]


@pytest.mark.parametrize("policy", [RowScaling(), RowScaling(power_of_two=True)])
def test_ao_4713_3356_a_row_of_zeros(policy: RowScaling) -> None:
    """torchao 4713 and 3356: one row all zero: a finite scale, codes 0."""
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    found = OperandCast(Operand("E4M3", policy)).cast(x)
    for codes, rows in ((found.plain, 4), (found.transposed, 32)):
        assert codes is not None
        assert codes.inverse.shape == (rows, 1)
        assert bool(codes.inverse.isfinite().all())
        assert bool(codes.decoded().isfinite().all())
    assert found.plain is not None
    assert not found.plain.codes.view(torch.uint8)[2].any()
