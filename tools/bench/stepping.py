"""Takes one timed step of a job under an arm: the unit that both drivers, alone and in pairs, are built of."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from adacheck.tools.bench.arms import Arm
from adacheck.tools.bench.cores import Placement
from adacheck.tools.training import JobConfig, TrainingJob


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its time, the part of it in which the trainer did nothing but checkpoint, and the CPU time of its thread."""

    total_ms: float
    blocked_ms: float
    training_cpu_s: float
    checkpoint_cpu_s: float


class Instance:
    """A job with its arm, and the steps it has taken."""

    def __init__(self, config: JobConfig, arm: Arm, directory: Path, placement: Placement) -> None:
        self.job, self.arm, self._placement = TrainingJob(config), arm, placement
        self._step = 0
        directory.mkdir(parents=True)
        arm.attach(self.job, directory)
        placement.settle()

    def take_step(self) -> Step:
        """One step of training and its checkpoint, timed; then, untimed, what keeps the machine fit for the next one."""
        self._step += 1
        start, start_cpu = time.perf_counter(), time.thread_time()
        self.job.train_one_step()
        trained, trained_cpu = time.perf_counter(), time.thread_time()
        self.arm.step_done(self._step)
        end, end_cpu = time.perf_counter(), time.thread_time()
        self._placement.settle()
        self.arm.between_steps()
        blocked_ms = (end - trained) * 1e3 + self.arm.hooked_ms
        return Step((end - start) * 1e3, blocked_ms, trained_cpu - start_cpu, end_cpu - trained_cpu)

    def take_steps(self, count: int) -> list[Step]:
        """`count` steps, each timed alone."""
        return [self.take_step() for _ in range(count)]

    def end_block(self, last: bool = False) -> dict[str, float]:
        """See `Arm.end_block`."""
        apart = self.arm.end_block(last)
        self._placement.settle()
        return apart
