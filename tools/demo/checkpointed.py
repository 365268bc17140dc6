"""The same training script with adacheck in it: a checkpoint at every step, and a restore at its start. Run by `adacheck-demo`."""

from __future__ import annotations

import sys
import time
from typing import Any

import adacheck
from adacheck.tools.demo.task import Task, emit, task_of
from adacheck.tools.demo.witness import job_config, parameter_count, state_bytes, witness
from adacheck.tools.parent_death import die_with_parent
from adacheck.tools.training import TrainingJob


def train(task: Task) -> None:
    """Restore, train to the last step with a checkpoint at each, and tell the parent about everything."""
    job = TrainingJob(job_config(task))
    store = adacheck.Store.open(task.uri, **task.options)
    ckpt = store.attach(job.model, job.optimizer, extra=job.extra)
    begun = time.perf_counter()
    start = ckpt.restore()
    emit("restored", step=start, restore_s=time.perf_counter() - begun, **_restored(ckpt, job))
    for step in range(start + 1, task.steps + 1):
        begun = time.perf_counter()
        loss = job.train_one_step()
        trained = time.perf_counter()
        emit("trained", step=step, loss=loss.hex())  # before the checkpoint: if the kill comes in between, the loss is known
        checkpointing = time.perf_counter()
        ckpt.step()
        step_ms = (time.perf_counter() - checkpointing + trained - begun) * 1e3
        emit("checkpointed", step=step, step_ms=step_ms, **_status(ckpt.status()))
        while step == task.wait_after:
            time.sleep(1)
    ckpt.close()
    emit("finished", step=task.steps, witness=witness(job), state_bytes=state_bytes(job), parameters=parameter_count(job))
    store.close()


def _restored(ckpt: adacheck.Checkpointer, job: TrainingJob) -> dict[str, Any]:
    cut = ckpt.restored
    if cut is None:
        return {"tier": "", "source": "", "replayed": []}
    return {"tier": str(cut.kind), "source": cut.source, "replayed": sorted(cut.replayed.values()), "witness": witness(job)}


def _status(status: adacheck.status.Status) -> dict[str, Any]:
    return {
        "committed": status.committed,
        "durable": status.durable,
        "published": status.published,
        "blocked_ms": status.blocked_ms,
        "payload_bytes": dict(status.payload_bytes),
        "failure": status.failure,
    }


if __name__ == "__main__":
    die_with_parent()
    train(task_of(sys.argv[1]))
