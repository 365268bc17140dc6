"""From a scheme to a backend: built in, from another package, and unknown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adacheck.backends.errors import Denied, UnknownScheme
from adacheck.backends.object_store import ObjectStore
from adacheck.backends.registry import known_schemes, open_backend
from adacheck.config import parse
from tests.seaweed import BUCKET, s3_server


def test_the_built_in_schemes(tmp_path: Path) -> None:
    assert {"file", "memory", "s3"} <= set(known_schemes())
    opened = {
        "file": open_backend("file", str(tmp_path)),
        "memory": open_backend("memory", "registry"),
        "s3": open_backend("s3", f"{BUCKET}/registry", s3_server().options),
    }
    for scheme, backend in opened.items():
        assert isinstance(backend, ObjectStore) and backend.name.startswith(f"{scheme}://")
        backend.put("a", b"1")
        assert backend.get("a") == b"1"
        backend.close()


def test_a_built_in_scheme_is_known_without_a_look_at_every_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would read a file of each: most of the time that an open takes."""
    monkeypatch.delattr("adacheck.backends.registry.entry_points")
    assert parse("file:///data/run", {}).address == "file:///data/run"


@pytest.mark.parametrize(("scheme", "near"), [("S3", "s3"), ("flie", "file"), ("memry", "memory")])
def test_an_unknown_scheme_offers_the_nearest(scheme: str, near: str) -> None:
    with pytest.raises(UnknownScheme, match=f"{scheme!r}.*did you mean {near!r}"):
        open_backend(scheme, "x")


def test_a_scheme_like_none_lists_all() -> None:
    with pytest.raises(UnknownScheme, match="file, memory, s3"):
        open_backend("qqqqqq", "x")


def _package(folder: Path) -> None:
    """An installed package that offers four schemes, one of them already taken and two broken."""
    (folder / "tape.py").write_text(
        "from adacheck.backends.memory import MemoryBackend\n"
        "def open_tape(address, options):\n"
        "    return MemoryBackend(f'tape:{address}:{options[\"speed\"]}')\n"
        "def open_nothing(address, options):\n"
        "    return None\n"
    )
    metadata = folder / "tape-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tape\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[adacheck.backends]\ntape = tape:open_tape\nfile = tape:open_tape\nnothing = tape:open_nothing\nlost = tape:absent\n"
    )


def test_another_package_adds_a_scheme_but_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert open_backend("tape", "drive-1", {"speed": 3}).name == "tape:drive-1:3"
    assert isinstance(open_backend("file", str(tmp_path / "store")), ObjectStore)
    with pytest.raises(Denied, match="returned a NoneType"):
        open_backend("nothing", "")
    with pytest.raises(Denied, match="'lost' of tape:absent cannot be loaded"):
        open_backend("lost", "")
    with pytest.raises(UnknownScheme, match="did you mean 'tape'"):
        open_backend("tap", "")
    monkeypatch.undo()
    sys.modules.pop("tape", None)


def test_opening_local_files_loads_no_s3_client() -> None:
    script = "import sys, adacheck.backends.registry\nassert not {'s3fs', 'botocore', 'aiohttp', 'torch'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
