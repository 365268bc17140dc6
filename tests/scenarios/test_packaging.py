"""What is built from a clone holds the real code behind the links, and installs nothing under a name that is not ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.tidy import LINKED, ROOT

pytestmark = pytest.mark.slow

INSIDE = ["__init__.py", "py.typed", "digest.py", "backends/base.py", "manifests/record.py", "tools/training.py", "tools/bench/__init__.py"]


def run(*command: str | Path, where: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=where, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from it, of a fresh clone of what is tracked here."""
    folder = tmp_path_factory.mktemp("built")
    clone = folder / "clone"
    clone.mkdir()
    for name in run("git", "ls-files", where=ROOT).splitlines():
        source, target = ROOT / name, clone / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink() or source.exists():
            shutil.copy2(source, target, follow_symlinks=False)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, clone, where=folder)
    return folder


def test_the_sdist_holds_files_and_no_links(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        members = {member.name.split("/", 1)[1]: member for member in archive.getmembers() if "/" in member.name}
    assert {f"adacheck/{name}" for name in INSIDE} <= {name for name, member in members.items() if member.isfile()}
    assert [name for name, member in members.items() if member.issym() or member.islnk()] == []
    assert {"LICENSE", "README.md", "pyproject.toml"} <= set(members)


def test_the_wheel_has_one_top_level_package_with_every_module(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"adacheck"}
    tracked = run("git", "ls-files", "--", "adacheck/*.py", *(f"{folder}/*.py" for folder in LINKED), where=ROOT).splitlines()
    present = [name for name in tracked if (ROOT / name).exists()]
    assert {f"adacheck/{name}" if name.split("/")[0] in LINKED else name for name in present} <= names
    assert {f"adacheck/{name}" for name in INSIDE} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_it_installs_into_a_clean_environment(built: Path, tmp_path: Path, pattern: str) -> None:
    """Dependencies come from the running interpreter's site-packages, without its editable install, so that torch is not fetched again."""
    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", environment, where=tmp_path)
    python = environment / "bin" / "python"
    shared = next(path for path in sys.path if path.endswith("site-packages"))
    run(python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", next(built.glob(pattern)), where=tmp_path, PYTHONPATH=shared)
    script = f"""
import importlib.util, sys
sys.path.append({shared!r})  # after this environment's own; a `.pth` file in a path added so is not read
import adacheck, adacheck.backends.base, adacheck.manifests.record, adacheck.tools.training
for module in (adacheck, adacheck.backends.base, adacheck.tools.training):
    assert module.__file__.startswith({str(environment)!r}), module.__file__
for name in {LINKED!r}:
    assert importlib.util.find_spec(name) is None, name
"""
    run(python, "-c", script, where=tmp_path)
    commands = {path.name for path in (environment / "bin").glob("adacheck-*")}
    assert commands == {"adacheck-fsck", "adacheck-restore", "adacheck-demo", "adacheck-bench"}
