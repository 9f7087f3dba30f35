"""The testing kit: inputs that break kernels, and comparisons that say where.

`check_cast`, `check_matmul` and the others hold a kernel to a contract; `contract` marks a function
for `fp8lab verify`. Below them, strategies and values make the inputs, `run_kernel` calls a kernel
on them, `to_torch` and `to_numpy` cross between the libraries, `assert_bits_equal` compares,
`compiled_ptx` shows what a kernel becomes. The kit knows the oracle and no kernel: kernels are
handed to it.
"""

from fp8lab.bridge import to_numpy, to_torch
from fp8lab.testing.adapters import (
    flat_input,
    on_cupy,
    takes_inverse_scale,
    takes_tensor_scale,
    transposed_output,
    writes_output,
)
from fp8lab.testing.bounds import (
    Bound,
    any_order_bound,
    norm_any_order_bound,
    one_code_bound,
    reciprocal_scale_bound,
)
from fp8lab.testing.checks import (
    check_adamw,
    check_amax,
    check_block_quantize,
    check_cast,
    check_clip,
    check_dequantize,
    check_matmul,
    check_mx_quantize,
    check_norm,
    check_requantize,
    check_scale_from_amax,
    check_scale_update,
    check_unscale,
)
from fp8lab.testing.comparison import assert_bits_equal
from fp8lab.testing.drawing import inputs_of
from fp8lab.testing.findings import Finding, KernelFault
from fp8lab.testing.launch import run_kernel
from fp8lab.testing.marks import contract
from fp8lab.testing.profiles import PROFILES, Profile
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
    "PROFILES",
    "AdamWCase",
    "Bound",
    "Finding",
    "KernelFault",
    "Profile",
    "adamw_states",
    "any_order_bound",
    "assembled",
    "assert_bits_equal",
    "cast_inputs",
    "cast_values",
    "check_adamw",
    "check_amax",
    "check_block_quantize",
    "check_cast",
    "check_clip",
    "check_dequantize",
    "check_matmul",
    "check_mx_quantize",
    "check_norm",
    "check_requantize",
    "check_scale_from_amax",
    "check_scale_update",
    "check_unscale",
    "compiled_ptx",
    "contract",
    "edge_values",
    "flat_input",
    "inputs_of",
    "norm_any_order_bound",
    "on_cupy",
    "one_code_bound",
    "ragged_sizes",
    "reciprocal_scale_bound",
    "run_kernel",
    "scales",
    "special_values",
    "spilled_bytes",
    "takes_inverse_scale",
    "takes_tensor_scale",
    "to_numpy",
    "to_torch",
    "transposed_output",
    "writes_output",
]
