"""Power cuts at every operation of a run and of a restore: a cut at or above the promised one comes back, bit for bit."""

from __future__ import annotations

import gc
import random
import shutil
import threading
import weakref
from pathlib import Path

import pytest

from adacheck.backends.object_store import ObjectStore
from adacheck.errors import AdacheckError, Detached
from tests.crash_images import Image, Recorder
from tests.tiny_run import Process, Snapshot, differing, reference

STEPS = 13


@pytest.fixture(scope="module")
def expected() -> list[Snapshot]:
    return reference(STEPS + 12)


def record(recorder: Recorder, patch: pytest.MonkeyPatch, steps: int, *, drain: bool, step: int | None = None) -> int:
    """Restore (`step`, or the newest) and train `steps` more steps under the recorder; gives the step restored."""
    with patch.context() as patched:
        patched.setattr("adacheck.start.LmdbBackend", recorder.open_nvme)
        objects = ObjectStore(f"file://{recorder.root}/objects", files=recorder.files)
        process = Process(recorder.root, objects)
        before = recorder.durable()
        recorder.durable = lambda: max(before, process.ckpt.status().durable)
        start = process.ckpt.restore(step)
        for _ in range(steps):
            process.step(drain=drain)
        process.settle()
        recorder.take("the end")
        process.abandon()
        return start


def check(image: Image, expected: list[Snapshot]) -> int:
    """Recover from a crash, train on for three steps, crash again, and recover again; gives the step of the first recovery."""
    where = f"crash {image.path.name}, before {image.before}"
    process = Process(image.path)
    first = process.ckpt.restore()
    assert first >= image.durable, f"{where}: step {image.durable} was durable, step {first} came back"
    assert not differing(process.run.snapshot(), expected[first]), f"{where}: step {first} came back with other bytes"
    for step in range(first + 1, first + 4):
        process.step()
        assert not differing(process.run.snapshot(), expected[step]), f"{where}: step {step} was trained to other bytes"
    assert process.durable == first + 3
    process.abandon()
    process = Process(image.path)
    second = process.ckpt.restore()
    assert second == first + 3, f"{where}: step {first + 3} was durable after the recovery, step {second} came back"
    assert not differing(process.run.snapshot(), expected[second]), f"{where}: step {second} came back with other bytes"
    process.abandon()
    shutil.rmtree(image.path)
    return first


@pytest.mark.parametrize("ended", ["abandoned", "closed"])
def test_nothing_is_left_of_a_process_that_has_ended(fast: Path, ended: str) -> None:
    """Neither memory nor a thread, or each of the hundreds of processes here would slow down all that follow."""
    before = set(threading.enumerate())
    process = Process(fast)
    process.ckpt.restore()
    for _ in range(3):
        process.step()
    if ended == "closed":
        process.ckpt.close()
    else:
        process.abandon()
    left: list[weakref.ref[object]] = [weakref.ref(part) for part in (process.ckpt, process.run.model, process.run.optimizer)]
    del process
    gc.collect()
    assert [each() for each in left] == [None, None, None]
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("drain", [True, False], ids=["lockstep", "free"])
@pytest.mark.parametrize("kept", [None, 5], ids=["dropped", "by-chance"])
def test_a_crash_at_any_operation_of_a_run_loses_nothing_durable(
    fast: Path, monkeypatch: pytest.MonkeyPatch, expected: list[Snapshot], drain: bool, kept: int | None
) -> None:
    recorder = Recorder(fast / "run", fast / "images", kept=None if kept is None else random.Random(kept))
    record(recorder, monkeypatch, STEPS, drain=drain)
    restored = {check(image, expected) for image in recorder.images}
    assert max(restored) == STEPS
    assert len(restored) == STEPS + 1 if drain else len(restored) > 2, "crashes were spread over the run"


@pytest.mark.parametrize("source", ["nvme", "object", "older"])
def test_a_crash_at_any_operation_of_a_restore_loses_nothing_durable(
    fast: Path, monkeypatch: pytest.MonkeyPatch, expected: list[Snapshot], source: str
) -> None:
    process = Process(fast / "run")
    process.ckpt.restore()
    for _ in range(10):
        process.step()
    process.abandon()
    if source == "object":
        shutil.rmtree(fast / "run" / "nvme")
    durable = {"nvme": 10, "object": 8, "older": 4}[source]
    recorder = Recorder(fast / "run", fast / "images")
    recorder.durable = lambda: durable
    assert record(recorder, monkeypatch, 1, drain=True, step=4 if source == "older" else None) == durable
    restored = {check(image, expected) for image in recorder.images}
    assert restored == {durable, durable + 1} | ({10} if source == "older" else set())


@pytest.mark.parametrize("nvme", [True, False], ids=["nvme", "object"])
def test_a_crash_at_any_operation_around_a_new_generation_loses_nothing_durable(
    fast: Path, monkeypatch: pytest.MonkeyPatch, expected: list[Snapshot], nvme: bool
) -> None:
    """The keeper gives up twice, and begins again some steps later with a new base."""
    recorder = Recorder(fast / "run", fast / "images")
    with monkeypatch.context() as patched:
        patched.setattr("adacheck.start.LmdbBackend", recorder.open_nvme)
        patched.setattr("adacheck.generations.RETRY_STEPS", 2)
        objects = ObjectStore(f"file://{recorder.root}/objects", files=recorder.files)
        process = Process(recorder.root, objects, nvme="" if nvme else "none")
        recorder.durable = lambda: process.ckpt.status().durable
        process.ckpt.restore()
        for _ in range(2):
            for _ in range(5):
                process.step()
            keeper = process.ckpt._keeper
            assert keeper is not None
            keeper.shared.fail(Detached("as if it had been stuck"))
            keeper.stop(20)  # else the number of steps until it has ended is anyone's guess
            while process.ckpt.status().failure is not None:
                process.step(drain=False)
                if (given_up := process.ckpt._generations._given_up) is not None and given_up.taking is not None:
                    given_up.taking.done.wait(20)  # of which no step waits
        process.step()
        recorder.take("the end")
        assert process.durable >= 11 if nvme else process.durable > 0
        process.abandon()
    for image in recorder.images:
        restarted = Process(image.path, nvme="" if nvme else "none")
        first = restarted.ckpt.restore()
        where = f"crash {image.path.name}, before {image.before}"
        assert first >= image.durable, f"{where}: step {image.durable} was durable, step {first} came back"
        assert not differing(restarted.run.snapshot(), expected[first]), f"{where}: step {first} came back with other bytes"
        restarted.abandon()


def test_the_simulation_notices_a_store_that_syncs_too_late(fast: Path, monkeypatch: pytest.MonkeyPatch, expected: list[Snapshot]) -> None:
    """Without the sync of an object before its name, some crash must lose what was promised, or the tests above show nothing."""
    recorder = Recorder(fast / "run", fast / "images", kept=random.Random(3))
    monkeypatch.setattr(recorder.files, "fsync", lambda descriptor: None)
    objects = ObjectStore(f"file://{recorder.root}/objects", files=recorder.files)
    process = Process(recorder.root, objects, nvme="none")
    recorder.durable = lambda: process.ckpt.status().durable
    process.ckpt.restore()
    for _ in range(9):
        process.step()
    process.abandon()
    lost = 0
    for image in recorder.images:
        try:
            restarted = Process(image.path, nvme="none")
            lost += restarted.ckpt.restore() < image.durable
            restarted.abandon()
        except AdacheckError:
            lost += 1
    assert lost
