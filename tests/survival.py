"""The proof that every test of capture asks for: killed, restored and continued, a job has the bits of the run without adacheck."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck.keeper.scan import Scan
from tests.training import Job, logged, names, opened, payloads

Make = Callable[[int], Job]
LAST, MORE = 14, 5
OPTIONS: dict[str, Any] = {"refresh": 5, "log_steps": 4}


def survives(
    root: Path, make: Make, caplog: pytest.LogCaptureFixture, *, again: Make | None = None, replayed: bool = True, last: int = LAST
) -> Scan:
    """Train, kill, restore into a job of another seed, go on: all of it as the run without adacheck. Gives the log as killed.

    `again` makes the job that is restored into, where the script then starts otherwise than it did at first. `replayed` says that no
    replay may give other bits than the trainer has. It is killed after step `last`.
    """
    reference, expected = make(1), {}
    for begin, end in ((0, last), (last, last + MORE)):
        reference.train(None, begin, end)
        expected[end] = reference.bits()
    uri = f"file://{root}"
    job = make(1)
    with opened(uri, job, **OPTIONS) as ckpt:
        assert ckpt.restore() == 0
        job.train(ckpt, 0, last, settle=True)
        assert job.bits() == expected[last]
        assert all(ckpt.inexact(step) == () for step in range(last + 1))
    found = logged(root)
    job = (again or make)(99)
    with opened(uri, job, **OPTIONS) as ckpt:
        assert ckpt.restore() == last
        assert job.bits() == expected[last]
        job.train(ckpt, last, last + MORE, settle=True)
        assert job.bits() == expected[last + MORE]
        assert all(ckpt.inexact(step) == () for step in range(last, last + MORE + 1))
    messages = [record.message for record in caplog.records]
    assert not [message for message in messages if "drift" in message or (replayed and "did not give" in message)]
    return found


def travelled(found: Scan, name: str) -> list[str]:
    """How a state travelled at each step that is still in the log, oldest first; `-` where it did not."""
    number = next(number for number, known in names(found).items() if known == name)
    return [payloads(increment).get(number, "-") for _, increment in sorted(found.increments.items())]


def mlp(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3))


def backward(model: torch.nn.Module, size: tuple[int, ...] = (5, 12)) -> None:
    torch.autograd.backward(model(torch.randn(size)).square().mean())


def plain(job: Job, n: int) -> None:
    for optimizer in job.optimizers.values():
        optimizer.zero_grad()
    backward(job.model)
    for optimizer in job.optimizers.values():
        optimizer.step()


def adamw(parameters: Iterable[Any], **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, **{"fused": True, **options})


def job_of(iterate: Callable[[Job, int], None], **options: Any) -> Make:
    """Jobs of the small model with one AdamW."""

    def make(seed: int) -> Job:
        model = mlp(seed)
        return Job(model, {"optim": adamw(model.parameters(), **options)}, iterate)

    return make
