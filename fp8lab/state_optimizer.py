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

from fp8lab.checkpoint_tree import dtype_name
from fp8lab.ops_adamw import fresh_state
from fp8lab.optimizer import AdamW


def capture_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with names where it has numbers.

    Raises:
        ValueError: A parameter of the optimizer is not one of the model's.
    """
    names = _names(model, optimizer)
    saved = optimizer.state_dict()
    named = {**saved}
    named["state"] = {names[place]: own for place, own in saved["state"].items()}
    named["param_groups"] = [
        {**group, "params": [names[place] for place in group["params"]]}
        for group in saved["param_groups"]
    ]
    return named


def restore_optimizer(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load what `capture_optimizer` gave.

    Of the problems that `optimizer_problems` finds, what is missing is taken from a fresh state,
    what is unknown is left out; there are no others.
    """
    places = {name: place for place, name in enumerate(_names(model, optimizer))}
    params = _params(optimizer)
    numbered = {**saved}
    numbered["state"] = {}
    for name, own in saved["state"].items():
        wanted = _wanted(optimizer, params[places[name]])
        numbered["state"][places[name]] = {
            key: own.get(key, value) for key, value in (wanted or own).items()
        }
    numbered["param_groups"] = [
        {**group, "params": [places[name] for name in group["params"]]}
        for group in saved["param_groups"]
    ]
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
    names = _names(model, optimizer)
    places = iter(names)
    own = [[next(places) for _ in group["params"]] for group in optimizer.param_groups]
    groups = [group["params"] for group in saved["param_groups"]]
    if own != groups:
        return [("param_groups", f"it was saved as {_counts(groups)}, this run has {_counts(own)}")]
    problems = []
    for name, param in zip(names, _params(optimizer), strict=True):
        there = saved["state"].get(name)
        if there:  # nothing is kept of a parameter that never had a gradient
            wanted = _wanted(optimizer, param)
            for key in sorted(wanted.keys() | there.keys()):
                problem = _problem(wanted.get(key), there.get(key), bool(wanted))
                if problem:
                    problems.append((f"state/{name}/{key}", problem))
    return problems


def _wanted(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """What the optimizer keeps of a parameter, with values to show dtypes and shapes."""
    if isinstance(optimizer, AdamW):
        return {"step": 0, **fresh_state(param, optimizer.formats)}
    return dict(optimizer.state.get(param, {}))


def _problem(wanted: Any, there: Any, known: bool) -> str | None:
    if not known:
        return None
    if there is None and wanted is not None:
        return "missing"
    if wanted is None and there is not None:
        return "unknown"
    tensors = isinstance(wanted, Tensor), isinstance(there, Tensor)
    if tensors == (True, True) and _shown(wanted) != _shown(there):
        return f"it was saved as {_shown(there)}, this run keeps {_shown(wanted)}"
    if tensors[0] != tensors[1]:
        return "it was saved as another kind of value"
    return None


def _shown(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


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
