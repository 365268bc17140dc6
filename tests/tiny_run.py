"""A training job of four states that takes a millisecond a step, and its own idea of what "the same bytes" means.

Its random numbers and its scheduler are part of it, so a restore that loses any of them trains on with other bits. Snapshots are
taken without the library under test: what they say is not what the library believes.
"""

from __future__ import annotations

import atexit
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adacheck.backends.base import Backend
from adacheck.backends.object_store import ObjectStore
from adacheck.checkpointer import Checkpointer
from adacheck.config import parse
from adacheck.deadline import Deadline
from adacheck.preemption import forget
from adacheck.store import Store

Snapshot = Mapping[str, bytes]
OPTIONS = {"full_every": 4, "log_steps": 4, "refresh": 5, "deadline_s": 20}


class TinyRun:
    """Model, optimizer, scheduler and data; all of it drawn from the global generators."""

    def __init__(self, width: int = 5) -> None:
        torch.manual_seed(11)
        random.seed(12)
        np.random.seed(13)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.9)

    @property
    def extra(self) -> dict[str, Any]:
        """What goes beside model and optimizer."""
        return {"scheduler": self.scheduler}

    def train_one_step(self) -> None:
        """One iteration, without the checkpoint."""
        scale = random.random() + np.random.rand()
        self.optimizer.zero_grad()
        loss = (self.model(torch.randn(8, 6) * scale) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def snapshot(self) -> Snapshot:
        """Every byte that training depends on, by name."""
        found = {f"model.{name}": _bytes(tensor) for name, tensor in self.model.state_dict().items()}
        for at, entries in self.optimizer.state_dict()["state"].items():
            found.update({f"optimizer.{at}.{name}": _bytes(value) for name, value in entries.items()})
        found["groups"] = repr(self.optimizer.state_dict()["param_groups"]).encode()
        found["scheduler"] = repr(sorted(self.scheduler.state_dict().items())).encode()
        found["torch"] = _bytes(torch.get_rng_state())
        found["python"] = repr(random.getstate()).encode()
        found["numpy"] = repr([np.asarray(part).tolist() for part in np.random.get_state()]).encode()
        return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def reference(steps: int, width: int = 5) -> list[Snapshot]:
    """Snapshots of an uninterrupted run without checkpoints: one before the first step, and one after each."""
    run = TinyRun(width)
    snapshots = [run.snapshot()]
    for _ in range(steps):
        run.train_one_step()
        snapshots.append(run.snapshot())
    return snapshots


def differing(a: Snapshot, b: Snapshot) -> list[str]:
    """Names whose bytes differ."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


@dataclass
class Process:
    """One start of the tiny job in this process, which can be abandoned as if it had been killed.

    Attributes:
        root: the directory of the run; the object tier is `root/objects`, NVMe `root/nvme` unless `nvme` says otherwise.
        objects: object tier to use instead of plain files.
        options: those of the store that differ from `OPTIONS`.
        durable: the highest durable step it has seen, which is what its log would have printed.
    """

    root: Path
    objects: Backend | None = None
    nvme: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    width: int = 5
    durable: int = -1
    run: TinyRun = field(init=False)
    ckpt: Checkpointer = field(init=False)
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.run = TinyRun(self.width)
        options = {**OPTIONS, "nvme": self.nvme or str(self.root / "nvme"), **self.options}
        address = f"file://{self.root}/objects"
        if self.objects is None:
            self.store = Store.open(address, **options)
        else:
            self.store = Store(parse(address, options), self.objects)
        self.ckpt = self.store.attach(self.run.model, self.run.optimizer, self.run.extra)

    def step(self, *, drain: bool = True) -> None:
        """Train and checkpoint one iteration; with `drain`, see it applied and nothing on its way."""
        self.run.train_one_step()
        self.ckpt.step()
        if drain:
            self.settle()
        self.durable = max(self.durable, self.ckpt.status().durable)

    def settle(self) -> None:
        """Wait until the keeper has nothing to do any more."""
        self.ckpt.drain()
        keeper = self.ckpt._keeper
        assert keeper is not None
        fulls, chain = keeper._full_thread, keeper.shared.chain
        assert keeper.shared.wait(lambda: not keeper.uploading and not fulls.due(chain.memory.least_base, wanted=False), 20)

    def abandon(self) -> None:
        """End it without any of the good deeds of `close()`: threads stop where they are, nothing more is made durable."""
        atexit.unregister(self.ckpt._at_exit)
        forget(self.ckpt._on_sigterm)
        self.ckpt._closed = True
        self.ckpt._capture.remove()
        self.ckpt._release(Deadline.after(20))


def plain_objects(root: Path) -> Backend:
    """The object tier of a `Process` without anything around it."""
    return ObjectStore(f"file://{root}/objects")
