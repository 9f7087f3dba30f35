"""Every random state of a process as plain values and tensors, and back."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fp8lab.checkpoint_tree import leaves, same_leaf, spelled
from fp8lab.state_values import kind_of_value, name_problems

AnyGenerator = np.random.Generator | torch.Generator | random.Random


def capture_random(generators: Mapping[str, AnyGenerator]) -> dict[str, Any]:
    """The global states of Python, NumPy and torch, and those of the named generators.

    The GPUs' (a seed and a Philox offset each) are there once CUDA is in use.
    """
    state: dict[str, Any] = {
        "python": _python_plain(random.getstate()),
        "numpy": _plain(np.random.get_state(legacy=False)),  # noqa: NPY002 (the global one is meant)
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["torch_cuda"] = torch.cuda.get_rng_state_all()
    for name, generator in generators.items():
        state[f"generator:{name}"] = _state_of(generator)
    return state


def seed_globals(seed: int) -> None:
    """Start the global generators anew, so that a run's state does not depend on its process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def restore_random(state: Mapping[str, Any], generators: Mapping[str, AnyGenerator]) -> None:
    """Put back those states that are there."""
    if "python" in state:
        random.setstate(_python_state(state["python"]))
    if "numpy" in state:
        np.random.set_state(_arrays(state["numpy"]))  # noqa: NPY002
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "torch_cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["torch_cuda"])
    for name, generator in generators.items():
        if f"generator:{name}" in state:
            _set_state(generator, state[f"generator:{name}"])


def random_problems(
    live: Mapping[str, Any], state: Mapping[str, Any], generators: Mapping[str, AnyGenerator]
) -> list[tuple[str, str]]:
    """(name, problem) for each saved state that its generator does not take; none is touched.

    Args:
        live: What `capture_random` gives now.
        state: What it gave.
        generators: The named ones.
    """
    problems = name_problems(live, state)
    known = {f"generator:{name}": generator for name, generator in generators.items()}
    for name in live.keys() & state.keys():
        if name == "torch_cuda":
            problem = _problem_of_gpus(live[name], state[name])
        else:
            takes = _takes(_another(name, known.get(name)), state[name])
            problem = None if takes else "it is no state of this generator"
        if problem is not None:
            problems.append((spelled(name), problem))
    return problems


def _another(name: str, generator: AnyGenerator | None) -> Any:
    """Another generator of a kind: a named one's, or that of the global one of this name.

    None of one that cannot be copied.
    """
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    if generator is not None:
        try:
            return copy.deepcopy(generator)
        except Exception:  # a bit generator of the user's
            return None
    if name == "python":
        return random.Random()
    if name == "numpy":
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        return np.random.RandomState(copy.deepcopy(bits))
    return torch.Generator()


def _takes(generator: Any, state: Any) -> bool:
    """Whether a generator takes a state over and gives the same one back."""
    if generator is None:
        return True  # nobody knows; the read-back will
    try:
        _set_state(generator, state)
    except Exception:  # whatever NumPy, torch and Python make of it
        return False
    one, other = dict(leaves({"": _state_of(generator)})), dict(leaves({"": state}))
    return one.keys() == other.keys() and all(same_leaf(one[key], other[key]) for key in one)


def _problem_of_gpus(live: list[torch.Tensor], saved: Any) -> str | None:
    """Those of a machine with fewer GPUs fit: the others' stay as they are."""
    if isinstance(saved, list) and len(saved) > len(live):
        return f"it was saved with {len(saved)} GPUs, here are {len(live)}"
    kinds = [kind_of_value(own) for own in saved] if isinstance(saved, list) else []
    if not kinds or kinds != [kind_of_value(own) for own in live[: len(kinds)]]:
        return "it is no state of these generators"
    return None


def _state_of(generator: AnyGenerator | np.random.RandomState) -> Any:
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return _python_plain(generator.getstate())


def _set_state(generator: AnyGenerator | np.random.RandomState, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _arrays(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_arrays(state))
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.setstate(_python_state(state))


def _python_plain(state: tuple[Any, ...]) -> dict[str, Any]:
    """Python's state with its words as one tensor, not 625 numbers."""
    version, words, gauss = state
    return {"version": version, "words": torch.tensor(words), "gauss": gauss}


def _python_state(plain: Mapping[str, Any]) -> tuple[Any, ...]:
    gauss = plain["gauss"]
    if gauss is not None and not isinstance(gauss, float):
        raise TypeError(f"gauss is {gauss!r}; accepted: a float, or None")
    return plain["version"], tuple(plain["words"].tolist()), gauss


def _plain(value: Any) -> Any:
    """NumPy's state tables with tensors in place of arrays, of the same dtypes."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    """What `_plain` was given."""
    if isinstance(value, Mapping):
        return {key: _arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
