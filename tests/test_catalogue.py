"""Versions, incarnations and retention: one winner of each race, and nothing is lost wherever a writer dies."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck.backends.base import Backend, Created, Exists, Parts
from adacheck.backends.memory import MemoryBackend
from adacheck.backends.object_store import ObjectStore
from adacheck.catalogue import Fulls, Head, head, in_order, listing, live, publish, versions, with_status
from adacheck.digest import digest
from adacheck.errors import ConfigError, DamagedCut, ForeignRun, Superseded
from adacheck.full_checkpoint import CutId, StateSource, write_full
from adacheck.full_reader import read_full
from adacheck.incarnations import (
    check_newest,
    new_run,
    newest_incarnation,
    open_run,
    read_forks,
    read_run,
    take_incarnation,
    void_unstarted,
    write_fork,
)
from adacheck.keeper.cut import NO_LIMIT
from adacheck.manifests import keys
from adacheck.manifests.chain import NO_LINK, seal_version
from adacheck.manifests.encoding import encode
from adacheck.manifests.errors import NewerFormat
from adacheck.manifests.record import Fork, FullEntry, StateSpec, TensorSpec, Version
from adacheck.retention import VERSIONS_KEPT, prune, retained
from adacheck.states import tensor_bytes

RUN = "run-a"


def write(backend: Backend, incarnation: int, step: int) -> FullEntry:
    spec = TensorSpec("param", "float32", (2,), (2,), (0,))
    states = [StateSource(StateSpec(0, "w", (), "parameter", "", True, (spec,), b""), lambda name: [bytes([0, 0, 0, step]) * 2])]
    return write_full(backend, CutId(RUN, 1, incarnation, step), states, [("step", str(step).encode())])


def started(backend: Backend, cut: int = 0, run: str = RUN) -> int:
    taken = take_incarnation(backend, run).incarnation
    write_fork(backend, Fork(run, taken, cut, True))
    return taken


def add(backend: Backend, incarnation: int, step: int) -> FullEntry:
    entry = write(backend, incarnation, step)
    publish(backend, RUN, incarnation, listing(entry))
    return entry


def steps(found: Head) -> list[int]:
    return [full.step for full in found.fulls]


def test_an_empty_store_has_no_head() -> None:
    backend = MemoryBackend()
    assert head(backend, RUN) == Head(None, (), ())
    assert (read_run(backend), newest_incarnation(backend), read_forks(backend, RUN)) == (None, 0, ())


def test_versions_are_numbered_and_linked() -> None:
    backend = MemoryBackend()
    one = started(backend)
    for step in (10, 20, 30):
        add(backend, one, step)
    newest_first = list(versions(backend, RUN))
    assert [found.number for found in newest_first if isinstance(found, Version)] == [3, 2, 1]
    third, second, first = newest_first
    assert isinstance(first, Version) and isinstance(second, Version) and isinstance(third, Version)
    assert [found.previous for found in (first, second, third)] == [NO_LINK, first.link, second.link]
    assert [seal_version(found) for found in (first, second, third)] == [first, second, third]
    assert steps(head(backend, RUN)) == [10, 20, 30]


def test_a_change_that_changes_nothing_writes_nothing() -> None:
    backend = MemoryBackend()
    one = started(backend)
    entry = add(backend, one, 10)
    assert publish(backend, RUN, one, listing(entry)).number == 1
    changed = publish(backend, RUN, one, with_status("proven", [entry.folder, "full/gone"]))
    assert (changed.number, [full.status for full in changed.fulls]) == (2, ["proven"])


def test_a_checkpoint_without_its_manifest_cannot_be_published() -> None:
    backend = MemoryBackend()
    one = started(backend)
    entry = write(backend, one, 10)
    backend.delete(keys.manifest(entry.folder))
    with pytest.raises(DamagedCut, match="has no manifest"):
        publish(backend, RUN, one, listing(entry))
    assert head(backend, RUN).version is None


def test_a_new_incarnation_carries_over_what_its_fork_leaves_alive() -> None:
    backend = MemoryBackend()
    one = started(backend)
    for step in (10, 20, 30):
        add(backend, one, step)
    two = started(backend, cut=25)
    assert steps(head(backend, RUN)) == [10, 20]  # before it has a version of its own
    add(backend, two, 35)
    assert steps(head(backend, RUN)) == [10, 20, 35]
    found = head(backend, RUN).version
    assert found is not None and (found.incarnation, found.number) == (2, 4)


def test_a_zombie_is_refused_and_what_it_published_is_not_seen() -> None:
    backend = MemoryBackend()
    one = started(backend)
    add(backend, one, 10)
    zombie = write(backend, one, 20)
    two = started(backend, cut=15)
    with pytest.raises(Superseded, match="incarnation 2"):
        publish(backend, RUN, one, listing(zombie))
    add(backend, two, 18)
    # Its put was on its way when the new incarnation began: it lands all the same.
    late = Version(RUN, one, 99, (zombie,), bytes(32), b"")
    backend.put(keys.version(one, 99), encode(seal_version(late)))
    assert steps(head(backend, RUN)) == [10, 18]
    with pytest.raises(Superseded):
        prune(backend, RUN, one, 1)
    assert steps(head(backend, RUN)) == [10, 18]


def entry(incarnation: int, step: int, status: str = "pending", finite: bool = True) -> FullEntry:
    return FullEntry(incarnation, step, keys.full_folder(incarnation, step, "a"), bytes(32), 1, status, finite)


def test_live_is_up_to_the_least_later_fork() -> None:
    fulls = [entry(i, s) for i in (1, 2, 3) for s in (10, 20, 30)]
    forks = [Fork(RUN, 1, 0, True), Fork(RUN, 2, 25, True), Fork(RUN, 3, 15, True)]
    assert [(full.incarnation, full.step) for full in live(fulls, forks)] == [(1, 10), (2, 10), (3, 10), (3, 20), (3, 30)]


class Racing(MemoryBackend):
    """Before the first put of a version, lets another writer go first."""

    other: Callable[[], object] | None = None

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        if self.other is not None and key.startswith(keys.VERSIONS_PREFIX):
            other, self.other = self.other, None
            other()
        return super().put(key, parts, exclusive=exclusive)


def test_the_loser_of_a_race_within_an_incarnation_adds_to_what_the_winner_published() -> None:
    backend = Racing()
    one = started(backend)
    first, second = write(backend, one, 10), write(backend, one, 20)
    backend.other = lambda: publish(backend, RUN, one, listing(second))
    assert publish(backend, RUN, one, listing(first)).number == 2
    assert steps(head(backend, RUN)) == [10, 20]


def test_the_loser_of_a_race_with_a_new_incarnation_is_superseded() -> None:
    backend = Racing()
    one = started(backend)
    add(backend, one, 10)
    mine = write(backend, one, 20)

    def newcomer() -> None:
        two = started(backend, cut=10)
        add(backend, two, 11)

    # Numbers of two incarnations do not collide: the zombie's put may succeed, and the fork table makes it worth nothing.
    backend.other = newcomer
    publish(backend, RUN, one, listing(mine))
    assert steps(head(backend, RUN)) == [10, 11]
    with pytest.raises(Superseded):
        publish(backend, RUN, one, listing(mine))


class LostAnswer(MemoryBackend):
    """Stores a version and then behaves as if someone else had been first: the answer to the put was lost and it was retried."""

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        done = super().put(key, parts, exclusive=exclusive)
        return Exists(key) if key.startswith(keys.VERSIONS_PREFIX) else done


def test_a_retried_put_finds_its_own_version() -> None:
    backend = LostAnswer()
    one = started(backend)
    add(backend, one, 10)
    assert [found.number for found in versions(backend, RUN) if isinstance(found, Version)] == [1]


def test_threads_that_publish_at_once_lose_nothing() -> None:
    backend = MemoryBackend()
    one = started(backend)
    entries = [write(backend, one, step) for step in range(1, 9)]
    threads = [threading.Thread(target=publish, args=(backend, RUN, one, listing(found))) for found in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps(head(backend, RUN)) == list(range(1, 9))
    assert len(list(versions(backend, RUN))) == 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: b"", "no bytes"),
        (lambda content: content[:-3], "bytes"),
        (lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:], "checksum"),
        (lambda content: encode(Fork(RUN, 1, 1, True)), "Fork"),
    ],
)
def test_a_damaged_newest_version_falls_to_the_next_and_is_reported(change: Callable[[bytes], bytes], reason: str) -> None:
    backend = MemoryBackend()
    one = started(backend)
    for step in (10, 20):
        add(backend, one, step)
    key = keys.version(one, 2)
    backend.put(key, change(backend.get(key)))
    found = head(backend, RUN)
    assert steps(found) == [10]
    assert [rejected.key for rejected in found.rejected] == [key] and reason in found.rejected[0].reason
    assert publish(backend, RUN, one, lambda fulls: fulls).number == 3, "a good record takes the place of the damaged one"
    assert head(backend, RUN).rejected == ()
    # Pruning deletes no checkpoint while a record is damaged: it may be the one that lists it.
    add(backend, one, 30)
    assert prune(backend, RUN, one, 1) == ()
    assert {key.split("/")[2][:17] for key in backend.list("full/")} == {f"step-{step:012d}" for step in (10, 20, 30)}


def test_versions_of_another_run_place_or_link_are_rejected() -> None:
    backend = MemoryBackend()
    one = started(backend)
    add(backend, one, 10)
    version = head(backend, RUN).version
    assert version is not None
    backend.put(keys.version(one, 2), encode(seal_version(replace(version, run="run-b", number=2))))
    backend.put(keys.version(one, 3), encode(version))
    backend.put(keys.version(one, 4), encode(replace(version, number=4)))
    reasons = [rejected.reason for rejected in head(backend, RUN).rejected]
    assert ["link" in reasons[0], "version 1" in reasons[1], "run-b" in reasons[2]] == [True] * 3
    assert add(backend, one, 20) and head(backend, RUN).version.number == 5  # type: ignore[union-attr]


def test_a_newer_format_is_refused_not_passed_over() -> None:
    backend = MemoryBackend()
    one = started(backend)
    add(backend, one, 10)
    content = bytearray(backend.get(keys.version(one, 1))[:-32])
    struct.pack_into("<H", content, 8, 2)
    backend.put(keys.version(one, 2), bytes(content) + blake3.blake3(bytes(content)).digest())
    with pytest.raises(NewerFormat, match="version 2"):
        head(backend, RUN)


def test_on_files_as_in_memory(tmp_path: Path) -> None:
    with ObjectStore(f"file://{tmp_path}") as backend:
        for _ in range(2):
            published = list(training(backend))
        check_store(backend, published[-1])
        assert folders(backend) == {full.folder for full in head(backend, RUN).fulls}
        with pytest.raises(Superseded):
            publish(backend, RUN, 1, lambda fulls: ())


def test_run_is_put_once() -> None:
    backend, first, second = MemoryBackend(), new_run(), new_run()
    assert open_run(backend, first) == first == open_run(backend, second) == read_run(backend)
    backend.put(keys.RUN, b"")
    with pytest.raises(DamagedCut, match=r"run\.msgpack"):
        open_run(backend, second)


def test_a_backend_without_exclusive_puts_is_refused() -> None:
    backend = MemoryBackend()
    backend.traits = replace(backend.traits, exclusive_put=False)
    with pytest.raises(ConfigError, match="exclusive"):
        open_run(backend, new_run())


def test_incarnations_taken_at_once_are_different() -> None:
    backend, taken = MemoryBackend(), []
    threads = [threading.Thread(target=lambda: taken.append(take_incarnation(backend, RUN).incarnation)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 9))
    check_newest(backend, 8)
    with pytest.raises(Superseded, match="incarnation 8 of the run has started"):
        check_newest(backend, 7)


def test_a_fork_is_written_once_and_by_the_newest_only() -> None:
    backend = MemoryBackend()
    one = started(backend, cut=7)
    write_fork(backend, Fork(RUN, one, 7, True))
    with pytest.raises(Superseded, match="otherwise than cut 8"):
        write_fork(backend, Fork(RUN, one, 8, True))
    take_incarnation(backend, RUN)
    with pytest.raises(Superseded):
        write_fork(backend, Fork(RUN, one, 7, True))
    assert read_forks(backend, RUN) == (Fork(RUN, 1, 7, True),)


def test_incarnations_that_never_started_are_voided() -> None:
    backend = MemoryBackend()
    started(backend, cut=5)
    stalled = take_incarnation(backend, RUN).incarnation
    three = take_incarnation(backend, RUN).incarnation
    assert void_unstarted(backend, RUN, three) == (Fork(RUN, 1, 5, True), Fork(RUN, stalled, NO_LIMIT, True))
    with pytest.raises(Superseded):
        write_fork(backend, Fork(RUN, stalled, 2, True))


def test_a_damaged_or_foreign_fork_is_an_error() -> None:
    backend = MemoryBackend()
    one = started(backend)
    whole = backend.get(keys.fork(one))
    for content, error in [
        (b"", DamagedCut),
        (whole[:-1], DamagedCut),
        (encode(Fork("run-b", one, 0, True)), ForeignRun),
        (encode(Fork(RUN, 9, 0, True)), DamagedCut),
    ]:
        backend.put(keys.fork(one), content)
        with pytest.raises(error, match="forks/i00000001"):
            head(backend, RUN)


# Retention.

statuses = st.sampled_from(["pending", "proven", "inexact"])
any_fulls = st.lists(st.tuples(st.integers(0, 40), statuses, st.booleans()), unique_by=lambda t: t[0], max_size=12).map(
    lambda rows: tuple(entry(1, *row) for row in rows)
)


@given(any_fulls, st.integers(1, 5))
def test_retention_keeps_the_newest_the_newest_proven_and_the_last_finite(fulls: Fulls, keep: int) -> None:
    kept = retained(fulls, keep)
    ordered = in_order(fulls)
    assert set(ordered[-keep:]) <= set(kept) <= set(fulls) and len(kept) <= keep + 2
    for matching in ([full for full in ordered if full.status == "proven"], [full for full in ordered if full.finite]):
        assert not matching or matching[-1] in kept
    assert retained(kept, keep) == kept


def test_keep_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="keep=0"):
        retained((), 0)


def folders(backend: Backend) -> set[str]:
    return {key.rpartition("/")[0] for key in backend.list("full/")}


def test_pruning_deletes_what_is_dropped_and_nothing_else() -> None:
    backend = MemoryBackend()
    one = started(backend)
    made = [add(backend, one, step) for step in (10, 20, 30, 40)]
    publish(backend, RUN, one, with_status("proven", [made[0].folder]))
    failed, in_flight, later = write(backend, one, 35), write(backend, one, 38), write(backend, one, 50)
    assert set(prune(backend, RUN, one, 2, busy=[in_flight.folder])) == {made[1].folder, failed.folder}
    kept = {made[0].folder, made[2].folder, made[3].folder}
    assert {full.folder for full in head(backend, RUN).fulls} == kept
    assert folders(backend) == kept | {in_flight.folder, later.folder}


def test_a_new_incarnation_sweeps_what_the_old_ones_left() -> None:
    backend = MemoryBackend()
    one = started(backend)
    alive, dead = add(backend, one, 10), add(backend, one, 30)
    failed = write(backend, one, 40)
    two = started(backend, cut=20)
    assert set(prune(backend, RUN, two, 5)) == {dead.folder, failed.folder}
    assert folders(backend) == {alive.folder}


def test_unknown_objects_are_left_alone() -> None:
    backend = MemoryBackend()
    one = started(backend)
    gone = add(backend, one, 10)
    add(backend, one, 20)
    backend.put(f"{gone.folder}/notes.txt", b"mine")
    backend.put("full/README", b"mine")
    prune(backend, RUN, one, 1)
    assert set(backend.list(gone.folder)) == {f"{gone.folder}/notes.txt"} and backend.get("full/README") == b"mine"


def test_old_version_records_go_and_the_last_few_stay() -> None:
    backend = MemoryBackend()
    one = started(backend)
    for step in range(1, 30):
        add(backend, one, step)
        prune(backend, RUN, one, 2)
        assert len(list(versions(backend, RUN))) <= VERSIONS_KEPT + 1
    assert steps(head(backend, RUN)) == [28, 29]
    assert len(folders(backend)) == 2


def test_each_deletion_lists_the_incarnations_again() -> None:
    class Watched(MemoryBackend):
        deleted = 0

        def delete(self, key: str) -> None:
            super().delete(key)
            self.deleted += 1
            if self.deleted == 1:
                take_incarnation(self, RUN)

    backend = Watched()
    one = started(backend)
    for step in (10, 20, 30):
        add(backend, one, step)
    with pytest.raises(Superseded):
        prune(backend, RUN, one, 1)
    assert backend.deleted == 1
    assert steps(head(backend, RUN)) == [30]
    assert len([key for key in backend.list("full/") if key.endswith("manifest.msgpack")]) == 2, "the manifest goes first"


# Crashes.


class Crash(BaseException):
    """The process is gone; no `except Exception` may catch it."""


class Crashing(MemoryBackend):
    """Dies at write number `at`, before or after it took effect."""

    at, after, writes = -1, False, 0

    def _write(self, action: Callable[[], object]) -> object:
        self.writes += 1
        if self.writes == self.at and not self.after:
            raise Crash
        done = action()
        if self.writes == self.at:
            raise Crash
        return done

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        put = super().put
        done = self._write(lambda: put(key, parts, exclusive=exclusive))
        assert isinstance(done, (Created, Exists))
        return done

    def delete(self, key: str) -> None:
        delete = super().delete
        self._write(lambda: delete(key))


def training(backend: Backend) -> Iterator[int]:
    """One incarnation: restores the head, then eight full checkpoints with pruning; yields the steps published."""
    run = open_run(backend, replace(new_run(), run=RUN)).run
    taken = take_incarnation(backend, run).incarnation
    void_unstarted(backend, run, taken)
    start = max(steps(head(backend, run)), default=0)
    write_fork(backend, Fork(run, taken, start, True))
    for step in range(start + 1, start + 9):
        made = write(backend, taken, step)
        publish(backend, run, taken, listing(made))
        yield step
        if step % 4 == 0:
            publish(backend, run, taken, with_status("proven", [made.folder]))
        prune(backend, run, taken, 2)


def check_store(backend: Backend, published: int) -> None:
    """Every listed checkpoint is whole, and nothing that was published is behind the head."""
    found = head(backend, RUN)
    assert found.rejected == ()
    for full in found.fulls:
        reader = read_full(backend, full)
        assert bytes(tensor_bytes(reader.tensor(0, "param"))) == bytes([0, 0, 0, full.step]) * 2
        assert reader.opaque() == {"step": str(full.step).encode()}
        assert digest(backend.get(keys.manifest(full.folder))) == full.manifest_digest
    assert max(steps(found), default=0) >= published


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_write_the_store_keeps_what_it_had(after: bool) -> None:
    whole = Crashing()
    for _ in training(whole):
        pass
    writes = whole.writes
    assert writes > 60
    for at in range(1, writes + 1):
        backend, published = Crashing(), 0
        backend.at, backend.after = at, after
        with pytest.raises(Crash):
            for step in training(backend):
                published = step
                check_store(backend, published)
        check_store(backend, published)
        proven = [full.step for full in head(backend, RUN).fulls if full.status == "proven"]
        for step in training(backend):  # the next incarnation, to its end
            published = step
            check_store(backend, published)
            if proven:
                assert max((full.step for full in head(backend, RUN).fulls if full.status == "proven"), default=0) >= proven[-1]
        left = folders(backend)
        assert left == {full.folder for full in head(backend, RUN).fulls}, "the next incarnation sweeps what the killed one left"
