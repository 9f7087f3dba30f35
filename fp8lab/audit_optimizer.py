"""The audit's check of an AdamW step: parameters, moments as stored, masters, what is also written.

Of a large parameter a run of neighbours is checked, whole blocks of its moments; another at each
audited step, until all were. Moments with one scale for the whole tensor, and orders that look at
an element's place, need the whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fp8lab import audit_slow_adamw as slow
from fp8lab import audit_slow_moments as moments
from fp8lab.audit_checks import Array, Compared, Look, Outputs
from fp8lab.audit_sampling import Places
from fp8lab.audit_slow import amax as slow_amax
from fp8lab.bridge import to_numpy
from fp8lab.emulation.adamw_states import AdamState, adamw_state
from fp8lab.emulation.amax import amax
from fp8lab.emulation.casting import quantize
from fp8lab.emulation.moments import StoredMoment
from fp8lab.emulation.random import random_words
from fp8lab.formats import BFLOAT16
from fp8lab.ops_adamw import MOMENTS, PARTS, AdamFormats, WeightCopies
from fp8lab.ops_adamw_steppers import StepperParts

_Arrays = dict[str, Array]


@dataclass(frozen=True)
class _Piece:
    """A run of elements of one parameter, as it was before the step.

    Attributes:
        place: Which parameter.
        start, stop: Which of its elements, in C order.
        chosen: Which of those are compared, counted from `start`.
        period: After how many steps each was.
        before: Copies of what the step reads: param, grad, moments by name, remainder.
        amax: What stood where the amax of the weight goes.
    """

    place: int
    start: int
    stop: int
    chosen: Places
    period: int
    before: _Arrays
    amax: float


def optimizer(look: Look) -> Callable[[Any], Outputs]:
    """`Stepper.step`."""
    given = look.given
    parts: StepperParts = given["self"].parts
    pieces = [_piece(look, parts, place) for place in range(len(parts.params))]
    numbers = [slow.Numbers(**vars(own)) for own in given["numbers"]]

    def finish(_: Any) -> Outputs:
        for piece in pieces:
            own = numbers[parts.groups[piece.place]]
            yield from _compared(look, parts, piece, own, given["seed"])

    return finish


def counted_optimizer(look: Look) -> Callable[[Any], Outputs]:
    """`Stepper.counted_step`: a step that was skipped leaves everything as it was."""
    given = look.given
    parts: StepperParts = given["self"].parts
    pieces = [_piece(look, parts, place) for place in range(len(parts.params))]
    before = given["counts"].tolist()

    def finish(_: Any) -> Outputs:
        skip = given["skip"]
        skipped = skip is not None and bool(skip.item())
        counts, numbers = given["counts"].tolist(), given["numbers"].tolist()
        wanted = [count + (not skipped) for count in before]
        yield Compared(
            "step counts",
            np.array(counts, np.int64),
            np.array(wanted, np.int64),
            lambda i: (i,),
            lambda i: {"before": np.int64(before[i])},
        )
        for piece in pieces:
            lr, beta1, beta2, eps, decay = numbers[piece.place]
            own = slow.Numbers(wanted[piece.place], lr, (beta1, beta2), eps, decay)
            seed = given["seed"] + max(wanted)
            yield from _compared(look, parts, piece, None if skipped else own, seed)

    return finish


def powers_are_the_cards(given: dict[str, Any]) -> bool:
    """Whether the step's powers are CUDA's powf, which the oracle can only take as they come."""
    formats: AdamFormats = given["self"].parts.formats
    return formats.order.constants == "float32"


def fp8_state(given: dict[str, Any]) -> bool:
    """Whether a stepper keeps or writes anything in FP8."""
    parts: StepperParts = given["self"].parts
    formats = (parts.formats.exp_avg, parts.formats.exp_avg_sq)
    narrow = any(fmt.element is not None and fmt.element.bits == 8 for fmt in formats)
    return narrow or any(copies.codes is not None for copies in parts.copies)


def _piece(look: Look, parts: StepperParts, place: int) -> _Piece:
    param, formats = parts.params[place], parts.formats
    size = param.numel()
    start, stop, period = 0, size, 1
    unit = max(fmt.block or 4 for fmt in (formats.exp_avg, formats.exp_avg_sq))
    run = size if size <= look.elements else max(1, look.elements // unit) * unit
    name = f"{look.name} {place}"
    if size > run and not _needs_all(formats):
        runs, period = look.sampler.elements(name, -(-size // run), 1)
        start = int(runs[0]) * run
        stop = min(start + run, size)
    length = stop - start
    chosen: Places = np.arange(length, dtype=np.int64)
    if look.slow and length > run:
        chosen, period = look.sampler.elements(f"{name} elements", length, run)
    before = _arrays(parts, place, start, stop)
    before["grad"] = _slice(look.given["grads"][place], start, stop)
    copies = parts.copies[place]
    seen = 0.0 if copies.amax is None else float(copies.amax)
    return _Piece(place, start, stop, chosen, period, before, seen)


def _needs_all(formats: AdamFormats) -> bool:
    order = formats.order
    whole = any(f.scaled and f.block is None for f in (formats.exp_avg, formats.exp_avg_sq))
    return (
        whole or order.tail is not None or (order.l2 == "first_rounded" and not formats.decoupled)
    )


def _arrays(parts: StepperParts, place: int, start: int, stop: int) -> _Arrays:
    """Copies of a parameter's elements and state, as they are now."""
    found = {"param": _slice(parts.params[place], start, stop)}
    for name, value in parts.states[place].items():
        found[name] = _slice(value, *_range_of(parts.formats, name, start, stop))
    return found


def _range_of(formats: AdamFormats, name: str, start: int, stop: int) -> tuple[int, int]:
    """Where a state's part of the elements `start` to `stop` lies."""
    for moment in MOMENTS:
        if name in (f"{moment}_scale", f"{moment}_power"):
            block = getattr(formats, moment).block
            return (0, 1) if block is None else (start // block, -(-stop // block))
    return start, stop


def _slice(tensor: Tensor, start: int, stop: int) -> Array:
    return np.array(to_numpy(tensor.detach().reshape(-1)[start:stop]))


def _compared(
    look: Look, parts: StepperParts, piece: _Piece, own: slow.Numbers | None, seed: int
) -> Outputs:
    """What the step made of a piece, against what it should have; `own` is None for no step."""
    after = _arrays(parts, piece.place, piece.start, piece.stop)
    elements = piece.chosen
    if own is None:
        wanted = {name: array for name, array in piece.before.items() if name != "grad"}
        some = _chosen(wanted, parts.formats, elements)
    elif look.slow:
        some = _by_slow(look, parts, piece, own, seed)
    else:
        some = _by_oracle(look, parts, piece, own, seed)
    found = _chosen(after, parts.formats, elements)
    shape = tuple(parts.params[piece.place].shape)

    def element(i: int) -> tuple[int, ...]:
        flat = piece.start + int(elements[i])
        return tuple(int(index) for index in np.unravel_index(flat, shape)) if shape else (flat,)

    def inputs(i: int) -> dict[str, Any]:
        place = int(elements[i])
        seen = ("param", "grad", *MOMENTS, "remainder")
        return {name: piece.before[name][place] for name in seen if name in piece.before}

    def block_of(name: str) -> Callable[[int], tuple[int, ...]]:
        first, _ = _range_of(parts.formats, name, piece.start, piece.stop)
        return lambda i: (first + i,)

    for name, actual in found.items():
        blockwise = name.endswith(("_scale", "_power"))
        where = block_of(name) if blockwise else element
        what = (lambda _: {}) if blockwise else inputs
        yield Compared(name, actual, some[name], where, what, piece.period, lambda _: piece.place)
    if own is not None:
        yield from _copies(look, parts, piece, some["param"], element)


def _chosen(arrays: _Arrays, formats: AdamFormats, chosen: Places) -> _Arrays:
    """The chosen elements of what has elements; scales and powers whole."""
    return {
        name: array if name.endswith(("_scale", "_power")) else array[chosen]
        for name, array in arrays.items()
    }


def _by_oracle(
    look: Look, parts: StepperParts, piece: _Piece, own: slow.Numbers, seed: int
) -> _Arrays:
    formats, before = parts.formats, piece.before

    def moment(name: str) -> StoredMoment:
        arrays: list[Any] = [before.get(name + part) for part in PARTS]
        return StoredMoment(getattr(formats, name), *arrays)

    words = None
    if formats.master == "bfloat16_stochastic":
        offset = parts.random_offsets[piece.place] + piece.start // 4
        words = random_words(seed, piece.stop - piece.start, offset=offset)
    state = AdamState(
        before["param"], moment("exp_avg"), moment("exp_avg_sq"), before.get("remainder")
    )
    new = adamw_state(
        state,
        before["grad"],
        **vars(own),
        order=formats.order,
        decoupled=formats.decoupled,
        grad_factor=_factor(look),
        random_words=words,
    )
    named: dict[str, Any] = {"param": new.param, "remainder": new.remainder}
    for name in MOMENTS:
        stored = getattr(new, name)
        for part, array in zip(PARTS, (stored.codes, stored.scale, stored.power), strict=True):
            named[name + part] = array
    kept = {name: array for name, array in named.items() if array is not None}
    return _chosen(kept, formats, piece.chosen)


@np.errstate(invalid="ignore")  # a signalling NaN
def _by_slow(
    look: Look, parts: StepperParts, piece: _Piece, own: slow.Numbers, seed: int
) -> _Arrays:
    formats, before, chosen = parts.formats, piece.before, piece.chosen
    p = before["param"].astype(np.float64)
    if "remainder" in before:
        p = slow.join(before["param"], before["remainder"])
    g = before["grad"].astype(np.float64)
    factor = _factor(look)
    if factor is not None:
        g = moments.r(g * float(factor))
    m, v = (
        moments.read(
            getattr(formats, name),
            before[name],
            before.get(f"{name}_scale"),
            before.get(f"{name}_power"),
        )
        for name in MOMENTS
    )
    places = np.arange(piece.start, piece.stop)
    size = parts.params[piece.place].numel()
    p, m, v = slow.new_values(formats.order, formats.decoupled, own, p, g, m, v, places, size)
    found: dict[str, Any] = {}
    for name, values in zip(MOMENTS, (m, v), strict=True):
        stored = moments.store(getattr(formats, name), values, g, chosen.tolist())
        found |= {name + part: array for part, array in zip(PARTS, stored, strict=True)}
    some = p[chosen]
    if formats.master == "float32":
        found["param"] = some.astype(np.float32)
    elif formats.master == "bfloat16_remainder":
        found["param"], found["remainder"] = slow.split(some)
    else:
        first = 4 * parts.random_offsets[piece.place] + piece.start
        words = [slow.random_word(seed, first + place) for place in chosen.tolist()]
        found["param"] = slow.round_stochastically(some.tolist(), words)
    return {name: array for name, array in found.items() if array is not None}


def _factor(look: Look) -> np.float32 | None:
    factor = look.given["factor"]
    return None if factor is None else np.float32(factor.item())


def _copies(
    look: Look,
    parts: StepperParts,
    piece: _Piece,
    param: Array,
    element: Callable[[int], tuple[int, ...]],
) -> Iterator[Compared]:
    """The bfloat16 weight, the codes and the amax that the step also writes, from its parameter."""
    copies: WeightCopies = parts.copies[piece.place]
    fmt, visible = copies.code_format, param

    def compared(output: str, tensor: Tensor, expected: Array) -> Compared:
        actual = _slice(tensor, piece.start, piece.stop)[piece.chosen]
        return Compared(
            output,
            actual,
            expected,
            element,
            lambda i: {"param": param[i]},
            piece.period,
            lambda _: piece.place,
        )

    def narrow(values: Array, target: Any, scale: float | None) -> Array:
        if look.slow:
            wide = values.astype(np.float64).tolist()
            return slow.narrow_codes(wide, target, scale)
        overflow = "ieee" if scale is None else "saturate"
        return quantize(values, target, scale=scale, overflow=overflow)

    if copies.weight is not None:
        visible = narrow(param, BFLOAT16, None)
        yield compared("weight copy", copies.weight, visible)
    if copies.codes is None:
        return
    assert copies.scale is not None
    assert copies.amax is not None
    yield compared("weight codes", copies.codes, narrow(visible, fmt, float(copies.scale)))
    whole = to_numpy(parts.params[piece.place] if copies.weight is None else copies.weight)
    largest = slow_amax(whole) if look.slow else amax(whole)
    yield Compared(
        "weight amax",
        np.array(to_numpy(copies.amax), np.float32).reshape(1),
        np.maximum(np.float32(piece.amax), np.float32(largest)).reshape(1),  # NaN stays
        lambda _: (0,),
        lambda _: {"amax before": np.float32(piece.amax)},
        owner=lambda _: piece.place,
    )
