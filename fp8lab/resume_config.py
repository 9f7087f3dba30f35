"""What a run's config.json says, read back; what a checkpoint must have in common with a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fp8lab.data import Corpus, load_corpus
from fp8lab.errors import UserError
from fp8lab.fallback_run import fallback_from_dict
from fp8lab.models import MlpConfig, ModelConfig, TransformerConfig
from fp8lab.recipes import recipe_from_dict
from fp8lab.saved_values import whole_number
from fp8lab.training import TrainingRun
from fp8lab.training_config import LATER, TrainingConfig

_MODELS: tuple[type[ModelConfig], ...] = (TransformerConfig, MlpConfig)


class StepCount:
    """The number of a run's step, as a part of its state."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def state_dict(self) -> dict[str, int]:
        """The steps done."""
        return {"step": self._run.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take them over."""
        self._run.step = whole_number(state_dict, "step", "progress")


def config_from_dict(described: Mapping[str, Any], source: str) -> TrainingConfig:
    """The configuration that `TrainingConfig.to_dict` wrote; other keys are not looked at.

    Raises:
        UserError: It is damaged, or a setting is missing.
    """
    names = [field.name for field in fields(TrainingConfig)]
    missing = [name for name in names if name not in described and name not in LATER]
    if missing:
        raise UserError(f"{source} is damaged or of another version: it lacks {missing[0]}")
    settings = {name: described[name] for name in names if name in described}
    try:
        settings["recipe"] = recipe_from_dict(described["recipe"], source=source)
        settings["betas"] = tuple(described["betas"])
        settings["model"] = _model_config(described["model"])
        settings["keep"] = tuple(described.get("keep", ()))
        if described.get("fallback") is not None:
            settings["fallback"] = fallback_from_dict(described["fallback"])
        return TrainingConfig(**settings)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{source} is damaged: {error}") from None


def _model_config(described: Any) -> ModelConfig:
    for kind in _MODELS if isinstance(described, Mapping) else ():
        if {field.name for field in fields(kind)} == described.keys():
            return kind(**described)
    raise ValueError("its model is none that there is")


def fingerprint_of(config: TrainingConfig, corpus: Corpus) -> dict[str, Any]:
    """What a checkpoint's run and the run that goes on with it must both have."""
    settings = config.to_dict()
    settings.pop("graph", None)  # the bits are the same with it and without
    return {
        "recipe": settings.pop("recipe"),
        "model": settings.pop("model"),
        "training": settings,
        "corpus_sha256": corpus.sha256,
    }


def corpus_again(said: Any, text: Path | None, source: str) -> Corpus:
    """The corpus of a run: the plays, or its text from where it was, or from `text`.

    Args:
        said: What config.json says of it: name, sha256, and path where it was a text.
        text: Where the text lies now; None for where it was.
        source: Where that is said, for messages.

    Raises:
        UserError: It cannot be read, or is another text, or what is said of it is damaged.
    """
    if not isinstance(said, dict) or not isinstance(said.get("path", ""), str):
        raise UserError(f"{source} is damaged: corpus is no table, or its path no text")
    path = text
    if path is None and "path" in said:
        path = Path(said["path"])
        if not path.is_file():
            raise UserError(f"the run's text is no more at {path}; say where it is: --text FILE")
    corpus = load_corpus(path)
    if corpus.sha256 != said.get("sha256"):
        raise UserError(
            f"the run trained on {said.get('name')} with SHA-256 {said.get('sha256')}; {path} is"
            " another text"
        )
    return corpus
