"""`adacheck-fsck --repair`: every object, damaged in every way, is repaired or given up for the newest good cut; nothing else changes.

Beside whole stores damaged object by object: who is kept out, who is not disturbed, and what a repair that is killed leaves.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest

from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.catalogue import head, listing, publish
from adacheck.check_records import Sample
from adacheck.digest import digest
from adacheck.finding import Kind, Severity, Tier
from adacheck.incarnations import read_forks, take_incarnation, write_fork
from adacheck.manifests import keys
from adacheck.manifests.encoding import decode, encode
from adacheck.manifests.record import Base, Fork, Full, Incarnation, Run, Segment
from adacheck.repair import repair_opened
from adacheck.repair_tensors import tensor_range
from adacheck.sense_bytes import tensor_bytes
from adacheck.tools import fsck, restore
from tests.damaged_store import CHANGES, NVME_KINDS, STEPS, Copy, victim
from tests.faults import Crashing, SimulatedCrash
from tests.flipped_store import NOW_UNIX_S, Content, Small, content_of, flip, loaded, restored
from tests.tidy import ROOT
from tests.tiny_run import Process
from tests.tool_run import run_tool

K = keys.Kind
NEWEST_FULL, OLDER_FULL = 8, 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    logging.getLogger("adacheck").setLevel(logging.CRITICAL)
    yield Small(tmp_path_factory.mktemp("small"))
    logging.getLogger("adacheck").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("other"), seed=2)


def tier_of(kind: keys.Kind) -> Tier:
    return Tier.NVME if kind in NVME_KINDS else Tier.OBJECT


def damaged(small: Small, other: Small, kind: keys.Kind, way: str) -> Content:
    """One object damaged; `swap`: with its sibling; `splice`: that of another run in its place; `longer`: bytes after its end."""
    tier = tier_of(kind)
    name, sibling = victim(small.copy, kind)
    held = small.content.of(tier)[name]
    if way == "swap":
        return small.content.with_object(tier, name, small.content.of(tier)[sibling]).with_object(tier, sibling, held)
    if way == "splice":
        return small.content.with_object(tier, name, other.content.of(tier)[victim(other.copy, kind)[0]])
    return small.content.with_object(tier, name, held + b"\0" if way == "longer" else CHANGES[way](held))


@pytest.mark.parametrize("way", [*CHANGES, "swap", "splice", "longer"])
@pytest.mark.parametrize("kind", list(keys.Kind))
def test_every_damage_is_repaired_or_given_up(small: Small, other: Small, kind: keys.Kind, way: str) -> None:
    before = damaged(small, other, kind, way)
    done, after = small.repaired(before)
    if not any(finding.severity is Severity.DAMAGE for finding in done.found):
        assert kind is K.STAGED and way == "delete" and not done.actions, "what nobody misses"
        return
    assert done.actions and not done.damage_left, done.left
    cut = small.restored(after)
    small.check_live(cut)
    assert cut is not None and done.newest is not None and cut.step == done.newest.step
    without = small.restored(before)
    assert cut.step >= (NEWEST_FULL if without is None else without.step), "it is no worse than before"
    lost = kind is K.INCREMENT and way not in ("flip", "swap")  # of a record in the middle of the chain nobody has a copy
    assert cut.step == (NEWEST_FULL if lost else STEPS), done.actions
    again, same = small.repaired(after)
    assert not again.actions and same == after, "a repaired store is left alone"
    kept_all(before, after)


def kept_all(before: Content, after: Content) -> None:
    """Whatever bytes were there are there still: under their name, set aside, or under the name they belong to."""
    for tier in Tier:
        left = set(after.of(tier).values())
        lost = [key for key, content in before.of(tier).items() if content and content not in left]
        # What is written over is proven to be the same object with one bit turned back, or what belongs there, whole.
        assert all(key in after.of(tier) for key in lost), lost


def test_a_shard_is_put_together_from_what_is_staged(small: Small) -> None:
    with_staged = staged_at(small, NEWEST_FULL)
    key = max(key for key in small.content.objects if key.endswith(".safetensors"))
    for bad in (b"", small.content.objects[key][:-7], None):
        done, after = small.repaired(with_staged.with_object(Tier.OBJECT, key, bad))
        assert [action.name for action in done.actions if "put together" in action.what] == [key]
        assert after.objects[key] == small.content.objects[key] and not done.damage_left


def staged_at(small: Small, step: int) -> Content:
    """The store with the states of a full checkpoint staged on NVMe, as while it is being uploaded."""
    folder = next(key.rpartition("/")[0] for key in small.content.objects if f"step-{step:012d}" in key)
    objects, content = loaded(small.content.objects), small.content
    manifest = decode(objects.get(keys.manifest(folder)), Full)
    run = next(decode(content, Incarnation).run for key, content in small.content.nvme.items() if key == keys.FENCE)
    for at, spec in enumerate(manifest.states):
        key, segments = keys.staged(1, step, spec.state), list[Segment]()
        for tensor in spec.tensors:
            elements = 1
            for size in tensor.shape:
                elements *= size
            if not elements:
                continue
            segment = Segment(tensor.name, 0, elements, "raw", 1.0, len(segments), tensor_bytes(tensor), b"")
            held = tensor_range(objects, folder, manifest, at, segment)
            assert held is not None
            segments.append(replace(segment, digest=digest(held)))
            content = content.with_object(Tier.NVME, f"{key}/{segment.slot:06d}", held)
        base = Base(run, 1, 0, step, spec, manifest.digests[at], tuple(segments))
        content = content.with_object(Tier.NVME, key, encode(base))
    return content


def test_a_fork_made_anew_never_brings_an_abandoned_step_back(small: Small) -> None:
    """Incarnation 3 went back to step 4; its fork is lost, and the full checkpoint at 8 stays dead."""
    objects = loaded(small.content.objects)
    run = decode(objects.get(keys.RUN), Run).run
    take_incarnation(objects, run)
    write_fork(objects, Fork(run, 3, OLDER_FULL, True))
    live = head(objects, run).fulls
    assert [full.step for full in live] == [OLDER_FULL]
    folder = keys.full_folder(3, 6, "aa")
    for key in list(objects.list(live[0].folder)):
        objects.put(key.replace(live[0].folder, folder), objects.get(key))
    publish(objects, run, 3, listing(replace(live[0], folder=folder, incarnation=3, step=6)))
    publish(objects, run, 3, lambda fulls: tuple(full for full in fulls if full.folder != folder))
    content = Content(content_of(objects), {})
    done, after = small.repaired(content.with_object(Tier.OBJECT, keys.fork(3), b"gone"))
    assert keys.fork(3) in {action.name for action in done.actions}
    (fork,) = [fork for fork in read_forks(loaded(after.objects), run) if fork.incarnation == 3]
    assert (fork.cut, fork.proven) == (OLDER_FULL, False)
    cut = restored(loaded(after.objects), None)
    small.check_live(cut)
    assert cut is not None and cut.step == OLDER_FULL


def test_a_repair_that_is_killed_is_begun_again(small: Small, other: Small) -> None:
    """At every change to either tier, for damage that takes several."""
    for kind, way in ((K.VERSION, "empty"), (K.INCREMENT, "truncate"), (K.BASE, "empty"), (K.MANIFEST, "truncate"), (K.RUN, "splice")):
        before = damaged(small, other, kind, way)
        whole, wanted = small.repaired(before)
        ended = False
        for crash_at in range(1, 40):
            objects, nvme = loaded(before.objects), loaded(before.nvme)
            in_objects, in_nvme = Crashing(objects, crash_at), Crashing(nvme, crash_at)
            try:
                repair_opened(small.config, in_objects, in_nvme, Sample(1.0), now_unix_s=NOW_UNIX_S)
                ended = True
            except SimulatedCrash:
                pass
            left = Content(content_of(objects), content_of(nvme))
            small.check_live(small.restored(left))
            done, after = small.repaired(left)
            assert not done.damage_left and done.newest == whole.newest, (kind, way, crash_at, done.left)
            small.check_live(small.restored(after))
            if ended:
                break
        assert ended and wanted != before


def test_an_absurd_incarnation_in_the_fence_is_found_and_made_right(small: Small) -> None:
    fence = decode(small.content.nvme[keys.FENCE], Incarnation)
    for number in (7, 90_000_000):
        done, after = small.repaired(small.content.with_object(Tier.NVME, keys.FENCE, encode(replace(fence, incarnation=number))))
        assert any(finding.severity is Severity.DAMAGE for finding in done.found)
        assert not done.damage_left, done.left
        assert after.nvme[keys.FENCE] == small.content.nvme[keys.FENCE] and done.newest is not None and done.newest.step == STEPS


# The tool, with real files


@pytest.fixture
def store(small: Small, tmp_path: Path) -> Copy:
    return small.copy.copied(tmp_path / "store")


def test_the_tool_says_what_it_does_and_ends_with_1(small: Small, store: Copy) -> None:
    name, _ = victim(store, K.BASE_SLOT)
    store.write(K.BASE_SLOT, name, flip(store.read(K.BASE_SLOT, name), 9))
    ended = run_tool(fsck.main, store.uri, "--repair")
    assert ended.code == 1, ended.err
    assert f"nvme {name}: one bit was another; it is turned back" in ended.out and "clean; newest cut: step 11" in ended.out
    assert run_tool(fsck.main, store.uri, "--repair").code == 0
    report = json.loads(run_tool(fsck.main, store.uri, "--read-data", "--json").out)
    assert report["findings"] == [] and report["newest_cut"]["step"] == STEPS


@pytest.mark.parametrize("way", ["flip", "delete"])
def test_a_full_checkpoint_that_is_given_up_is_named(store: Copy, way: str) -> None:
    """The flip is of more than one bit, which nothing can turn back."""
    folders = {key.rpartition("/")[0] for key in store.names(K.MANIFEST)}
    for key in store.names(K.SHARD):
        store.write(K.SHARD, key, None if way == "delete" else bytes([store.read(K.SHARD, key)[0] ^ 0xFF]) + store.read(K.SHARD, key)[1:])
    ended = run_tool(fsck.main, store.uri, "--repair")
    assert ended.code == 1, ended.out
    for folder in folders:
        assert f"object {folder}: the full checkpoint of step {step_of(folder)} is given up" in ended.out
        assert f"unlisted: object {folder}" in ended.out and "a repair gave it up; --gc, or a later full checkpoint" in ended.out
        assert "lost     this full checkpoint, when it was dropped or given up" in ended.out
    assert "no full checkpoint: object full/" in ended.out and "only NVMe of this host can restore, step 11" in ended.out
    after = run_tool(fsck.main, store.uri)
    assert after.code == 0 and "start the run: it publishes one" in after.out


def step_of(folder: str) -> int:
    name = keys.parse(keys.manifest(folder))
    assert name is not None
    return name.step


def test_many_objects_are_told_in_one_line_and_each_in_json(small: Small, store: Copy, tmp_path: Path) -> None:
    """An increment cut short in the middle of the chain: all that is above the newest full checkpoint is given up."""
    name, _ = victim(store, K.INCREMENT)
    store.write(K.INCREMENT, name, store.read(K.INCREMENT, name)[:-7])
    same = store.copied(tmp_path / "same")
    text = run_tool(fsck.main, store.uri, "--repair")
    lines = [line for line in text.out.splitlines() if "given up" in line]
    report = json.loads(run_tool(fsck.main, same.uri, "--repair", "--json").out)
    given_up = [action for action in report["actions"] if action["given_up"]]
    assert text.code == 1 and len(given_up) > 20 and len(lines) == 1, text.out
    assert lines[0].startswith(f"nvme {len(given_up)} objects of steps ") and lines[0].endswith("set aside within data.mdb")
    (noted,) = [found for found in report["left"] if found["kind"] == Kind.SET_ASIDE]
    assert noted["remedy"] == "nothing: they are keys within data.mdb, no files; --gc removes them when they are old"
    assert re.search(r" a repair set aside at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$", noted["found"])
    gone = run_tool(fsck.main, store.uri, "--gc", "--older-than", "0s")
    removed = re.findall(r"^removed nvme (\d+) objects", gone.out, re.MULTILINE)  # apart: those whose empty name stays
    assert len(removed) == 2 and sum(map(int, removed)) == len(given_up) and len(gone.out.splitlines()) == 3, gone.out


def test_what_cannot_be_repaired_ends_with_4(store: Copy) -> None:
    shutil.rmtree(store.root / "nvme")
    for key in store.names(K.MANIFEST):
        store.write(K.MANIFEST, key, b"gone")
    ended = run_tool(fsck.main, store.uri, "--repair", "--json")
    report = json.loads(ended.out)
    assert (
        ended.code == 4
        and not report["clean"]
        and [found["kind"] for found in report["left"] if found["severity"] == "damage"] == ["no cut"]
    )


def test_an_lmdb_file_that_cannot_be_read_is_moved_away(small: Small, store: Copy, tmp_path: Path) -> None:
    file = store.nvme / "data.mdb"
    file.write_bytes(file.read_bytes()[:5000])
    ended = run_tool(fsck.main, store.uri, "--repair", "--json")
    report = json.loads(ended.out)
    moved = file.parent.with_name("0.damaged-1")
    assert ended.code == 1 and report["clean"] and moved.is_dir(), ended.err
    assert [action["given_up"] for action in report["actions"]] == [True]
    assert (str(file), "damage") in {(found["name"], found["severity"]) for found in report["findings"]}
    assert [(found["kind"], found["severity"]) for found in report["left"]] == [(Kind.SET_ASIDE, "note")]
    assert str(moved) in report["left"][0]["name"] and report["newest_cut"]["step"] == NEWEST_FULL
    taken = run_tool(restore.main, store.uri, "--to", str(tmp_path / "out"), "--json")
    assert taken.code == 0 and json.loads(taken.out)["step"] == NEWEST_FULL


def test_a_trainer_of_this_host_keeps_a_repair_out(store: Copy) -> None:
    before = content_of_files(store)
    holder = "import sys; from adacheck.backends.lmdb_store import LmdbBackend as L; b = L(sys.argv[1]); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", holder, str(store.nvme)], stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "open\n"
        ended = run_tool(fsck.main, store.uri, "--repair")
        assert ended.code == 8 and f"process {trainer.pid}" in ended.err and "repair it when that has ended" in ended.err, ended.err
        assert "choose another directory" not in ended.err
        kept = run_tool(fsck.main, store.uri, "--gc")
        assert f"kept nvme {store.nvme}: in use by process {trainer.pid}; run it again when that has ended" in kept.out
        trainer.communicate("\n")
    assert content_of_files(store) == before


def content_of_files(store: Copy) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in store.root.rglob("*")
        if path.is_file() and path.suffix != ".lock" and path.name != "lock.mdb"
    }


def test_a_trainer_elsewhere_goes_on_after_a_repair(tmp_path: Path) -> None:
    """It publishes its next full checkpoint, durable and with all that was repaired."""
    trainer = Process(tmp_path)
    trainer.ckpt.restore()
    for _ in range(9):
        trainer.step()
    objects = trainer.store.objects
    broken = max(key for key in objects.list(keys.VERSIONS_PREFIX))
    objects.put(broken, b"gone")
    for key in [key for key in objects.list(keys.FULL_PREFIX) if "step-000000000004" in key and key.endswith("opaque.msgpack")]:
        objects.put(key, b"gone")
    here = replace(trainer.store.config, nvme=str(tmp_path / "here"))
    done = repair_opened(here, objects, None, Sample(1.0), now_unix_s=NOW_UNIX_S)
    assert not done.damage_left and done.newest is not None and done.newest.step == 8, done.left
    for _ in range(4):
        trainer.step()
    trainer.ckpt.close()
    steps = [full.step for full in head(trainer.store.objects, done.run or "").fulls]
    assert steps == [8, 12] or steps == [1, 8, 12]
    assert run_tool(fsck.main, f"file://{tmp_path}/objects?nvme={tmp_path}/nvme", "--read-data").code == 0
    again = Process(tmp_path)
    assert again.ckpt.restore() == 13
    again.abandon()


def test_what_is_set_aside_outlives_the_next_start(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.ckpt.restore()
    for _ in range(9):
        first.step()
    first.ckpt.close()
    (file,) = (tmp_path / "nvme").rglob("data.mdb")
    with LmdbBackend(file.parent) as nvme:
        last = max(key for key in nvme.list("") if (name := keys.parse(key)) is not None and name.kind is K.INCREMENT)
        nvme.put(last, nvme.get(last)[:-1])
    uri = f"file://{tmp_path}/objects?nvme={tmp_path}/nvme"
    assert run_tool(fsck.main, uri, "--repair").code == 1
    again = Process(tmp_path)
    assert again.ckpt.restore() == 8
    again.step()
    again.ckpt.close()
    with LmdbBackend(file.parent) as nvme:
        assert [name for name in nvme.list(keys.QUARANTINE_PREFIX) if name.endswith(last)]
    report = json.loads(run_tool(fsck.main, uri, "--read-data", "--json").out)
    assert [found["kind"] for found in report["findings"]] == [Kind.SET_ASIDE] and report["newest_cut"]["step"] == 9
