"""Versions gone without a trace: the checkpoints they listed are named, listed again, and deleted by nobody; the dead stay dead."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from adacheck.backends.memory import MemoryBackend
from adacheck.catalogue import head, listing, publish
from adacheck.check import STALE_S, Check
from adacheck.check_records import Sample
from adacheck.errors import NoCut
from adacheck.fallen_back import fallen_back
from adacheck.finding import Finding, Kind, Severity, Tier
from adacheck.garbage import Garbage, Kept, Removed
from adacheck.incarnations import read_incarnation, take_incarnation, write_fork
from adacheck.manifests import keys
from adacheck.manifests.encoding import decode, encode
from adacheck.manifests.record import Fork, Full, Run
from adacheck.recovery import gather, read_newest
from adacheck.retention import prune
from adacheck.tools import fsck
from tests.flipped_store import Content, Small, content_of, flip, loaded, restored
from tests.tiny_run import Process, plain_objects
from tests.tool_run import run_tool

FAR_AHEAD_UNIX_S = 4_000_000_000.0
OLDER_FULL, NEWEST_FULL = 4, 8


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    logging.getLogger("adacheck").setLevel(logging.CRITICAL)
    yield Small(tmp_path_factory.mktemp("small"))
    logging.getLogger("adacheck").setLevel(logging.NOTSET)


def without_versions(small: Small, listed: int) -> Content:
    """The object tier alone, on another host, without the versions that list more than so many full checkpoints; the second of two
    starts has published nothing."""
    objects = loaded(small.content.objects)
    run = run_of(objects)
    fulls = head(objects, run).fulls
    for key in list(objects.list(keys.VERSIONS_PREFIX)):
        objects.delete(key)
    if listed:
        publish(objects, run, 2, lambda _: fulls[:listed])
    return Content(content_of(objects), {})


def run_of(objects: MemoryBackend) -> str:
    return decode(objects.get(keys.RUN), Run).run


def collected(small: Small, objects: MemoryBackend) -> tuple[list[str], dict[str, str]]:
    found = list(Garbage(small.config, objects, older_than_s=0, now_unix_s=FAR_AHEAD_UNIX_S).collect())
    return [each.name for each in found if isinstance(each, Removed)], {each.name: each.why for each in found if isinstance(each, Kept)}


def found_in(small: Small, objects: MemoryBackend, now_unix_s: float = FAR_AHEAD_UNIX_S) -> list[Finding]:
    return list(Check(small.config, objects, Sample(1.0), nvme=MemoryBackend(), now_unix_s=now_unix_s).findings())


def folder_of(content: Content, step: int) -> str:
    return next(key.rpartition("/")[0] for key in content.objects if f"step-{step:012d}" in key)


@pytest.mark.parametrize("listed", [0, 1])
def test_what_only_lost_versions_listed_is_kept_and_listed_again(small: Small, listed: int) -> None:
    before = without_versions(small, listed)
    folders = [folder_of(before, step) for step in (OLDER_FULL, NEWEST_FULL)][listed:]
    objects = loaded(before.objects)
    damage = [finding for finding in found_in(small, objects) if finding.severity is Severity.DAMAGE]
    assert [finding.name for finding in damage if finding.kind is Kind.UNLISTED] == folders
    assert all("--repair" in finding.remedy for finding in damage if finding.kind is Kind.UNLISTED)
    removed, kept = collected(small, objects)
    assert not removed and content_of(objects) == before.objects
    assert list(kept) == folders and all("run --repair first" in why for why in kept.values())
    done, after = small.repaired(before)
    assert done.actions and not done.damage_left and done.newest is not None and done.newest.step == NEWEST_FULL
    repaired = loaded(after.objects)
    assert [full.step for full in head(repaired, run_of(repaired)).fulls] == [OLDER_FULL, NEWEST_FULL]
    small.check_live(restored(repaired, None))
    assert collected(small, repaired) == ([], {}) and small.repaired(after)[1] == after


def test_an_unlisted_one_that_is_not_whole_is_given_up_for_good(small: Small) -> None:
    before = without_versions(small, 1)
    folder = folder_of(before, NEWEST_FULL)
    shard = next(key for key in before.objects if key.startswith(folder) and key.endswith(".safetensors"))
    done, after = small.repaired(before.with_object(Tier.OBJECT, shard, flip(before.objects[shard], 99)))
    assert not done.damage_left and done.newest is not None and done.newest.step == OLDER_FULL
    assert keys.manifest(folder) not in after.objects and before.objects[keys.manifest(folder)] in after.objects.values()
    assert not small.repaired(after)[0].actions
    assert shard in collected(small, loaded(after.objects))[0]


def test_one_that_is_being_published_is_no_damage(small: Small) -> None:
    """The newest incarnation put its manifest, and the version comes next; an hour later nobody brings it any more."""
    objects = loaded(small.content.objects)
    run = run_of(objects)
    folder = unlisted(objects, 2, 12)
    stat = objects.stat(keys.manifest(folder))
    assert stat is not None
    soon = found_in(small, objects, stat.modified_unix_s + STALE_S - 1)
    assert [(finding.severity, finding.name) for finding in soon if finding.kind is Kind.UNLISTED] == [(Severity.NOTE, folder)]
    late = found_in(small, objects, stat.modified_unix_s + STALE_S)
    assert [(finding.severity, finding.name) for finding in late if finding.kind is Kind.UNLISTED] == [(Severity.DAMAGE, folder)]
    take_incarnation(objects, run)
    write_fork(objects, Fork(run, 3, 11, True))
    dead = found_in(small, objects)
    assert [(finding.severity, finding.name) for finding in dead if finding.kind is Kind.UNLISTED] == [(Severity.NOTE, folder)]
    assert keys.manifest(folder) in collected(small, objects)[0], "a later start went back behind it"


def unlisted(objects: MemoryBackend, incarnation: int, step: int) -> str:
    """A full checkpoint of this step with a valid manifest, which no version lists."""
    run = run_of(objects)
    folder, newest = keys.full_folder(incarnation, step, "aa"), head(objects, run).fulls[-1]
    manifest = decode(objects.get(keys.manifest(newest.folder)), Full)
    for key in list(objects.list(newest.folder)):
        objects.put(key.replace(newest.folder, folder), objects.get(key))
    objects.put(keys.manifest(folder), encode(replace(manifest, incarnation=incarnation, step=step)))
    return folder


def test_a_trainer_deletes_it_only_once_a_newer_one_is_listed(small: Small) -> None:
    objects = loaded(without_versions(small, 1).objects)
    run, entry = run_of(objects), head(loaded(small.content.objects), run_of(loaded(small.content.objects))).fulls[-1]
    assert prune(objects, run, 2, 3) == () and list(objects.list(entry.folder))
    folder = unlisted(objects, 2, 12)
    publish(objects, run, 2, listing(replace(entry, incarnation=2, step=12, folder=folder)))
    assert prune(objects, run, 2, 3) == (entry.folder,)


@pytest.mark.parametrize("listed", [0, 1])
def test_a_start_that_does_not_see_it_says_so(small: Small, listed: int) -> None:
    sources = gather(run_of(loaded(small.content.objects)), loaded(without_versions(small, listed).objects), None)
    said = fallen_back(small.config, sources, read_newest(sources), None)
    assert said is not None and "not step 8, the newest there was" in said and "--repair, run before a start" in said
    sources = gather(sources.run, loaded(small.content.objects), None)
    assert fallen_back(small.config, sources, read_newest(sources), read_incarnation(sources.objects, sources.run, 2)) is None


def test_steps_of_an_abandoned_lineage_do_not_count_as_newer(small: Small) -> None:
    """The head lists a dead full checkpoint of step 8; the newest incarnation went back to 4 and may be writing step 6."""
    objects = loaded(small.content.objects)
    run = run_of(objects)
    take_incarnation(objects, run)
    write_fork(objects, Fork(run, 3, OLDER_FULL, True))
    shard = f"{keys.full_folder(3, 6, 'aa')}/{keys.shard_name(1, 1)}"
    objects.put(shard, b"being written")
    removed, kept = collected(small, objects)
    assert shard not in removed and "may be writing it" in kept[shard.rpartition("/")[0]]


def test_a_run_is_not_begun_anew_beside_what_a_repair_lists_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a host without the log: the refused start leaves the run as it was, so a repair at once is enough, even while it waits."""
    process = Process(tmp_path, options={"nvme": "none"})
    process.ckpt.restore()
    for _ in range(OLDER_FULL):
        process.step()
    process.abandon()
    with plain_objects(tmp_path) as objects:
        for key in list(objects.list(keys.VERSIONS_PREFIX)):
            objects.delete(key)
    for restores in (True, False):
        trial = Process(tmp_path, options={"nvme": "none"})
        with pytest.raises(NoCut, match=r"full checkpoints that no version lists any more \(full/.*; for a new run, give another URI"):
            trial.ckpt.restore() if restores else trial.step()
        trial.abandon()
    waiting = Process(tmp_path, options={"nvme": "none"})
    with pytest.raises(NoCut):
        waiting.ckpt.restore()
    assert not caplog.records, "nobody goes on without them"
    assert run_tool(fsck.main, f"file://{tmp_path}/objects?nvme=none", "--repair").code == 1
    assert waiting.ckpt.restore() == OLDER_FULL
    waiting.abandon()
    process = Process(tmp_path, options={"nvme": "none"})
    assert process.ckpt.restore() == OLDER_FULL
    process.abandon()
