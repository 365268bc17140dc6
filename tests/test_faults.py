"""The instruments that other tests stand on: that faults come when they should, and that a power cut drops what it should."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from adacheck.backends.base import Created, Exists, Expect
from adacheck.backends.errors import Full, Unavailable
from adacheck.backends.memory import MemoryBackend
from adacheck.backends.object_store import ObjectStore
from tests.faults import Crashing, CrashingFiles, Fault, Faulty, SimulatedCrash, at_calls, seeded


def test_faults_come_before_or_after_the_call() -> None:
    inner = MemoryBackend()
    backend = Faulty(inner, at_calls({1: Fault(Full("no room")), 2: Fault(Unavailable("lost reply"), after=True)}))
    with pytest.raises(Full):
        backend.put("a", b"1")
    assert inner.stat("a") is None
    with pytest.raises(Unavailable):
        backend.put("a", b"1")
    assert inner.get("a") == b"1"
    assert backend.get("a") == b"1"
    assert backend.calls == 3


def test_a_seeded_schedule_repeats_and_has_its_rate() -> None:
    def drawn(seed: int) -> list[tuple[int, bool]]:
        schedule = seeded(seed, 0.3, lambda: Unavailable("x"), ("put",))
        assert all(schedule(number, "get", "k") is None for number in range(100))
        found = ((number, schedule(number, "put", "k")) for number in range(1000))
        return [(number, fault.after) for number, fault in found if fault is not None]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 250 < len(drawn(1)) < 350
    assert {after for _, after in drawn(1)} == {True, False}


@pytest.mark.parametrize(("crash_at", "after", "left"), [(1, False, {}), (1, True, {"a": b"1"}), (2, False, {"a": b"1"}), (3, True, {})])
def test_a_crash_stops_everything_at_one_call(crash_at: int, after: bool, left: dict[str, bytes]) -> None:
    inner = MemoryBackend()
    backend = Crashing(inner, crash_at, after=after)
    with pytest.raises(SimulatedCrash):
        backend.put("a", b"1")
        backend.get("a")
        backend.put_many([("b", b"2"), ("a", None)])
        backend.delete("b")
    assert backend.dead
    assert {key: inner.get(key) for key in inner.list("")} == left
    for call in (
        lambda: backend.get("a"),
        lambda: backend.stat("a"),
        lambda: backend.list(""),
        lambda: backend.put("a", b""),
        lambda: backend.put_many([]),
        lambda: backend.delete("a"),
        backend.close,
    ):
        with pytest.raises(SimulatedCrash):
            call()
    assert {key: inner.get(key) for key in inner.list("")} == left


def test_a_batch_that_is_not_atomic_can_crash_between_its_items(tmp_path: Path) -> None:
    with ObjectStore(f"file://{tmp_path}") as inner:
        inner.put("c", b"old")
        counted = Crashing(inner)
        assert counted.put_many([("a", b"1"), ("b", b"2")], expect=Expect("c", b"new")) == Exists("c")
        assert counted.put_many([("a", b"1"), ("b", b"2"), ("c", None)]) == Created()
        assert counted.calls == 3
        with pytest.raises(SimulatedCrash):
            Crashing(inner, 2).put_many([("d", b"1"), ("e", b"2")])
        assert list(inner.list("")) == ["a", "b", "d"]


def _write(files: CrashingFiles, path: Path, content: bytes, *, sync: bool) -> None:
    descriptor = files.create(path)
    files.write(descriptor, content)
    if sync:
        files.fsync(descriptor)
    files.close(descriptor)


def test_a_power_cut_drops_what_was_not_synced(tmp_path: Path) -> None:
    (tmp_path / "before").write_bytes(b"here all along")
    files = CrashingFiles(tmp_path)
    files.make_dir(tmp_path / "kept")
    files.make_dir(tmp_path / "lost")
    _write(files, tmp_path / "kept" / "both", b"synced", sync=True)
    _write(files, tmp_path / "kept" / "name only", b"not synced", sync=False)
    files.fsync_dir(tmp_path / "kept")
    _write(files, tmp_path / "kept" / "content only", b"synced", sync=True)
    files.unlink(tmp_path / "kept" / "both")
    files.fsync_dir(tmp_path)
    files.remove_dir(tmp_path / "lost")
    files.make_dir(tmp_path / "later")
    files.replace(tmp_path / "before", tmp_path / "moved")
    files.power_cut()
    found = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"before": b"here all along", "kept/both": b"synced", "kept/name only": b""}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "kept", "lost"]
    with pytest.raises(SimulatedCrash):
        files.unlink(tmp_path / "before")


def test_a_crash_in_a_write_leaves_half_of_it_at_most(tmp_path: Path) -> None:
    outcomes = set()
    for seed in range(30):
        root = tmp_path / str(seed)
        root.mkdir()
        files = CrashingFiles(root, 2, kept=random.Random(seed))
        with pytest.raises(SimulatedCrash):
            _write(files, root / "a", b"12345678", sync=True)
        files.power_cut()
        outcomes.add((root / "a").read_bytes() if (root / "a").exists() else None)
    assert outcomes == {None, b"", b"1234"}


@pytest.mark.parametrize("forgotten", ["fsync", "fsync_dir"])
def test_a_store_that_forgets_to_sync_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    files = CrashingFiles(tmp_path)
    with ObjectStore(f"file://{tmp_path}", files=files) as store:
        monkeypatch.setattr(files, forgotten, lambda _: None)
        store.put("a", b"1")
        files.power_cut()
        assert store.stat("a") is None or store.get("a") != b"1"
