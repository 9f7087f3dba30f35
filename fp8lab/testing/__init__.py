"""The testing kit: inputs that break kernels, and comparisons that say where.

`check_cast`, `check_matmul` and the others hold a kernel to a contract; `contract` marks a function
for `fp8lab verify`. Below them, strategies and values make the inputs, `run_kernel` calls a kernel
on them, `to_torch` and `to_numpy` cross between the libraries, `assert_bits_equal` compares,
`compiled_ptx` shows what a kernel becomes. The kit knows the oracle and no kernel: kernels are
handed to it.

Importing this package loads none of it: what it offers is loaded when it is asked for. So what
needs no Hypothesis (comparison, values, PTX) works where that is not installed, and the audit of a
training run does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from fp8lab.testing.ptx import assembled, compiled_ptx, spilled_bytes
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

_NAMES = {
    "fp8lab.bridge": (
        "to_numpy",
        "to_torch",
    ),
    "fp8lab.testing.adapters": (
        "flat_input",
        "on_cupy",
        "takes_inverse_scale",
        "takes_tensor_scale",
        "transposed_output",
        "writes_output",
    ),
    "fp8lab.testing.bounds": (
        "Bound",
        "any_order_bound",
        "norm_any_order_bound",
        "one_code_bound",
        "reciprocal_scale_bound",
    ),
    "fp8lab.testing.checks": (
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
    ),
    "fp8lab.testing.comparison": ("assert_bits_equal",),
    "fp8lab.testing.drawing": ("inputs_of",),
    "fp8lab.testing.findings": (
        "Finding",
        "KernelFault",
    ),
    "fp8lab.testing.launch": ("run_kernel",),
    "fp8lab.testing.marks": ("contract",),
    "fp8lab.testing.profiles": (
        "PROFILES",
        "Profile",
    ),
    "fp8lab.testing.ptx": (
        "assembled",
        "compiled_ptx",
        "spilled_bytes",
    ),
    "fp8lab.testing.strategies": (
        "AdamWCase",
        "adamw_states",
        "cast_inputs",
        "ragged_sizes",
        "scales",
    ),
    "fp8lab.testing.values": (
        "CAST_KINDS",
        "cast_values",
        "edge_values",
        "special_values",
    ),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "hypothesis":
            raise
        raise ModuleNotFoundError(
            f'{__name__}.{name} needs hypothesis, which is not installed; install "fp8lab[test]"'
            " (in a checkout: make test)",
            name=error.name,
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
