"""The benchmarks of matrix products: what they draw, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp8lab.errors import UserError
from fp8lab.experiments import bench_linear_products, bench_matmul, bench_matmul_emulation
from fp8lab.experiments.card_timing import ratios
from fp8lab.experiments.commands import exit_code
from fp8lab.experiments.documents import fill
from fp8lab.experiments.matmul_table import SECTION, section
from fp8lab.experiments.plot_matmul import draw
from fp8lab.records import Row, read_rows


def made_up_rows() -> list[Row]:
    environment = {"device": "a card", "packages": {"torch": "2", "triton": "3"}}
    head: Row = {"kind": "run", "when": "2026-11-29T00:00:00", "command": "bench"}
    rows: list[Row] = [head | {"environment": environment}]
    for place, shape in enumerate(("small", "large")):
        for mode in bench_matmul.MODES:
            heat = {
                "ratio": 1.1 - place / 10,
                "lowest": 0.9,
                "highest": 1.2,
                "fp8lab_tflops": 1100.0,
                "cublaslt_tflops": 1000.0,
            }
            row: Row = {"kind": "speed", "mode": mode.name, "shape": shape, "different": place}
            row |= {"m": 64, "n": 64, "k": 64, "clock_mhz": None, "power_w": 300.0}
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
        "matmul-card.png",
        "matmul-errors.png",
    }
    assert all(path.stat().st_size > 1000 for path in paths)
    assert draw([], tmp_path) == []


def test_the_document_says_what_is_met(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("x\n<!-- products: begin -->\nold\n<!-- products: end -->\ny\n")
    linear: Row = {
        "kind": "linear",
        "m": 4096,
        "scaling": "blocks",
        "product": "forward",
        "fp8lab_tflops": 900.0,
        "ratio": 1.25,
        "different": 0,
    }
    fill(document, SECTION, section([*made_up_rows(), linear]))
    text = document.read_text()
    assert text.startswith("x\n<!-- products: begin -->\n\nMeasured on 2026-11-29 on one a card")
    assert text.endswith("<!-- products: end -->\ny\n")
    assert "old" not in text
    # Geometric means of 1.1 and 1.0.
    assert "| native | 1.00, aimed at 1.05 | 1.049 | 1.000, large | 1.049 | the least |" in text
    assert "| 1x128 by 128x128 | 1.08, aimed at 1.15 | 1.049 | 1.000, large | 1.049 | no |" in text
    assert "| blocks | forward | 900 | 1.250 | 1.250 | 0 |" in text
    document.write_text("nothing")
    with pytest.raises(UserError, match="lacks the markers"):
        fill(document, SECTION, "text")


def test_ratios_are_taken_round_by_round() -> None:
    found = ratios({"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 2.0, 2.0]}, "ours", "theirs")
    assert found == {"ratio": 1.0, "lowest": 0.5, "highest": 2.0}


def test_the_products_of_a_layer_have_its_sizes() -> None:
    found = {(c.product, c.scaling): (c.m, c.n, c.k) for c in bench_linear_products.cases(7, 3, 5)}
    assert len(found) == 8
    for scaling in bench_linear_products.SCALINGS:
        assert found["forward", scaling] == (7, 3, 5)
        assert found["data gradient", scaling] == (7, 5, 3)
        assert found["weight gradient", scaling] == (3, 5, 7)
        assert found["weight gradient, added", scaling] == (3, 5, 7)


def test_without_a_card_the_benchmark_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    monkeypatch.setattr("sys.argv", ["bench"])
    for bench in (bench_matmul, bench_linear_products):
        assert exit_code(bench.main) == 2
        assert "needs a CUDA device" in capsys.readouterr().err


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
