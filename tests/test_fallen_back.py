"""A start elsewhere than the last one says whose log may have newer steps; every other start says nothing."""

from __future__ import annotations

import logging
import platform
import shutil
from pathlib import Path

import pytest

from adacheck import incarnations
from adacheck.backends.errors import Busy
from adacheck.keeper.nvme import NvmeCopy
from tests.tiny_run import Process

A, B, NONE = "host-a", "host-b", "none"


def begun(root: Path, log: str, caplog: pytest.LogCaptureFixture, steps: int = 0) -> tuple[int, list[str]]:
    """A start with a log in that folder, killed after so many steps: the step it restored, and its warnings."""
    caplog.set_level(logging.WARNING, "adacheck")
    caplog.clear()
    process = Process(root, nvme=NONE if log == NONE else str(root / log))
    try:
        step = process.ckpt.restore()
        said = [record.getMessage() for record in caplog.records]
        for _ in range(steps):
            process.step()
        return step, said
    finally:
        process.abandon()


def names(said: list[str], root: Path, number: int, log: str, after: int) -> bool:
    """Whether the one warning says which start trained on after which step, and where its log is."""
    (line,) = said
    here = f"incarnation {number} (started " in line and f"on {platform.node()}, pid " in line
    return here and f"trained on after step {after} with its log in {root}/{log} there" in line


def test_the_log_of_the_host_that_trained_last_is_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert begun(tmp_path, A, caplog, 6) == (0, [])
    step, said = begun(tmp_path, B, caplog, 7)
    assert (
        step == 4
        and names(said, tmp_path, 1, A, 0)
        and said[0].startswith(f"nothing on NVMe at {tmp_path}/{B}: restored step 4 from full/")
    )
    step, said = begun(tmp_path, A, caplog, 3)
    assert step == 8 and names(said, tmp_path, 2, B, 4) and said[0].startswith("restored step 8 from full/")
    assert begun(tmp_path, A, caplog) == (11, []), "it has said so, and is the one that trained last"
    step, said = begun(tmp_path, B, caplog)
    assert step == 8 and names(said, tmp_path, 4, A, 11), "also where the older cut is one of its own log"


def test_a_log_is_missed_by_a_start_without_one_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path, A, caplog, 6)
    step, said = begun(tmp_path, NONE, caplog, 5)
    assert step == 4 and names(said, tmp_path, 1, A, 0)
    assert begun(tmp_path, NONE, caplog, 1) == (8, [])
    assert begun(tmp_path, A, caplog, 1) == (8, []), "the start before had no log, so none can have more"
    assert begun(tmp_path, B, caplog)[1] != []


def test_a_log_that_was_deleted_is_missed_and_not_sought_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path, A, caplog, 6)
    shutil.rmtree(tmp_path / A)
    step, (line,) = begun(tmp_path, A, caplog, 1)
    assert step == 4 and line.startswith(
        f"nothing on NVMe at {tmp_path}/{A} (it was deleted, or the disk is another one): restored step 4 "
    )
    assert begun(tmp_path, A, caplog) == (5, [])


def test_a_start_that_failed_before_it_trained_is_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path, A, caplog, 6)
    with monkeypatch.context() as patch, pytest.raises(Busy):
        patch.setattr(incarnations, "write_fork", broken)
        begun(tmp_path, B, caplog)
    assert begun(tmp_path, A, caplog, 1) == (6, [])
    with monkeypatch.context() as patch, pytest.raises(Busy):
        patch.setattr(NvmeCopy, "truncate", broken)  # after its fork record
        begun(tmp_path, A, caplog)
    assert begun(tmp_path, A, caplog) == (7, [])


def broken(*_: object) -> None:
    raise Busy("it is over")
