"""Digests of everything a training job is made of, computed without adacheck: they decide whether two runs are equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import blake3
import torch

from adacheck.tools.byte_gpt import GPTConfig
from adacheck.tools.demo.task import Task
from adacheck.tools.training import DEMO_JOB, JobConfig, Precision, TrainingJob

_PRECISIONS: dict[str, Precision] = {"autocast": "autocast", "bf16": "bf16"}


def job_config(task: Task) -> JobConfig:
    """The job of a task: the demo's model, or one of 0.1 million parameters if `small`."""
    config = replace(DEMO_JOB, precision=_PRECISIONS[task.precision], total_steps=task.steps)
    if task.small:
        config = replace(config, model=GPTConfig(context=32, width=64, layers=2, heads=4), batch=4, corpus_bytes=100_000)
    return config


def witness(job: TrainingJob) -> dict[str, str]:
    """Digests of the parameters, of the optimizer (tensors and hyperparameters), and of the rest (schedule, loader, random numbers)."""
    optimizer = [repr({k: v for k, v in group.items() if k != "params"}).encode() for group in job.optimizer.param_groups]
    rest = [repr(item.state_dict()).encode() for _, item in sorted(job.extra.items())]
    return {
        "parameters": _digest(_parts(job.model.state_dict())),
        "optimizer": _digest([*optimizer, *_optimizer_parts(job)]),
        "schedule, loader, random numbers": _digest([*rest, _bytes(torch.get_rng_state())]),
    }


def state_bytes(job: TrainingJob) -> int:
    """Bytes of a full checkpoint: all parameters (tied ones once) and optimizer tensors."""
    tensors = [*job.model.parameters(), *(t for entries in job.optimizer.state.values() for t in entries.values())]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def parameter_count(job: TrainingJob) -> int:
    """Parameters of the model, tied ones once."""
    return sum(p.numel() for p in job.model.parameters())


def _optimizer_parts(job: TrainingJob) -> Iterator[bytes | memoryview]:
    for group in job.optimizer.param_groups:
        for parameter in group["params"]:
            yield from _parts(job.optimizer.state[parameter])


def _parts(tensors: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    for name, tensor in sorted(tensors.items()):
        yield f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
        yield _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _digest(parts: Iterator[bytes | memoryview] | list[bytes | memoryview]) -> str:
    hasher = blake3.blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
