"""The floors: who may import whom. Read from the source, so imports inside functions count, too.

1. `errors`, `formats`, `recipes`: plain data.
2. `emulation/`: NumPy, ml_dtypes and floor 1. `testing/` stands on it and is handed the kernels.
3. `kernels/`: torch, Triton, NumPy and floor 1. Never the oracle.
4. `ops` imports both; layers, optimizers and `training` go through it; experiments, gates and the
   command line stand on top.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fp8lab"
LINKED = ("emulation", "experiments", "kernels")

FLOOR_1 = frozenset(
    {
        "fp8lab.delayed_presets",
        "fp8lab.errors",
        "fp8lab.formats",
        "fp8lab.optimizer_formats",
        "fp8lab.recipes",
        "fp8lab.swiglu_constants",
    }
) | {f"fp8lab.recipes_{part}" for part in ("policies", "model", "presets", "text")}
BRIDGE = "fp8lab.bridge"  # between NumPy and torch; it loads torch when it is called
ORACLE = frozenset({"numpy", "ml_dtypes"})


@dataclass(frozen=True)
class Room:
    """What the modules of one room may import besides the standard library and their own room.

    Attributes:
        packages: Top-level packages of others.
        modules: Parts of fp8lab, each with all below it.
    """

    packages: frozenset[str]
    modules: frozenset[str]


ROOMS = {
    "fp8lab.delayed_presets": Room(frozenset(), frozenset()),
    "fp8lab.errors": Room(frozenset(), frozenset()),
    "fp8lab.formats": Room(ORACLE, FLOOR_1),
    "fp8lab.optimizer_formats": Room(ORACLE, FLOOR_1),
    "fp8lab.swiglu_constants": Room(frozenset(), frozenset()),
    **{part: Room(ORACLE, FLOOR_1) for part in FLOOR_1 if part.startswith("fp8lab.recipes")},
    "fp8lab.emulation": Room(ORACLE, FLOOR_1),
    # NumPy is what the interpreter computes in, so it is quietened through NumPy.
    "fp8lab.kernels": Room(frozenset({"numpy", "torch", "triton"}), FLOOR_1),
    # Triton, to compile a kernel that is handed in and read its PTX; CuPy, to hand one arrays.
    "fp8lab.testing": Room(
        ORACLE | {"torch", "triton", "cupy", "hypothesis", "pytest"},
        FLOOR_1 | {"fp8lab.emulation", BRIDGE},
    ),
    BRIDGE: Room(ORACLE | {"torch"}, frozenset()),
}

# Above the rooms, a module imports its own height and what is below. A module that is not named
# here is at HEIGHT_OF_PARTS.
HEIGHT_OF_PARTS = 2
HEIGHTS = {
    "fp8lab.observe": 1,
    "fp8lab.ops": 1,
    "fp8lab.ops_adamw": 1,
    "fp8lab.ops_gradients": 1,
    "fp8lab.ops_linear": 1,
    "fp8lab.ops_operands": 1,
    "fp8lab.ops_swiglu": 1,
    "fp8lab.ops_telemetry": 1,
    "fp8lab.training": 3,
    "fp8lab.resume": 3,
    "fp8lab.resume_check": 3,
    "fp8lab.resume_config": 3,
    "fp8lab.resume_folder": 3,
    "fp8lab.gates": 4,
    "fp8lab.experiments": 4,
    "fp8lab.cli": 5,
    "fp8lab.cli_options": 5,
    "fp8lab.cli_sweep": 5,
    "fp8lab.cli_train": 5,
    "fp8lab.cli_watch": 5,
    "fp8lab.__main__": 6,
}
# They reach the kernels through `ops`, where the audit sees every operation.
THROUGH_OPS = (
    "fp8lab.conversion",
    "fp8lab.freezing",
    "fp8lab.gradients",
    "fp8lab.linear",
    "fp8lab.linear_casts",
    "fp8lab.linear_compiled",
    "fp8lab.linear_products",
    "fp8lab.linear_state",
    "fp8lab.optimizer",
    "fp8lab.swiglu",
    "fp8lab.swiglu_compiled",
    "fp8lab.swiglu_products",
    "fp8lab.telemetry",
    "fp8lab.telemetry_meter",
    "fp8lab.telemetry_parameters",
    "fp8lab.training",
)


def is_in(module: str, part: str) -> bool:
    """Whether `module` is `part` or lies below it."""
    return module == part or module.startswith(part + ".")


def height(module: str) -> int:
    """How high a module of fp8lab stands; the rooms are at the bottom."""
    if any(is_in(module, room) for room in ROOMS):
        return 0
    return next((h for part, h in HEIGHTS.items() if is_in(module, part)), HEIGHT_OF_PARTS)


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, module) for each import anywhere in `source`; a relative import's name has its dots.

    `from fp8lab import x` counts as fp8lab.x, and import_module("x") and __import__("x") as x.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}" if base == "fp8lab" else base
        elif isinstance(node, ast.Call) and node.args:
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            first = node.args[0]
            if (
                name in ("import_module", "__import__")
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                yield node.lineno, first.value


def broken_floors(module: str, source: str) -> list[str]:
    """One line for each import in `source` that `module` may not have."""
    return [
        f"{module}, line {line}: imports {imported}; {reason}"
        for line, imported in imports(source)
        if (reason := _reason_against(module, imported))
    ]


def _reason_against(module: str, imported: str) -> str | None:
    top = imported.partition(".")[0]
    if imported.startswith("."):
        return "imports are absolute"
    if top in LINKED:
        return f"the right name is fp8lab.{imported}"
    if top in sys.stdlib_module_names or not is_in(module, "fp8lab"):
        return None
    own = next((name for name in ROOMS if is_in(module, name)), None)
    if own is not None:
        room = ROOMS[own]
        if top == "fp8lab":
            allowed = room.modules | {own}
            return None if any(is_in(imported, a) for a in allowed) else _list(own, allowed)
        return None if top in room.packages else _list(own, room.packages)
    # `import fp8lab` and what its __init__ offers load nothing from above by themselves.
    if top != "fp8lab" or imported == "fp8lab" or module == "fp8lab":
        return None
    if is_in(imported, "fp8lab.kernels") and any(is_in(module, part) for part in THROUGH_OPS):
        return "it reaches the kernels through fp8lab.ops"
    if height(imported) > height(module):
        return f"that stands above it ({height(imported)} above {height(module)}, see HEIGHTS)"
    return None


def _list(room: str, allowed: frozenset[str]) -> str:
    return f"{room} may import {', '.join(sorted(allowed)) or 'the standard library alone'}"


def module_files() -> Iterator[tuple[str, Path]]:
    """(module name, file) for each module of fp8lab, the linked folders included."""
    for path in sorted(PACKAGE.glob("**/*.py")) + [
        path for part in LINKED for path in sorted((PACKAGE / part).glob("**/*.py"))
    ]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(module_files())


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_floor_may(module: str) -> None:
    found = broken_floors(module, MODULES[module].read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


def test_tests_import_by_the_right_names() -> None:
    files = sorted((ROOT / "tests").glob("**/*.py"))
    found = [line for f in files for line in broken_floors(f.stem, f.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_every_room_is_looked_at() -> None:
    for part in ("fp8lab.formats", "fp8lab.emulation", "fp8lab.kernels", "fp8lab.testing"):
        assert any(is_in(module, part) for module in MODULES), f"no module of {part} was found"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fp8lab.formats", "import torch"),
        ("fp8lab.recipes", "from fp8lab import ops"),
        ("fp8lab.emulation.casting", "import torch.nn"),
        ("fp8lab.emulation.casting", "def f():\n    from triton import language"),
        ("fp8lab.emulation.casting", "from fp8lab.kernels.casting import quantize"),
        ("fp8lab.emulation.casting", "from fp8lab import kernels"),
        ("fp8lab.emulation.casting", "import importlib\nimportlib.import_module('torch')"),
        ("fp8lab.emulation.casting", "from fp8lab.formats_extra import E4M3"),
        ("fp8lab.kernels.casting", "from fp8lab.emulation import casting"),
        ("fp8lab.kernels.casting", "import ml_dtypes"),
        ("fp8lab.testing.casts", "import fp8lab.kernels.casting"),
        ("fp8lab.testing.casts", "from fp8lab.ops import matmul"),
        ("fp8lab.ops", "from fp8lab.linear import Float8Linear"),
        ("fp8lab.linear", "from fp8lab.training import train"),
        ("fp8lab.linear", "from fp8lab.kernels.matmul import matmul"),
        ("fp8lab.training", "import fp8lab.experiments.sweep"),
        ("fp8lab.gates", "from fp8lab import cli"),
        ("fp8lab.linear", "from . import ops"),
        ("fp8lab.linear", "import emulation.casting"),
        ("test_casting", "from kernels.casting import quantize"),
        ("test_casting", "import experiments"),
    ],
)
def test_a_planted_import_is_found(module: str, source: str) -> None:
    assert len(broken_floors(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fp8lab.emulation.casting", "import math\nimport numpy as np\nimport ml_dtypes"),
        ("fp8lab.emulation.matmul", "from fp8lab.emulation.casting import quantize"),
        ("fp8lab.kernels.casting", "import torch, triton\nimport triton.language as tl"),
        ("fp8lab.kernels.matmul", "from fp8lab.formats import E4M3\nimport fp8lab.kernels.launch"),
        ("fp8lab.testing.casts", "import torch\nfrom fp8lab.emulation import casting"),
        ("fp8lab.ops", "from fp8lab import emulation, kernels"),
        ("fp8lab.optimizer", "from fp8lab import ops"),
        ("fp8lab.cli", "from fp8lab.experiments import sweep"),
        ("test_casting", "import torch\nfrom fp8lab.kernels import casting"),
    ],
)
def test_an_import_that_is_allowed_is_not(module: str, source: str) -> None:
    assert broken_floors(module, source) == []


def test_the_oracle_does_not_load_torch_or_triton() -> None:
    code = """
        import sys
        import fp8lab.emulation.casting
        loaded = {"torch", "triton"} & set(sys.modules)
        sys.exit(f"loaded with the oracle: {sorted(loaded)}" if loaded else 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("statement", ["import {}", "import {}.sub", "from {} import sub"])
def test_ruff_refuses_the_bare_name(name: str, statement: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed; install fp8lab[dev]")
    planted = tmp_path / "planted.py"
    planted.write_text(statement.format(name) + "\n")
    config = ROOT / "pyproject.toml"
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", config, planted],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert f"import fp8lab.{name} instead" in done.stdout
