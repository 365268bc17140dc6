"""What `store.reader()` holds between planning and reading: as of one moment, and never for long when nobody comes to read."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

import adacheck
from adacheck import reader as reader_module
from adacheck.backends.errors import Denied
from adacheck.errors import ForeignRun
from adacheck.hold import Hold
from adacheck.reader import CutReader, _Reach
from adacheck.tools import fsck
from adacheck.tools.exit_codes import CLEAN, OPERATIONAL
from tests.dcp_job import dcp_load
from tests.tiny_run import Process, TinyRun
from tests.tool_run import run_tool

DEADLINE_S = 20
BUSY = {"log_steps": 4, "refresh": 4, "full_every": 10_000}
"""A log that has pruned every step after a few more."""


class Between(DefaultLoadPlanner):
    """Calls back when every rank has planned."""

    def __init__(self, callback: Callable[[], None]) -> None:
        super().__init__()
        self._callback = callback

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self._callback()
        plans: list[LoadPlan] = super().create_global_plan(global_plan)
        return plans


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """A trainer whose log has reached its size."""
    process = Process(tmp_path, options=BUSY, width=60)
    process.ckpt.restore()
    train(process, 40)
    yield process
    process.abandon()


def train(process: Process, steps: int) -> None:
    for _ in range(steps):
        process.step()


def load(reader: CutReader, callback: Callable[[], None]) -> dict[str, Any]:
    model = TinyRun(60).model
    return dcp_load({f"model.{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}, reader, Between(callback))


def weights(process: Process) -> dict[str, torch.Tensor]:
    return {f"model.{name}": value.clone() for name, value in process.run.model.state_dict().items()}


def log_bytes(process: Process) -> int:
    return next((process.root / "nvme").rglob("data.mdb")).stat().st_size


def expire() -> None:
    """Wait until nothing is held by a timer."""
    for thread in threading.enumerate():
        if thread.name == "adacheck-hold":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def fail() -> None:
    raise RuntimeError("the planner fails")


def test_a_load_whose_planning_fails_does_not_let_the_log_grow(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "HOLD_S", 0.01)
    before, reader = log_bytes(process), process.store.reader()
    with pytest.raises(CheckpointException, match="the planner fails"):
        load(reader, fail)
    expire()
    train(process, 60)
    assert log_bytes(process) <= before * 1.25
    assert reader.step == 40, "and the reader is still there"


def test_ranks_that_cannot_agree_let_go_at_once(process: Process) -> None:
    reader = process.store.reader()
    reader.read_metadata()
    plan = reader.prepare_local_plan(LoadPlan([]))
    with pytest.raises(ForeignRun):
        reader.prepare_global_plan([plan, LoadPlan([], storage_data=_Reach("another", 40, frozenset([40]), ()))])
    assert not reader._hold.resume()


def test_a_cut_that_is_pruned_after_the_planning_is_loaded(process: Process) -> None:
    wanted, reader = weights(process), process.store.reader()
    found = load(reader, lambda: train(process, 30))
    assert 40 not in {point.step for point in process.store.steps()}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not reader._hold.resume(), "and nothing is held any more"


def test_when_planning_takes_too_long_the_cut_is_looked_for_again(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "HOLD_S", 0.01)
    wanted, reader = weights(process), process.store.reader()
    found = load(reader, expire)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted), "it is still there"

    def go_on() -> None:
        expire()
        train(process, 30)

    with pytest.raises(CheckpointException, match=r"planning took longer than 0\.01 s, and the cut .* step 40 .*; load again"):
        load(reader, go_on)


def test_a_step_of_another_start_is_not_taken_for_the_one_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "HOLD_S", 0.01)
    process = Process(tmp_path, options=BUSY, width=60)
    process.ckpt.restore()
    train(process, 3)
    reader = process.store.reader()
    started: list[Process] = []

    def start_again() -> None:
        expire()
        process.abandon()
        started.append(Process(tmp_path, options=BUSY, width=60))
        started[0].ckpt.restore()

    with pytest.raises(CheckpointException, match="restarted after step 3 was planned for"):
        load(reader, start_again)
    started[0].abandon()


def test_what_is_lent_is_left_by_the_timer_or_taken_back_never_both() -> None:
    events: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[str]:
        events.append(f"+{name}")
        yield name
        events.append(f"-{name}")

    hold = Hold()
    assert hold.enter(noted("a")) == "a" and hold.enter(noted("b")) == "b"
    assert events == ["+a", "-a", "+b"]
    hold.lend(DEADLINE_S)
    assert hold.resume() and not hold.resume() and events[-1] == "+b", "taken back, and held"
    hold.lend(0.001)
    expire()
    assert not hold.resume() and events[-1] == "-b"
    hold.enter(noted("c"))
    hold.lend(DEADLINE_S)
    hold.leave()
    assert not hold.resume() and events[3:] == ["-b", "+c", "-c"]
    expire()  # the timer that was called off ends


@contextmanager
def without_rights(root: Path, closed: Path | None = None) -> Iterator[None]:
    """As a user who may read everything under `root`, and write nothing; into `closed` he may not look."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if closed is not None:
        closed.chmod(0o700)
    if os.geteuid() != 0:
        yield
    else:
        os.setresuid(65534, 65534, 0)
        try:
            yield
        finally:
            os.setresuid(0, 0, 0)
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_who_may_not_write_can_read(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory() as folder:  # that of pytest is closed to other users
        root = Path(folder)
        process = Process(root, nvme=str(root / "objects" / "nvme"))
        process.ckpt.restore()
        train(process, 1)
        process.ckpt.publish_full()
        process.abandon()
        process.store.close()
        with without_rights(root), adacheck.Store.open(f"file://{root}/objects") as store:
            assert [(point.step, point.tiers) for point in store.steps()] == [(1, ("object",))]
            run = TinyRun()
            state = {f"model.{name}": torch.zeros_like(value) for name, value in run.model.state_dict().items()}
            dcp_load(state, store.reader())
            assert all(torch.equal(state[f"model.{name}"], value) for name, value in process.run.model.state_dict().items())
            assert "not looked at: the NVMe copy" in caplog.text and "must be able to write its lock.mdb" in caplog.text
            with pytest.raises(Denied, match="objects is not writable"):
                store.attach(run.model, run.optimizer)
            said = run_tool(fsck.main, f"file://{root}/objects")
            assert said.code == OPERATIONAL and "the NVMe copy was not checked, all else was: " in said.err
            assert "must be able to write its lock.mdb" in said.err and "with nvme=none to check the object tier alone" in said.err
            assert run_tool(fsck.main, f"file://{root}/objects?nvme=none").code == CLEAN


def test_an_nvme_directory_of_another_user_hides_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        process = Process(root)
        process.ckpt.restore()
        train(process, 1)
        process.ckpt.publish_full()
        process.abandon()
        process.store.close()
        with without_rights(root, closed=root / "nvme"), adacheck.Store.open(f"file://{root}/objects?nvme={root}/nvme") as store:
            assert [(point.step, point.tiers) for point in store.steps()] == [(1, ("object",))]
            assert "not listed: the NVMe copy" in caplog.text
            assert store.reader().step == 1
            said = run_tool(fsck.main, f"file://{root}/objects?nvme={root}/nvme")
            assert said.code == OPERATIONAL and "the NVMe copy was not checked, all else was: " in said.err
