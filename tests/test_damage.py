"""Damaged, missing and misplaced objects in either tier: a restore goes to the next source or to an older cut, and says why.

Never wrong bytes: what comes back is compared with an uninterrupted run, and so is what is trained from there and restored again.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from adacheck.backends.base import Backend
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.errors import DamagedCut
from adacheck.manifests import chain, keys
from adacheck.manifests.encoding import decode, encode
from adacheck.manifests.record import Chain, Increment, Linked
from tests.tiny_run import Process, Snapshot, differing, plain_objects, reference

STEPS = 10
BASE, FULL = 4, 8
LONG = {"log_steps": 100}
Damage = Callable[[Backend], None]


@pytest.fixture(scope="module")
def expected() -> list[Snapshot]:
    return reference(STEPS + 4)


@pytest.fixture(scope="module")
def stored() -> Iterator[Path]:
    """A run that was killed after ten steps, and beside it (`other`) a second run of the same length.

    Full checkpoints at 1, 4 and 8. Its NVMe has bases of all states at 4, where it moved to a new host, and all increments since.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        for root in (Path(folder) / "run", Path(folder) / "other"):
            for start, stop in ((0, BASE), (BASE, STEPS)):
                process = Process(root, options=LONG)
                assert process.ckpt.restore() == start
                for _ in range(start, stop):
                    process.step()
                process.abandon()
                if stop == BASE:
                    shutil.rmtree(root / "nvme")
        yield Path(folder)


@pytest.fixture
def root(stored: Path) -> Iterator[Path]:
    """A copy of the run, to be damaged."""
    with tempfile.TemporaryDirectory(dir=stored) as folder:
        shutil.copytree(stored / "run", folder, dirs_exist_ok=True)
        yield Path(folder)


def nvme_of(root: Path) -> LmdbBackend:
    return LmdbBackend(next((root / "nvme").rglob("data.mdb")).parent)


def restored(root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot]) -> tuple[int, list[str]]:
    """Restore and compare; train on, crash, and restore and compare again. Gives the first step, and what was logged until then."""
    caplog.set_level(logging.WARNING, "adacheck")
    caplog.clear()
    process = Process(root, options=LONG)
    step = process.ckpt.restore()
    lines = [record.getMessage() for record in caplog.records]
    kept = [line for line in lines if "is kept in" in line]
    lines = [line for line in lines if line not in kept]
    assert len(kept) == len(list((root / "nvme").rglob("0.damaged-*"))) - any("was moved to" in line for line in lines)
    assert not differing(process.run.snapshot(), expected[step])
    for _ in range(2):
        process.step()
    assert process.durable == step + 2, "durable steps are promised again after the restore"
    process.abandon()
    process = Process(root)
    assert process.ckpt.restore() == step + 2, "what is promised after the restore is kept"
    assert not differing(process.run.snapshot(), expected[step + 2])
    process.abandon()
    return step, lines


def flipped(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


EDITS: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": flipped,
    "truncated": lambda content: content[:-1],
    "empty": lambda content: b"",
    "longer": lambda content: content + b"\0",
    "missing": lambda content: None,
}


def edit(backend: Backend, key: str, how: str) -> None:
    content = EDITS[how](backend.get(key))
    if content is None:
        backend.delete(key)
    else:
        backend.put(key, content)


def swap(backend: Backend, a: str, b: str) -> None:
    first, second = backend.get(a), backend.get(b)
    backend.put(a, second)
    backend.put(b, first)


def increment_slot(backend: Backend, step: int, role: str) -> str:
    """The key of a segment of an increment, of its gradients, refreshes or opaque items."""
    increment = decode(decode(backend.get(keys.increment(1, step)), Linked).entry, Increment)
    segment = {
        "gradient": lambda: increment.gradients[0].segments[0],
        "opaque": lambda: increment.opaque[0],
    }[role]()
    return keys.increment_slot(1, step, segment.slot)


def oldest_base(backend: Backend) -> tuple[str, int]:
    """Key and step of the base that the first state has."""
    head = decode(backend.get(keys.CHAIN), Chain)
    return keys.base(1, head.base_states[0], head.base_steps[0]), head.base_steps[0]


@pytest.mark.parametrize("how", EDITS)
def test_a_bad_record_of_an_increment_ends_the_log_before_it(
    root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot], how: str
) -> None:
    with nvme_of(root) as nvme:
        edit(nvme, keys.increment(1, 10), how)
    step, lines = restored(root, caplog, expected)
    assert step == 9
    assert how == "missing" or "10" in "".join(lines)


@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("role", ["gradient", "opaque"])
def test_a_bad_segment_of_an_increment_costs_its_step(
    root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot], how: str, role: str
) -> None:
    with nvme_of(root) as nvme:
        edit(nvme, increment_slot(nvme, 10, role), how)
    step, lines = restored(root, caplog, expected)
    assert step == 9
    assert len(lines) == 2 and "s000000000010" in lines[0] and "need it" not in lines[0]
    assert lines[1].startswith("restored step 9 from lmdb:") and says_what_is_lost(root, lines[1], "not step 10", "1 step is lost")


def test_swapped_increments_are_not_taken_for_each_other(root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot]) -> None:
    with nvme_of(root) as nvme:
        swap(nvme, keys.increment(1, 9), keys.increment(1, 10))
    step, lines = restored(root, caplog, expected)
    assert step == FULL
    assert any("increment 9: swapped" in line for line in lines), lines


def test_an_increment_spliced_in_from_another_run_is_refused(
    root: Path, stored: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot]
) -> None:
    with nvme_of(root) as nvme, nvme_of(stored / "other") as other:
        nvme.put(keys.increment(1, 10), other.get(keys.increment(1, 10)))
    step, lines = restored(root, caplog, expected)
    assert step == 9
    assert any("increment 10: spliced" in line for line in lines)


def test_an_increment_that_was_rewritten_with_its_link_does_not_follow_its_predecessor(
    root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot]
) -> None:
    with nvme_of(root) as nvme:
        increment = decode(decode(nvme.get(keys.increment(1, 10)), Linked).entry, Increment)
        forged = chain.append(replace(increment, gradients=increment.gradients[1:]), b"\1" * 32)
        nvme.put(keys.increment(1, 10), encode(forged))
    step, lines = restored(root, caplog, expected)
    assert step == 9
    assert lines


@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("part", ["record", "segment"])
def test_a_bad_base_falls_to_the_full_checkpoint(
    root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot], how: str, part: str
) -> None:
    with nvme_of(root) as nvme:
        key, _ = oldest_base(nvme)
        edit(nvme, key if part == "record" else f"{key}/000000", how)
    step, lines = restored(root, caplog, expected)
    assert step == FULL
    lines = [line for line in lines if "base" in line]
    assert 1 <= len(lines) <= 2, "one line for the base, not one for every step it would have served"
    assert part == "record" or lines[0].endswith("; cuts 5 to 10 there need it")


def test_a_bad_increment_costs_the_cuts_that_need_it_and_says_which(
    root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot]
) -> None:
    with nvme_of(root) as nvme:
        edit(nvme, increment_slot(nvme, 7, "gradient"), "flipped")
    step, lines = restored(root, caplog, expected)
    assert step == FULL and len(lines) == 2
    assert lines[0].startswith("rejected: cut 10 from lmdb:") and lines[0].endswith("; cuts 7 to 10 there need it")
    assert lines[1].startswith("restored step 8 from full/") and says_what_is_lost(root, lines[1], "not step 10", "2 steps are lost")


def says_what_is_lost(root: Path, line: str, *words: str) -> bool:
    """Whether a line on what was restored instead names the tool that may mend it, and this."""
    remedy = f"adacheck-fsck 'file://{root}/objects?nvme={root}/nvme' --repair, run before a start, mends what can be mended"
    return all(word in line for word in words) and line.endswith(remedy)


def test_an_nvme_directory_that_is_gone_is_missed(root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot]) -> None:
    shutil.rmtree(root / "nvme")
    step, lines = restored(root, caplog, expected)
    assert step == FULL and len(lines) == 1
    assert lines[0].startswith(f"nothing on NVMe at {root}/nvme: restored step 8 from full/")
    assert "/run/nvme there, which may have newer steps: this start goes on without, and from then on they are no part" in lines[0]


def test_a_start_that_loses_nothing_says_nothing(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot]
) -> None:
    assert restored(root, caplog, expected) == (STEPS, [])
    for _ in range(2):  # a new run, and its second start, which finds a log without steps
        caplog.clear()
        process = Process(tmp_path)
        assert process.ckpt.restore() == 0
        process.abandon()
        assert not caplog.records


def test_a_base_of_another_state_is_refused(root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot]) -> None:
    with nvme_of(root) as nvme:
        head = decode(nvme.get(keys.CHAIN), Chain)
        first, second = list(zip(head.base_states, head.base_steps, strict=True))[:2]
        swap(nvme, keys.base(1, *first), keys.base(1, *second))
    step, lines = restored(root, caplog, expected)
    assert step == FULL
    assert any("base" in line and "is of" in line for line in lines)


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty"])
def test_a_bad_head_record_falls_to_the_full_checkpoint(
    root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot], how: str
) -> None:
    with nvme_of(root) as nvme:
        edit(nvme, keys.CHAIN, how)
    step, lines = restored(root, caplog, expected)
    assert step == FULL
    assert any("chain record" in line for line in lines)
    assert lines[-1].startswith("restored step 8 from full/") and says_what_is_lost(root, lines[-1], "the log on NVMe cannot be read")


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "missing"])
def test_a_bad_fence_is_replaced(root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot], how: str) -> None:
    with nvme_of(root) as nvme:
        edit(nvme, keys.FENCE, how)
    step, _ = restored(root, caplog, expected)
    assert step == STEPS


@pytest.mark.parametrize("how", ["empty", "truncated", "garbage"])
def test_a_data_file_that_is_no_lmdb_is_moved_away(
    root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot], how: str
) -> None:
    file = next((root / "nvme").rglob("data.mdb"))
    content = {"empty": b"", "truncated": file.read_bytes()[:6000], "garbage": b"\xa5" * 20_000}[how]
    file.write_bytes(content)
    step, lines = restored(root, caplog, expected)
    assert step == FULL
    assert any("moved" in line and str(file.parent) in line for line in lines)
    assert "nothing on NVMe" in lines[-1] and "(what was there was moved aside)" in lines[-1]
    assert [kept.read_bytes() for kept in (root / "nvme").rglob("0.damaged*/data.mdb")] == [content], "nothing is thrown away"


def full_objects(objects: Backend, step: int) -> dict[str, str]:
    """The objects of a full checkpoint by the last part of their names, shards as `shard`."""
    found = [key for key in objects.list("full/") if f"step-{step:012d}" in key]
    return {key.rpartition("/")[2].split("-")[0].split(".")[0]: key for key in found}


@pytest.mark.parametrize("how", [how for how in EDITS if how != "longer"])
@pytest.mark.parametrize("name", ["shard", "opaque", "manifest"])
def test_a_bad_object_of_a_full_checkpoint_falls_to_the_one_before(
    root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot], how: str, name: str
) -> None:
    shutil.rmtree(root / "nvme")
    with plain_objects(root) as objects:
        edit(objects, full_objects(objects, 8)[name], how)
    step, lines = restored(root, caplog, expected)
    assert step == 4
    lines = [line for line in lines if "cut 8" in line]
    assert len(lines) == 1 and name in lines[0]


@pytest.mark.parametrize("name", ["shard", "opaque", "manifest"])
def test_objects_of_two_full_checkpoints_are_not_taken_for_each_other(
    root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot], name: str
) -> None:
    shutil.rmtree(root / "nvme")
    with plain_objects(root) as objects:
        swap(objects, full_objects(objects, 4)[name], full_objects(objects, 8)[name])
    step, lines = restored(root, caplog, expected)
    assert step == 1
    assert [line.split()[2] for line in lines if line.startswith("rejected: cut")] == ["8", "4"]


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty"])
def test_a_bad_version_falls_to_the_one_before(root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot], how: str) -> None:
    shutil.rmtree(root / "nvme")
    with plain_objects(root) as objects:
        newest = max(objects.list("versions/"))
        edit(objects, newest, how)
    step, lines = restored(root, caplog, expected)
    assert step in (4, 8)
    assert len([line for line in lines if newest in line]) == 1


@pytest.mark.parametrize("key", ["run.msgpack", "forks/i00000001.msgpack"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "empty"])
def test_without_identity_or_fork_table_nothing_is_restored(root: Path, how: str, key: str) -> None:
    """A dead step could count as live, so this is refused; the object is named, and can be put back from a copy."""
    with plain_objects(root) as objects:
        before = objects.get(key)
        edit(objects, key, how)
        process = Process(root)
        with pytest.raises(DamagedCut, match=key):
            process.ckpt.restore()
        process.abandon()
        objects.put(key, before)
    process = Process(root)
    assert process.ckpt.restore() == STEPS
    process.abandon()


def test_a_kernel_of_another_machine_is_not_replayed(root: Path, caplog: pytest.LogCaptureFixture, expected: list[Snapshot]) -> None:
    """As if the log had been written on a CPU whose vector instructions give other bits."""
    with nvme_of(root) as nvme:
        head = decode(nvme.get(keys.CHAIN), Chain)
        link = head.anchor_link
        for step in range(BASE + 1, STEPS + 1):
            linked = decode(nvme.get(keys.increment(1, step)), Linked)
            increment = decode(linked.entry, Increment)
            events = tuple(replace(e, kernel=replace(e.kernel, cpu_capability="DEFAULT")) for e in increment.events)
            forged = chain.append(replace(increment, events=events), link)
            link = forged.link
            nvme.put(keys.increment(1, step), encode(forged))
    step, lines = restored(root, caplog, expected)
    assert step == FULL
    assert len(lines) == 2 and "DEFAULT" in lines[0] and "gradients cannot be replayed" in lines[0], lines
