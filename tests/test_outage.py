"""A tier that stops working in mid-run, and comes back: training goes on, promises are kept, and it is used again."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck import full_checkpoint
from adacheck.backends.errors import BackendError, Full, Unavailable
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.object_store import ObjectStore
from adacheck.checkpointer import Checkpointer
from adacheck.errors import AdacheckError, NotDurable
from adacheck.keeper import full_thread
from adacheck.manifests.record import FullEntry
from adacheck.store import Store
from tests.crash_images import Image, Recorder, RecordingNvme
from tests.faults import Fault, Faulty
from tests.tiny_run import Process, Snapshot, differing, plain_objects, reference


@dataclass
class Switch:
    """While `error` is set, every mutating call fails with it."""

    error: BackendError | None = None
    failed: int = 0

    def __call__(self, number: int, method: str, key: str) -> Fault | None:
        if self.error is None or method not in ("put", "put_many", "delete"):
            return None
        self.failed += 1
        return Fault(self.error)


@pytest.fixture(scope="module")
def expected() -> list[Snapshot]:
    return reference(60)


@pytest.fixture
def fast() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture
def nvme(monkeypatch: pytest.MonkeyPatch) -> Switch:
    """Makes NVMe fail on demand."""
    switch = Switch()
    monkeypatch.setattr("adacheck.start.LmdbBackend", lambda path: Faulty(LmdbBackend(path), switch))
    return switch


def steps(process: Process, count: int, *, until: Callable[[], bool] = lambda: False) -> None:
    """Train so many steps, or fewer if `until` comes true."""
    for _ in range(count):
        if until():
            return
        process.step()


def restart(root: Path, expected: list[Snapshot], **options: object) -> tuple[int, str]:
    """Restore after a crash and compare; gives the step and where it came from."""
    process = Process(root, options=options)
    step = process.ckpt.restore()
    assert not differing(process.run.snapshot(), expected[step])
    assert process.ckpt.restored is not None
    source = str(process.ckpt.restored.kind)
    process.abandon()
    return step, source


def test_nvme_that_fills_up_is_replaced_by_a_full_checkpoint_and_used_again(
    fast: Path, nvme: Switch, expected: list[Snapshot], caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(fast, options={"full_every": 1000})
    process.ckpt.restore()
    steps(process, 6)
    assert process.ckpt.status().durable == 6
    nvme.error = Full("no room on the test's disk")
    steps(process, 3)
    status = process.ckpt.status()
    assert status.lost_copies == ("nvme",) and status.failure is None
    assert status.published == status.durable == 6, "a full checkpoint took over from NVMe"
    steps(process, 3)
    assert "NVMe cannot be used again yet" in caplog.text
    nvme.error = None
    steps(process, 10, until=lambda: not process.ckpt.status().lost_copies)
    assert process.ckpt.status().lost_copies == (), "NVMe was not used again"
    steps(process, 2)
    durable = process.ckpt.status().durable
    assert durable == process.ckpt.status().step
    process.abandon()
    assert restart(fast, expected) == (durable, "nvme")
    assert "no room on the test's disk" in caplog.text


def test_a_crash_at_any_operation_while_nvme_fails_and_comes_back_loses_nothing(
    fast: Path, monkeypatch: pytest.MonkeyPatch, expected: list[Snapshot]
) -> None:
    recorder, switch = Recorder(fast / "run", fast / "images"), Switch()
    with monkeypatch.context() as patched:
        patched.setattr("adacheck.start.LmdbBackend", lambda path: RecordingNvme(Faulty(LmdbBackend(path), switch), recorder))
        process = Process(recorder.root, ObjectStore(f"file://{recorder.root}/objects", files=recorder.files))
        recorder.durable = lambda: process.ckpt.status().durable
        process.ckpt.restore()
        for burst in range(3):
            for _ in range(5):
                process.step(drain=False)
            switch.error = Unavailable(f"outage {burst}")
            for _ in range(2):
                process.step(drain=burst != 1)
            switch.error = None
            steps(process, 25, until=lambda: not process.ckpt.status().lost_copies)
            assert process.ckpt.status().lost_copies == ()
        recorder.take("the end")
        process.abandon()
    kinds = {check(image, expected) for image in recorder.images}
    assert kinds == {"nvme", "object", "nothing"}


def check(image: Image, expected: list[Snapshot]) -> str:
    """Recover from a crash; gives the tier it came from."""
    process = Process(image.path)
    step = process.ckpt.restore()
    where = f"crash {image.path.name}, before {image.before}"
    assert step >= image.durable, f"{where}: step {image.durable} was durable, step {step} came back"
    assert not differing(process.run.snapshot(), expected[step]), f"{where}: step {step} came back with other bytes"
    process.abandon()
    return str(process.ckpt.restored.kind) if process.ckpt.restored is not None else "nothing"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small filesystem")
def test_a_real_filesystem_that_fills_up(tmp_path: Path, expected: list[Snapshot]) -> None:
    mount = tmp_path / "nvme"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True).returncode:
        pytest.skip("this sandbox does not let root mount")
    try:
        process = Process(tmp_path, options={"full_every": 1000})
        process.ckpt.restore()
        steps(process, 1)
        ballast = mount / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(mount).free))
        steps(process, 12, until=lambda: bool(process.ckpt.status().lost_copies))
        assert process.ckpt.status().lost_copies == ("nvme",)
        ballast.unlink()
        steps(process, 40, until=lambda: not process.ckpt.status().lost_copies)
        steps(process, 2)
        assert process.ckpt.status().lost_copies == ()
        durable = process.ckpt.status().durable
        process.abandon()
        assert restart(tmp_path, expected) == (durable, "nvme")
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_an_object_tier_that_is_down_for_a_while_costs_full_checkpoints_only(
    fast: Path, expected: list[Snapshot], caplog: pytest.LogCaptureFixture
) -> None:
    switch = Switch()
    process = Process(fast, Faulty(plain_objects(fast), switch))
    process.ckpt.restore()
    steps(process, 5)
    assert process.ckpt.status().published == 4
    switch.error = Unavailable("the test's server is away")
    steps(process, 5)
    assert process.ckpt.status().durable == 10, "NVMe goes on"
    assert process.ckpt.status().published == 4
    assert "the test's server is away" in caplog.text and switch.failed
    switch.error = None
    steps(process, 5)
    assert (process.ckpt.status().published or 0) >= 12
    process.abandon()
    shutil.rmtree(fast / "nvme")
    assert restart(fast, expected)[0] >= 12


def test_on_error_raise_raises_at_the_next_step(fast: Path) -> None:
    switch = Switch()
    process = Process(fast, Faulty(plain_objects(fast), switch), options={"on_error": "raise"})
    process.ckpt.restore()
    steps(process, 5)
    switch.error = Unavailable("the test's server is away")
    with pytest.raises(AdacheckError, match="server is away"):
        steps(process, 10)
    process.abandon()


def test_nvme_that_comes_back_is_no_error(fast: Path, nvme: Switch) -> None:
    process = Process(fast, options={"on_error": "raise"})
    process.ckpt.restore()
    steps(process, 3)
    nvme.error = Full("no room on the test's disk")
    with pytest.raises(AdacheckError, match="no room"):
        steps(process, 3)
    nvme.error = None
    steps(process, 40, until=lambda: not process.ckpt.status().lost_copies)
    steps(process, 2)
    assert process.ckpt.status().lost_copies == ()
    process.ckpt.close()


def test_without_nvme_only_full_checkpoints_are_durable_and_close_makes_the_last_one(fast: Path, expected: list[Snapshot]) -> None:
    process = Process(fast, nvme="none")
    assert process.ckpt.restore() == 0
    steps(process, 6)
    assert process.ckpt.status().durable == process.ckpt.status().published == 4
    process.ckpt.close()
    process = Process(fast, nvme="none")
    assert process.ckpt.restore() == 6
    assert not differing(process.run.snapshot(), expected[6])
    assert {point.tiers for point in process.store.steps()} == {("object",)}
    steps(process, 1)
    process.abandon()
    process = Process(fast, nvme="none")
    assert process.ckpt.restore() == 6
    process.abandon()


def test_close_makes_a_last_step_durable_that_was_not_even_committed(fast: Path, expected: list[Snapshot]) -> None:
    process = Process(fast)
    process.ckpt.restore()
    for _ in range(7):
        process.step(drain=False)  # the round that commits a step is that of the next
    process.ckpt.close()
    assert restart(fast, expected) == (7, "nvme")


def test_close_tries_again_until_the_object_tier_is_back(fast: Path, expected: list[Snapshot]) -> None:
    switch = Switch()

    def schedule(number: int, method: str, key: str) -> Fault | None:
        if switch.failed >= 3:
            switch.error = None
        return switch(number, method, key)

    process = Process(fast, Faulty(plain_objects(fast), schedule), nvme="none")
    process.ckpt.restore()
    steps(process, 5)
    switch.error = Unavailable("the test's server is away")
    process.ckpt.close()
    assert switch.failed == 3
    process = Process(fast, nvme="none")
    assert process.ckpt.restore() == 5
    assert not differing(process.run.snapshot(), expected[5])
    process.abandon()


def test_close_raises_when_the_last_step_cannot_be_made_durable(fast: Path) -> None:
    switch = Switch()
    process = Process(fast, Faulty(plain_objects(fast), switch), nvme="none", options={"deadline_s": 2})
    process.ckpt.restore()
    steps(process, 5)
    switch.error = Unavailable("the test's server is away")
    with pytest.raises(NotDurable, match=r"step 5 .*server is away"):
        process.ckpt.close()


def test_an_unstaging_that_fails_does_not_end_full_checkpoints(
    fast: Path, monkeypatch: pytest.MonkeyPatch, expected: list[Snapshot]
) -> None:
    """NVMe fills up while a full checkpoint is uploaded from it: what was staged cannot be deleted."""
    switch = Switch()
    monkeypatch.setattr("adacheck.start.LmdbBackend", lambda path: Faulty(LmdbBackend(path), switch))

    def schedule(number: int, method: str, key: str) -> Fault | None:
        if key.endswith("manifest.msgpack") and method == "put":
            switch.error = Full("no room on the test's disk")
        return None

    process = Process(fast, Faulty(plain_objects(fast), schedule))
    process.ckpt.restore()
    steps(process, 9)
    assert (process.ckpt.status().published or 0) >= 8
    process.abandon()
    switch.error = None
    shutil.rmtree(fast / "nvme")
    assert restart(fast, expected)[0] >= 8


def test_a_keeper_that_is_stuck_is_given_up_after_the_deadline(
    fast: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    gate.set()

    def schedule(number: int, method: str, key: str) -> Fault | None:
        if method == "put_many":
            gate.wait(20)
        return None

    monkeypatch.setattr("adacheck.start.LmdbBackend", lambda path: Faulty(LmdbBackend(path), schedule))
    caplog.set_level(logging.WARNING, "adacheck")
    process = Process(fast, options={"deadline_s": 5})
    process.ckpt.restore()
    steps(process, 3)
    process.ckpt._generations.blocks.count, process.ckpt._generations.blocks.deadline_s = 2, 0.2
    gate.clear()
    for _ in range(1000):
        process.step(drain=False)
        if process.ckpt.status().failure is not None:
            break
    for _ in range(5):
        process.step(drain=False)
    gate.set()
    assert "did not keep up" in (process.ckpt.status().failure or "")
    assert len([record for record in caplog.records if "did not keep up" in record.getMessage()]) == 1
    process.abandon()


def quiet(ckpt: Checkpointer) -> None:
    """Wait until every step is applied and no full checkpoint is wanted or on its way."""
    ckpt.drain()
    keeper = ckpt._keeper
    assert keeper is not None
    fulls, chain = keeper._full_thread, keeper.shared.chain
    assert keeper.shared.wait(lambda: not keeper.uploading and not fulls.due(chain.memory.least_base, wanted=keeper.shared.full_wanted), 20)


def test_an_nvme_directory_that_is_deleted_is_lost_at_once(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    store = Store.open(f"file://{tmp_path}/run", nvme=str(tmp_path / "nvme"))
    ckpt = store.attach(model, optimizer)
    ckpt.restore()
    for step in range(12):
        model(torch.randn(3, 8)).square().mean().backward()
        optimizer.step()
        ckpt.step()
        if step == 5:
            quiet(ckpt)
            shutil.rmtree(tmp_path / "nvme")
    quiet(ckpt)
    status = ckpt.status()
    assert status.lost_copies == ("nvme",) and status.durable == status.published
    live = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ckpt.close()
    fresh = torch.nn.Linear(8, 8)
    with Store.open(f"file://{tmp_path}/run", nvme=str(tmp_path / "nvme")).attach(fresh, torch.optim.AdamW(fresh.parameters())) as again:
        assert again.restore() == 12
        assert all(torch.equal(tensor, live[name]) for name, tensor in fresh.state_dict().items())


def test_an_object_tier_that_is_deleted_gets_its_identity_back(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Store.open(f"file://{tmp_path}/run", nvme=str(tmp_path / "nvme"), full_every=4).attach(model, optimizer)
    ckpt.restore()
    for step in range(14):
        model(torch.randn(3, 8)).square().mean().backward()
        optimizer.step()
        ckpt.step()
        quiet(ckpt)
        if step == 5:
            shutil.rmtree(tmp_path / "run")
    live = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ckpt.close()
    # a copy for the other host: the first to open the run publishes a full checkpoint of its own, at 14
    shutil.copytree(tmp_path / "run", tmp_path / "run-of-another-host")
    for run, nvme, newest in (("run", "nvme", 14), ("run-of-another-host", "another-host", 12)):
        fresh = torch.nn.Linear(8, 8)
        again = Store.open(f"file://{tmp_path}/{run}", nvme=str(tmp_path / nvme)).attach(fresh, torch.optim.AdamW(fresh.parameters()))
        assert again.restore() == newest
        if newest == 14:
            assert all(torch.equal(tensor, live[name]) for name, tensor in fresh.state_dict().items())
        again.close()


def test_a_log_that_vanishes_during_an_upload_is_not_called_a_failure_of_the_object_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "adacheck")
    process = Process(tmp_path)
    process.ckpt.restore()
    process.step()

    def write_full(*args: Any, **options: Any) -> FullEntry:
        for file in (tmp_path / "nvme").rglob("data.mdb"):
            file.unlink()
        return full_checkpoint.write_full(*args, **options)

    monkeypatch.setattr(full_thread, "write_full", write_full)
    for _ in range(4):
        process.step()
    said = [record.getMessage() for record in caplog.records]
    assert any("staged on NVMe for the full checkpoint at step 4 " in line and "data.mdb was deleted" in line for line in said), said
    assert not [line for line in said if "object tier" in line] and process.ckpt.status().object_failure is None
    process.abandon()
