"""Every random state of a process as plain values and tensors, and back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

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


def _state_of(generator: AnyGenerator) -> Any:
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return _python_plain(generator.getstate())


def _set_state(generator: AnyGenerator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _arrays(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.setstate(_python_state(state))


def _python_plain(state: tuple[Any, ...]) -> dict[str, Any]:
    """Python's state with its words as one tensor, not 625 numbers."""
    version, words, gauss = state
    return {"version": version, "words": torch.tensor(words), "gauss": gauss}


def _python_state(plain: Mapping[str, Any]) -> tuple[Any, ...]:
    return plain["version"], tuple(plain["words"].tolist()), plain["gauss"]


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
