"""How parameters moved in a step: norms of weights, gradients, updates and moments; histograms.

An entry of a parameter has, each where there is such a thing:

    weight_norm        after the step
    grad_norm          of `main_grad` or `grad` as it lies there after the step; the lab's AdamW
                       leaves gradients as they are, so that they are unscaled here; left out where
                       their scale is not known, see `fp8lab.telemetry_scales`
    update_norm        of weight after less weight before, from a copy that a watched step makes:
                       exact for every optimizer, clip, decay and skipped step; costs the memory of
                       the weights on that step
    exp_avg_norm, exp_avg_sq_norm       of the decoded moments
    exp_avg_bins, exp_avg_sq_bins       64 counts by magnitude, see
                       `fp8lab.emulation.telemetry.magnitude_bins`

Norms are torch's, in float64, whose order of summation is torch's own; rows show ten digits. Bins
are integers. Moments that are stored expanded are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8lab.conversion_names import is_matched
from fp8lab.errors import UserError
from fp8lab.ops_telemetry import Words, magnitude_bins
from fp8lab.optimizer_formats import MomentFormat
from fp8lab.telemetry_scales import GradientScales

MOMENTS = ("exp_avg", "exp_avg_sq")


class ParameterWatch:
    """The parameters of a model on a watched step.

    Args:
        model: Whose.
        scales: Of its gradients; the optimizer there is that of the moments.
        patterns: Of `fnmatch`, one of which the name of a parameter's module must match.
    """

    def __init__(
        self,
        model: nn.Module,
        scales: GradientScales,
        patterns: Sequence[str],
    ) -> None:
        self._params = {
            name: param
            for name, param in model.named_parameters()
            if param.requires_grad and is_matched(name.rpartition(".")[0], patterns)
        }
        self._scales = scales
        self._before: list[Tensor] = []
        self._keys: list[tuple[str, str]] = []  # of the numbers, then of the bins
        self._numbers = 0

    @torch.no_grad()
    def begin(self) -> None:
        """Keep the weights, and the loss scale of this step."""
        weights = self._weights()
        self._before = [torch.empty_like(own) for own in weights]
        if weights:
            torch._foreach_copy_(self._before, weights)
        self._scales.begin()

    def forget(self) -> None:
        """Drop what `begin` kept: the step was not finished."""
        self._before = []
        self._scales.forget()

    @torch.no_grad()
    def tensors(self) -> list[Tensor]:
        """Queue all numbers of the step; what `entries` wants on the host.

        Raises:
            UserError: The scale of the gradients is ambiguous, see `GradientScales.of`.
        """
        names, weights = list(self._params), self._weights()
        found = _keyed(names, "weight_norm", _norms(weights))
        try:
            found += self._gradient_norms()
        except UserError:
            self.forget()
            raise
        if weights:
            torch._foreach_sub_(self._before, weights)  # the update with its sign changed
        found += _keyed(names, "update_norm", _norms(self._before))
        self.forget()
        bins: list[tuple[tuple[str, str], Tensor]] = []
        for moment in MOMENTS:
            decoded = {name: self._moment(param, moment) for name, param in self._params.items()}
            values = {name: own for name, own in decoded.items() if own is not None}
            found += _keyed(values, f"{moment}_norm", _norms(list(values.values())))
            bins += _keyed(values, f"{moment}_bins", magnitude_bins(list(values.values())))
        self._keys = [key for key, _ in (*found, *bins)]
        self._numbers = len(found)
        return [own for _, own in (*found, *bins)]

    def entries(self, words: Sequence[Words]) -> dict[str, dict[str, Any]]:
        """What a row says, by name.

        Args:
            words: `tensors`, brought to the host.
        """
        found: dict[str, dict[str, Any]] = {name: {} for name in self._params}
        for place, ((name, key), own) in enumerate(zip(self._keys, words, strict=True)):
            if place < self._numbers:
                found[name][key] = float(f"{float(own.view(np.float64)):.10g}")
            else:
                found[name][key] = own.tolist()
        return found

    def _weights(self) -> list[Tensor]:
        return [param.detach() for param in self._params.values()]

    def _gradient_norms(self) -> list[tuple[tuple[str, str], Tensor]]:
        names = {id(param): name for name, param in self._params.items()}
        grads: dict[str, Tensor] = {}
        unscales: dict[int, tuple[Tensor, list[str]]] = {}  # by identity; one for most models
        for param, unscale in self._scales.of(self._params.values()):
            grad = getattr(param, "main_grad", None)
            grad = param.grad if grad is None else grad
            if grad is None:
                continue
            grads[name := names[id(param)]] = grad.detach()
            if unscale is not None:
                unscales.setdefault(id(unscale), (unscale, []))[1].append(name)
        norms = dict(zip(grads, _norms(list(grads.values())), strict=True))
        for unscale, scaled in unscales.values():
            torch._foreach_mul_([norms[name] for name in scaled], unscale)
        return _keyed(norms, "grad_norm", list(norms.values()))

    def _moment(self, param: Tensor, name: str) -> Tensor | None:
        optimizer = self._scales.optimizer
        state = {} if optimizer is None else optimizer.state.get(param, {})
        formats = getattr(optimizer, "formats", None)
        return moment_values(state, name, getattr(formats, name, None))


def moment_values(state: dict[str, Any], name: str, fmt: MomentFormat | None) -> Tensor | None:
    """A moment as float32: element times inverse scale, rounded, as `read_moment` of the oracle.

    Args:
        state: An optimizer's, of one parameter.
        name: The moment's.
        fmt: How it is stored, where that is known.

    Returns:
        float32; None where there is no such moment, or where it is stored expanded.
    """
    codes = state.get(name)
    if codes is None or f"{name}_power" in state:
        return None
    values: Tensor = codes.detach().float()
    scale: Tensor | None = state.get(f"{name}_scale")
    if scale is not None and (fmt is None or fmt.block is None):
        values = values * scale.reshape(())
    elif scale is not None and fmt is not None and fmt.block is not None:
        wide = scale.reshape(-1).repeat_interleave(fmt.block)[: values.numel()]
        values = values * wide.reshape(values.shape)
    return values


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each, float64, 0-d."""
    if not tensors:
        return []
    return list(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))


def _keyed(
    names: Iterable[str], key: str, tensors: Sequence[Tensor]
) -> list[tuple[tuple[str, str], Tensor]]:
    return [((name, key), own) for name, own in zip(names, tensors, strict=True)]
