"""However a script ends, short of a kill, its last finished step is durable; and a second process is kept out meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adacheck.errors import StoreBusy
from tests.scenarios.ending_trainer import STEPS
from tests.tidy import ROOT
from tests.tiny_run import Process, differing, reference

DEADLINE_S = 60


@contextmanager
def started(root: Path, way: str) -> Iterator[subprocess.Popen[str]]:
    """A script under way; ended and reaped whatever happens."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.scenarios.ending_trainer", str(root), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def check(root: Path, step: int) -> None:
    process = Process(root)
    assert process.ckpt.restore() == step
    assert not differing(process.run.snapshot(), reference(step)[step])
    process.ckpt.close()


@pytest.mark.parametrize(("way", "code", "says"), [("run_off_the_end", 0, ""), ("raise_an_error", 1, "the script's own fault")])
def test_the_last_step_is_durable_when_the_interpreter_ends(tmp_path: Path, way: str, code: int, says: str) -> None:
    with started(tmp_path, way) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code and says in errors, errors
    check(tmp_path, STEPS)


@pytest.mark.parametrize(("way", "code"), [("wait_for_sigterm", -signal.SIGTERM), ("exit_in_a_handler", 3)])
def test_the_last_step_is_durable_after_sigterm(tmp_path: Path, way: str, code: int) -> None:
    with started(tmp_path, way) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["ready", str(process.pid)]
        second = Process(tmp_path)
        with pytest.raises(StoreBusy, match=f"process {process.pid}"):
            second.ckpt.restore()
        assert 1 <= second.store.steps()[-1].step <= STEPS, "looking is allowed"
        second.ckpt.close()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, errors
    check(tmp_path, STEPS)


def test_forks_in_mid_run_disturb_neither_keeper_nor_log(tmp_path: Path) -> None:
    with started(tmp_path, "fork_in_mid_run") as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    restarted = Process(tmp_path)
    assert restarted.ckpt.restore() == STEPS + 3
    restarted.ckpt.close()
