"""Record what a card returns for matrix products, for tests that run without one.

    python -m fp8lab.experiments.record_golden [--out FOLDER]

Prints, for each case, how many of its elements differ from the oracle. `hopper_products.npz` holds
inputs and outputs of the lab's kernels, and under "cases" what each was, as JSON;
`cublaslt_epilogues.npz` those of torch._scaled_mm with a bias, and with scales of blocks on both
sides. `tests/test_matmul_golden.py` reads them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from fp8lab.bridge import to_numpy, to_torch
from fp8lab.emulation.matmul import TENSOR_CORES
from fp8lab.emulation.matmul import matmul as oracle
from fp8lab.errors import UserError
from fp8lab.experiments.commands import Parser, check_writable, exit_code
from fp8lab.kernels.dot_tile import dot_tile
from fp8lab.kernels.matmul import matmul
from fp8lab.records import environment
from fp8lab.testing.products import accumulator_values, operand_values

Array = np.ndarray[Any, Any]
OUT = Path("tests/golden")
PRODUCTS, EPILOGUES = "hopper_products.npz", "cublaslt_epilogues.npz"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@dataclass(frozen=True)
class GoldenCase:
    """One product.

    Attributes:
        name: Its arrays in the file are `{name}_a` (M, K), `{name}_b` (N, K), `{name}_d`, and where
            there are any `{name}_start`, `{name}_bias`, `{name}_scale_a`, `{name}_scale_b`: raw
            bits as unsigned integers, but for scales, which are float32.
        core: The name of the core that should give these bits.
        dtypes: Of a and b.
        sizes: M, N and K.
        start: The kind of accumulator, "" for none.
        kinds: Of the operands.
        special: Whether they may hold NaN and infinities.
        promote: k between promotions.
        bias: Whether there is one, along N.
        scaling: "", "1x128 by 1x128" or "1x32 by 1x32".
        cast: Whether a is cast to FP8 inside the kernel.
        tile: Whether one tile of tl.dot computes it; else the library's kernel.
    """

    name: str
    core: str = "hopper_fp8"
    dtypes: tuple[str, str] = (E4M3, E4M3)
    sizes: tuple[int, int, int] = (64, 64, 96)
    start: str = ""
    kinds: tuple[str, str] = ("ordinary", "ordinary")
    special: bool = False
    promote: int | None = None
    bias: bool = False
    scaling: str = ""
    cast: bool = False
    tile: bool = True


def cases() -> list[GoldenCase]:
    """What the first recordings lack."""
    found = [
        GoldenCase(f"start_{kind}", start=kind, kinds=("exponents", "ordinary"), sizes=(64, 64, 64))
        for kind in ("zero", "ordinary", "wide", "huge", "special")
    ]
    found += [
        GoldenCase("special", dtypes=(E4M3, E5M2), special=True, kinds=("patterns", "sparse")),
        GoldenCase("special_e5m2", dtypes=(E5M2, E5M2), special=True, kinds=("sparse", "sparse")),
        GoldenCase("opposed", kinds=("opposed", "exponents"), dtypes=(E4M3, E5M2)),
        GoldenCase("in_registers", cast=True, start="ordinary"),
        GoldenCase("promoted_start", promote=32, start="ordinary", dtypes=(E5M2, E4M3)),
    ]
    for pair in ((E4M3, E4M3), (E5M2, E5M2), (E4M3, E5M2)):
        name = "_".join(dtype.removeprefix("float8_") for dtype in pair)
        found += [
            GoldenCase(f"f16_{name}_{start}", "hopper_fp8_f16", pair, start=start)
            for start in ("ordinary", "huge")
        ]
    for dtype, core in (("bfloat16", "hopper_bf16"), ("float16", "hopper_f16")):
        for kind, special in (("ordinary", False), ("patterns", True), ("opposed", False)):
            found.append(
                GoldenCase(
                    f"{dtype}_{kind}",
                    core,
                    (dtype, dtype),
                    (64, 64, 64),
                    "ordinary",
                    (kind, "ordinary"),
                    special,
                )
            )
    found += [
        GoldenCase("m16", "hopper_fp8_via_f16", (E4M3, E5M2), (16, 64, 128), "ordinary"),
        GoldenCase("m32", "hopper_fp8_via_f16", (E5M2, E4M3), (32, 64, 64), "zero", special=True),
        GoldenCase("bias", sizes=(70, 48, 200), bias=True, promote=128, tile=False),
        GoldenCase("columns", sizes=(70, 48, 300), scaling="1x128 by 1x128", tile=False),
        GoldenCase("mx", sizes=(70, 48, 100), scaling="1x32 by 1x32", tile=False),
    ]
    return found


def inputs(case: GoldenCase, seed: int) -> dict[str, Array]:
    """The arrays of a case, by the oracle's argument names; b is (N, K)."""
    m, n, k = case.sizes
    core = TENSOR_CORES[case.core]
    arrays: dict[str, Array] = {
        "a": operand_values(seed, (m, k), case.dtypes[0], case.kinds[0], special=case.special),
        "b": operand_values(seed + 1, (n, k), case.dtypes[1], case.kinds[1], special=case.special),
    }
    if case.start:
        arrays["start"] = accumulator_values(seed + 2, (m, n), core.accumulator, case.start)
    if case.bias:
        arrays["bias"] = accumulator_values(seed + 3, (1, n), "float32", "ordinary")[0]
    if case.scaling:
        blocks = -(-k // (128 if "128" in case.scaling else 32))
        rng = np.random.default_rng(seed)
        arrays["scale_a"] = np.exp2(rng.uniform(-6, 6, (m, blocks))).astype(np.float32)
        arrays["scale_b"] = np.exp2(rng.uniform(-6, 6, (blocks, n))).astype(np.float32)
    return arrays


def expected(case: GoldenCase, arrays: dict[str, Array]) -> Array:
    """What the oracle gives."""
    return oracle(
        arrays["a"],
        arrays["b"].T,
        core=TENSOR_CORES[case.core],
        accumulator=arrays.get("start"),
        promote_every=case.promote,
        bias=arrays.get("bias"),
        inverse_scale_a=arrays.get("scale_a"),
        inverse_scale_b=arrays.get("scale_b"),
    )


def on_card(case: GoldenCase, arrays: dict[str, Array]) -> Array:
    """What the card gives, widened to float32."""
    there = {name: to_torch(array, device="cuda") for name, array in arrays.items()}
    if not case.tile:
        return to_numpy(
            matmul(
                there["a"],
                there["b"].t(),
                promote_every=case.promote,
                bias=there.get("bias"),
                inverse_scale_a=there.get("scale_a"),
                inverse_scale_b=there.get("scale_b"),
            )
        )
    m, n, k = case.sizes
    half = TENSOR_CORES[case.core].accumulator == "float16"
    start = there.get("start", torch.zeros(m, n, device="cuda"))
    out = torch.empty_like(start)
    dot_tile[(1,)](
        there["a"].float() if case.cast else there["a"],
        there["b"],
        start,
        out,
        k,
        M=m,
        N=n,
        BLOCK_K=32 if k % 64 else 64,
        PROMOTE=case.promote,
        CAST_A=case.cast,
        HALF=half,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return to_numpy(out).astype(np.float32)


def record(path: Path) -> None:
    """Record every case of the lab's kernels."""
    stored: dict[str, Array] = {}
    for place, case in enumerate(cases()):
        arrays = inputs(case, 1000 * place)
        got, want = on_card(case, arrays), expected(case, arrays)
        nan = np.isnan(got) & np.isnan(want)
        different = int(((got.view(np.uint32) != want.view(np.uint32)) & ~nan).sum())
        payload = int((got.view(np.uint32)[nan] != 0x7FFFFFFF).sum())
        print(f"{case.name:<24} {different} of {got.size} differ; {payload} NaN of other bits")
        for name, array in (arrays | {"d": got}).items():
            bits = np.dtype(f"u{array.dtype.itemsize}")
            stored[f"{case.name}_{name}"] = array if "scale" in name else array.view(bits)
    stored["cases"] = np.array(json.dumps([asdict(case) for case in cases()]))
    _save(path, stored)


def epilogues() -> list[tuple[str, bool, str]]:
    """What is recorded of torch._scaled_mm: scaling, fast accumulation, and the bias' type.

    cuBLASLt takes no bias with a float32 result, and only one of the result's type.
    """
    found = [
        (scaling, fast, dtype)
        for dtype in ("bfloat16", "float16")
        for scaling in ("tensor", "vectors", "1x128 by 128x128")
        for fast in (True, False)
        if not (fast and "by" in scaling)
    ]
    return [*found, ("1x128 by 1x128", False, "")]


def epilogue_inputs() -> dict[str, Array]:
    """Codes (M, K) and (N, K), a bias, and both scales of each scaling."""
    m, n, k = 96, 128, 512
    rng = np.random.default_rng(5)
    arrays: dict[str, Array] = {
        "a": rng.standard_normal((m, k), np.float32).astype(ml_dtypes.float8_e4m3fn),
        "b": rng.standard_normal((n, k), np.float32).astype(ml_dtypes.float8_e4m3fn),
        "bias": 20 * rng.standard_normal(n, np.float32),
    }
    for scaling, shapes in {
        "tensor": ((1, 1), (1, 1)),
        "vectors": ((m, 1), (1, n)),
        "1x128 by 128x128": ((m, k // 128), (k // 128, n // 128)),
        "1x128 by 1x128": ((m, k // 128), (k // 128, n)),
    }.items():
        for side, shape in zip("ab", shapes, strict=True):
            arrays[f"{scaling} {side}"] = rng.random(shape, np.float32) + np.float32(0.1)
    return arrays


def epilogue_expected(arrays: dict[str, Array], scaling: str, fast: bool, dtype: str) -> Array:
    """What the oracle gives, in float32 before it is rounded to `dtype`."""
    bias = arrays["bias"].astype(dtype).astype(np.float32) if dtype else None
    return oracle(
        arrays["a"],
        arrays["b"].T,
        inverse_scale_a=arrays[f"{scaling} a"],
        inverse_scale_b=arrays[f"{scaling} b"],
        bias=bias,
        promote_every=None if fast else 128,
    )


def epilogue_on_card(arrays: dict[str, Array], scaling: str, fast: bool, dtype: str) -> Array:
    """What torch._scaled_mm gives."""
    kind = getattr(torch, dtype or "float32")
    there = {name: to_torch(array, device="cuda") for name, array in arrays.items()}
    # Scales of blocks in the order that it wants them: those of all rows lie together.
    scale_a, scale_b = there[f"{scaling} a"], there[f"{scaling} b"]
    if "by" in scaling:
        scale_a = scale_a.t().contiguous().t()
    if "by 128" in scaling:
        scale_b = scale_b.t().contiguous().t()
    if scaling == "tensor":
        scale_a, scale_b = scale_a[0, 0], scale_b[0, 0]
    result = torch._scaled_mm(
        there["a"],
        there["b"].t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=there["bias"].to(kind) if dtype else None,
        out_dtype=kind,
        use_fast_accum=fast,
    )
    return to_numpy(result)


def record_epilogues(path: Path) -> None:
    """Record what torch._scaled_mm does around the sum."""
    arrays = epilogue_inputs()
    stored = {
        name: array.view(np.uint8) if array.dtype.itemsize == 1 else array
        for name, array in arrays.items()
    }
    for case in epilogues():
        got = epilogue_on_card(arrays, *case)
        bits = np.dtype(f"u{got.dtype.itemsize}")
        want = epilogue_expected(arrays, *case).astype(got.dtype)
        different = int((got.view(bits) != want.view(bits)).sum())
        print(f"{epilogue_name(*case):<40} {different} of {got.size} differ")
        stored[epilogue_name(*case)] = got.view(bits)
    _save(path, stored)


def epilogue_name(scaling: str, fast: bool, dtype: str) -> str:
    """The key of an output."""
    return f"{scaling}, {'fast' if fast else 'promoted'}, {dtype or 'no bias'}"


def _save(path: Path, stored: dict[str, Array]) -> None:
    stored["environment"] = np.array(json.dumps(environment("cuda")))
    np.savez_compressed(path, **stored)  # type: ignore[arg-type]
    print(path, f"{path.stat().st_size / 1e6:.2f} MB")


def main(arguments: list[str] | None = None) -> int:
    """Record what a card gives."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    folder = parser.parse_args(arguments).out
    for name in (EPILOGUES, PRODUCTS):
        check_writable(folder / name)
    if not torch.cuda.is_available():
        raise UserError("record_golden needs a CUDA device; tests read what it has recorded")
    folder.mkdir(parents=True, exist_ok=True)
    record_epilogues(folder / EPILOGUES)
    record(folder / PRODUCTS)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
