"""Twenty real kills of a training process, each followed by a restart: nothing that was printed as durable is ever lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.scenarios.kill_trainer import digest
from tests.tidy import ROOT
from tests.tiny_run import TinyRun

KILLS, STEPS_AFTER = 20, 10
DEADLINE_S = 180.0


@dataclass
class Started:
    """What one trainer printed before it ended; `exit` is its exit code, `-9` after a kill."""

    pid: int = 0
    restored: tuple[int, str] | None = None
    steps: list[tuple[int, int, str]] = field(default_factory=list)
    closed: bool = False
    exit: int = 0


class Expected:
    """Digests of an uninterrupted run, computed as far as they are asked for."""

    def __init__(self) -> None:
        self._run = TinyRun()
        self._digests = [digest(self._run.snapshot())]

    def __getitem__(self, step: int) -> str:
        while len(self._digests) <= step:
            self._run.train_one_step()
            self._digests.append(digest(self._run.snapshot()))
        return self._digests[step]


@contextmanager
def trainers(root: Path) -> Iterator[subprocess.Popen[str]]:
    """The process that forks trainers; ended and reaped whatever happens, a trainer that still runs with it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.scenarios.kill_trainer", str(root)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT, start_new_session=True
    )
    watchdog = threading.Timer(DEADLINE_S, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        with process:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def start_one(process: subprocess.Popen[str], steps: int, kill_at_line: int | None = None, delay_s: float = 0.0) -> Started:
    """Start a trainer that trains to step `steps`; kill it so long after its `kill_at_line`-th line."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"go {steps}\n")
    process.stdin.flush()
    found = Started()
    for number, line in enumerate(process.stdout, start=1):
        word, *rest = line.split()
        if word == "pid":
            found.pid = int(rest[0])
        elif word == "restored":
            found.restored = (int(rest[0]), rest[1])
        elif word == "step":
            found.steps.append((int(rest[0]), int(rest[1]), rest[2]))
        elif word == "closed":
            found.closed = True
        elif word == "exit":
            found.exit = int(rest[0])
            return found
        if number == kill_at_line:
            time.sleep(delay_s)
            os.kill(found.pid, signal.SIGKILL)
    raise AssertionError("the process that forks trainers has died")


@pytest.mark.timeout(200)
def test_twenty_kills_lose_nothing_that_was_durable(tmp_path: Path) -> None:
    chance, expected = random.Random(20), Expected()
    durable, restored = -1, set[int]()
    with trainers(tmp_path) as process:
        for kill in range(KILLS + 1):
            if kill < KILLS:
                # Lines 1 and 2 come before and after the restore; within a restore a kill is as good as between two steps.
                line = chance.choice([1, 2, *range(3, 18)])
                found = start_one(process, 1_000_000, line, chance.random() * 0.05)
                assert found.exit == -signal.SIGKILL
            else:
                found = start_one(process, max(durable, 0) + STEPS_AFTER)
                assert found.closed and found.exit == 0
            if found.restored is not None:
                step, bytes_found = found.restored
                assert step >= durable, f"after kill {kill}: step {durable} was durable, step {step} was restored"
                assert bytes_found == expected[step], f"after kill {kill}: step {step} was restored with other bytes"
                restored.add(step)
            for step, promised, bytes_found in found.steps:
                assert bytes_found == expected[step], f"after kill {kill}: step {step} was trained to other bytes"
                durable = max(durable, promised)
    assert len(restored) > KILLS // 2
    assert found.steps, "the last trainer had steps to train"
