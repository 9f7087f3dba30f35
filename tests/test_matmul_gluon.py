"""What the fast kernel compiles to for sm_90. No card is needed; one does run it in
tests/test_matmul_card.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# In a process of its own: one that was started for the interpreter compiles nothing.
CHILD = """
    import json, subprocess, sys, tempfile
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource
    from fp8lab.kernels.matmul_gluon_device import matmul_kernel
    from fp8lab.kernels.matmul_gluon_plan import GluonPlan

    plan = GluonPlan(**json.load(sys.stdin))
    layout = gl.NVMMASharedLayout.get_default_for

    def operand(rows):
        block = [rows, plan.depth]
        return f"tensordesc<fp8e4nv{block},{layout(block, gl.float8e4nv)!r}>"

    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    signature = dict.fromkeys(matmul_kernel.arg_names, "i32")
    signature |= dict.fromkeys(["left_scale", "right_scale", "bias", "start"], "*fp32")
    signature |= {
        "left_desc": operand(plan.box),
        "right_desc": operand(plan.columns),
        "out_desc": f"tensordesc<bf16{plan.piece},{layout(plan.piece, gl.bfloat16)!r}>",
        "left_scale_desc": f"tensordesc<fp32[1, {plan.box}],{flat!r}>",
        "right_scale_desc": f"tensordesc<fp32[1, {plan.scale_columns}],{flat!r}>",
        "PLAN": "constexpr",
    }
    compiled = triton.compile(
        GluonASTSource(matmul_kernel, signature, constexprs={"PLAN": plan}),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "enable_fp_fusion": False},
    )
    ptxas = triton.knobs.nvidia.ptxas.path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        assembled = subprocess.run(
            [ptxas, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"],
            capture_output=True, text=True, check=True,
        )
    shared = compiled.metadata.shared
    json.dump({"ptx": compiled.asm["ptx"], "log": assembled.stderr, "shared": shared}, sys.stdout)
"""

PLAN = {
    "rows": 128,
    "columns": 128,
    "depth": 128,
    "stages": 5,
    "group": 8,
    "drain": 8,
    "swap": False,
    "scaling": "none",
    "by_row": False,
    "by_column": False,
    "squares": False,
    "start": False,
    "bias": "none",
    "bfloat16": True,
}
BLOCKS = {"scaling": "blocks", "by_row": True, "squares": True}
BOTH = {"scaling": "blocks", "by_row": True, "by_column": True}
WIDE = {"columns": 256, "stages": 4, "drain": 1}
TALL = {"rows": 192, "stages": 5, "drain": 1}


def compiled(**options: Any) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD)],
        cwd=ROOT,
        env=environment,
        input=json.dumps(PLAN | options),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("options", "shape", "count"),
    [
        # Two warpgroups; 8 + 4 + 2 + 1 partial sums, each of four steps.
        (BLOCKS, "m64n128k32", 2 * 15 * 4),
        (BOTH, "m64n128k32", 2 * 15 * 4),
        # Two warpgroups, a loop over stages of four parts.
        (WIDE, "m64n64k32", 2 * 4 * 4),
        (WIDE | BLOCKS, "m64n64k32", 2 * 4 * 4),
        (WIDE | BOTH, "m64n64k32", 2 * 4 * 4),
        # Three warpgroups, a loop over stages of four steps.
        (TALL | {"scaling": "tensor"}, "m64n128k32", 3 * 4),
        (TALL | {"scaling": "vectors", "bias": "vector", "swap": True}, "m64n128k32", 3 * 4),
        (TALL | BLOCKS | {"start": True}, "m64n128k32", 3 * 4),
        (TALL | BLOCKS | {"by_row": False}, "m64n128k32", 3 * 4),
        (TALL | BLOCKS | {"by_row": False, "by_column": True}, "m64n128k32", 3 * 4),
        (TALL | BOTH, "m64n128k32", 3 * 4),
        # Two warpgroups, a loop over stages of four steps.
        (
            {"columns": 256, "stages": 4, "drain": 0, "scaling": "vectors"},
            "m64n256k32",
            2 * 4,
        ),
        # One warpgroup, stages of eight steps.
        (
            {
                "rows": 64,
                "columns": 16,
                "depth": 256,
                "stages": 8,
                "drain": 0,
                "swap": True,
            },
            "m64n16k32",
            8,
        ),
    ],
    ids=[
        "1x128 by 128x128",
        "1x128 by 1x128",
        "wide",
        "wide, 1x128 by 128x128",
        "wide, 1x128 by 1x128",
        "tall",
        "tall, swapped",
        "tall, 1x128 by 128x128",
        "tall, 128x128 by 128x128",
        "tall, 128x128 by 1x128",
        "tall, 1x128 by 1x128",
        "native",
        "few rows",
    ],
)
def test_the_fast_kernel_compiles_without_spills_or_serialised_products(
    options: dict[str, Any], shape: str, count: int
) -> None:
    """ptxas says C7510 to C7514 where it serialises wgmma, and Triton hides it."""
    found = compiled(**options)
    steps = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.{shape}\.f32\.e4m3\.e4m3", found["ptx"])
    assert len(steps) == count
    assert ("fma.rn.f32" in found["ptx"]) == (options.get("scaling") == "blocks")
    assert "C75" not in found["log"]
    assert "0 bytes spill stores, 0 bytes spill loads" in found["log"]
    assert found["shared"] <= 227 * 1024
    # Nothing is read before the kernel before has ended.
    wait, copy = found["ptx"].index("griddepcontrol.wait"), found["ptx"].index("cp.async.bulk")
    assert wait < copy
