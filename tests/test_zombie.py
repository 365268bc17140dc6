"""Two trainers of one run, of which one does not know that it is dead: it harms nothing that is live, and learns that it must stop."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from adacheck import catalogue, incarnations
from adacheck.backends.errors import BackendError, Full
from adacheck.errors import Closed, ForeignRun, NotRestored, StoreBusy, Superseded
from adacheck.manifests import keys
from adacheck.manifests.encoding import decode, encode
from adacheck.manifests.record import Chain, Incarnation
from tests.tiny_run import Process, Snapshot, differing, plain_objects, reference


@pytest.fixture
def fast() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


def trained(process: Process, count: int) -> list[Snapshot]:
    """Snapshots after each of so many steps."""
    found = []
    for _ in range(count):
        process.step()
        found.append(process.run.snapshot())
    return found


def test_a_zombie_on_another_host_changes_nothing_of_the_live_lineage(fast: Path, caplog: pytest.LogCaptureFixture) -> None:
    zombie = Process(fast, nvme=str(fast / "host-a"))
    zombie.ckpt.restore()
    trained(zombie, 6)
    heir = Process(fast, nvme=str(fast / "host-b"))
    assert heir.ckpt.restore() == 4, "the other host has the object tier only"
    live = dict(enumerate(trained(heir, 5), start=5))
    objects = plain_objects(fast)
    before = {key: objects.get(key) for key in objects.list("")}
    zombie.run.train_one_step()
    for _ in range(8):  # past its full checkpoints at 8 and 12
        zombie.run.train_one_step()
        zombie.ckpt.step()
        time.sleep(0.02)
    assert "incarnation 2 of the run has started" in (zombie.ckpt.status().failure or "")
    assert len([r for r in caplog.records if "training goes on" in r.getMessage()]) == 1, "said once"
    after = {key: objects.get(key) for key in objects.list("")}
    assert {key: after.get(key) for key in before} == before, "nothing of the live lineage was changed or deleted"
    run = incarnations.read_run(objects)
    assert run is not None
    assert {full.incarnation for full in catalogue.head(objects, run.run).fulls if full.step > 4} == {2}
    zombie.abandon()
    heir.abandon()
    returned = Process(fast, nvme=str(fast / "host-a"))
    step = returned.ckpt.restore()
    assert step == 8 and returned.ckpt.restored is not None
    assert "i00000002" in returned.ckpt.restored.source, "what the zombie wrote on its own host is cut off by the fork"
    assert not differing(returned.run.snapshot(), live[8])
    returned.step()
    assert returned.durable == 9
    returned.abandon()


def test_a_zombie_hears_of_it_at_once_where_errors_are_raised(fast: Path) -> None:
    zombie = Process(fast, nvme=str(fast / "host-a"), options={"on_error": "raise"})
    zombie.ckpt.restore()
    trained(zombie, 2)
    heir = Process(fast, nvme=str(fast / "host-b"))
    heir.ckpt.restore()
    with pytest.raises(Superseded, match="incarnation 2 of the run has started"):
        for _ in range(1000):
            zombie.step(drain=False)
    zombie.abandon()
    heir.abandon()


def test_the_fence_of_a_newer_incarnation_stops_every_transaction(fast: Path) -> None:
    zombie = Process(fast)
    zombie.ckpt.restore()
    trained(zombie, 6)
    start = zombie.ckpt._start
    assert start is not None and start.nvme is not None
    newer = Incarnation(start.incarnation.run, 2, 0.0, "elsewhere", 1, "")
    start.nvme.put(keys.FENCE, encode(newer))
    before = {key: start.nvme.get(key) for key in start.nvme.list("")}
    for _ in range(5):
        zombie.step(drain=False)
    keeper = zombie.ckpt._keeper
    assert keeper is not None
    keeper.shared.wait(lambda: keeper.failure is not None, 20)
    assert isinstance(keeper.failure, Superseded)
    assert {key: start.nvme.get(key) for key in start.nvme.list("")} == before
    assert decode(start.nvme.get(keys.CHAIN), Chain).incarnation == 1
    zombie.abandon()


def test_a_second_opening_on_this_host_is_refused_and_harms_nothing(fast: Path) -> None:
    first = Process(fast)
    first.ckpt.restore()
    trained(first, 3)
    second = Process(fast)
    with pytest.raises(StoreBusy, match=str(os.getpid())):
        second.ckpt.restore()
    second.ckpt.close()
    assert [point.step for point in first.store.steps()][-1] == 3, "looking is allowed"
    trained(first, 2)
    assert first.ckpt.status().durable == 5 and first.ckpt.status().failure is None
    first.abandon()
    restarted = Process(fast)
    assert restarted.ckpt.restore() == 5
    assert restarted.ckpt._start is not None and restarted.ckpt._start.incarnation.incarnation == 2, "the refused one took no number"
    restarted.abandon()


def test_nvme_of_another_run_is_refused_naming_both(fast: Path) -> None:
    runs = []
    for name in ("one", "two"):
        process = Process(fast / name)
        process.ckpt.restore()
        trained(process, 2)
        process.abandon()
        run = incarnations.read_run(plain_objects(fast / name))
        assert run is not None
        runs.append(run.run)
    process = Process(fast / "one", nvme=str(fast / "two" / "nvme"))
    with pytest.raises(ForeignRun, match=rf"belongs to run {runs[1]}, but the object tier .* has run {runs[0]}"):
        process.ckpt.restore()
    with pytest.raises(ForeignRun):
        process.store.steps()
    process.ckpt.close()
    shutil.rmtree(fast / "one" / "objects")
    process = Process(fast / "one")
    with pytest.raises(ForeignRun, match=rf"belongs to run {runs[0]}, but the object tier .* has no run at all"):
        process.ckpt.restore()
    process.ckpt.close()
    assert not list((fast / "one" / "objects").iterdir()), "nothing was begun"


def test_directories_that_cannot_be_used(fast: Path) -> None:
    (fast / "file").write_text("in the way")
    process = Process(fast, nvme=str(fast / "file"))
    with pytest.raises(BackendError, match=re.escape(str(fast / "file"))):
        process.ckpt.restore()
    process.ckpt.close()
    with pytest.raises(BackendError, match=re.escape(str(fast / "file"))):
        Process(fast / "file")


def test_a_full_directory_at_the_start(tmp_path: Path) -> None:
    mount = tmp_path / "nvme"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True).returncode:
        pytest.skip("only root can mount a small filesystem")
    try:
        (mount / "ballast").write_bytes(bytes(shutil.disk_usage(mount).free))
        process = Process(tmp_path)
        with pytest.raises(Full, match=re.escape(str(mount))):
            process.ckpt.restore()
        process.ckpt.close()
        (mount / "ballast").unlink()
        process = Process(tmp_path)
        assert process.ckpt.restore() == 0
        trained(process, 2)
        process.ckpt.close()
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_steps_without_a_restore_or_after_close_are_refused(fast: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "adacheck")
    process = Process(fast)
    trained(process, 2)  # a new run needs no restore()
    process.ckpt.close()
    with pytest.raises(Closed, match="step 2"):
        process.ckpt.step()
    process = Process(fast)
    process.run.train_one_step()
    with pytest.raises(NotRestored, match="the newest is step 2"):
        process.ckpt.step()
    process.ckpt.close()
    process = Process(fast)
    assert process.ckpt.restore() == 2
    assert not differing(process.run.snapshot(), reference(2)[2])
    process.ckpt.close()
