"""The demo's child processes: started, listened to with a deadline, killed when asked, and never left behind."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from adacheck.tools.demo.task import Task

SILENCE_S = 120.0
"""Longest a training process may say nothing before it counts as hung."""

UNINTERRUPTED, CHECKPOINTED = "adacheck.tools.demo.uninterrupted", "adacheck.tools.demo.checkpointed"
"""The two training scripts."""

Event = dict[str, Any]


class DemoError(RuntimeError):
    """The demo cannot go on: a process failed or hung, or something it needs is missing."""


class Training:
    """A training process; its events are also kept in `NAME.jsonl` in `folder`, its messages in `NAME.log`.

    Args:
        script: module to run.
        environment: variables besides this process's own; torch gets one thread, which leaves a core to the checkpoints.
    """

    def __init__(self, name: str, script: str, task: Task, folder: Path, environment: Mapping[str, str]) -> None:
        self._name = name
        self._log = folder / f"{name}.log"
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        command = [sys.executable, "-m", script, task.to_json()]
        with self._log.open("wb") as log:
            settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=settings)
        self._listener = threading.Thread(target=self._listen, args=(folder / f"{name}.jsonl",), name=f"demo-{name}", daemon=True)
        self._listener.start()
        self.killed = False

    def events(self) -> Iterator[Event]:
        """What the process tells, until it has ended; after `kill`, what it had told before.

        Raises:
            DemoError: it ended by itself with an error, or told nothing for too long.
        """
        while (line := self._next_line()) is not None:
            yield json.loads(line)
        if self._process.wait(SILENCE_S) != 0 and not self.killed:
            self._fail(f"ended with exit status {self._process.returncode}")

    @property
    def returncode(self) -> int | None:
        """As `subprocess.Popen` has it: `None` while it runs."""
        return self._process.returncode

    def kill(self) -> None:
        """SIGKILL: the process gets no chance to tidy up."""
        self.killed = True
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        self._listener.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _listen(self, transcript: Path) -> None:
        assert self._process.stdout is not None
        with transcript.open("w") as kept:
            for line in self._process.stdout:
                kept.write(line)
                if line.endswith("\n"):  # the kill may have cut the last one short
                    self._lines.put(line)
        self._lines.put(None)

    def _next_line(self) -> str | None:
        try:
            return self._lines.get(timeout=SILENCE_S)
        except queue.Empty:
            self._fail(f"said nothing for {SILENCE_S:.0f} s")

    def _fail(self, what: str) -> NoReturn:
        said = self._log.read_text(errors="replace")[-3000:]
        raise DemoError(f"the training process {self._name!r} {what}; its last messages:\n{said}")


def run_fsck(uri: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """`adacheck-fsck URI --read-data` as a user would run it: its exit status, and what it printed.

    Raises:
        DemoError: it did not end.
    """
    command = [sys.executable, "-m", "adacheck.tools.fsck", uri, "--read-data"]
    settings = {**os.environ, "COLUMNS": "200", **environment}
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=settings, timeout=SILENCE_S)
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"{' '.join(command)} did not end within {SILENCE_S:.0f} s") from error
    return done.returncode, done.stdout + done.stderr
