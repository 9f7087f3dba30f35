"""Everything that is training state, by name: captured bit for bit, and put back or refused.

    model       parameters and buffers by name: weights, scales, amax histories, cached weight
                codes; and what a module gives through `get_extra_state`
    modes       which modules are in evaluation mode, which parameters are frozen
    optimizer   of each parameter, by name: step counter, moments as raw codes with their scales and
                powers, remainder of the master; and the groups' numbers
    scaler      the loss scaler's `state_dict`
    scheduler   the schedule's
    random      Python's, NumPy's and torch's generators (a GPU's: seed and Philox offset) and those
                that are named
    NAME        any other: the data cursor, fallback, telemetry, counters

A resumed run without one of these does not crash; its loss drifts. So `restore` refuses a state in
which anything is missing, of another dtype or shape, or too much, unless it is told otherwise; then
it lists what was left as it was. Afterwards it reads everything back and compares bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from fp8lab.checkpoint import CheckpointError
from fp8lab.checkpoint_tree import Tree, leaves, same_leaf, spelled
from fp8lab.errors import UserError
from fp8lab.state_names import kind_of
from fp8lab.state_optimizer import capture_optimizer, optimizer_problems, restore_optimizer
from fp8lab.state_random import AnyGenerator, capture_random, random_problems, restore_random
from fp8lab.state_values import kind_of_value, name_problems, rough_misfit

_OWN_PARTS = ("model", "modes", "optimizer", "scaler", "scheduler", "random")


class Stateful(Protocol):
    """What torch calls stateful: a loss scaler, a schedule, a data cursor."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state over."""


@dataclass(frozen=True)
class Difference:
    """One thing in which a saved state does not fit the run.

    Attributes:
        path: Where, as in "model/blocks.0.qkv.casts.input.scale".
        problem: "missing" (the run needs it), "unknown" (the run has no place for it), or what
            differs.
    """

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path} ({kind_of(self.path)}): {self.problem}"


@dataclass(frozen=True)
class TrainingState:
    """The live objects of a training run whose state must survive.

    Attributes:
        model: Its `state_dict` must hold all that it needs: buffers, and extra state that is made
            of plain values and tensors.
        optimizer: Of the model's parameters.
        scaler, scheduler: Where there are any.
        generators: Random generators by name: NumPy's, torch's or Python's.
        others: Anything else with a `state_dict`, by part name: small letters, digits, "_".
    """

    model: nn.Module
    optimizer: Optimizer | None = None
    scaler: Stateful | None = None
    scheduler: Stateful | None = None
    generators: Mapping[str, AnyGenerator] = field(default_factory=dict)
    others: Mapping[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = sorted(set(self.others) & set(_OWN_PARTS))
        if taken:
            raise ValueError(f"part {taken[0]!r} is this class's own; choose another name")

    def capture(self) -> dict[str, Tree]:
        """The state by part. Tensors are the live ones: copy them (`checkpoint.take_state`)."""
        state: dict[str, Tree] = {"model": dict(self.model.state_dict()), "modes": self._modes()}
        if self.optimizer is not None:
            state["optimizer"] = capture_optimizer(self.model, self.optimizer)
        for part, owner in self._stateful().items():
            state[part] = owner.state_dict()
        state["random"] = capture_random(self.generators)
        return state

    def restore(
        self, state: Mapping[str, Tree], *, strict: bool = True, read_back: bool = True
    ) -> list[Difference]:
        """Put a captured state back, in place, and compare it with what was given, in bits.

        Nothing is changed where the state does not fit, as far as this can be seen before: of what
        an object keeps whose `state_dict` is its own affair, the kinds of its values.

        Args:
            state: What `capture` gave, on the CPU or where it was.
            strict: Refuse a state that lacks something or has something more. Otherwise what is
                missing stays as it is in the live objects, and is listed.
            read_back: Whether to compare afterwards: it reads all of the state once more.

        Returns:
            What was missing or not used: nothing where `strict`.

        Raises:
            CheckpointError: The state does not fit: the first of the differences. Or an object did
                not take it over; what was put back before it has changed then.
        """
        differences = self.differences(state)
        fatal = [d for d in differences if strict or d.problem not in ("missing", "unknown")]
        if fatal:
            more = f" (and {len(fatal) - 1} more)" if len(fatal) > 1 else ""
            raise CheckpointError(f"the saved state does not fit this run: {fatal[0]}{more}")
        try:
            self._put(state, {d.path for d in differences})
        except UserError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the saved state was not taken over ({type(error).__name__}: {error}); parts of it"
                " are put back already: build the run anew"
            ) from error
        if read_back:
            self._check_read_back(state, {d.path for d in differences})
        return differences

    def differences(self, state: Mapping[str, Tree]) -> list[Difference]:
        """In what a saved state does not fit these objects; nothing is changed."""
        live, owners = self.capture(), self._stateful()
        found = [Difference(part, problem) for part, problem in name_problems(live, state)]
        for part in (own for own in live if own in state):
            if not isinstance(state[part], Mapping):
                problems = [("", f"it was saved as {kind_of_value(state[part])}, not as a table")]
            elif part == "modes":
                problems = self._mode_problems(state[part])
            elif part == "optimizer":
                assert self.optimizer is not None
                problems = optimizer_problems(self.model, self.optimizer, state[part])
            elif part == "random":
                problems = random_problems(live[part], state[part], self.generators)
            elif part == "model" or isinstance(owners[part], nn.Module):
                problems = _tensor_problems(live[part], state[part])
            else:
                problems = _kept_problems(live[part], state[part])
            found += [Difference(f"{part}/{n}" if n else part, problem) for n, problem in problems]
        return found

    def _stateful(self) -> dict[str, Stateful]:
        given = {"scaler": self.scaler, "scheduler": self.scheduler, **self.others}
        return {part: owner for part, owner in given.items() if owner is not None}

    def _modes(self) -> dict[str, list[str]]:
        return {
            "eval": [name for name, module in self.model.named_modules() if not module.training],
            "frozen": [n for n, p in self.model.named_parameters() if not p.requires_grad],
        }

    def _mode_problems(self, saved: Mapping[str, Any]) -> list[tuple[str, str]]:
        names = {
            "eval": [name for name, _ in self.model.named_modules()],
            "frozen": [name for name, _ in self.model.named_parameters()],
        }
        problems = name_problems(names, saved)
        for kind, known in names.items():
            listed = saved.get(kind, [])
            if not isinstance(listed, list) or not all(isinstance(own, str) for own in listed):
                problems.append((kind, "it was saved as no list of names"))
            elif odd := [name for name in listed if name not in known]:
                problems.append((kind, f"it names {odd[0]!r}, which the model lacks"))
            elif listed != [name for name in known if name in listed]:
                problems.append((kind, "its names are not in the model's order, each once"))
        return problems

    def _put(self, state: Mapping[str, Tree], left: set[str]) -> None:
        if "model" in state:
            saved = {
                name: value
                for name, value in state["model"].items()
                if f"model/{spelled(name)}" not in left
            }
            self.model.load_state_dict(saved, strict=False)
        if "modes" in state:
            modes = {**self._modes(), **state["modes"]}
            for name, module in self.model.named_modules():
                module.training = name not in modes["eval"]
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name not in modes["frozen"])
        if self.optimizer is not None and "optimizer" in state:
            restore_optimizer(self.model, self.optimizer, state["optimizer"])
        for part, owner in self._stateful().items():
            if part in state:
                owner.load_state_dict({**owner.state_dict(), **state[part]})
        if "random" in state:  # last, so that nothing above has drawn from them
            restore_random(state["random"], self.generators)

    def _check_read_back(self, state: Mapping[str, Tree], left: set[str]) -> None:
        now = dict(leaves(self.capture()))
        for path, value in leaves(dict(state)):
            # Of an empty table all that was missing is left, too.
            if any(f"{path}/".startswith(f"{p}/") or p.startswith(f"{path}/") for p in left):
                continue
            if path not in now or not same_leaf(now[path], value):
                raise CheckpointError(
                    f"{path} ({kind_of(path)}) was not taken over: read back, it is not what was"
                    " saved"
                )


def _tensor_problems(live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[tuple[str, str]]:
    problems = name_problems(live, saved)
    for name in live.keys() & saved.keys():
        own, other = _shape_of(live[name]), _shape_of(saved[name])
        if own != other:
            problems.append((spelled(name), f"it was saved as {other}, this run keeps {own}"))
    return sorted(problems)


def _shape_of(value: Any) -> str:
    return kind_of_value(value) if isinstance(value, Tensor) else "plain values"


def _kept_problems(live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of an object's own state: what more it keeps may depend on what it has seen, so that the
    read-back alone can tell.
    """
    problems = [(spelled(name), "missing") for name in live if name not in saved]
    for name in live.keys() & saved.keys():
        if (problem := rough_misfit(live[name], saved[name])) is not None:
            problems.append((spelled(name), problem))
    return sorted(problems)
