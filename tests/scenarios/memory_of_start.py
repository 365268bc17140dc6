"""A process that starts, trains, and says the most memory it had: `python -m … URI STEPS`. Prints bytes by name as JSON.

Counted is anonymous memory, sampled every millisecond: pages of mapped files (LMDB's, libraries) are the page cache's, which the
kernel takes back as it likes. It must run with `MALLOC`: as glibc comes, memory that was freed stays with its arenas, and would be counted.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch

import adacheck

MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16)}
"""Everything from 64 KiB on is mapped, and given back when it is freed."""

ROWS, TENSORS = 700, 10
PARAMETERS_BYTES = 4 * ROWS * ROWS * TENSORS
MOMENTS_BYTES = 2 * PARAMETERS_BYTES
STATES_BYTES = PARAMETERS_BYTES + MOMENTS_BYTES


class Peak:
    """The most anonymous memory this process had, watched from a thread of its own."""

    def __init__(self) -> None:
        self._bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self._bytes = max(self._bytes, anonymous_bytes())

    def take(self) -> int:
        """The most since the last call."""
        peak, self._bytes = max(self._bytes, anonymous_bytes()), 0
        return peak

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()


def anonymous_bytes() -> int:
    """Memory of this process that belongs to no file."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ckpt: adacheck.Checkpointer, start: int, steps: int) -> None:
    """Train; each step is applied before the next begins, so that nothing depends on who is faster."""
    for step in range(start, start + steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 / (step + 1))
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        ckpt.drain()


def main() -> None:
    uri, steps = sys.argv[1], int(sys.argv[2])
    assert MALLOC.items() <= os.environ.items(), "what was freed would be counted"
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(ROWS, ROWS)) for _ in range(TENSORS)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    peak = Peak()
    try:
        with adacheck.Store.open(uri, log_steps=100, full_every=1000, refresh=20) as store:
            ckpt = store.attach(model, optimizer)
            before = anonymous_bytes()
            start = ckpt.restore()
            restored = peak.take()
            train(model, optimizer, ckpt, start, steps)
            trained = peak.take()
            ckpt.publish_full()
            ckpt.close()
    finally:
        peak.stop()
    source = ckpt.restored.source if ckpt.restored else ""
    replayed = max(ckpt.restored.replayed.values(), default=0) if ckpt.restored else 0
    found = {"start": start, "source": source, "replayed": replayed, "before": before, "restored": restored, "trained": trained}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
