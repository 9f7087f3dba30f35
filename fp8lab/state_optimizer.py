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

from fp8lab.ops_adamw import fresh_state
from fp8lab.optimizer import AdamW
from fp8lab.state_values import kind_of_value, misfit


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
    fresh state where there is none; what is unknown is left out; there are no others.
    """
    names, params = _names(model, optimizer), _params(optimizer)
    current = optimizer.state_dict()
    state, groups = saved.get("state", {}), saved.get("param_groups", current["param_groups"])
    numbered: dict[str, Any] = {"state": {}, "param_groups": []}
    for place, name in enumerate(names):
        kept = current["state"].get(place, {})
        own = state.get(name, kept)
        if own:
            wanted = {**_wanted(optimizer, params[place]), **kept} or own
            numbered["state"][place] = {key: own.get(key, value) for key, value in wanted.items()}
    for live, group in zip(current["param_groups"], groups, strict=True):
        there = {key: group.get(key, value) for key, value in live.items()}
        numbered["param_groups"].append({**there, "params": live["params"]})
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
    if problems := _outer_problems(saved):
        return problems
    names = _names(model, optimizer)
    places = iter(names)
    own = [[next(places) for _ in group["params"]] for group in optimizer.param_groups]
    groups = [group["params"] for group in saved["param_groups"]]
    if own != groups:
        return [("param_groups", f"it was saved as {_counts(groups)}, this run has {_counts(own)}")]
    current = optimizer.state_dict()["param_groups"]
    for place, (live, group) in enumerate(zip(current, saved["param_groups"], strict=True)):
        same = {**live, "params": group["params"]}  # they are compared above, by name
        problems += _table_problems(f"param_groups/{place}", same, group)
    problems += [(f"state/{name}", "unknown") for name in saved["state"] if name not in names]
    for name, param in zip(names, _params(optimizer), strict=True):
        there = saved["state"].get(name)
        if there is None:
            problems.append((f"state/{name}", "missing"))
        elif not isinstance(there, Mapping):
            problems.append((f"state/{name}", f"it was saved as {kind_of_value(there)}"))
        elif there and (wanted := _wanted(optimizer, param)):
            # Nothing is kept of a parameter that never had a gradient.
            problems += _table_problems(f"state/{name}", wanted, there)
    return problems


def _outer_problems(saved: Any) -> list[tuple[str, str]]:
    """Whether it is an optimizer's state at all."""
    if not isinstance(saved, Mapping):
        return [("", f"it was saved as {kind_of_value(saved)}, this run keeps a table")]
    found = [(name, "missing") for name in ("state", "param_groups") if name not in saved]
    found += [(str(name), "unknown") for name in saved if name not in ("state", "param_groups")]
    if found:
        return found
    if not isinstance(saved["state"], Mapping):
        return [("state", f"it was saved as {kind_of_value(saved['state'])}")]
    groups = saved["param_groups"]
    fine = isinstance(groups, list) and all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
        for group in groups
    )
    return [] if fine else [("param_groups", "it was saved as no list of groups")]


def _table_problems(
    path: str, wanted: Mapping[str, Any], there: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """(path, problem) for each entry that does not fit."""
    problems = [(f"{path}/{key}", "missing") for key in wanted if key not in there]
    problems += [(f"{path}/{key}", "unknown") for key in there if key not in wanted]
    for key in wanted.keys() & there.keys():
        if (problem := misfit(wanted[key], there[key])) is not None:
            problems.append((f"{path}/{key}", problem))
    return sorted(problems)


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
