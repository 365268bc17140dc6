"""`adacheck-fsck --gc`: what nobody refers to goes when it is old; what is listed, young, in flight, or not ours stays. On files and S3."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from adacheck.backends.base import Backend
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.object_store import ObjectStore
from adacheck.catalogue import head, publish
from adacheck.config import StoreConfig, parse
from adacheck.finding import Tier
from adacheck.garbage import Garbage, Kept, Removed
from adacheck.incarnations import take_incarnation
from adacheck.manifests import keys
from adacheck.tools import fsck
from tests.damaged_store import CHANGES, STEPS, Copy, build, victim
from tests.flipped_store import content_of
from tests.seaweed import BUCKET, s3_server
from tests.tool_run import run_tool

DAY_S = 86_400.0
FAR_AHEAD_UNIX_S = 4_000_000_000.0
"""A now at which everything is old."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return build(tmp_path_factory.mktemp("built"), 1, {})


@pytest.fixture
def store(built: Copy, tmp_path: Path) -> Copy:
    return built.copied(tmp_path / "store")


@pytest.fixture
def objects(store: Copy) -> Iterator[Backend]:
    with ObjectStore(f"file://{store.root}/objects") as backend:
        yield backend


def run_of(store: Copy) -> str:
    return store.nvme.parent.name


def collected(
    config: StoreConfig, objects: Backend, *, older_than_s: float = 7 * DAY_S, now_unix_s: float = FAR_AHEAD_UNIX_S
) -> tuple[dict[str, int], dict[str, str]]:
    """What was removed, with its size, and what was kept, with the reason."""
    found = list(Garbage(config, objects, older_than_s=older_than_s, now_unix_s=now_unix_s).collect())
    removed = {each.name: each.size_bytes for each in found if isinstance(each, Removed)}
    return removed, {each.name: each.why for each in found if isinstance(each, Kept)}


def left_behind(objects: Backend, incarnation: int, step: int) -> tuple[str, list[str]]:
    """A folder that an upload left which was killed before its manifest."""
    folder = keys.full_folder(incarnation, step, "killed")
    names = [f"{folder}/{keys.shard_name(1, 2)}", f"{folder}/{keys.shard_name(2, 2)}"]
    for name in names:
        objects.put(name, b"half a shard")
    return folder, names


def test_a_store_without_garbage_loses_nothing(store: Copy, objects: Backend) -> None:
    before = content_of(objects)
    assert collected(parse(store.uri, {}), objects) == ({}, {})
    assert content_of(objects) == before


def test_folders_of_earlier_incarnations_go_when_they_are_old(store: Copy, objects: Backend) -> None:
    before = content_of(objects)
    _, names = left_behind(objects, 1, 11)
    stat = objects.stat(names[-1])
    assert stat is not None
    config = parse(store.uri, {})
    removed, kept = collected(config, objects, older_than_s=DAY_S, now_unix_s=stat.modified_unix_s + DAY_S - 1)
    assert (removed, list(kept.values())) == ({}, ["it is not old enough"])
    removed, kept = collected(config, objects, older_than_s=DAY_S, now_unix_s=stat.modified_unix_s + DAY_S + 1)
    assert (removed, kept) == (dict.fromkeys(names, len(b"half a shard")), {})
    assert content_of(objects) == before


def test_what_the_newest_incarnation_may_be_writing_stays_however_old(store: Copy, objects: Backend) -> None:
    newest = head(objects, run_of(store)).fulls[-1].step
    folder, _ = left_behind(objects, 2, newest + 1)
    _, names = left_behind(objects, 2, newest - 1)
    removed, kept = collected(parse(store.uri, {}), objects)
    assert removed.keys() == set(names), "a failed attempt below the newest listed step"
    assert list(kept) == [folder] and "incarnation 2, the newest, may be writing it" in kept[folder]
    take_incarnation(objects, run_of(store))
    removed, kept = collected(parse(store.uri, {}), objects)
    assert len(removed) == 2 and not kept, "nobody can list it any more"


def test_a_checkpoint_that_is_published_meanwhile_stays(store: Copy, objects: Backend) -> None:
    """It is listed between the listing of the folders and the deletion: the head is read again before each."""
    run = run_of(store)
    entry = head(objects, run).fulls[-1]
    publish(objects, run, 2, lambda fulls: tuple(full for full in fulls if full != entry))
    garbage = Garbage(parse(store.uri, {}), objects, older_than_s=0, now_unix_s=FAR_AHEAD_UNIX_S).collect()
    listing = objects.list

    def list_and_publish(prefix: str) -> Iterator[str]:
        found = list(listing(prefix))
        if prefix == keys.FULL_PREFIX:
            publish(objects, run, 2, lambda fulls: (*fulls, entry))
        return iter(found)

    objects.list = list_and_publish  # type: ignore[method-assign]
    assert [each for each in garbage if isinstance(each, Removed)] == []
    objects.list = listing  # type: ignore[method-assign]
    assert list(objects.list(entry.folder)) and entry in head(objects, run).fulls


def test_while_a_version_is_damaged_no_checkpoint_goes(store: Copy, objects: Backend) -> None:
    _, names = left_behind(objects, 1, 11)
    last = max(objects.list(keys.VERSIONS_PREFIX))
    content = objects.get(last)
    objects.put(last, content[:-1])
    removed, kept = collected(parse(store.uri, {}), objects)
    assert not removed and "repair it first" in kept[last]
    objects.put(last, content)
    assert collected(parse(store.uri, {}), objects)[0].keys() == set(names)


def test_strange_names_are_told_and_never_touched(store: Copy, objects: Backend) -> None:
    strange = ["notes/readme.txt", "full/i00000001/step-000000000004-aa/mine.bin", "quarantine/mine"]
    for name in strange:
        objects.put(name, b"mine")
    removed, kept = collected(parse(store.uri, {}), objects)
    assert not removed and kept == dict.fromkeys(strange, "it has no name of this project")
    assert all(objects.get(name) == b"mine" for name in strange)


def test_temporaries_go_by_their_folder_and_their_age(store: Copy, objects: Backend) -> None:
    root, newest = store.root / "objects", head(objects, run_of(store)).fulls[-1].step
    folders = {
        "versions/i00000001": True,
        keys.full_folder(1, 11, "aa"): True,
        keys.full_folder(2, newest + 1, "aa"): False,
        "notes": False,
    }
    made = {}
    for folder, goes in folders.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        temporary = root / folder / f"~{'ab' * 8}.tmp"
        temporary.write_bytes(b"x")
        os.utime(temporary, (1_000_000, 1_000_000))
        made[temporary] = goes
    config = parse(store.uri, {})
    assert collected(config, objects, older_than_s=DAY_S, now_unix_s=1_000_000 + DAY_S - 1)[0] == {}
    removed, kept = collected(config, objects, older_than_s=DAY_S, now_unix_s=1_000_000 + DAY_S)
    assert {root / name for name in removed} == {path for path, goes in made.items() if goes}
    assert {path for path in made if path.exists()} == {path for path, goes in made.items() if not goes}
    assert len(kept) == 2


def test_multipart_uploads_on_s3_go_by_their_folder_and_their_age(store: Copy, objects: Backend) -> None:
    server = s3_server()
    address = f"s3://{BUCKET}/garbage"
    with ObjectStore(address, **server.options) as remote:
        for key, content in content_of(objects).items():
            remote.put(key, content)
        newest = head(remote, run_of(store)).fulls[-1].step
        old, flying = keys.full_folder(1, 11, "aa"), keys.full_folder(2, newest + 1, "aa")
        for folder in (old, flying, "notes"):
            begin_upload(remote, f"garbage/{folder}/{keys.shard_name(1, 1)}")
        begun_unix_s = {upload.folder: upload.touched_unix_s for upload in remote.uploads()}
        config = parse(f"{address}?nvme=none", {})
        assert collected(config, remote, older_than_s=DAY_S, now_unix_s=begun_unix_s[old] + DAY_S - 1)[0] == {}
        removed, kept = collected(config, remote, older_than_s=DAY_S, now_unix_s=max(begun_unix_s.values()) + DAY_S)
        assert [name.partition("#")[0] for name in removed] == [f"{old}/{keys.shard_name(1, 1)}"]
        assert {upload.folder for upload in remote.uploads()} == {flying, "notes"} and len(kept) == 2
        for upload in list(remote.uploads()):
            remote.discard_upload(upload.name)


def begin_upload(remote: ObjectStore, key: str) -> None:
    """As a process does that is killed before it uploads a part."""
    fs = remote._place._fs  # type: ignore[union-attr]
    fs.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)


def test_what_was_set_aside_goes_when_it_is_old(store: Copy, objects: Backend) -> None:
    objects.put(keys.quarantined(1_000_000, keys.RUN), b"12345")
    with LmdbBackend(store.nvme) as nvme:
        nvme.put(keys.quarantined(1_000_000, keys.CHAIN), b"123")
        nvme.put(keys.quarantined(2_000_000, keys.CHAIN), b"123")
    moved, mine = store.nvme.with_name("0.damaged-1"), store.nvme.with_name("0.damaged-mine")
    mine.mkdir()
    moved.mkdir()
    (moved / "data.mdb").write_bytes(b"1234567")
    os.utime(moved / "data.mdb", (500_000, 500_000))
    os.utime(moved, (1_000_000, 1_000_000))  # when it was moved
    config = parse(store.uri, {})
    assert collected(config, objects, older_than_s=DAY_S, now_unix_s=1_000_000 + DAY_S - 1) == ({}, {})
    removed, kept = collected(config, objects, older_than_s=DAY_S, now_unix_s=1_000_000 + DAY_S)
    names = {keys.quarantined(1_000_000, keys.RUN): 5, keys.quarantined(1_000_000, keys.CHAIN): 3, str(moved): 7}
    assert (removed, kept) == (names, {}) and not moved.exists() and mine.exists()


def test_an_empty_folder_beside_the_log_goes_as_well(store: Copy) -> None:
    """As somebody leaves it who took the file out."""
    moved = store.nvme.with_name("0.damaged-1")
    moved.mkdir()
    assert run_tool(fsck.main, store.uri, "--gc", "--older-than", "0s").code == 0
    assert not moved.exists()


@pytest.mark.parametrize("way", ["empty", "flip"])
@pytest.mark.parametrize("kind", list(keys.Kind))
def test_what_a_repair_settled_stays_settled(store: Copy, kind: keys.Kind, way: str) -> None:
    name, _ = victim(store, kind)
    content = store.read(kind, name)
    store.write(kind, name, CHANGES[way](content * 2 if way == "flip" else content))  # so long that it is not turned back
    assert run_tool(fsck.main, store.uri, "--repair").code == 1
    before = json.loads(run_tool(fsck.main, store.uri, "--read-data", "--json").out)
    assert run_tool(fsck.main, store.uri, "--gc", "--older-than", "0s").code == 0
    ended = run_tool(fsck.main, store.uri, "--read-data", "--json")
    report = json.loads(ended.out)
    assert ended.code == 0 and report["newest_cut"] == before["newest_cut"], report["findings"]
    again = json.loads(run_tool(fsck.main, store.uri, "--gc", "--older-than", "0s", "--json").out)
    assert again["removed"] == []


def test_beside_a_trainer_its_nvme_is_left_alone(store: Copy, objects: Backend) -> None:
    with LmdbBackend(store.nvme) as nvme:
        nvme.put(keys.quarantined(1_000_000, keys.CHAIN), b"123")
        removed, kept = collected(parse(store.uri, {}), objects)
        assert not removed and kept[str(store.nvme)] == f"in use by this process ({os.getpid()}); run it again when that has ended"


def test_the_tool_removes_says_what_and_how_much(store: Copy, objects: Backend) -> None:
    _, names = left_behind(objects, 1, 11)
    objects.put("mine", b"x")
    young = run_tool(fsck.main, store.uri, "--gc")
    assert young.code == 0 and "0 removed, 0 bytes; 2 kept" in young.out
    ended = run_tool(fsck.main, store.uri, "--gc", "--older-than", "0s", "--json")
    report = json.loads(ended.out)
    assert ended.code == 0 and [each["name"] for each in report["removed"]] == names and report["removed_bytes"] == 24
    assert report["kept"] == [{"tier": Tier.OBJECT, "name": "mine", "why": "it has no name of this project"}]
    report = json.loads(run_tool(fsck.main, store.uri, "--read-data", "--json").out)
    assert report["newest_cut"]["step"] == STEPS and [found["name"] for found in report["findings"]] == ["mine"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--older-than", "7"], "write 7d"), (["--gc", "--repair"], "repair first"), (["--gc", "--read-data"], "by itself")],
)
def test_a_wrong_call(store: Copy, arguments: list[str], words: str) -> None:
    ended = run_tool(fsck.main, store.uri, *arguments)
    assert ended.code == 16 and words in " ".join(ended.err.replace("│", " ").split())
