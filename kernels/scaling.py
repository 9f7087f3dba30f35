"""Scales on the device: the Triton twins of `fp8lab.emulation.scaling`, under its names.

The names live by topic in `scaling_scales`, `scaling_blocks`, `scaling_mx`, `scaling_delayed` and
`scaling_presets`; this module offers them all.
"""

from fp8lab.delayed_presets import DELAYED_PRESETS, DelayedPreset
from fp8lab.kernels.scaling_blocks import (
    dequantize_blocks,
    quantize_blocks,
    quantize_blocks_with_transpose,
)
from fp8lab.kernels.scaling_delayed import (
    ALGORITHMS,
    DelayedScalingState,
    record_amax,
    update_delayed,
    update_delayed_,
)
from fp8lab.kernels.scaling_matrix import BlockSettings, BothLayouts
from fp8lab.kernels.scaling_mx import (
    MX_BLOCK,
    dequantize_mx,
    quantize_mx,
    quantize_mx_with_transpose,
)
from fp8lab.kernels.scaling_presets import (
    step_delayed,
    step_delayed_,
)
from fp8lab.kernels.scaling_rules import CURRENT_PRESETS, MX_ROUNDINGS
from fp8lab.kernels.scaling_scales import (
    amax,
    amax_of_lines,
    current_scale,
    inverse_scale,
    mx_scale,
    scale_from_amax,
)

__all__ = [
    "ALGORITHMS",
    "CURRENT_PRESETS",
    "DELAYED_PRESETS",
    "MX_BLOCK",
    "MX_ROUNDINGS",
    "BlockSettings",
    "BothLayouts",
    "DelayedPreset",
    "DelayedScalingState",
    "amax",
    "amax_of_lines",
    "current_scale",
    "dequantize_blocks",
    "dequantize_mx",
    "inverse_scale",
    "mx_scale",
    "quantize_blocks",
    "quantize_blocks_with_transpose",
    "quantize_mx",
    "quantize_mx_with_transpose",
    "record_amax",
    "scale_from_amax",
    "step_delayed",
    "step_delayed_",
    "update_delayed",
    "update_delayed_",
]
