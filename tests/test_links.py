"""emulation/, kernels/ and experiments/ are parts of fp8lab through three relative links."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("emulation", "experiments", "kernels")

LINK_WAS_LOST = (
    "fp8lab/{0} is {1}, not a link to ../{0}. A clone with core.symlinks=false, or an archive "
    "unpacked without links, turns links into text files: clone again with "
    "`git clone -c core.symlinks=true` (on Windows, turn on developer mode first)."
)


def assert_is_link(path: Path) -> None:
    """Raise with what to do unless `path` is a relative link to the folder of its name, one up."""
    if not path.is_symlink():
        what = "a file" if path.is_file() else "a folder" if path.is_dir() else "missing"
        raise AssertionError(LINK_WAS_LOST.format(path.name, what))
    # As text: an absolute link to the right folder works in this clone alone.
    target = str(path.readlink()).replace(os.sep, "/")
    assert target == f"../{path.name}", f"{path.name} links to {target}, not ../{path.name}"
    assert path.is_dir(), f"{path.name} links to {target}, which is no folder"


@pytest.mark.parametrize("part", PARTS)
def test_part_is_linked(part: str) -> None:
    assert_is_link(ROOT / "fp8lab" / part)


def test_a_lost_link_is_explained(tmp_path: Path) -> None:
    lost = tmp_path / "kernels"
    lost.write_text("../kernels")
    with pytest.raises(AssertionError, match=r"is a file, not a link.*core\.symlinks=true"):
        assert_is_link(lost)


def test_a_link_that_works_in_one_clone_alone_is_found(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "fp8lab").mkdir()
    absolute = tmp_path / "fp8lab" / "kernels"
    absolute.symlink_to(tmp_path / "kernels", target_is_directory=True)
    with pytest.raises(AssertionError, match=r"not \.\./kernels"):
        assert_is_link(absolute)


def test_kernels_has_no_init_file() -> None:
    """With one, running from the root would hide the project on PyPI that is called `kernels`."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for part in ("emulation", "experiments"):
        assert (ROOT / part / "__init__.py").is_file(), f"{part}/ is an ordinary package"


def test_each_part_is_imported_through_fp8lab() -> None:
    for part in PARTS:
        spec = importlib.util.find_spec(f"fp8lab.{part}")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        (folder,) = spec.submodule_search_locations
        assert Path(folder).resolve() == ROOT / part


def test_packaging_finds_each_part() -> None:
    """A finder that wants __init__.py would leave kernels/ out of the wheel, and say nothing."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    find = settings["tool"]["setuptools"]["packages"]["find"]
    assert find["namespaces"] is True
    # In another process: setuptools puts its own distutils in the place of Python's.
    code = (
        "import setuptools, sys; "
        "print(*setuptools.find_namespace_packages(*map(eval, sys.argv[1:])), sep='\\n')"
    )
    arguments = [repr("."), repr(find["exclude"]), repr(find["include"])]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    packages = done.stdout.split()
    expected = {"fp8lab", "fp8lab.testing", *(f"fp8lab.{part}" for part in PARTS)}
    assert expected <= set(packages)
    assert not [name for name in packages if "__pycache__" in name]
