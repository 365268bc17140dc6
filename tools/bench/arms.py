"""The ways to checkpoint that the benchmark compares, behind one small interface: what is done at a step, and how long that blocks.

Every arm takes a checkpoint at every step. What an arm does inside the training step itself (in hooks) it must time and report; what it
does in `step_done` the driver times.
"""

from __future__ import annotations

import shutil
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from adacheck.tools.training import TrainingJob


class Arm:
    """One way to checkpoint a job; this one takes none, and is what the others are compared with.

    Calls come in this order, all from one thread: `attach`, then steps and ends of blocks, then `close`.

    Attributes:
        warmup_steps: steps before it does what it goes on doing; they are not counted.
        hooked_ms: what it took inside the job's last step, by its own clock; 0 for arms without hooks.
    """

    warmup_steps: int = 2
    hooked_ms: float = 0.0

    def attach(self, job: TrainingJob, directory: Path) -> None:
        """Get ready to checkpoint `job` under `directory`, which is empty. Called once, before the first step."""

    def step_done(self, step: int) -> None:
        """Take the checkpoint after step number `step`; the trainer is blocked until it returns."""

    def between_steps(self) -> None:
        """Untimed, after each step: what a run would not do there, such as deleting what the disk has no room for."""

    def end_block(self, last: bool) -> dict[str, float]:
        """Bring background work to an end, so that the next block of the other arm is not disturbed.

        Returns what belongs to no single step, each in ms under its name (`drain`). `last`: there is no further block.
        """
        return {}

    def written_bytes(self) -> int:
        """All bytes written so far, warm-up included; called after an `end_block`, the driver takes differences."""
        return 0

    def close(self) -> None:
        """Release everything."""


class WholeState(Arm):
    """What the arms that write the whole state at each step share: the state, a folder a step, and that only the newest two stay."""

    def attach(self, job: TrainingJob, directory: Path) -> None:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as `no_dist=True` asks for
        self.job, self.directory = job, directory
        self._written_bytes = 0

    def state(self) -> dict[str, Any]:
        """Everything that a restart needs, by reference: the cheapest form that PyTorch offers, without renaming."""
        extra = {name: item.state_dict() for name, item in self.job.extra.items()}
        rng = {"torch": torch.get_rng_state()}
        return {"model": self.job.model.state_dict(), "optimizer": self.job.optimizer.state_dict(), "extra": extra, "rng": rng}

    def place(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.directory / f"step-{step:06d}"

    def end_block(self, last: bool) -> dict[str, float]:
        start = time.perf_counter()
        self.wait()
        drained_ms = (time.perf_counter() - start) * 1e3
        self._weigh_and_delete(keep=0)
        return {"drain": drained_ms}

    def between_steps(self) -> None:
        self._weigh_and_delete(keep=2)

    def wait(self) -> None:
        """Until nothing is being written any more."""

    def written_bytes(self) -> int:
        return self._written_bytes

    def _weigh_and_delete(self, keep: int) -> None:
        folders = sorted(self.directory.glob("step-*"))
        for folder in folders[: len(folders) - keep]:
            self._written_bytes += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder)


class TorchSave(WholeState):
    """`torch.save` to a file; it does not sync, so a power cut may lose it."""

    def step_done(self, step: int) -> None:
        self.place(step).mkdir()
        torch.save(self.state(), self.place(step) / "checkpoint.pt")


class DcpSave(WholeState):
    """`torch.distributed.checkpoint.save`; its writer syncs files."""

    def step_done(self, step: int) -> None:
        save(self.state(), checkpoint_id=self.place(step), no_dist=True)


class DcpAsyncSave(WholeState):
    """`async_save`: blocked until the previous one is written, and until this one is staged.

    Args:
        options: of a stager that is kept from step to step; `None` leaves everything at its default.
    """

    def __init__(self, options: StagingOptions | None = None) -> None:
        self._stager = None if options is None else DefaultStager(options)
        self._written: Future[Any] | None = None
        self._staged: Future[None] | None = None

    def attach(self, job: TrainingJob, directory: Path) -> None:
        super().attach(job, directory)
        job.optimizer.register_step_pre_hook(self._wait_until_staged)

    def step_done(self, step: int) -> None:
        self.wait()
        saving = async_save(self.state(), checkpoint_id=self.place(step), no_dist=True, async_stager=self._stager)
        if isinstance(saving, AsyncSaveResponse):
            self._staged, self._written = saving.staging_completion, saving.upload_completion
        else:
            self._written = saving

    def wait(self) -> None:
        if self._written is not None:
            self._written.result()

    def close(self) -> None:
        self.wait()
        if self._stager is not None:
            self._stager.close()

    def _wait_until_staged(self, *_: object) -> None:
        """The optimizer may not write into what is still being copied."""
        start = time.perf_counter()
        if self._staged is not None:
            self._staged.result()
        self.hooked_ms = (time.perf_counter() - start) * 1e3
