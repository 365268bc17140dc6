"""The demo's reference: the plain training script, without adacheck's store, that nobody kills. Run by `adacheck-demo` as a process."""

from __future__ import annotations

import sys
import time

from adacheck.tools.demo.task import Task, emit, task_of
from adacheck.tools.demo.witness import job_config, witness
from adacheck.tools.parent_death import die_with_parent
from adacheck.tools.training import TrainingJob


def train(task: Task) -> None:
    """Train to the last step; after each, tell its loss (exactly, in hexadecimal) and the digests of everything."""
    job = TrainingJob(job_config(task))
    for step in range(1, task.steps + 1):
        begun = time.perf_counter()
        loss = job.train_one_step()
        step_ms = (time.perf_counter() - begun) * 1e3
        emit("trained", step=step, loss=loss.hex(), step_ms=step_ms, witness=witness(job))


if __name__ == "__main__":
    die_with_parent()
    train(task_of(sys.argv[1]))
