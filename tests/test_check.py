"""Every object of both tiers, damaged in every way: the finding names it and its fault, and no restore returns wrong bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from adacheck.backends.memory import MemoryBackend
from adacheck.backends.wrappers import Wrapper
from adacheck.catalogue import publish
from adacheck.check import Check
from adacheck.check_nvme import check_records, check_slots
from adacheck.check_records import Look, Sample
from adacheck.config import parse
from adacheck.finding import Kind, Tier
from adacheck.incarnations import read_run
from adacheck.manifests import chain, keys
from adacheck.tools import fsck, restore
from tests.damaged_store import CHANGES, NVME_KINDS, STEPS, Copy, build, damage
from tests.tool_run import Ended, run_tool

K = keys.Kind
RAW = (K.INCREMENT_SLOT, K.BASE_SLOT, K.STAGED_SLOT, K.SHARD, K.OPAQUE, K.HISTORY_COPY)
"""Objects without an envelope: bytes of another run are other bytes, no more can be said."""

WAYS = (*CHANGES, "swap", "splice")


def expected_kind(kind: keys.Kind, way: str) -> Kind:
    """What a check must say."""
    if way == "delete":
        return {K.INCREMENT: Kind.GAP, K.STAGED: Kind.ORPHAN}.get(kind, Kind.MISSING)
    if way == "splice":
        return Kind.WRONG_BYTES if kind in RAW else Kind.SPLICED
    return {"flip": Kind.WRONG_BYTES, "empty": Kind.ZERO_LENGTH, "truncate": Kind.TRUNCATED, "swap": Kind.SWAPPED}[way]


class Runs:
    """Two intact stores, and the digests of every step of the first."""

    def __init__(self, root: Path) -> None:
        self.expected: dict[str, dict[str, str]] = {}
        self.mine = build(root / "mine", 1, self.expected)
        self.other = build(root / "other", 2, {})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def check(store: Copy, *options: str) -> tuple[int, dict[str, Any]]:
    ended = run_tool(fsck.main, store.uri, "--json", *options)
    return ended.code, json.loads(ended.out)


def restored(store: Copy, to: Path) -> tuple[Ended, dict[str, Any] | None]:
    ended = run_tool(restore.main, store.uri, "--to", str(to), "--json")
    return ended, json.loads(ended.out) if ended.code == 0 else None


def digests(described: dict[str, Any]) -> dict[str, str]:
    return {key: tensor["digest"] for key, tensor in described["tensors"].items()}


def test_an_intact_store_is_clean(runs: Runs, tmp_path: Path) -> None:
    code, report = check(runs.mine, "--read-data")
    assert (code, report["findings"], report["clean"]) == (0, [], True)
    assert report["newest_cut"]["step"] == STEPS and report["newest_cut"]["tier"] == "nvme"
    assert report["version"] == 1 and report["checked"]["objects"] > 60
    ended, described = restored(runs.mine, tmp_path / "out")
    assert ended.code == 0 and described is not None and described["step"] == STEPS
    assert digests(described) == runs.expected[str(STEPS)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", list(keys.Kind))
def test_each_damage_is_its_own_finding_and_never_wrong_bytes(runs: Runs, tmp_path: Path, kind: keys.Kind, way: str) -> None:
    store = runs.mine.copied(tmp_path / "store")
    name = damage(store, runs.other, kind, way)
    before = contents(store)
    code, report = check(store, "--read-data")
    assert contents(store) == before, "the check wrote to the store"
    said = {(finding["name"], finding["kind"], finding["tier"]) for finding in report["findings"]}
    wanted = expected_kind(kind, way)
    assert (name, wanted, "nvme" if kind in NVME_KINDS else "object") in said, said
    assert code == (0 if wanted is Kind.ORPHAN else 4) and report["clean"] == (code == 0)
    assert all(finding[field] for finding in report["findings"] for field in ("expected", "found", "lost", "remedy"))
    ended, described = restored(store, tmp_path / "out")
    if described is None:
        assert ended.code in (4, 8) and "error:" in ended.err and report["newest_cut"] is None
        assert Kind.NO_CUT in {finding["kind"] for finding in report["findings"]}
    else:
        assert digests(described) == runs.expected[str(described["step"])]
        assert report["newest_cut"]["step"] == described["step"], "the check and the restore disagree"


def contents(store: Copy) -> dict[str, bytes]:
    """Every byte of the store, LMDB's table of readers apart."""
    return {
        str(path): path.read_bytes() for path in store.root.rglob("*") if path.is_file() and path.name not in ("lock.mdb", "writer.lock")
    }


@pytest.mark.parametrize("kind", [K.INCREMENT_SLOT, K.BASE_SLOT, K.STAGED_SLOT, K.SHARD, K.OPAQUE])
@pytest.mark.parametrize("way", ["delete", "truncate", "empty"])
def test_what_is_missing_or_short_is_found_without_reading_data(runs: Runs, tmp_path: Path, kind: keys.Kind, way: str) -> None:
    store = runs.mine.copied(tmp_path / "store")
    name = damage(store, runs.other, kind, way)
    code, report = check(store)
    assert code == 4 and (name, expected_kind(kind, way)) in {(finding["name"], finding["kind"]) for finding in report["findings"]}


def test_kinds_of_a_chain_are_kinds_of_finding() -> None:
    assert {kind.value for kind in chain.Kind} <= {kind.value for kind in Kind}


@pytest.mark.parametrize(("change", "kind"), [("empty", Kind.ZERO_LENGTH), ("truncate", Kind.TRUNCATED), ("delete", Kind.MISSING)])
def test_the_file_of_the_nvme_copy(runs: Runs, tmp_path: Path, change: str, kind: Kind) -> None:
    store = runs.mine.copied(tmp_path / "store")
    file = store.nvme / "data.mdb"
    content = CHANGES[change](file.read_bytes())
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    code, report = check(store)
    assert code == 4 and [(finding["name"], finding["kind"]) for finding in report["findings"]] == [(str(file), kind)]
    assert report["newest_cut"]["step"] == 8, "the object tier is still there"


def test_without_its_nvme_directory_a_store_is_clean_and_says_so(runs: Runs, tmp_path: Path) -> None:
    code, report = check(Copy(runs.mine.copied(tmp_path / "store").root), "--read-data")
    assert code == 0
    ended = run_tool(fsck.main, f"file://{runs.mine.root}/objects?nvme={tmp_path}/elsewhere", "--json")
    report = json.loads(ended.out)
    assert ended.code == 0 and [finding["kind"] for finding in report["findings"]] == [Kind.NO_COPY]
    assert report["newest_cut"]["step"] == 8
    assert not (tmp_path / "elsewhere").exists()


def test_the_nvme_directory_of_another_run(runs: Runs) -> None:
    ended = run_tool(fsck.main, f"file://{runs.mine.root}/objects?nvme={runs.other.root}/nvme", "--json")
    assert ended.code == 4
    assert [(f["kind"], f["name"]) for f in json.loads(ended.out)["findings"]] == [(Kind.SPLICED, f"{runs.other.root}/nvme")]


def test_leftovers_are_notes(runs: Runs, tmp_path: Path) -> None:
    store = runs.mine.copied(tmp_path / "store")
    folder = keys.full_folder(2, 11, "killed")
    store.write(K.SHARD, f"{folder}/{keys.shard_name(1, 1)}", b"half a sha")
    store.write(K.SHARD, "notes/readme.txt", b"mine")
    store.write(K.INCREMENT_SLOT, keys.increment_slot(1, 12, 0), b"a step that was never finished")
    upload = store.root / "objects" / "full" / f"~{'ab' * 8}.tmp"
    upload.write_bytes(b"x")
    code, report = check(store, "--read-data")
    assert code == 0 and [f["kind"] for f in report["findings"]].count(Kind.STALE_UPLOAD) == 0, "it may still be written to"
    os.utime(upload, (0, 0))
    code, report = check(store, "--read-data")
    said = {(finding["severity"], finding["kind"], finding["name"]) for finding in report["findings"]}
    assert code == 0 and said == {
        ("note", Kind.UNLISTED, folder),
        ("note", Kind.ORPHAN, "notes/readme.txt"),
        ("note", Kind.ORPHAN, keys.increment(1, 12)),
        ("note", Kind.STALE_UPLOAD, f"full/~{'ab' * 8}.tmp"),
    }


def test_two_faults_are_two_findings_and_cost_what_they_cost(runs: Runs, tmp_path: Path) -> None:
    store = runs.mine.copied(tmp_path / "store")
    first = damage(store, runs.other, K.BASE_SLOT, "flip")
    second = store.names(K.SHARD)[-1]
    store.write(K.SHARD, second, CHANGES["flip"](store.read(K.SHARD, second)))
    code, report = check(store, "--read-data")
    assert code == 4 and {(f["name"], f["kind"]) for f in report["findings"]} == {(first, Kind.WRONG_BYTES), (second, Kind.WRONG_BYTES)}
    assert report["newest_cut"]["step"] == 4, "neither NVMe nor the newest full checkpoint"
    ended, described = restored(store, tmp_path / "out")
    assert described is not None and described["step"] == 4 and digests(described) == runs.expected["4"]
    assert "rejected: cut 11" in ended.err and "rejected: cut 8" in ended.err


def test_the_newest_increment_is_missed_because_a_base_is_of_its_step(runs: Runs, tmp_path: Path) -> None:
    store = runs.mine.copied(tmp_path / "store")
    last = store.names(K.INCREMENT)[-1]
    store.write(K.INCREMENT, last, None)
    code, report = check(store)
    assert code == 4 and {(f["kind"], f["name"]) for f in report["findings"]} == {(Kind.MISSING, last), (Kind.ORPHAN, last)}
    ended, described = restored(store, tmp_path / "out")
    assert described is not None and described["step"] == report["newest_cut"]["step"] == 8, ended.err


class DroppedMeanwhile(Wrapper):
    """An object tier whose trainer drops its oldest full checkpoint at the moment that somebody reads its manifest."""

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        name = keys.parse(key)
        if name is not None and (name.kind, name.step) == (K.MANIFEST, 4):
            run = read_run(self._backend)
            assert run is not None
            publish(self._backend, run.run, 2, lambda fulls: tuple(full for full in fulls if full.step != 4))
            for other in list(self._backend.list(key.rpartition("/")[0] + "/")):
                self._backend.delete(other)
        return super().get(key, byte_range)


def test_a_full_checkpoint_that_is_dropped_during_the_check_is_no_finding(runs: Runs, tmp_path: Path) -> None:
    store = runs.mine.copied(tmp_path / "store")
    with store.open(K.MANIFEST) as objects:
        checked = Check(parse(store.uri, {}), DroppedMeanwhile(objects), Sample(1.0))
        assert list(checked.findings()) == []
        assert not [key for key in objects.list(keys.FULL_PREFIX) if "step-000000000004" in key], "it was dropped"


def test_what_the_nvme_copy_dropped_after_its_records_were_read_is_no_finding(runs: Runs, tmp_path: Path) -> None:
    store = runs.mine.copied(tmp_path / "store")
    run = store.nvme.parent.name
    with store.open(K.CHAIN) as nvme, MemoryBackend() as memory:
        for key in nvme.list(""):
            memory.put(key, nvme.get(key))
        look = Look(memory, Tier.NVME, Sample(1.0))
        found = check_records(look, run, [])
        assert look.findings == [] and len(found.increments) >= 3
        pruned, rolled = next(iter(found.increments)), next(iter(found.bases))
        for key in [*memory.list(pruned), *memory.list(rolled)]:
            memory.delete(key)
        check_slots(look, found)
        assert look.findings == []
        slot = next(key for key in memory.list(list(found.increments)[1] + "/"))
        memory.delete(slot)
        check_slots(look, found)
        assert [(finding.kind, finding.name) for finding in look.findings] == [(Kind.MISSING, slot)], "its record is still there"
