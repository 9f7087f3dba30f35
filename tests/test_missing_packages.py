"""What works where a package is not installed, and what is said of the rest.

`make sweep` installs neither pytest nor Hypothesis, and a training run is audited without them.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from fp8lab import cli, testing
from fp8lab.cli import main

ROOT = Path(__file__).resolve().parent.parent


def without_the_kit(code: str) -> subprocess.CompletedProcess[str]:
    """Run code where importing Hypothesis and pytest fails."""
    hidden = 'import sys\nsys.modules["hypothesis"] = sys.modules["pytest"] = None\n'
    return subprocess.run(
        [sys.executable, "-c", hidden + textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_audit_needs_no_hypothesis() -> None:
    done = without_the_kit("""
        import torch, fp8lab
        import fp8lab.experiments.audit_run
        from fp8lab.gradients import UpdateStep
        from fp8lab.optimizer import AdamW

        model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        fp8lab.convert(model, "delayed", products="codes")
        step = UpdateStep(model, AdamW(model.parameters()))
        with fp8lab.audit(every=1) as report:
            step.zero_grad()
            step.backward(model(torch.ones(4, 32)).sum())
            step()
        print(report.checked > 0, report.differences)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "0"]


def test_what_needs_hypothesis_says_what_has_it() -> None:
    done = without_the_kit("""
        import fp8lab.testing
        fp8lab.testing.assert_bits_equal(1.0, 1.0)
        fp8lab.testing.check_cast
    """)
    last = done.stderr.splitlines()[-1]
    assert "fp8lab.testing.check_cast needs hypothesis, which is not installed" in last
    assert 'install "fp8lab[test]" (in a checkout: make test)' in last


@pytest.mark.parametrize(
    "command", [["verify", "x.py"], ["verify", "--mutants"], ["new-kernel", "mine"]]
)
def test_commands_of_the_kit_name_the_extra_that_has_it(command: list[str]) -> None:
    done = without_the_kit(f"from fp8lab.cli import main; sys.exit(main({command}))")
    assert done.returncode == 2
    assert done.stderr == (
        f"fp8lab {command[0]}: hypothesis is not installed; install"
        ' "fp8lab[test]" (in a checkout: make test)\n'
    )


def test_each_package_is_in_the_extra_that_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for names, target, packages in cli._EXTRAS:
        has = " ".join(line for name in names.split(",") for line in extras[name])
        assert all(f"{package}>=" in has for package in packages)
        install = (ROOT / "Makefile").read_text().replace("$(comma)", ",")
        assert f"$(call install,{names})" in install
        assert f"\n{target}: $(" in install


def test_another_package_gets_no_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, said in (("torch.nn", "make sweep"), ("cupy", "cupy is not installed\n")):

        def fail(given: object, module: str = module) -> int:
            raise ModuleNotFoundError(name=module)

        monkeypatch.setattr(cli, "_info", fail)
        assert main(["info"]) == 2
        assert said in capsys.readouterr().err


def test_all_that_the_kit_offers_is_there() -> None:
    """What type checkers see is what is loaded."""
    tree = ast.parse(Path(str(testing.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == testing._HOMES
    assert sorted(testing.__all__) == sorted(seen)
    for name, home in seen.items():
        assert getattr(testing, name) is getattr(importlib.import_module(str(home)), name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        testing.nothing  # noqa: B018
