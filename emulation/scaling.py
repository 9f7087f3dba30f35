"""Scales: amax, the scale it gives, delayed scaling's history, blocks, MX.

`scale` multiplies when quantising, `inverse_scale` when dequantising; the E8M0 scale of MX is the
standard's, and multiplies when dequantising. Exponents come from bits, never from a logarithm.

The names live by topic in `amax`, `scale_rules`, `delayed`, `delayed_presets`, `blocks`, `mx` and
`fake_quantize`; this module offers them all.
"""

from fp8lab.delayed_presets import DELAYED_PRESETS, DelayedPreset
from fp8lab.emulation.amax import amax, merge_amax
from fp8lab.emulation.blocks import dequantize_blocks, expand_blocks, quantize_blocks
from fp8lab.emulation.delayed import (
    ALGORITHMS,
    AmaxAlgorithm,
    DelayedScalingState,
    quantize_delayed,
    record_amax,
    resize_history,
    update_delayed,
)
from fp8lab.emulation.delayed_presets import step_delayed
from fp8lab.emulation.fake_quantize import fake_quantize, fake_quantize_grad
from fp8lab.emulation.mx import MX_BLOCK, MX_ROUNDINGS, dequantize_mx, mx_scale, quantize_mx
from fp8lab.emulation.scale_rules import (
    CURRENT_PRESETS,
    FLT_MAX,
    SMALLEST_SCALE,
    CurrentPreset,
    check_margin,
    current_scale,
    inverse_scale,
    scale_from_amax,
    static_scale,
)

__all__ = [
    "ALGORITHMS",
    "CURRENT_PRESETS",
    "DELAYED_PRESETS",
    "FLT_MAX",
    "MX_BLOCK",
    "MX_ROUNDINGS",
    "SMALLEST_SCALE",
    "AmaxAlgorithm",
    "CurrentPreset",
    "DelayedPreset",
    "DelayedScalingState",
    "amax",
    "check_margin",
    "current_scale",
    "dequantize_blocks",
    "dequantize_mx",
    "expand_blocks",
    "fake_quantize",
    "fake_quantize_grad",
    "inverse_scale",
    "merge_amax",
    "mx_scale",
    "quantize_blocks",
    "quantize_delayed",
    "quantize_mx",
    "record_amax",
    "resize_history",
    "scale_from_amax",
    "static_scale",
    "step_delayed",
    "update_delayed",
]
