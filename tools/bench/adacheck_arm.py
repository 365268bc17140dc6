"""The benchmark's arm for this project: a checkpoint at every step through `Store.open`, as a user writes it."""

from __future__ import annotations

import time
from pathlib import Path

from adacheck.checkpointer import Checkpointer
from adacheck.store import Store
from adacheck.tools.bench.arms import Arm
from adacheck.tools.training import TrainingJob

FULL_EVERY = 1_000_000
"""One full checkpoint, at the first step: in a run it comes once in a thousand steps, and its cost is printed apart."""


class AdacheckArm(Arm):
    """Local files as the object tier, the log beside them; warmed up past the steps in which replay is certified."""

    warmup_steps = 9

    def attach(self, job: TrainingJob, directory: Path) -> None:
        self._store = Store.open(f"file://{directory}/store", full_every=FULL_EVERY)
        self._checkpointer: Checkpointer = self._store.attach(job.model, job.optimizer, extra=job.extra)
        self._checkpointer.restore()
        self._written_bytes = 0

    def step_done(self, step: int) -> None:
        begun = time.perf_counter()
        self._checkpointer.step()
        self.hooked_ms = max(0.0, self._checkpointer.status().blocked_ms - (time.perf_counter() - begun) * 1e3)

    def between_steps(self) -> None:
        self._written_bytes += sum(self._checkpointer.status().payload_bytes.values())

    def end_block(self, last: bool) -> dict[str, float]:
        begun = time.perf_counter()
        self._checkpointer.drain()
        apart = {"drain": (time.perf_counter() - begun) * 1e3}
        if last:
            begun = time.perf_counter()
            self._checkpointer.publish_full()
            apart["full checkpoint"] = (time.perf_counter() - begun) * 1e3
        return apart

    def written_bytes(self) -> int:
        return self._written_bytes

    def close(self) -> None:
        self._checkpointer.close()
        self._store.close()
