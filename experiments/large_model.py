"""The large model that experiments train on a GPU, and its schedule: one place for all of them."""

from __future__ import annotations

from typing import Any

from fp8lab.models import TransformerConfig

LARGE = TransformerConfig(context=1024, width=768, layers=17, heads=12)
"""122M parameters."""
LARGE_TRAINING: dict[str, Any] = {"model": LARGE, "batch": 8, "peak_lr": 6e-4, "warmup": 200}
"""Fields of a `TrainingConfig`: 8,192 tokens a step; a learning rate for 2,000 steps or so."""
