"""The lab's AdamW as a torch optimizer, with its state in any of the lab's formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from fp8lab.ops_adamw import (
    AdamFormats,
    StepNumbers,
    Stepper,
    WeightCopies,
    fresh_state,
)
from fp8lab.ops_adamw_counted import CountedNumbers, numbers_row
from fp8lab.ops_adamw_steppers import make_stepper
from fp8lab.optimizer_formats import MASTER_FORMATS

_NUMBERS = ("lr", "betas", "eps", "weight_decay")
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


class AdamW(torch.optim.Optimizer):
    """AdamW: the oracle's on a CPU, the kernel's on a GPU, all parameters in one launch.

    The contract is `fp8lab.emulation.adamw_states.adamw_state`'s.

    Args:
        params: Parameters, or groups of them, as torch takes them: float32 with the master
            "float32", else bfloat16; of one device.
        lr: Learning rate; a schedule writes `group["lr"]`.
        betas, eps, weight_decay: As in `torch.optim.AdamW`.
        order, decoupled: The order of operations; False for Adam with L2 regularisation.
        exp_avg, exp_avg_sq: Names of the moments' formats.
        master: One of `fp8lab.optimizer_formats.MASTER_FORMATS`.
        seed: Of stochastic rounding, for the master "bfloat16_stochastic": step t draws
            `random_words` of the seed (seed << 32) + t.
        capturable: Whether learning rates and steps live on the device (float64 and int64), so that
            a step can be skipped without waiting for the device, and repeated in a CUDA graph. The
            bits are the same (with the order "torch_cuda" on a GPU, the powers are the card's own).

    State of a parameter: `step` (Python int; with `capturable` it is brought up to date by
    `state_dict`) and the tensors of `fp8lab.ops_adamw.fresh_state`. `load_state_dict` keeps their
    dtypes and bits.

    In a CUDA graph (`fp8lab.graphs` does all this): `place_gradients` before the capture, with the
    gradient tensors that the graph will read; before a replay, `update_numbers` hands a schedule's
    new learning rate to the device.

    Raises:
        ValueError: A number is outside its range, or a name is unknown.
        TypeError: A parameter is of another dtype than the master asks for, or sparse.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        order: str = "plain",
        decoupled: bool = True,
        exp_avg: str = "float32",
        exp_avg_sq: str = "float32",
        master: str = "float32",
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        if master not in MASTER_FORMATS:
            raise ValueError(f"unknown master {master!r}; accepted: {', '.join(MASTER_FORMATS)}")
        if not isinstance(seed, int) or not 0 <= seed < 1 << 31:
            raise ValueError(f"seed is {seed}; accepted: an integer, 0 to 2**31 - 1")
        self.formats = AdamFormats.named(order, decoupled, exp_avg, exp_avg_sq, master)
        self.seed = seed
        self.capturable = capturable
        self._copies: dict[Tensor, WeightCopies] = {}
        self._stepper: Stepper | None = None
        self._stepper_key: tuple[Any, ...] = ()
        self._counted: CountedNumbers | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does; its dtypes and numbers are checked."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_numbers(group)
            wanted = torch.float32 if self.formats.master == "float32" else torch.bfloat16
            for param in group["params"]:
                if param.dtype != wanted:
                    raise TypeError(
                        f"a parameter has dtype {param.dtype}; accepted with master"
                        f" {self.formats.master}: {wanted}"
                    )
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def also_write(
        self,
        param: Tensor,
        *,
        weight: Tensor | None = None,
        codes: Tensor | None = None,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        """Have every step write what the next forward pass reads of a parameter, in the same pass.

        What is written is the new weight's; a step that is skipped writes none of it. Nothing here
        is part of the saved state. Given again, the tensors replace the last ones; given nothing,
        the parameter has none.

        Args:
            param: One of the optimizer's parameters.
            weight, codes, scale, amax: See `fp8lab.ops_adamw.WeightCopies`. The scale is read at
                each step and may change in place; the caller resets the amax.

        Raises:
            TypeError, ValueError: They do not fit the parameter, it is not the optimizer's, or
                codes are of another format than another parameter's.
        """
        if not any(param is own for group in self.param_groups for own in group["params"]):
            raise ValueError(
                f"a tensor of shape {tuple(param.shape)} is no parameter of this optimizer"
            )
        copies = WeightCopies(weight, codes, scale, amax)
        copies.check(param)
        others = {own.code_format for key, own in self._copies.items() if key is not param}
        if codes is not None and others - {None, copies.code_format}:
            raise ValueError(f"codes are {codes.dtype}; accepted: one format for all parameters")
        self._copies[param] = copies
        self._stepper = None

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        factor: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss again, as torch's optimizers take it.
            factor: One float32 on the parameters' device that multiplies every gradient: what
                unscales and clips (`gradient_norm` makes one).
            skip: One int32 on that device: unless it is 0, nothing is written and no step is
                counted (`gradient_norm` makes one, too). Only with `capturable`: a Python int
                cannot know.

        Raises:
            TypeError: A gradient is sparse or of another dtype, or factor or skip is. ValueError: A
                number is outside its range, a shape does not fit, or a skip without `capturable`.
                Parameters and state are as before then.
        """
        if skip is not None and not self.capturable:
            raise ValueError("a skip flag needs steps on the device; build AdamW(capturable=True)")
        _check_single("factor", factor, torch.float32)
        _check_single("skip", skip, torch.int32)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        chosen, grads, numbers, places = self._gather()
        if not chosen:
            return loss
        params, offsets = [param for param, _ in chosen], [offset for _, offset in chosen]
        if self.capturable:
            stepper, counted = self._counted_parts(params, offsets, numbers, places)
            stepper.counted_step(
                grads,
                counted.numbers,
                counted.counts,
                factor=factor,
                skip=skip,
                seed=self.seed << 32,
            )
            return loss
        longest = max(own.step for own in numbers)
        stepper = self._stepper_for(params, places, offsets)
        stepper.step(grads, numbers, factor=factor, seed=(self.seed << 32) + longest)
        for param in params:
            self.state[param]["step"] += 1
        return loss

    @torch.no_grad()
    def place_gradients(self) -> None:
        """Make ready, without a step, what a CUDA graph of a step reads; only with `capturable`.

        It holds for the gradients that are there now, until `layout` is another.

        Raises:
            TypeError, ValueError: As for `step`.
        """
        chosen, grads, numbers, places = self._gather()
        if chosen:
            params, offsets = [param for param, _ in chosen], [offset for _, offset in chosen]
            stepper, _ = self._counted_parts(params, offsets, numbers, places)
            stepper.place(grads)

    @property
    def layout(self) -> tuple[object, object]:
        """What a captured step reads beside the gradients; another object once it is made anew."""
        return self._stepper, self._counted

    def update_numbers(self) -> None:
        """Hand the groups' numbers to the device, for the next replay of a graph."""
        if self._counted is not None:
            rows: dict[int, list[float]] = {}
            for group in self.param_groups:
                rows |= dict.fromkeys(map(id, group["params"]), numbers_row(group))
            self._counted.set([rows[id(param)] for param in self._counted.params])

    def _counted_parts(
        self,
        params: list[nn.Parameter],
        offsets: list[int],
        numbers: list[StepNumbers],
        places: list[int],
    ) -> tuple[Stepper, CountedNumbers]:
        stepper = self._stepper_for(params, [0] * len(params), offsets)
        counted = self._counted_for(params)
        counted.set([numbers_row(numbers[place]) for place in places])
        return stepper, counted

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps its own fields alone; a copy needs these as well.
        self._fetch_counts()
        own = {name: getattr(self, name) for name in ("formats", "seed", "capturable", "_copies")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stepper, self._stepper_key, self._counted = None, (), None

    def state_dict(self) -> dict[str, Any]:
        """As torch's; the steps that a device counted are fetched first."""
        self._fetch_counts()
        return super().state_dict()

    def _fetch_counts(self) -> None:
        if self._counted is not None:
            counts = self._counted.counts.tolist()
            for param, count in zip(self._counted.params, counts, strict=True):
                self.state[param]["step"] = count

    def _counted_for(self, params: list[nn.Parameter]) -> CountedNumbers:
        known = self._counted
        if known is None or [id(p) for p in known.params] != [id(p) for p in params]:
            self._fetch_counts()
            self._counted = CountedNumbers(params, [self.state[p]["step"] for p in params])
        assert self._counted is not None
        return self._counted

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, bit for bit: torch itself would cast it to the parameters' dtype.

        Raises:
            ValueError: The groups do not match, a number in them is out of range, or a state is
                not in this optimizer's formats.
        """
        for live, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            check_numbers({**live, **saved})
        params = [param for group in self.param_groups for param in group["params"]]
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        if len(params) == len(saved_ids):  # otherwise torch says what does not match
            for param, place in zip(params, saved_ids, strict=True):
                self._check_loaded(param, state_dict["state"].get(place, {}))
        super().load_state_dict(state_dict)
        for param, place in zip(params, saved_ids, strict=True):
            for name, value in state_dict["state"].get(place, {}).items():
                if isinstance(value, Tensor):
                    self.state[param][name] = value.detach().to(param.device, copy=True)
        self._stepper = self._counted = None

    def _check_loaded(self, param: Tensor, saved: dict[str, Any]) -> None:
        if not saved:
            return
        step = saved.get("step")
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"the saved step is {step}; accepted: an integer, 0 and up")
        wanted = {n: (t.dtype, t.shape) for n, t in fresh_state(param, self.formats).items()}
        found = {n: (t.dtype, t.shape) for n, t in saved.items() if isinstance(t, Tensor)}
        if wanted != found:
            raise ValueError(
                f"the saved state holds {_shown(found)}; this optimizer keeps {_shown(wanted)}:"
                " build it with the formats that were saved"
            )

    def _gather(
        self,
    ) -> tuple[list[tuple[nn.Parameter, int]], list[Tensor], list[StepNumbers], list[int]]:
        """The parameters with gradients and their random offsets; gradients; numbers; whose."""
        chosen: list[tuple[nn.Parameter, int]] = []
        grads, places = [], []
        numbers: list[StepNumbers] = []
        offset = 0
        # All of them before the first state is made.
        for group in self.param_groups:
            check_numbers(group)
            for param in group["params"]:
                if param.grad is not None:
                    _check_gradient(param, param.grad)
        for group in self.param_groups:
            lr, betas, eps, decay = (group[name] for name in _NUMBERS)
            fixed = float(lr), (float(betas[0]), float(betas[1])), float(eps), float(decay)
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["step"] = 0
                        state.update(fresh_state(param, self.formats))
                    own = StepNumbers(state["step"] + 1, *fixed)
                    if own not in numbers:
                        numbers.append(own)
                    chosen.append((param, offset))
                    grads.append(param.grad.contiguous())
                    places.append(numbers.index(own))
                offset += -(-param.numel() // 4)
        return chosen, grads, numbers, places

    def _stepper_for(
        self, params: list[nn.Parameter], places: list[int], offsets: list[int]
    ) -> Stepper:
        """The stepper of the last step, unless the parameters or their tensors are others now."""
        states = [self.state[param] for param in params]
        copies = [self._copies.get(param, WeightCopies()) for param in params]
        tensors = [
            {name: value for name, value in state.items() if isinstance(value, Tensor)}
            for state in states
        ]
        key = (
            tuple(param.data_ptr() for param in params),
            tuple(value.data_ptr() for state in tensors for value in state.values()),
            tuple(param.grad.dtype for param in params if param.grad is not None),
            tuple(places),
            tuple(own.addresses for own in copies),
        )
        if self._stepper is None or key != self._stepper_key:
            self._stepper = make_stepper(params, tensors, self.formats, places, offsets, copies)
            self._stepper_key = key
        return self._stepper


def check_numbers(group: Mapping[str, Any]) -> None:
    """Refuse a group's numbers with which no step can be taken.

    Raises:
        ValueError: With what is accepted.
    """
    for name in ("lr", "eps", "weight_decay"):
        if not _is_number(group[name]) or not 0 <= group[name] < float("inf"):
            raise ValueError(f"{name} is {group[name]}; accepted: a number, finite, at least 0")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas is {betas}; accepted: two numbers, at least 0 and below 1")
    for index, beta in enumerate(betas, start=1):
        if not _is_number(beta) or not 0 <= beta < 1:
            raise ValueError(f"beta{index} is {beta}; accepted: a number, at least 0 and below 1")


def _is_number(value: Any) -> bool:
    """Whether it is a number that float64 holds: an integer may be longer."""
    return isinstance(value, Real) and (not isinstance(value, int) or abs(value) < 2**63)


def _check_gradient(param: Tensor, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise TypeError(f"a gradient has layout {grad.layout}; accepted: dense gradients")
    if grad.dtype not in _GRADIENTS:
        accepted = ", ".join(map(str, _GRADIENTS))
        raise TypeError(f"a gradient has dtype {grad.dtype}; accepted: {accepted}")
    if grad.shape != param.shape:
        raise ValueError(
            f"a gradient has shape {tuple(grad.shape)}; accepted: its parameter's"
            f" {tuple(param.shape)}"
        )


def _check_single(name: str, given: Tensor | None, dtype: torch.dtype) -> None:
    """Refuse a factor or a flag that is not one element of its dtype."""
    if given is None:
        return
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} is {given!r}; accepted: a tensor of one element, {dtype}")
    if given.dtype != dtype or given.numel() != 1:
        raise TypeError(
            f"{name} is {given.dtype} of shape {tuple(given.shape)}; accepted: one element, {dtype}"
        )


def _shown(state: dict[str, tuple[torch.dtype, torch.Size]]) -> str:
    return ", ".join(f"{name} {dtype} {tuple(shape)}" for name, (dtype, shape) in state.items())
