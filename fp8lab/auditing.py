"""The audit: every FP8 operation that runs inside is computed again, from the bits that went in.

    with fp8lab.audit(every=100) as report:
        train(model)
    print(report)

What a kernel computed (on a GPU, or in Triton's interpreter) is held to the oracle; what the oracle
computed itself, to its slow form. The first differing bit raises, with layer, operation, element,
input bits, the expected value and the actual one. `docs/audit.md` says what is checked and how.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8lab.audit_arguments import check_choices, integer
from fp8lab.audit_blocks import block_cast
from fp8lab.audit_checks import (
    Check,
    Compared,
    Look,
    amax,
    cast,
    dequantize,
    norm,
    scale,
    scale_update,
)
from fp8lab.audit_names import Names
from fp8lab.audit_optimizer import (
    counted_optimizer,
    fp8_state,
    optimizer,
    powers_are_the_cards,
)
from fp8lab.audit_product import product
from fp8lab.audit_report import KEPT, AuditError, AuditReport, Difference, Line
from fp8lab.audit_sampling import Sampler
from fp8lab.errors import UserError
from fp8lab.linear_state import DelayedGroup
from fp8lab.observe import Arguments, Finish, Where, observing, reaches
from fp8lab.ops_adamw_steppers import KernelStepper
from fp8lab.ops_linear import computed_by_kernel
from fp8lab.recipes import OPERANDS
from fp8lab.testing.comparison import differing

__all__ = ["AuditError", "AuditReport", "Difference", "audit"]

CHECKS: dict[str, Check] = {
    "cast": cast,
    "block_cast": block_cast,
    "amax": amax,
    "scale": scale,
    "scale_update": scale_update,
    "dequantize": dequantize,
    "product": product,
    "norm": norm,
    "optimizer": optimizer,
    "counted_optimizer": counted_optimizer,
}
# Those of a layer: the first of them after a step is the beginning of the next.
OF_LAYERS = ("cast", "block_cast", "amax", "scale", "dequantize", "product")
BY_ORACLE, BY_SLOW = 4096, 4  # elements of a product, by who computes them
ALL_CASTS = "all delayed casts"  # whose scales are moved on together


@contextmanager
def audit(
    every: int = 1,
    sample: int | None = None,
    *,
    on_difference: str = "raise",
    seed: int = 0,
    slow: bool = False,
    model: nn.Module | None = None,
) -> Iterator[AuditReport]:
    """Inside, compute FP8 operations again and compare their bits.

    Args:
        every: Every how many steps, from the first on. A step ends with a step of an optimizer and
            the `advance_scaling` after it, and the next begins with the next operation of a layer;
            where neither ever happens (inference), everything is one step.
        sample: How many elements of each product are computed again, by whole rows of both
            operands; of casts, decoded codes and parameters 16 times as many. What has no more
            elements is checked whole; amaxes, norms, scales of tensors and scale updates always
            are. None is 4096 where the oracle computes, 4 where its slow form does. Which elements
            is decided by the seed; every element comes once in a period, which the report gives.
        on_difference: "raise" an `AuditError` at the first differing bit, or "count" them.
        seed: Of the samples, any integer that fits 64 bits, signed or unsigned.
        slow: Whether what kernels compute is held to the slow form, too.
        model: Names layers and parameters in the report. Layers that `fp8lab.convert` made and
            models that `UpdateStep` or `advance_scaling` moves on are known without it.

    Yields:
        The report, which grows.

    Raises:
        UserError: An argument that is not accepted, no FP8 operation inside, or a graph of
            `torch.compile` or a CUDA graph being captured inside.
        AuditError: A bit differs.

    Audits may be nested, and each thread has its own; a backward pass on a GPU, which has a thread
    of its own, is seen by all that are open.
    """
    check_choices(on_difference, slow, model)
    every = integer("every", every, 1, "1 and up")
    seed = integer("seed", seed, -(2**63), "from -2**63 to 2**64 - 1", 2**64 - 1)
    if sample is not None:
        sample = integer("sample", sample, 1, "1 and up, or None for the default")
    own = _Audit(every, sample, on_difference == "raise", Sampler(seed), slow, model)
    handle = register_optimizer_step_post_hook(own.after_optimizer)
    try:
        with observing(own):
            yield own.report
    finally:
        handle.remove()
    if not own.fp8:
        raise UserError(
            "no FP8 operation ran inside the audit; turn layers into FP8 ones with fp8lab.convert"
            " (a recipe other than bf16), and run the model inside the `with`"
        )


class _Audit:
    """An audit that is open: an `Observer`."""

    def __init__(
        self,
        every: int,
        sample: int | None,
        raises: bool,
        sampler: Sampler,
        slow: bool,
        model: nn.Module | None,
    ) -> None:
        self.every, self.sample, self.raises = every, sample, raises
        self.sampler, self.slow = sampler, slow
        self.report = AuditReport()
        self.fp8 = False
        self.names = Names()
        if model is not None:
            self.note_model(model)
        self._ended = True
        self._stepped: set[int] = set()  # the optimizers that stepped in this step
        self._lock = threading.Lock()

    def note_model(self, model: nn.Module) -> None:
        """See `Observer`."""
        self.names.note_model(model)

    def end_step(self) -> None:
        """See `Observer`."""
        self._ended = True

    def after_optimizer(self, *_: Any) -> None:
        """Called after a step of any optimizer of the process."""
        if reaches(self):
            self.end_step()

    def before(self, operation: str, given: Arguments, where: Where) -> Finish | None:
        """See `Observer`."""
        self._count_step(operation, given)
        if operation in OF_LAYERS or operation == "scale_update":
            self.fp8 = True
        stepper = operation.endswith("optimizer")
        if stepper:
            self.fp8 = self.fp8 or fp8_state(given)
        if where and isinstance(where[0], nn.Module):
            self.names.note_layer(where[0])
        if (self.report.steps - 1) % self.every:
            return None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UserError(
                "the audit reads values on the host, which a CUDA graph cannot capture; capture"
                " outside of it"
            )
        kernel = _by_kernel(operation, given)
        if stepper and kernel and powers_are_the_cards(given):
            self._leave_out(1, "AdamW steps with powers that are the card's own")
            return None
        forms = ([False] if kernel else []) + ([True] if self.slow or not kernel else [])
        layer, what = self._layer(where), _what(operation, where)
        begun = []
        for slow in forms:
            count = self.sample or (BY_SLOW if slow else BY_ORACLE)
            name = f"{layer}, {what}, {slow}"
            begun.append((slow, CHECKS[operation](Look(given, name, self.sampler, slow, count))))

        def finish(result: Any) -> None:
            for slow, check in begun:
                form = "slow form" if slow else "oracle"
                for compared in check(result):
                    self._compare(
                        compared, layer, what, form, partial(self._owner, compared, where, given)
                    )

        return finish

    def _count_step(self, operation: str, given: Arguments) -> None:
        begins = self._ended and operation in OF_LAYERS
        if operation.endswith("optimizer"):
            stepper = id(given["self"])
            begins = self._ended and stepper in self._stepped
            if begins:
                self._stepped.clear()
            self._stepped.add(stepper)
        elif begins:
            self._stepped.clear()
        if begins or self.report.steps == 0:
            self._ended = False
            self.report.steps += 1
            self.report.audited += not (self.report.steps - 1) % self.every

    def _leave_out(self, count: int, what: str) -> None:
        if count:
            self.report.unchecked[what] = self.report.unchecked.get(what, 0) + count

    def _compare(
        self,
        compared: Compared,
        layer: str,
        what: str,
        form: str,
        owner: Callable[[int], str | None],
    ) -> None:
        where = differing(compared.actual, compared.expected)
        first = int(where[0]) if where.size else 0
        # The update of all delayed casts together is one line of the report.
        of_line = layer if what == "scale update" else owner(0) or layer
        # "scale of input" for the scale itself, "scale of input, inverse scale" for the other.
        itself = compared.output in (what.split(" of ")[0], "product")
        output = "" if itself else f", {compared.output}"
        operation = f"{what}{output}"
        with self._lock:
            report = self.report
            line = report.lines.setdefault((of_line, operation), Line())
            line.checks += 1
            line.elements += compared.expected.size
            line.differences += where.size
            line.period = max(line.period, compared.period)
            report.checked += 1
            report.elements += compared.expected.size
            report.differences += where.size
            self._leave_out(*compared.left_out)
        if not where.size:
            return
        difference = Difference(
            report.steps,
            owner(first) or layer,
            operation,
            compared.element(first),
            compared.inputs(first),
            compared.expected[first],
            compared.actual[first],
            int(where.size),
            compared.expected.size,
            form,
        )
        with self._lock:
            if len(report.found) < KEPT:
                report.found.append(difference)
        if self.raises:
            raise AuditError(difference)

    def _layer(self, where: Where) -> str:
        """The name of what runs; "-" outside of layers."""
        if not where:
            return "-"
        return self.names.layer(where[0]) if isinstance(where[0], nn.Module) else ALL_CASTS

    def _owner(self, compared: Compared, where: Where, given: Arguments, i: int) -> str | None:
        """The parameter or cast whose output an element is; None for the layer's own."""
        if compared.owner is None:
            return None
        place = compared.owner(i)
        if where and isinstance(where[0], DelayedGroup):
            return self.names.cast(where[0].casts[place])
        if "grads" in given:
            return self.names.parameter(given["self"].parts.params[place], place)
        return None


def _what(operation: str, where: Where) -> str:
    """An operation with the role or product that it is part of."""
    part = where[1] if len(where) > 1 else ""
    if operation == "product":
        return f"{part} product" if part else "product"
    name = {"block_cast": "cast", "counted_optimizer": "optimizer", "scale_update": "scale update"}
    shown = name.get(operation, operation)
    return f"{shown} of {part}" if part in OPERANDS else shown


def _by_kernel(operation: str, given: Arguments) -> bool:
    """Whether a kernel computes it; otherwise the oracle does."""
    if operation.endswith("optimizer"):
        return isinstance(given["self"], KernelStepper)
    if operation == "norm":
        return bool(given["grads"][0].is_cuda)
    if operation == "dequantize":
        return bool(given["self"].codes.is_cuda)
    if operation in ("cast", "block_cast"):
        return computed_by_kernel(given["x"], given.get("policy"))
    if operation == "product":
        return computed_by_kernel(given["a"].codes)
    tensor: Tensor = given["scale" if operation == "scale_update" else next(iter(given))]
    return tensor.is_cuda
