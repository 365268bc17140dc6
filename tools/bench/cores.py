"""Which cores the threads run on, and how much CPU and memory they used: read from Linux, by role.

Roles: the thread that trains, and everything else in the process. A GPU trainer leaves its host's cores to the rest; pinning the
two roles to a core each stands for that on a machine with two.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TRAINER_CORE, BACKGROUND_CORE = 0, 1


class Placement:
    """While it is entered, keeps the calling thread on one core and all others on another, if `pinned`; otherwise does nothing.

    Threads are born on the core of their parent, so `settle` must be called again after whatever may have started one.
    """

    def __init__(self, pinned: bool) -> None:
        self._allowed = os.sched_getaffinity(0)
        self.pinned = pinned and len(self._allowed) > 1
        allowed = sorted(self._allowed)
        self._trainer, self._background = ({allowed[TRAINER_CORE]}, {allowed[BACKGROUND_CORE]}) if self.pinned else (set[int](), set[int]())

    def settle(self) -> None:
        """Move every thread of the process to the core of its role."""
        if not self.pinned:
            return
        trainer = threading.get_native_id()
        _move_threads(lambda thread: self._trainer if thread == trainer else self._background)

    def __enter__(self) -> Self:
        self.settle()
        return self

    def __exit__(self, *_: object) -> None:
        if self.pinned:
            _move_threads(lambda _: self._allowed)


def _move_threads(cores_of: Callable[[int], set[int]]) -> None:
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ended since it was listed
            os.sched_setaffinity(int(task.name), cores_of(int(task.name)))


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds so far: of the calling thread, and of all other threads of the process, ended ones included."""

    trainer_s: float
    background_s: float

    def since(self, earlier: CpuTimes) -> CpuTimes:
        """What was used after `earlier`."""
        return CpuTimes(self.trainer_s - earlier.trainer_s, self.background_s - earlier.background_s)


def cpu_times() -> CpuTimes:
    """CPU seconds of the calling thread and of the rest."""
    trainer_s = time.thread_time()
    return CpuTimes(trainer_s, time.process_time() - trainer_s)


def named_cpu_times() -> dict[str, float]:
    """CPU seconds of each living Python thread but the calling one, by its name, numbers at its end left out; for long-lived roles."""
    total: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.native_id is None:
            continue
        with suppress(FileNotFoundError):
            spent_ns = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
            name = thread.name.rstrip("0123456789-_ ")
            total[name] = total.get(name, 0.0) + spent_ns / 1e9
    return total


def peak_rss_bytes() -> int:
    """Most memory this process had resident. From `VmHWM`: `ru_maxrss` still holds the parent's after `exec`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
