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

ROOT = Path(__file__).resolve().parent.parent

# In a process of its own: one that was started for the interpreter compiles nothing.
CHILD = """
    import json, subprocess, sys, tempfile
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource
    from fp8lab.kernels.matmul_gluon_device import GluonPlan, matmul_kernel

    plan = GluonPlan(
        stages=5, group_m=8, drain=8, scaling="blocks", start=False, bias="none", bfloat16=True
    )
    layout = gl.NVMMASharedLayout.get_default_for
    operand = f"tensordesc<fp8e4nv[128, 128],{layout([128, 128], gl.float8e4nv)!r}>"
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    signature = dict.fromkeys(matmul_kernel.arg_names, "i32")
    signature |= dict.fromkeys(["scale_a", "scale_b", "bias", "start"], "*fp32")
    signature |= {
        "a_desc": operand,
        "b_desc": operand,
        "out_desc": f"tensordesc<bf16[64, 128],{layout([64, 128], gl.bfloat16)!r}>",
        "scale_desc": f"tensordesc<fp32[1, 128],{flat!r}>",
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


def compiled() -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_fast_kernel_compiles_without_spills_or_serialised_products() -> None:
    """ptxas says C7510 to C7514 where it serialises wgmma, and Triton hides it."""
    found = compiled()
    steps = re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", found["ptx"]
    )
    # Two warpgroups; 8 + 4 + 2 + 1 partial sums, each of four steps.
    assert len(steps) == 2 * 15 * 4
    assert "fma.rn.f32" in found["ptx"]
    assert "C75" not in found["log"]
    assert "0 bytes spill stores, 0 bytes spill loads" in found["log"]
    assert found["shared"] <= 227 * 1024
