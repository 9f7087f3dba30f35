"""Whether rows are those of a benchmark, so that what is drawn or told from them is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8lab.errors import UserError
from fp8lab.experiments.row_checks import (
    Kinds,
    check_once,
    check_row,
    is_count,
    is_positive,
    is_text,
    one_of,
    table_of,
)
from fp8lab.records import Row

_PACKAGES = table_of({"torch": is_text, "triton": is_text})
_ENVIRONMENT = table_of({"device": is_text, "packages": _PACKAGES})
_RUN: Kinds = {
    "kind": one_of("run"),
    "when": is_text,
    "command": is_text,
    "environment": _ENVIRONMENT,
}
_HEAT = table_of(
    dict.fromkeys(("ratio", "lowest", "highest", "fp8lab_tflops", "cublaslt_tflops"), is_positive)
)
_PRODUCTS: dict[str, Kinds] = {
    "speed": {
        **dict.fromkeys(("mode", "shape"), is_text),
        **dict.fromkeys(("m", "n", "k", "different"), is_count),
        **dict.fromkeys(("hot", "rested"), _HEAT),
    },
    "error": {
        "mode": is_text,
        "k": is_count,
        **dict.fromkeys(("card", "oracle"), is_positive),
    },
    "linear": {
        **dict.fromkeys(("layer", "product", "scaling"), is_text),
        **dict.fromkeys(("m", "n", "k", "different"), is_count),
        **dict.fromkeys(("ratio", "fp8lab_tflops"), is_positive),
    },
}
_OPTIMIZER_HEAD: Kinds = {
    "environment": _ENVIRONMENT,
    "rounds": is_count,
    "date": is_text,
    "command": is_text,
}
_OPTIMIZER: Kinds = {
    **dict.fromkeys(("group", "name"), is_text),
    **dict.fromkeys(
        ("elements", "bytes_per_element", "milliseconds", "copy", "share_of_copy"), is_positive
    ),
}
_SPREAD = table_of(dict.fromkeys(("median", "smallest", "largest"), is_positive))
_CASTING: Kinds = {
    **dict.fromkeys(("case", "kind", "date", "command", "device"), is_text),
    "packages": _PACKAGES,
    "elements": is_positive,
    "bytes": is_count,
    "microseconds": _SPREAD,
}


def checked_products(rows: list[Any], kinds: Sequence[str], source: Path) -> list[Row]:
    """The rows of `bench_matmul` or `bench_linear_products`.

    Args:
        rows: What the file holds.
        kinds: Of the rows after the first: "speed" and "error", or "linear".
        source: The file.

    Raises:
        UserError: Something else, a damaged row, or one that stands there twice.
    """
    _not_empty(rows, source)
    for line, row in enumerate(rows, start=1):
        if line == 1:
            check_row(row, _RUN, source, line)
            continue
        check_row(row, {"kind": one_of(*kinds)}, source, line)
        check_row(row, _PRODUCTS[row["kind"]], source, line)
    place = ("layer", "product", "scaling") if "linear" in kinds else ("kind", "mode", "shape", "k")
    check_once(rows, place, source)
    return rows


def checked_optimizer(rows: list[Any], source: Path) -> list[Row]:
    """The rows of `bench_optimizer`.

    Raises:
        UserError: Something else, a damaged row, or one that stands there twice.
    """
    _not_empty(rows, source)
    for line, row in enumerate(rows, start=1):
        check_row(row, _OPTIMIZER if line > 1 else _OPTIMIZER_HEAD, source, line)
    check_once(rows, ("group", "name"), source)
    return rows


def checked_casting(rows: list[Any], source: Path) -> list[Row]:
    """The rows of `bench_casting`.

    Raises:
        UserError: Something else, a damaged row, one that stands there twice, or none of the device
            copy.
    """
    _not_empty(rows, source)
    for line, row in enumerate(rows, start=1):
        check_row(row, _CASTING, source, line)
        for key in ("share_of_copy", "microseconds_in_graph"):
            if row.get(key) is not None:
                check_row(row, {key: _SPREAD}, source, line)
    check_once(rows, ("case", "kind", "elements"), source)
    if not any(row["case"] == "copy" for row in rows):
        raise UserError(f"{source} holds no row of the device copy; run bench_casting again")
    return rows


def _not_empty(rows: list[Any], source: Path) -> None:
    if len(rows) < 2:
        raise UserError(f"{source} holds no measurements; run the benchmark first")
