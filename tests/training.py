"""Small training jobs for the tests of a whole checkpointer: what they are made of, every bit they hold, and how they die.

`bits` looks at a job with torch alone, not through the code that is tested: what it does not see, a restore could lose.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import adacheck
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.capture import opaque
from adacheck.capture.rng import rng_state
from adacheck.checkpointer import Checkpointer
from adacheck.deadline import Deadline
from adacheck.errors import Detached
from adacheck.keeper.scan import Scan, scan
from adacheck.manifests.record import Increment
from adacheck.preemption import forget


@dataclass
class Job:
    """A training job: `iterate(job, n)` is iteration n without its `ckpt.step()`. Its data come from torch's generator."""

    model: torch.nn.Module
    optimizers: dict[str, Optimizer]
    iterate: Callable[[Job, int], None]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def optimizer(self) -> Optimizer:
        """The only one."""
        (optimizer,) = self.optimizers.values()
        return optimizer

    def attach(self, store: adacheck.Store) -> Checkpointer:
        """Hook the job up; the one optimizer of most jobs is given as it is."""
        optimizers = self.optimizer if list(self.optimizers) == ["optim"] else self.optimizers
        return store.attach(self.model, optimizers, self.extra)

    def train(self, ckpt: Checkpointer | None, first: int, last: int, *, settle: bool = False) -> None:
        """Do the iterations after `first` up to `last`; `settle` lets the keeper finish each before the next one."""
        for n in range(first + 1, last + 1):
            self.iterate(self, n)
            if ckpt is not None:
                ckpt.step()
                if settle:
                    ckpt.drain()

    def bits(self) -> dict[str, str]:
        """Everything the job holds, by name: digests of tensors with dtype and shape, hyperparameters, `extra`, generators."""
        found: dict[str, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            found[f"{name} (requires_grad={parameter.requires_grad})"] = _digest(parameter)
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            found[name] = _digest(buffer)
        for title, optimizer in self.optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                plain = {key: value for key, value in group.items() if key != "params"}
                found[f"{title}[{g}]"] = _encoded(plain)
                for p, parameter in enumerate(group["params"]):
                    found[f"{title}[{g}][{p}]"] = _digest(parameter)  # it need not be the model's
                    for key, entry in optimizer.state.get(parameter, {}).items():
                        found[f"{title}[{g}][{p}].{key}"] = _digest(entry) if isinstance(entry, torch.Tensor) else _encoded(entry)
            own = {key: entry for key, entry in optimizer.state.items() if not isinstance(key, torch.Tensor)}
            found[f"{title}.own"] = _encoded(own)
        found.update({f"extra.{name}": _encoded(item.state_dict()) for name, item in self.extra.items()})
        found["rng"] = _encoded(rng_state())
        return found


def _digest(tensor: torch.Tensor) -> str:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.numel() == 1:
        plain = plain.as_strided((1,), (1,))  # torch keeps the stride of a slice, and views nothing as bytes then
    content = plain.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.blake2s(content).hexdigest()}"


def _encoded(value: Any) -> str:
    return hashlib.blake2s(opaque.encode("test", value)).hexdigest()


@contextmanager
def opened(uri: str, job: Job, **options: Any) -> Iterator[Checkpointer]:
    """The job's checkpointer on this store; killed at the end, unless it was closed."""
    with adacheck.Store.open(uri, **options) as store:
        ckpt = job.attach(store)
        try:
            yield ckpt
        finally:
            kill(ckpt)


def kill(ckpt: Checkpointer) -> None:
    """End a checkpointer as the death of its process would: nothing is waited for or written, locks and files are free.

    Increments that were on their way to the log may or may not arrive, as with a kill a moment later or earlier.
    """
    if ckpt._closed:
        return
    ckpt._closed = True
    atexit.unregister(ckpt._at_exit)
    forget(ckpt._on_sigterm)
    ckpt._capture.remove()
    if ckpt._keeper is not None:
        ckpt._keeper.shared.fail(Detached("killed by a test"))
    ckpt._release(Deadline.after(ckpt._config.deadline_s))


def restored_bits(uri: str, make: Callable[[int], Job], step: int, **options: Any) -> dict[str, str]:
    """What a fresh job, made with another seed, holds after restoring; the cut must be `step`."""
    torch.manual_seed(4711)
    job = make(99)
    with opened(uri, job, **options) as ckpt:
        assert ckpt.restore() == step
        return job.bits()


def nvme_folder(root: Path) -> Path:
    """The directory of the only chain under `root/nvme`."""
    (folder,) = (path.parent for path in (root / "nvme").rglob("data.mdb"))
    return folder


def logged(root: Path) -> Scan:
    """What the NVMe log of a `file://root` store holds, as a restore would read it; also beside a live trainer in this process."""
    folder = nvme_folder(root)
    backend = LmdbBackend(folder, create=False, read_only=True)
    try:
        found = scan(backend, folder.parent.name)
    finally:
        backend.close()
    assert found is not None and not found.rejected
    return found


def payloads(increment: Increment) -> dict[int, str]:
    """How each state of an increment travelled: `gradient`, `value: reason`, or `derived` where nothing of it did."""
    found = {gradient.state: "gradient" for gradient in increment.gradients}
    found.update({derived.state: "derived" for derived in increment.derived})
    found.update({value.spec.state: f"value: {value.reason}" for value in increment.values})
    return found


def names(found: Scan) -> Mapping[int, str]:
    """First names of all states that are in the log, by number."""
    specs = [base.spec for base in found.bases.values()]
    specs += [value.spec for increment in found.increments.values() for value in increment.values]
    return {spec.state: spec.fqn for spec in specs}
