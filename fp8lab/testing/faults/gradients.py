"""Hypotheses of gradients: the norm, the clip coefficient, unscaling with its finite check."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.gradients import clip_coefficient, gradient_norm, order_free_sum
from fp8lab.testing.faults.hypothesis import NARROW, Arrays, Hypothesis, Settings, float32, flushed

Array = npt.NDArray[Any]
F32 = np.float32
_ONE = F32(1)
_EPS = F32(1e-6)
_TAILS = (32, 128, 1024, 16384)


def _is_gradient(name: str) -> bool:
    return name.startswith("gradients[")


def _gradients(arrays: Arrays) -> list[Array]:
    return [float32(array) for name, array in arrays.items() if _is_gradient(name)]


def of_norm(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_norm`."""
    name = next(iter(expected), "norm")
    for fault, norm in _norms(_gradients(inputs)):
        yield fault, {name: float32(norm)}


def _norms(grads: list[Array]) -> Iterator[tuple[str, Any]]:
    """Wrong norms of all gradients together."""
    flat = np.concatenate([np.zeros(0, np.float32), *(g.reshape(-1) for g in grads)])
    right = _norm(grads)
    without_nan = [np.where(np.isnan(g), F32(0), g) for g in grads]
    finite = [np.where(np.isfinite(g), g, F32(0)) for g in grads]
    yield "nan-lost", _norm(without_nan)
    yield "infinity-lost", _norm(finite)
    everywhere = bool(np.isfinite(flat).all())
    for fault, other in (("nan-lost", np.inf), ("infinity-lost", np.nan), ("infinity-lost", 0)):
        yield fault, right if everywhere else other
    yield "last-tensor-left-out", _norm(grads[:-1])
    yield "last-tensor-left-out", _norm(grads[1:])
    yield "empty-tensor-ends-list", _norm(list(takewhile(lambda g: g.size > 0, grads)))
    for size in _TAILS:
        yield "tail-left-out", _norm([g.reshape(-1)[: g.size // size * size] for g in grads])
    yield "tail-left-out", _norm([g.reshape(-1)[:-1] for g in grads])
    yield from _sums(grads, flat)
    yield "largest-for-norm", np.abs(flat).max(initial=F32(0))
    yield "sum-of-magnitudes", F32(np.abs(flat.astype(np.float64)).sum())
    for narrow in NARROW:
        yield "input-in-16-bits", _norm([narrow(g) for g in grads])
        yield "result-in-16-bits", narrow(right)


def _sums(grads: list[Array], flat: Array) -> Iterator[tuple[str, Any]]:
    """Sums of squares in other orders and types."""
    wide = flat.astype(np.float64) ** 2
    parts = [g.reshape(-1).astype(np.float64) ** 2 for g in grads]
    for total in (
        _sequential(wide),
        _sequential(wide[::-1]),
        wide.sum(),
        _sequential(np.array([part.sum() for part in parts], dtype=np.float64)),
        _sequential(np.array([_sequential(part) for part in parts], dtype=np.float64)),
    ):
        yield "sum-in-plain-order", F32(np.sqrt(total))
    # The tree's own way to add, without its lanes and leaves.
    every = order_free_sum(np.concatenate([np.zeros(1), wide]))
    yield "sum-in-plain-order", F32(np.sqrt(every))
    squares = flat * flat
    for total in (_sequential(squares), _sequential(squares[::-1]), squares.sum(dtype=np.float32)):
        yield "sum-in-float32", np.sqrt(total)
    yield "sum-in-float32", F32(np.sqrt(squares.astype(np.float64).sum()))
    narrow = [g.reshape(-1) * g.reshape(-1) for g in grads]
    for totals in ([_sequential(part) for part in narrow], [part.sum() for part in narrow]):
        yield "sum-in-float32", np.sqrt(_sequential(float32(totals)))
        yield "sum-in-float32", _combined(np.sqrt(float32(totals)))
    norms = float32([_norm([g]) for g in grads])
    yield "norm-of-rounded-norms", _combined(norms)
    yield "norm-of-rounded-norms", _norm([norms])
    yield "root-in-float32", np.sqrt(F32(wide.sum()))
    yield "root-missing", F32(wide.sum())
    yield "mean-for-sum", F32(np.sqrt(wide.sum() / max(flat.size, 1)))


def _norm(grads: list[Array]) -> F32:
    return gradient_norm(grads).norm


def _sequential(terms: Array) -> Any:
    """One term after the other, in the terms' own type, from zero."""
    return np.add.accumulate(terms)[-1] if terms.size else terms.dtype.type(0)


def _combined(norms: Array) -> Any:
    return np.sqrt(_sequential(norms * norms))


def of_clip(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_clip`."""
    grads, limit = _gradients(inputs), float(inputs["max_norm"])
    bound, norm = F32(limit), _norm(grads)
    right = clip_coefficient(norm, limit)

    def named(results: list[Array]) -> Arrays:
        return dict(zip(expected, map(float32, results), strict=True))

    for fault, coefficient in _coefficients(grads, limit, norm):
        yield fault, named([g * F32(coefficient) for g in grads])
    divisor = np.maximum((norm + _EPS) / bound, _ONE)
    yield "clip-divides", named([g / divisor for g in grads])
    each = [clip_coefficient(_norm([g]), limit) for g in grads]
    yield "clip-each-tensor", named([g * c for g, c in zip(grads, each, strict=True)])
    yield "clip-by-value", named([np.clip(g, -bound, bound) for g in grads])
    clipped = [g * right for g in grads]
    for narrow in NARROW:
        yield "result-in-16-bits", named([narrow(g) for g in clipped])
    yield "last-tensor-left-out", named([*clipped[:-1], *grads[-1:]])
    yield "last-tensor-left-out", named([*grads[:1], *clipped[1:]])


def _coefficients(grads: list[Array], limit: float, norm: F32) -> Iterator[tuple[str, Any]]:
    """Wrong coefficients, each a number."""
    bound, right = F32(limit), clip_coefficient(norm, limit)
    for number in (1.0, 0.0):
        yield "clip-of-nan", number if np.isnan(right) else right
    yield "coefficient-divided", np.minimum(bound / (norm + _EPS), _ONE)
    yield "coefficient-in-float64", np.minimum(limit / (np.float64(norm) + 1e-6), 1.0)
    yield "eps-missing", np.minimum((_ONE / norm) * bound, _ONE)
    yield "eps-missing", np.minimum(bound / norm, _ONE)
    for coefficient in (bound / norm, (_ONE / norm) * bound):
        yield "eps-missing", coefficient if norm > bound else _ONE
    for coefficient in (bound / (norm + _EPS), (_ONE / (norm + _EPS)) * bound):
        yield "eps-missing", coefficient if norm > bound else _ONE
    for eps in (1e-5, 1e-7, 1e-8, 1e-12):
        yield "wrong-eps", np.minimum((_ONE / (norm + F32(eps))) * bound, _ONE)
    yield "clip-not-clamped", (_ONE / (norm + _EPS)) * bound
    yield "clip-not-clamped", bound / (norm + _EPS)
    yield "clip-missing", _ONE
    for narrow in NARROW:
        yield "scale-in-16-bits", narrow(right)
    for fault, other in _norms(grads):
        yield fault, clip_coefficient(F32(other), limit)


def of_unscale(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_unscale`."""
    grads = _gradients(inputs)
    inverse = F32(next(array for name, array in inputs.items() if not _is_gradient(name)))
    flag = next(name for name in expected if not _is_gradient(name))
    names = [name for name in expected if _is_gradient(name)]
    unscaled = [g * inverse for g in grads]
    right = _any_not_finite(unscaled)

    def outputs(results: list[Array], found: bool) -> Arrays:
        arrays = dict(zip(names, map(float32, results), strict=True))
        like = expected[flag]
        return {**arrays, flag: np.asarray(found).astype(like.dtype).reshape(like.shape)}

    for fault, found in _flags(grads, unscaled, right):
        yield fault, outputs(unscaled, found)
    finite = [np.where(np.isfinite(g), g, F32(0)) for g in unscaled]
    for found in (right, False):
        yield "nonfinite-zeroed", outputs(finite, found)
    yield "scale-divides", outputs([g / inverse for g in grads], right)
    yield "scale-inverted-twice", outputs([g / (_ONE / inverse) for g in grads], right)
    yield "scale-ignored", outputs(grads, right)
    yield "scale-twice", outputs([g * inverse * inverse for g in grads], right)
    for results in _in_float16(grads, inverse):
        yield results[0], outputs(results[1], right)
    yield "result-flushed", outputs([flushed(g) for g in unscaled], right)
    yield "subnormal-inputs-flushed", outputs([flushed(g) * inverse for g in grads], right)
    yield "last-tensor-left-out", outputs([*unscaled[:-1], *grads[-1:]], right)


def _in_float16(grads: list[Array], inverse: F32) -> Iterator[tuple[str, list[Array]]]:
    for narrow in NARROW:
        yield "scale-in-16-bits", [g * narrow(inverse) for g in grads]
        yield "result-in-16-bits", [narrow(g * inverse) for g in grads]
        yield "input-in-16-bits", [narrow(g) * inverse for g in grads]


def _flags(grads: list[Array], unscaled: list[Array], right: bool) -> Iterator[tuple[str, bool]]:
    """Wrong answers to whether something is not finite."""
    yield "nan-lost", any(np.isinf(g).any() for g in unscaled)
    yield "infinity-lost", any(np.isnan(g).any() for g in unscaled)
    yield "infinity-lost", any(((g == np.inf) | np.isnan(g)).any() for g in unscaled)
    yield "check-before-unscaling", _any_not_finite(grads)
    yield "last-tensor-left-out", _any_not_finite(unscaled[:-1])
    yield "last-tensor-left-out", _any_not_finite(unscaled[1:])
    yield "last-tensor-alone", _any_not_finite(unscaled[-1:])
    yield "last-tensor-alone", _any_not_finite(unscaled[:1])
    for size in _TAILS:
        whole = [g.reshape(-1)[: g.size // size * size] for g in unscaled]
        yield "tail-left-out", _any_not_finite(whole)
    total = float32([g.sum(dtype=np.float32) for g in unscaled]).sum(dtype=np.float32)
    yield "check-by-sum", not np.isfinite(total)
    yield "check-missing", False
    yield "check-inverted", not right


def _any_not_finite(grads: list[Array]) -> bool:
    return any(not np.isfinite(g).all() for g in grads)
