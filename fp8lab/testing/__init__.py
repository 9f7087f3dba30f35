"""The testing kit: inputs that break kernels, and comparisons that say where.

Strategies and values make the inputs, `run_kernel` calls a kernel on them, `to_torch` and
`to_numpy` cross between the libraries, `assert_bits_equal` compares, `compiled_ptx` shows what a
kernel becomes. The kit knows the oracle and no kernel: kernels are handed to it.
"""

from fp8lab.bridge import to_numpy, to_torch
from fp8lab.testing.comparison import assert_bits_equal
from fp8lab.testing.launch import run_kernel
from fp8lab.testing.ptx import compiled_ptx
from fp8lab.testing.strategies import (
    AdamWCase,
    adamw_states,
    cast_inputs,
    ragged_sizes,
    scales,
)
from fp8lab.testing.values import CAST_KINDS, cast_values, edge_values, special_values

__all__ = [
    "CAST_KINDS",
    "AdamWCase",
    "adamw_states",
    "assert_bits_equal",
    "cast_inputs",
    "cast_values",
    "compiled_ptx",
    "edge_values",
    "ragged_sizes",
    "run_kernel",
    "scales",
    "special_values",
    "to_numpy",
    "to_torch",
]
