"""The faults that the kit can name: what each looks like, and what to do about it."""

from __future__ import annotations

from fp8lab.testing.faults.fault import Fault
from fp8lab.testing.faults.named_casts import CASTS
from fp8lab.testing.faults.named_optimizer import GRADIENTS, OPTIMIZER
from fp8lab.testing.faults.named_products import PRODUCTS
from fp8lab.testing.faults.named_scales import SCALES

TOPICS: dict[str, tuple[Fault, ...]] = {
    "Casts": CASTS,
    "Scales, blocks and histories": SCALES,
    "Matrix products": PRODUCTS,
    "AdamW": OPTIMIZER,
    "Norm, clip and unscale": GRADIENTS,
}
FAULTS: dict[str, Fault] = {fault.name: fault for topic in TOPICS.values() for fault in topic}
