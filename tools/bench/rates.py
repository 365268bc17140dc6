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

from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.digest import tensor_digest_of_bytes
from adacheck.keeper.log import BATCH_BYTES
from adacheck.tools.bench.replay_rate import measure
from adacheck.tools.bench.statistics import median

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


def bare_digest(content: memoryview) -> Run:
    """BLAKE3 of each 4 MiB of `content`, by the library alone."""

    def digest_all() -> None:
        for start in range(0, len(content), PART_BYTES):
            blake3.blake3(content[start : start + PART_BYTES]).digest()

    return digest_all


def own_digest(content: memoryview) -> Run:
    """The same bytes through this project's digest of a tensor: each 4 MiB, then the list."""

    def digest_all() -> None:
        tensor_digest_of_bytes(content)

    return digest_all


def own_log(content: memoryview, log: LmdbBackend) -> Run:
    """The same bytes into the log's LMDB, in transactions of the log's size, each over the values of the call before."""
    keys = [f"part/{start:012d}" for start in range(0, len(content), PART_BYTES)]
    per_batch = BATCH_BYTES // PART_BYTES

    def write_all() -> None:
        for first in range(0, len(keys), per_batch):
            chosen = keys[first : first + per_batch]
            log.put_many((key, content[(first + i) * PART_BYTES : (first + i + 1) * PART_BYTES]) for i, key in enumerate(chosen))

    return write_all


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


def replay_rates(shapes: list[tuple[int, ...]] | None) -> list[Comparison]:
    """Replay beside the bare optimizer step; narrowing beside copying the same bytes."""
    rates = measure(shapes=shapes)
    millions, moved_mb = rates.parameters / 1e6, rates.parameters * 4 / 1e6
    copied = ("a copy of the fp32 gradients", "MB/s", moved_mb / rates.copy_s)
    return [
        Comparison("replay", "fused AdamW, gradients widened", "M parameters/s", millions / rates.bare_s, millions / rates.replay_s),
        Comparison("narrowing", *copied, moved_mb / rates.narrow_s),
        Comparison("narrowing, clipped", *copied, moved_mb / rates.narrow_clipped_s),
    ]


def measure_rates(directory: Path, size_bytes: int = LOG_BYTES, shapes: list[tuple[int, ...]] | None = None) -> list[Comparison]:
    """Every part, on one thread. Call it in a fresh process."""
    torch.set_num_threads(1)
    content = memoryview(np.random.default_rng(0).bytes(size_bytes))
    replay = replay_rates(shapes)
    with LmdbBackend(directory / "log") as log:
        return [
            *replay,
            compare("digest", "blake3", "GB/s", size_bytes / 1e9, bare_digest(content), own_digest(content)),
            compare(
                "NVMe log", "a file with fsync", "MB/s", size_bytes / 1e6, bare_file(content, directory / "raw"), own_log(content, log)
            ),
        ]
