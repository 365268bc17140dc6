"""Copies of one object tier, and one that was put back from an older copy: nobody restores what another history wrote to NVMe."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from adacheck.backends.base import Backend
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.errors import ForeignRun
from adacheck.manifests import keys
from adacheck.tools import fsck, restore
from tests.tiny_run import Process, Snapshot, differing, plain_objects
from tests.tool_run import run_tool


def trained(root: Path, nvme: Path, steps: int, scale: float = 1.0) -> tuple[int, Snapshot, Snapshot]:
    """A start that trains to a step: where it began, and its bytes there and at its end. With another `scale` the bytes are others."""
    process = Process(root, nvme=str(nvme))
    try:
        begun = process.ckpt.restore()
        first = process.run.snapshot()
        for group in process.run.optimizer.param_groups:
            group["lr"] *= scale
        for _ in range(begun, steps):
            process.step()
        return begun, first, process.run.snapshot()
    finally:
        process.abandon()


def refused(root: Path, nvme: Path, words: str) -> None:
    """Every start and reader of the store refuses, and nothing changes, however often it is tried."""
    before = content(root, nvme)
    for _ in range(3):
        with pytest.raises(ForeignRun, match=words):
            trained(root, nvme, 99)
    process = Process(root, nvme=str(nvme))
    with pytest.raises(ForeignRun, match=words):
        process.store.steps()
    process.ckpt.close()
    ended = run_tool(restore.main, uri(root, nvme), "--list")
    assert ended.code == 8 and "last taken by incarnation" in ended.err
    assert content(root, nvme) == before


def uri(root: Path, nvme: Path) -> str:
    return f"file://{root}/objects?nvme={nvme}"


def content(root: Path, nvme: Path) -> tuple[Mapping[str, bytes], Mapping[str, bytes]]:
    (file,) = nvme.rglob("data.mdb")
    with LmdbBackend(file.parent, create=False, read_only=True) as log:
        return held(plain_objects(root)), held(log)


def held(backend: Backend) -> Mapping[str, bytes]:
    return {key: backend.get(key) for key in backend.list("")}


def copied(root: Path, to: Path) -> None:
    shutil.copytree(root / "objects", to / "objects")


def test_a_copy_of_the_object_tier_does_not_take_the_log_of_its_original(tmp_path: Path) -> None:
    original, copy, nvme = tmp_path / "a", tmp_path / "b", tmp_path / "nvme"
    trained(original, nvme, 9)
    copied(original, copy)
    tip = trained(original, nvme, 13)[2]
    refused(copy, nvme, r"of which file://.*/b/objects knows nothing.*a copy.*another nvme=DIR.*older copy.*--repair")
    own = tmp_path / "own"
    begun, _, other = trained(copy, own, 14, scale=5.0)
    assert begun == 8, "from its own full checkpoint"
    begun, first, _ = trained(original, nvme, 14)
    assert begun == 13 and not differing(first, tip)
    refused(original, own, r"but in file://.*/a/objects that is incarnation 2 .*went on apart.*another nvme=DIR")
    begun, first, _ = trained(copy, own, 15)
    assert begun == 14 and not differing(first, other)


def test_a_check_names_a_log_of_another_copy_and_a_repair_leaves_it_alone(tmp_path: Path) -> None:
    original, copy, nvme, own = (tmp_path / name for name in ("a", "b", "nvme", "own"))
    trained(original, nvme, 9)
    copied(original, copy)
    trained(original, nvme, 13)
    trained(copy, own, 14, scale=5.0)
    before = content(copy, nvme)
    for arguments in ((), ("--repair",)):
        ended = run_tool(fsck.main, uri(copy, nvme), *arguments)
        assert ended.code == 4
        assert "went on apart" in ended.out and "newest cut: step 12 from full/" in ended.out, "of its own"
        assert content(copy, nvme) == before


def test_an_object_tier_that_was_put_back_goes_on_from_the_log_once_a_repair_was_told_to(tmp_path: Path) -> None:
    root, nvme = tmp_path / "a", tmp_path / "nvme"
    trained(root, nvme, 9)
    copied(root, tmp_path / "kept")
    for steps in (11, 13, 14):
        tip = trained(root, nvme, steps)[2]
    shutil.rmtree(root / "objects")
    copied(tmp_path / "kept", root)
    refused(root, nvme, r"incarnation 4 .* knows nothing.*put back from an older copy: adacheck-fsck '.*' --repair")
    ended = run_tool(fsck.main, uri(root, nvme))
    assert ended.code == 4 and "if this object tier was put back from an older copy, --repair" in ended.out
    ended = run_tool(fsck.main, uri(root, nvme), "--repair")
    assert ended.code == 1, ended.out
    begun, first, _ = trained(root, nvme, 15)
    assert begun == 14 and not differing(first, tip)


def test_an_object_tier_that_was_put_back_begins_from_its_own_in_an_empty_directory(tmp_path: Path) -> None:
    root, nvme = tmp_path / "a", tmp_path / "nvme"
    trained(root, nvme, 9)
    copied(root, tmp_path / "kept")
    trained(root, nvme, 13)
    shutil.rmtree(root / "objects")
    copied(tmp_path / "kept", root)
    assert trained(root, tmp_path / "empty", 10)[0] == 8
    refused(root, nvme, r"but in file://.*/a/objects that is incarnation 2 .*went on apart")


@pytest.mark.parametrize("how", ["flipped", "another's"])
def test_a_damaged_incarnation_record_does_not_make_a_log_foreign(tmp_path: Path, how: str) -> None:
    root, nvme = tmp_path / "a", tmp_path / "nvme"
    trained(root, nvme, 9)
    trained(root, nvme, 10)
    objects = plain_objects(root)
    record = objects.get(keys.incarnation(2))
    objects.put(keys.incarnation(2), bytes([record[0] ^ 1]) + record[1:] if how == "flipped" else objects.get(keys.incarnation(1)))
    assert trained(root, nvme, 11)[0] == 10


def test_a_repair_that_made_an_incarnation_anew_does_not_make_a_log_foreign(tmp_path: Path) -> None:
    """It was made on a host without the log, and so without what the fence says."""
    root, nvme = tmp_path / "a", tmp_path / "nvme"
    trained(root, nvme, 9)
    trained(root, nvme, 10)
    trained(root, tmp_path / "elsewhere", 11)
    (root / "objects" / keys.incarnation(2)).unlink()
    assert run_tool(fsck.main, uri(root, tmp_path / "third"), "--repair").code == 1
    assert trained(root, nvme, 11)[0] == 8, "what the other host began from; the log is taken for this run's"
