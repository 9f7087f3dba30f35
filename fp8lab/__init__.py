"""fp8lab: a laboratory for FP8 training.

`fp8lab.emulation` says which bits are right (NumPy only), `fp8lab.kernels` are the Triton kernels
held to those bits, `fp8lab.testing` is the kit that compares them, and `fp8lab.experiments` runs
the sweeps. `fp8lab.convert` turns a model's linear layers into FP8 ones. Importing this package
loads none of them, and never torch: what it offers below is loaded when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8lab.auditing import audit
    from fp8lab.conversion import conversion_report, convert, restore
    from fp8lab.freezing import freeze

__version__ = "0.1.0"

__all__ = ["__version__", "audit", "conversion_report", "convert", "freeze", "restore"]

_HOMES = {
    "audit": "fp8lab.auditing",
    "convert": "fp8lab.conversion",
    "conversion_report": "fp8lab.conversion",
    "restore": "fp8lab.conversion",
    "freeze": "fp8lab.freezing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
