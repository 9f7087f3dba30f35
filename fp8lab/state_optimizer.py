"""An optimizer's state by the names of its parameters, in the dtypes that it keeps.

torch numbers parameters by their order, so that a model whose layers were built in another order
takes over the moments of the wrong parameters without a word; names do not. And torch casts loaded
moments to the dtype of their parameter; here they stay what they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fp8lab.checkpoint_tree import spelled
from fp8lab.ops_adamw import fresh_state
from fp8lab.optimizer import AdamW, check_numbers
from fp8lab.state_values import kind_of_value, misfit, name_problems, rough_misfit

_NUMBERS = ("lr", "betas", "eps", "weight_decay")  # of a group of the lab's AdamW
_OF_SCHEDULES = {"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}


def capture_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with names where it has numbers.

    Each parameter has its table; it is empty where nothing is kept of it yet, so that one that is
    not there was lost.

    Raises:
        ValueError: A parameter of the optimizer is not one of the model's.
    """
    names = _names(model, optimizer)
    saved = optimizer.state_dict()
    named = {**saved}
    named["state"] = {name: saved["state"].get(place, {}) for place, name in enumerate(names)}
    named["param_groups"] = [
        {**group, "params": [names[place] for place in group["params"]]}
        for group in saved["param_groups"]
    ]
    return named


def restore_optimizer(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load what `capture_optimizer` gave.

    Of the problems that `optimizer_problems` finds, what is missing stays as it is, or is as in a
    fresh state where there is none; what is unknown is left out; there are no others. What torch's
    schedules put into groups is taken over: one that is made later needs it.
    """
    names, params = _names(model, optimizer), _params(optimizer)
    current = optimizer.state_dict()
    state, groups = saved.get("state", {}), saved.get("param_groups", current["param_groups"])
    numbered: dict[str, Any] = {key: saved.get(key, value) for key, value in current.items()}
    numbered["state"], numbered["param_groups"] = {}, []
    for place, name in enumerate(names):
        kept = current["state"].get(place, {})
        own = state.get(name, kept)
        if own:
            wanted = {**_wanted(optimizer, params[place]), **kept} or own
            numbered["state"][place] = {key: own.get(key, value) for key, value in wanted.items()}
    for live, group in zip(current["param_groups"], groups, strict=True):
        kept = {key: value for key, value in group.items() if key in live or key in _OF_SCHEDULES}
        numbered["param_groups"].append({**live, **kept, "params": live["params"]})
    optimizer.load_state_dict(numbered)
    for place, own in numbered["state"].items():
        param = params[place]
        for key, value in own.items():
            loaded = optimizer.state[param][key]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[param][key] = value.detach().to(loaded.device, copy=True)


def optimizer_problems(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """(path, problem) for each way in which a saved state does not fit the optimizer.

    The lab's AdamW says what it keeps of a parameter; of another optimizer this is known only once
    it has taken a step.
    """
    current = optimizer.state_dict()
    problems = name_problems(current, saved)
    if "param_groups" in saved:
        problems += _group_problems(model, optimizer, current["param_groups"], saved)
    if "state" in saved:
        problems += _state_problems(model, optimizer, saved["state"])
    return problems


def _group_problems(
    model: nn.Module, optimizer: Optimizer, current: list[dict[str, Any]], saved: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Of the groups: whose they are, what is missing or unknown, and values that cannot be."""
    groups = saved["param_groups"]
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        return [("param_groups", "it was saved as no list of groups")]
    places = iter(_names(model, optimizer))
    own = [[next(places) for _ in group["params"]] for group in current]
    there = [group["params"] for group in groups]
    if own != there:
        return [("param_groups", f"it was saved as {_counts(there)}, this run has {_counts(own)}")]
    problems = []
    for place, (live, group) in enumerate(zip(current, groups, strict=True)):
        path, exact = f"param_groups/{place}", isinstance(optimizer, AdamW)
        for key in (own for own in live if own != "params"):
            fits = misfit if exact and key in _NUMBERS else rough_misfit
            if key not in group:
                problems.append((f"{path}/{spelled(key)}", "missing"))
            elif (problem := fits(live[key], group[key])) is not None:
                problems.append((f"{path}/{spelled(key)}", problem))
        more = [key for key in group if key not in live and key not in _OF_SCHEDULES]
        problems += [(f"{path}/{spelled(key)}", "unknown") for key in more]
        if exact and not problems:
            try:
                check_numbers({**live, **group})
            except ValueError as error:
                problems.append((path, str(error)))
    return problems


def _state_problems(model: nn.Module, optimizer: Optimizer, saved: Any) -> list[tuple[str, str]]:
    if not isinstance(saved, Mapping):
        return [("state", f"it was saved as {kind_of_value(saved)}")]
    names = _names(model, optimizer)
    problems = [(f"state/{spelled(name)}", "unknown") for name in saved if name not in names]
    for name, param in zip(names, _params(optimizer), strict=True):
        path, there = f"state/{spelled(name)}", saved.get(name)
        if name not in saved:
            problems.append((path, "missing"))
        elif not isinstance(there, Mapping):
            problems.append((path, f"it was saved as {kind_of_value(there)}"))
        elif there and (wanted := _wanted(optimizer, param)):
            # Nothing is kept of a parameter that never had a gradient.
            exact = isinstance(optimizer, AdamW)
            problems += _entry_problems(path, wanted, there, exact=exact)
    return problems


def _entry_problems(
    path: str, wanted: Mapping[str, Any], there: Mapping[str, Any], *, exact: bool
) -> list[tuple[str, str]]:
    """Of a parameter's table; another optimizer's lists may grow, and numbers be unset."""
    problems = [(f"{path}/{key}", problem) for key, problem in name_problems(wanted, there)]
    for key in wanted.keys() & there.keys():
        tensors = isinstance(wanted[key], Tensor), isinstance(there[key], Tensor)
        fits = misfit if exact or any(tensors) else rough_misfit
        if (problem := fits(wanted[key], there[key])) is not None:
            problems.append((f"{path}/{spelled(key)}", problem))
    step = there.get("step", 0)
    if exact and not problems and (not isinstance(step, int) or step < 0):
        problems.append((f"{path}/step", f"it is {step!r}; accepted: an integer, 0 and up"))
    return sorted(problems)


def _is_group(group: Any) -> bool:
    return (
        isinstance(group, Mapping)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
    )


def _wanted(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """What the optimizer keeps of a parameter, with values to show dtypes and shapes."""
    if isinstance(optimizer, AdamW):
        return {"step": 0, **fresh_state(param, optimizer.formats)}
    return dict(optimizer.state.get(param, {}))


def _counts(groups: list[list[str]]) -> str:
    sizes = " + ".join(str(len(group)) for group in groups)
    return f"{sizes} parameters from {groups[0][0] if groups and groups[0] else 'none'}"


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in its order."""
    by_identity = {id(param): name for name, param in model.named_parameters()}
    names = []
    for place, param in enumerate(_params(optimizer)):
        if id(param) not in by_identity:
            raise ValueError(
                f"parameter {place} of the optimizer, {tuple(param.shape)}, is not the model's;"
                " build the optimizer from model.parameters() after the last change of the model"
            )
        names.append(by_identity[id(param)])
    return names
