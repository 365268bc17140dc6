"""One arm by itself in a process of its own: what each step is blocked, what is written, and the CPU and memory it costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from adacheck.tools.bench.all_arms import ARMS
from adacheck.tools.bench.cores import Placement, cpu_times, named_cpu_times, peak_rss_bytes
from adacheck.tools.bench.statistics import median, p99
from adacheck.tools.bench.stepping import Instance
from adacheck.tools.training import JobConfig


@dataclass(frozen=True, slots=True)
class AloneResult:
    """What one arm costs. CPU is in seconds a step; `threads_cpu_s` names the background threads that lived through all steps."""

    arm: str
    steps: int
    step_median_ms: float
    blocked_median_ms: float
    blocked_p99_ms: float
    written_bytes_per_step: float
    training_cpu_s: float
    checkpoint_cpu_s: float
    background_cpu_s: float
    threads_cpu_s: dict[str, float]
    peak_rss_bytes: int
    apart_ms: dict[str, float]


def run_alone(arm_name: str, config: JobConfig, steps: int, directory: Path) -> AloneResult:
    """Train `steps` counted steps under one arm, threads pinned. Call it in a fresh process: peak memory and threads are the process's."""
    torch.set_num_threads(1)
    arm = ARMS[arm_name]()
    with Placement(pinned=True) as placement:
        instance = Instance(config, arm, directory, placement)
        instance.take_steps(arm.warmup_steps)
        instance.end_block()
        before, before_named, before_bytes = cpu_times(), named_cpu_times(), arm.written_bytes()
        taken = instance.take_steps(steps)
        apart = instance.end_block(last=True)
        background_s = cpu_times().since(before).background_s
        named = {name: (spent - before_named.get(name, 0.0)) / steps for name, spent in named_cpu_times().items()}
        written_bytes = arm.written_bytes() - before_bytes
        arm.close()
    return AloneResult(
        arm=arm_name,
        steps=steps,
        step_median_ms=median([step.total_ms for step in taken]),
        blocked_median_ms=median([step.blocked_ms for step in taken]),
        blocked_p99_ms=p99([step.blocked_ms for step in taken]),
        written_bytes_per_step=written_bytes / steps,
        training_cpu_s=sum(step.training_cpu_s for step in taken) / steps,
        checkpoint_cpu_s=sum(step.checkpoint_cpu_s for step in taken) / steps,
        background_cpu_s=background_s / steps,
        threads_cpu_s=named,
        peak_rss_bytes=peak_rss_bytes(),
        apart_ms=apart,
    )
