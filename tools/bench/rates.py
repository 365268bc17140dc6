"""Rates of the single parts (replay, digest, log), each beside the bare operation that bounds it, in turns on one thread.

A part is only slow or fast in relation to what the machine can do at that moment, so both sides are timed alternately.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import blake3
import numpy as np
import torch

from adacheck.tools.bench.statistics import median
from adacheck.tools.byte_gpt import BENCH, ByteGPT, GPTConfig

ROUNDS = 7
PART_BYTES = 4 << 20
LOG_BYTES = 200 << 20

Run = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A part's rate beside the bare operation's, both medians, in `unit`; `ours` is `None` where there is nothing to compare yet."""

    part: str
    bare_operation: str
    unit: str
    bare: float
    ours: float | None

    @property
    def ratio(self) -> float | None:
        """Ours over bare: 1.0 is as fast as the machine."""
        return None if self.ours is None else self.ours / self.bare


def compare(part: str, bare_operation: str, unit: str, amount: float, bare: Run, ours: Run | None = None) -> Comparison:
    """Time `bare` and `ours` in turns; each call handles `amount` units. The first round warms up and does not count."""
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(ROUNDS + 1):
        for name, run in (("bare", bare), ("ours", ours)):
            if run is not None:
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    rate = {name: amount / median(taken[1:]) for name, taken in times.items() if taken}
    return Comparison(part, bare_operation, unit, rate["bare"], rate.get("ours"))


def bare_adamw(config: GPTConfig = BENCH) -> tuple[Run, int]:
    """One fused AdamW step over a whole model of fp32 parameters whose gradients arrive as bf16; and its number of parameters."""
    parameters = list(ByteGPT(config).parameters())
    received = [torch.randn_like(parameter).to(torch.bfloat16) for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)

    def step() -> None:
        for parameter, gradient in zip(parameters, received, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)
        optimizer.step()

    return step, sum(parameter.numel() for parameter in parameters)


def bare_digest(content: memoryview) -> Run:
    """BLAKE3 of each 4 MiB of `content`, by the library alone."""

    def digest_all() -> None:
        for start in range(0, len(content), PART_BYTES):
            blake3.blake3(content[start : start + PART_BYTES]).digest()

    return digest_all


def bare_file(content: memoryview, path: Path) -> Run:
    """Write `content` over a file in pieces of 4 MiB and sync it: what a log costs at least."""

    def write_all() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            for start in range(0, len(content), PART_BYTES):
                os.write(descriptor, content[start : start + PART_BYTES])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    return write_all


def measure_rates(directory: Path, size_bytes: int = LOG_BYTES, config: GPTConfig = BENCH) -> list[Comparison]:
    """The three parts, on one thread. Call it in a fresh process."""
    torch.set_num_threads(1)
    content = memoryview(np.random.default_rng(0).bytes(size_bytes))
    step, parameters = bare_adamw(config)
    return [
        compare("replay", "fused AdamW, gradients widened", "M parameters/s", parameters / 1e6, step),
        compare("digest", "blake3", "GB/s", size_bytes / 1e9, bare_digest(content)),
        compare("NVMe log", "a file with fsync", "MB/s", size_bytes / 1e6, bare_file(content, directory / "raw")),
    ]
