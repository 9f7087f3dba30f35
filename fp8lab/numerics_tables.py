"""The tables of `docs/numerics.md`, made from the code: `python -m fp8lab.numerics_tables`.

Each stands between two comments in the document that name it; the command writes them anew, and a
test compares them with what the code gives.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fp8lab.emulation.casting import quantize
from fp8lab.formats import (
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    OVERFLOW_POLICIES,
    TARGETS,
    FloatFormat,
    format_named,
)
from fp8lab.peers import PEERS

DOCUMENT = Path("docs/numerics.md")
# The names of one policy each; "saturate" and "ieee" are other names of two of them.
PRESETS = ("ptx_satfinite", "ml_dtypes", "torch_2_11_cuda", "torch_2_13_cpu")


def formats_table() -> str:
    """Every target: widths, bias, range and special codes."""
    head = ("format", "bits s.e.m", "bias", "largest", "smallest normal", "smallest")
    rows = [(*head, "NaN", "Inf", "-0", "dtype")]
    for fmt in TARGETS.values():
        infinity = "none" if fmt.infinity_code is None else _hex(fmt.infinity_code, fmt)
        rows.append(
            (
                fmt.name,
                f"{int(fmt.signed)}.{fmt.exponent_bits}.{fmt.mantissa_bits}",
                str(fmt.bias),
                f"{fmt.max_finite:g}" if fmt.max_finite < 1e6 else f"{fmt.max_finite:.5g}",
                _power(fmt.min_normal),
                _power(fmt.min_subnormal),
                _hex(fmt.nan_code, fmt),
                infinity,
                _hex(fmt.sign_bit, fmt) if fmt.has_negative_zero else "none",
                fmt.dtype.name,
            )
        )
    return _markdown(rows)


def policies_table() -> str:
    """What each policy gives in each FP8 format for what has no code, as codes."""
    inputs = {
        "finite overflow": 1e39,
        "-overflow": -1e39,
        "+Inf": np.inf,
        "-Inf": -np.inf,
        "+NaN": np.nan,
        "-NaN": np.copysign(np.nan, -1.0),
        "-0": -0.0,
        "0": 0.0,
        "-1": -1.0,
    }
    rows: list[Sequence[str]] = [("format", "policy", *inputs)]
    values = np.array(list(inputs.values()))
    for fmt in FORMATS.values():
        for name in PRESETS:
            codes = quantize(values, fmt, overflow=name).view(fmt.code_dtype)
            rows.append((fmt.name, name, *(_hex(int(code), fmt) for code in codes)))
    return _markdown(rows)


def choices_table() -> str:
    """The separate choices that each preset consists of."""
    fields = ("finite", "infinity", "nan_code", "nan_sign", "zero", "negative")
    rows: list[Sequence[str]] = [("preset", "formats", *fields)]
    for name in PRESETS:
        preset = OVERFLOW_POLICIES[name]
        for formats, policy in (("all others", preset.policy), *preset.exceptions):
            where = formats if preset.exceptions else "all"
            rows.append((name, where, *(str(getattr(policy, field)) for field in fields)))
    return _markdown(rows)


# Inputs on which libraries differ: format, how it is written, its value. float64 where it says so.
DIFFERENCES: tuple[tuple[FloatFormat, str, float, type[np.floating]], ...] = (
    (E4M3, "464", 464.0, np.float32),
    (E4M3, "465", 465.0, np.float32),
    (E4M3, "-1e4", -1e4, np.float32),
    (E4M3, "+Inf", np.inf, np.float32),
    (E4M3, "-Inf", -np.inf, np.float32),
    (E4M3, "+NaN", np.nan, np.float32),
    (E4M3, "-NaN", np.copysign(np.nan, -1.0), np.float32),
    (E4M3, "-0", -0.0, np.float32),
    (E4M3, "0x1.efffffffffffep-1, float64", float.fromhex("0x1.efffffffffffep-1"), np.float64),
    (E5M2, "61440", 61440.0, np.float32),
    (E5M2, "+Inf", np.inf, np.float32),
    (E5M2, "+NaN", np.nan, np.float32),
    (E5M2, "-NaN", np.copysign(np.nan, -1.0), np.float32),
    (format_named("E4M3FNUZ"), "248", 248.0, np.float32),
    (format_named("E4M3FNUZ"), "+Inf", np.inf, np.float32),
    (format_named("E4M3FNUZ"), "-0", -0.0, np.float32),
    (E8M0, "0", 0.0, np.float32),
    (E8M0, "3 (a tie)", 3.0, np.float32),
    (E8M0, "-1", -1.0, np.float32),
    (E8M0, "+Inf", np.inf, np.float32),
    (E8M0, "1.25 * 2^-127", 1.25 * 2.0**-127, np.float32),
    (E8M0, "1e-60, float64", 1e-60, np.float64),
)


def differences_table() -> str:
    """Where libraries differ: the input, our answer by policy, and theirs.

    Raises:
        RuntimeError: A library is missing, or is not the version that its preset describes.
    """
    for peer in PEERS:
        if reason := peer.lacking():
            raise RuntimeError(f"cannot ask {peer.name}: {reason}")
    head = ("format", "input", "ours, saturate", "ours, ieee")
    rows: list[Sequence[str]] = [(*head, *(peer.name for peer in PEERS))]
    for fmt, text, value, dtype in DIFFERENCES:
        x = np.array([value], dtype=dtype)
        ours = [quantize(x, fmt, overflow=overflow) for overflow in ("saturate", "ieee")]
        theirs = [p.cast(x, fmt) if fmt.name in p.formats else None for p in PEERS]
        cells = (
            "-" if codes is None else _hex(int(codes.view(np.uint8)[0]), fmt)
            for codes in (*ours, *theirs)
        )
        rows.append((fmt.name, text, *cells))
    return _markdown(rows)


TABLES: dict[str, Callable[[], str]] = {
    "formats": formats_table,
    "choices": choices_table,
    "policies": policies_table,
    "differences": differences_table,
}


def with_tables(text: str, tables: dict[str, Callable[[], str]] = TABLES) -> str:
    """The document with each table made anew.

    Raises:
        ValueError: The document has no place for one of them.
    """
    for name, make in tables.items():
        pattern = re.compile(
            rf"(<!-- table: {name} -->\n).*?(<!-- end: {name} -->)", flags=re.DOTALL
        )
        table = make()
        text, count = pattern.subn(rf"\g<1>{table}\n\g<2>", text)
        if count != 1:
            raise ValueError(f"the document has {count} places for the table {name!r}, not one")
    return text


def main() -> int:
    """Write the document's tables anew."""
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_tables(text), encoding="utf-8")
    print(f"{DOCUMENT}: {', '.join(TABLES)}")
    return 0


def _hex(code: int, fmt: FloatFormat) -> str:
    return f"0x{code:0{fmt.bits // 4}X}"


def _power(value: float) -> str:
    return f"2^{int(np.log2(value))}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
