"""The benchmarks of matrix products: what they draw, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8lab.experiments import bench_matmul, bench_matmul_emulation
from fp8lab.experiments.plot_matmul import draw
from fp8lab.records import Row, read_rows


def made_up_rows() -> list[Row]:
    rows: list[Row] = [{"kind": "run", "environment": {"device": "a card"}}]
    for place, shape in enumerate(("small", "large")):
        for mode in bench_matmul.MODES:
            heat = {
                "ratio": 1.1 - place / 10,
                "fp8lab_tflops": 1100.0,
                "cublaslt_tflops": 1000.0,
            }
            row: Row = {"kind": "speed", "mode": mode.name, "shape": shape, "different": place}
            rows.append(row | {"hot": heat, "rested": heat})
    rows += [
        {"kind": "error", "mode": mode, "k": k, "card": k * 1e-6, "oracle": k * 1e-6}
        for mode in ("native", "promoted 128")
        for k in (32, 64)
    ]
    return rows


def test_figures_are_drawn_from_rows_alone(tmp_path: Path) -> None:
    paths = draw(made_up_rows(), tmp_path)
    assert {path.name for path in paths} == {
        "matmul-rates.png",
        "matmul-ratios.png",
        "matmul-errors.png",
    }
    assert all(path.stat().st_size > 1000 for path in paths)
    assert draw([], tmp_path) == []


def test_the_summary_names_the_worst_shape() -> None:
    text = bench_matmul.summary(made_up_rows())
    assert "native            hot     geometric mean 1.049, worst 1.000 at large" in text
    assert "elements that differ from cuBLASLt: 1" in text


@pytest.mark.parametrize("shape", bench_matmul.shapes().values(), ids=bench_matmul.shapes())
def test_shapes_suit_every_contestant(shape: tuple[int, int, int]) -> None:
    """Blocks of 128, and torch's scales of blocks only where it reads them rightly."""
    m, n, k = shape
    assert m % 16 == 0
    assert n % 128 == 0
    assert k % 512 == 0


def test_the_emulators_are_compared_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    sizes = ["--sizes", "8", "64", "64", "--repeats", "1", "--out", str(path)]
    monkeypatch.setattr("sys.argv", ["bench", *sizes])
    assert bench_matmul_emulation.main() == 0
    rows = [row for row in read_rows(path) if row["kind"] == "speed"]
    assert {(row["name"], row["threads"]) for row in rows} >= {("fp8lab", 1), ("fp8lab", 2)}
    assert all(row["different"] == 0 for row in rows)
    assert json.loads(path.read_text().splitlines()[0])["environment"]["processor"]
