"""What a Triton kernel compiles to for a GPU that need not be there.

Compilation runs in a process of its own: one that was started for the Triton interpreter cannot
compile any more.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def compiled_ptx(
    kernel: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    capability: int = 90,
    num_warps: int = 4,
    enable_fp_fusion: bool = False,
    aligned: Iterable[str] = (),
    registers: int | None = None,
) -> str:
    """The PTX of a kernel, Triton's or Gluon's.

    Args:
        kernel: Where the jitted function is, as "package.module:function".
        signature: The Triton type of each run-time argument: "*fp32", "i32", ...
        constants: The value of each compile-time argument; anything that can be pickled.
        capability: The target's compute capability: 90 is sm_90.
        num_warps: Warps a program.
        enable_fp_fusion: Whether multiply and add may become one operation.
        aligned: The run-time arguments that are multiples of 16, as Triton finds them to be at most
            launches: pointers, sizes. Without it no access is wider than an element.
        registers: The most registers a thread may take; None leaves it to the compiler.

    Returns:
        The PTX text.

    Raises:
        RuntimeError: The kernel does not compile; the message holds the compiler's.
    """
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
    if registers is not None:
        options["maxnreg"] = registers
    request = {
        "kernel": kernel,
        "signature": dict(signature),
        "constants": dict(constants),
        "capability": capability,
        "options": options,
        "aligned": list(aligned),
    }
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # The child imports what this process would, installed or not.
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import _main; _main()"],
        input=pickle.dumps(request),
        env=environment,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{kernel} does not compile for sm_{capability}:\n{done.stderr.decode()}"
        )
    return done.stdout.decode()


def assembled(ptx: str, folder: Path) -> tuple[Path, str]:
    """The machine code that ptxas, Triton's own, makes of PTX, and what it says about it.

    Args:
        folder: Where the files go.

    Raises:
        FileNotFoundError: There is no ptxas. subprocess.CalledProcessError: It refuses the PTX.
    """
    from triton import __file__ as triton

    own = Path(triton).parent / "backends/nvidia/bin"
    ptxas = shutil.which("ptxas", path=own) or shutil.which("ptxas")
    if ptxas is None:
        raise FileNotFoundError(f"there is no ptxas in {own} or on the path")
    source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    name = "" if target is None else target[1]
    done = subprocess.run(
        [ptxas, "-v", f"--gpu-name={name}", source, "-o", cubin],
        capture_output=True,
        text=True,
        check=True,
    )
    return cubin, done.stderr


def spilled_bytes(ptx: str, folder: Path) -> int:
    """What ptxas says that a thread spills."""
    _, said = assembled(ptx, folder)
    return sum(int(size) for size in re.findall(r"(\d+) bytes spill stores", said))


def _main() -> None:
    """In the process of its own: the request from standard input, the PTX to standard output."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    request = pickle.load(sys.stdin.buffer)
    module, name = request["kernel"].split(":")
    function = getattr(import_module(module), name)
    signature = {
        argument: request["signature"].get(argument, "constexpr") for argument in function.arg_names
    }
    divisible = {
        (function.arg_names.index(argument),): [["tt.divisibility", 16]]
        for argument in request["aligned"]
    }
    form = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    source = form(function, signature, constexprs=request["constants"], attrs=divisible)
    target = GPUTarget("cuda", request["capability"], 32)
    compiled = triton.compile(source, target=target, options=request["options"])
    sys.stdout.write(compiled.asm["ptx"])
