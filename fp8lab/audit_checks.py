"""How the audit computes each FP8 operation of a layer again, from the bits that went in.

A check is begun before the operation runs, when it keeps what the operation will overwrite and
draws its sample, and is finished with the result. It gives `Compared` outputs and judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fp8lab import audit_slow as slow
from fp8lab.audit_sampling import Places, Sampler
from fp8lab.bridge import to_numpy
from fp8lab.emulation import casting, scaling
from fp8lab.emulation.gradients import gradient_norm
from fp8lab.observe import Arguments
from fp8lab.ops_operands import Codes

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Compared:
    """Some elements of one output of an operation, as they are and as they should be.

    Attributes:
        output: Which output.
        actual, expected: 1-D, of one dtype.
        element: From a place in those to the element's index in the output.
        inputs: From such a place to what that element was computed from, by name.
        period: After how many checks every element was compared once.
        owner: Whose output it is, where that is not the layer that runs: a cast, a parameter.
        left_out: How many elements of the sample were not compared, and why.
    """

    output: str
    actual: Array
    expected: Array
    element: Callable[[int], tuple[int, ...]]
    inputs: Callable[[int], dict[str, Any]]
    period: int = 1
    owner: Callable[[int], Any] | None = None
    left_out: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class Look:
    """One operation, about to run.

    Attributes:
        given: Its arguments by name.
        name: Of the layer and the operation: what samples are drawn by.
        sampler: Draws them.
        slow: Whether the slow form computes; else the oracle does.
        sample: How many elements of a product; 16 times as many of everything else.
    """

    given: Arguments
    name: str
    sampler: Sampler
    slow: bool
    sample: int

    @property
    def elements(self) -> int:
        """How many elements of what is not a product."""
        return 16 * self.sample


Outputs = Iterator[Compared]
Check = Callable[[Look], Callable[[Any], Outputs]]


def picked(matrix: Tensor, rows: Places, columns: Places) -> Array:
    """The elements of a matrix at pairs of indices, whatever its type and strides."""
    bits = matrix.detach()
    if bits.element_size() == 1:
        bits = bits.view(torch.uint8)
    device = matrix.device
    found = bits[torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)]
    return to_numpy(found.view(matrix.dtype))


def cast(look: Look) -> Callable[[Any], Outputs]:
    """`ops_linear.tensor_codes`: codes in both layouts, amax, inverse scale."""
    x, fmt, amax_out = (look.given[name] for name in ("x", "fmt", "amax_out"))
    scale = np.array(to_numpy(look.given["scale"]), np.float32).reshape(())
    before = None if amax_out is None else float(amax_out)
    rows, columns = divided(look, x.shape)

    def finish(layouts: Any) -> Outputs:
        values = picked(x, rows.places, columns.places)
        if look.slow:
            expected = slow.codes(values, fmt, [float(scale)] * len(values))
        else:
            expected = casting.quantize(values, fmt, scale=scale)

        def inputs(i: int) -> dict[str, Any]:
            return {"x": values[i], "scale": scale}

        if layouts.plain is not None:
            actual = picked(layouts.plain.codes, rows.places, columns.places)
            yield Compared("codes", actual, expected, at(rows, columns), inputs, rows.period)
        if layouts.transposed is not None:
            actual = picked(layouts.transposed.codes, columns.places, rows.places)
            element = at(columns, rows)
            yield Compared("transposed codes", actual, expected, element, inputs, rows.period)
        if before is not None:
            largest = slow.amax(to_numpy(x)) if look.slow else float(scaling.amax(to_numpy(x)))
            seen = (before, largest)
            merged = math.nan if any(map(math.isnan, seen)) else max(seen)
            yield single("amax", amax_out, merged, {"amax before": np.float32(before)})
        wanted = slow.inverse(float(scale)) if look.slow else scaling.inverse_scale(scale)
        yield single("inverse scale", look.given["inverse"], wanted, {"scale": scale})

    return finish


@dataclass(frozen=True)
class Axis:
    """One index of each sampled element."""

    places: Places
    period: int


def divided(look: Look, shape: Any) -> tuple[Axis, Axis]:
    """Elements of a matrix, drawn one by one: row and column of each."""
    places, period = look.sampler.elements(look.name, shape[0] * shape[1], look.elements)
    rows, columns = np.divmod(places, max(shape[1], 1))
    return Axis(rows, period), Axis(columns, period)


def at(first: Axis, second: Axis) -> Callable[[int], tuple[int, ...]]:
    """From a place in a sample to the element's index."""
    return lambda i: (int(first.places[i]), int(second.places[i]))


def single(output: str, actual: Tensor, expected: Any, inputs: dict[str, Any]) -> Compared:
    """An output of one float32."""
    found = np.array(to_numpy(actual), np.float32).reshape(1)
    wanted = np.array(expected, np.float32).reshape(1)
    return Compared(output, found, wanted, lambda _: (0,), lambda _: inputs)


def amax(look: Look) -> Callable[[Any], Outputs]:
    """`ops.amax`."""

    def finish(found: Tensor) -> Outputs:
        x = to_numpy(look.given["x"])
        largest = slow.amax(x) if look.slow else scaling.amax(x)
        yield single("amax", found, largest, {})

    return finish


def scale(look: Look) -> Callable[[Any], Outputs]:
    """`ops.current_scale`: the scale of an amax, and its inverse."""
    given = look.given
    fmt, power, torchao = given["fmt"], given["power_of_two"], given["preset"] == "torchao"

    def wanted(amaxes: Array) -> Array:
        if look.slow and torchao:
            found = [slow.torchao_scale(v, fmt, power_of_two=power) for v in slow.floats(amaxes)]
        elif look.slow:
            options = {"margin": given["margin"], "power_of_two": power}
            found = [slow.scale_from(v, fmt, **options) for v in slow.floats(amaxes)]
        elif torchao:
            own = scaling.current_scale(amaxes, fmt, preset="torchao", power_of_two=power)
            return np.where(np.isfinite(own) & (own > 0), own, np.float32(1))
        else:
            return scaling.scale_from_amax(amaxes, fmt, margin=given["margin"], power_of_two=power)
        return np.array(found, np.float32)

    def finish(found: Any) -> Outputs:
        amaxes = np.array(to_numpy(given["amax"]), np.float32).reshape(-1)
        scales = wanted(amaxes)
        inverses = scaling.inverse_scale(scales)
        if look.slow:
            inverses = np.array([slow.inverse(v) for v in slow.floats(scales)], np.float32)
        for output, actual, expected in (
            ("scale", found[0], scales),
            ("inverse scale", found[1], inverses),
        ):
            flat = to_numpy(actual).reshape(-1)
            yield Compared(output, flat, expected, lambda i: (i,), lambda i: {"amax": amaxes[i]})

    return finish


def scale_update(look: Look) -> Callable[[Any], Outputs]:
    """`ops.update_delayed_`: scales and histories of many casts."""
    given = look.given
    names = ("margin", "algorithm", "power_of_two")
    options = {name: given[name] for name in names}
    fmt, group = given["fmt"], given["group_amax"]
    before, history = np.array(to_numpy(given["scale"])), np.array(to_numpy(given["amax_history"]))
    group = None if group is None else np.array(to_numpy(group)).reshape(before.shape)

    def wanted() -> tuple[Array, Array]:
        if not look.slow:
            state = scaling.DelayedScalingState(before, history)
            new = scaling.update_delayed(state, fmt, group_amax=group, **options)
            return new.scale.reshape(-1), new.amax_history.reshape(len(history), -1)
        columns = history.reshape(len(history), -1).T.tolist()
        groups = [None] * before.size if group is None else group.reshape(-1).tolist()
        rows = zip(before.reshape(-1).tolist(), columns, groups, strict=True)
        found = [slow.update(s, h, fmt, group_amax=own, **options) for s, h, own in rows]
        return (
            np.array([s for s, _ in found], np.float32),
            np.array([h for _, h in found], np.float32).reshape(before.size, len(history)).T,
        )

    def finish(_: Any) -> Outputs:
        scales, histories = wanted()
        count = max(before.size, 1)

        def inputs(i: int) -> dict[str, Any]:
            place = i % count
            amaxes = history.reshape(len(history), -1)[:, place]
            return {"scale": before.reshape(-1)[place], "amax history": amaxes}

        def owner(i: int) -> int:
            return i % count

        after = to_numpy(given["scale"]).reshape(-1)
        yield Compared("scale", after, scales, lambda i: (i,), inputs, owner=owner)
        after = np.ascontiguousarray(to_numpy(given["amax_history"])).reshape(-1)
        wide = np.ascontiguousarray(histories).reshape(-1)
        yield Compared("amax history", after, wide, lambda i: divmod(i, count), inputs, owner=owner)

    return finish


def dequantize(look: Look) -> Callable[[Any], Outputs]:
    """`ops_operands.Codes.decoded`: codes times their inverse scales."""
    codes: Codes = look.given["self"]
    rows, columns = divided(look, codes.codes.shape)

    def finish(found: Tensor) -> Outputs:
        some = picked(codes.codes, rows.places, columns.places)
        inverse = inverses_at(codes, rows.places, columns.places)
        if look.slow:
            expected = slow.decoded(some, slow.floats(inverse))
        else:
            expected = casting.dequantize(some, inverse_scale=inverse)
        actual = picked(found, rows.places, columns.places)
        yield Compared(
            "values",
            actual,
            expected,
            at(rows, columns),
            lambda i: {"code": some[i], "inverse_scale": inverse[i]},
            rows.period,
        )

    return finish


def inverses_at(codes: Codes, rows: Places, columns: Places) -> Array:
    """The float32 inverse scale of some elements."""
    table = to_numpy(codes.inverse)
    if codes.block is None:
        found = np.broadcast_to(table.reshape(-1)[:1], rows.shape)
    else:
        down, across = codes.block
        found = table[rows // down if down else 0, columns // across if across else 0]
        found = np.broadcast_to(found, rows.shape)
    if found.dtype == ml_dtypes.float8_e8m0fnu:
        words = found.view(np.uint8).reshape(-1).tolist()
        return np.array([slow.mx_value(word) for word in words], np.float32)
    return np.asarray(found, np.float32)


def norm(look: Look) -> Callable[[Any], Outputs]:
    """`ops_gradients.GradientNorm`: norm, skip flag and factor of all gradients."""
    given = look.given

    def finish(found: Any) -> Outputs:
        grads = [to_numpy(grad.detach()) for grad in given["grads"]]
        unscale, limit = float(given["inverse_scale"]), given["self"].max_norm
        if look.slow:
            wanted: tuple[Any, ...] = slow.norm(grads, unscale, limit)
        else:
            seen = gradient_norm(grads, inverse_scale=unscale, max_norm=limit)
            wanted = (seen.norm, int(not seen.finite), seen.factor)
        inputs = {"inverse_scale": np.float32(unscale)}
        yield single("norm", found.norm, wanted[0], inputs)
        yield single("skip", found.skip, wanted[1], inputs)
        yield single("factor", found.factor, wanted[2], inputs | {"norm": np.float32(wanted[0])})

    return finish
