"""The contracts, one file a topic. Importing this makes all of them known by name."""

from fp8lab.testing.contracts.blocks import BlockQuantize, MxQuantize
from fp8lab.testing.contracts.casts import Cast, Dequantize, Requantize
from fp8lab.testing.contracts.gradients import Clip, Norm, Unscale
from fp8lab.testing.contracts.optimizer import AdamW
from fp8lab.testing.contracts.products import Matmul
from fp8lab.testing.contracts.scales import Amax, ScaleFromAmax, ScaleUpdate

__all__ = [
    "AdamW",
    "Amax",
    "BlockQuantize",
    "Cast",
    "Clip",
    "Dequantize",
    "Matmul",
    "MxQuantize",
    "Norm",
    "Requantize",
    "ScaleFromAmax",
    "ScaleUpdate",
    "Unscale",
]
