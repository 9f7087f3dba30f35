"""Planted faults: small kernels, each wrong in one way, that the contracts must catch.

`run` tries all of them; `fp8lab verify --mutants` shows what it gives.
"""

from fp8lab.testing.mutants import (
    decoding,
    gradients,
    planted_adamw,
    planted_blocks,
    planted_casts,
    planted_products,
    planted_scales,
    requantizing,
)
from fp8lab.testing.mutants.registry import MUTANTS, RIGHT, Choices, Mutant
from fp8lab.testing.mutants.scoring import MutantResult, run, tried

__all__ = [
    "MUTANTS",
    "RIGHT",
    "Choices",
    "Mutant",
    "MutantResult",
    "decoding",
    "gradients",
    "planted_adamw",
    "planted_blocks",
    "planted_casts",
    "planted_products",
    "planted_scales",
    "requantizing",
    "run",
    "tried",
]
