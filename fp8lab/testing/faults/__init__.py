"""Faults that the kit knows by name, and the wrong computations by which it recognises them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp8lab.testing.faults import (
    adamw,
    blocks,
    casts,
    decoding,
    gradients,
    histories,
    products,
    scales,
)
from fp8lab.testing.faults.catalogue import FAULTS, TOPICS
from fp8lab.testing.faults.fault import Fault
from fp8lab.testing.faults.hypothesis import Arrays, Hypotheses, Hypothesis, Settings

__all__ = ["FAULTS", "TOPICS", "Fault", "Hypothesis", "hypotheses_of"]

_BY_CONTRACT: dict[str, Hypotheses] = {
    "cast": casts.of_cast,
    "dequantize": decoding.of_dequantize,
    "requantize": decoding.of_requantize,
    "amax": casts.of_amax,
    "block_quantize": blocks.of_block_quantize,
    "mx_quantize": blocks.of_mx_quantize,
    "scale_from_amax": scales.of_scale_from_amax,
    "scale_update": histories.of_scale_update,
    "matmul": products.of_matmul,
    "adamw": adamw.of_adamw,
    "norm": gradients.of_norm,
    "clip": gradients.of_clip,
    "unscale": gradients.of_unscale,
}


def hypotheses_of(
    contract: str, settings: Settings, inputs: Arrays, expected: Arrays
) -> Iterator[Hypothesis]:
    """What may have gone wrong under a contract, from the narrowest fault to the widest.

    Args:
        contract: The contract's name; of one that is unknown there are no hypotheses.
        settings: Its choices by parameter name.
        inputs: What the kernel was given, by parameter name.
        expected: The right outputs: their names, shapes and dtypes.
    """
    make = _BY_CONTRACT.get(contract)
    if make is None:
        return
    yield from make(settings, inputs, expected)
    yield "nothing-computed", {name: np.zeros_like(array) for name, array in expected.items()}
