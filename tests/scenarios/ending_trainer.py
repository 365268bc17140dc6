"""A training script that ends in one of the ways scripts end, without a word to its checkpointer. `python -m … ROOT WAY`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.scenarios.kill_trainer import say
from tests.tiny_run import Process

STEPS = 7


class Numbers(torch.utils.data.Dataset[int]):
    """Something for data-loader workers to fetch."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def run_off_the_end(process: Process) -> None:
    pass


def raise_an_error(process: Process) -> None:
    raise RuntimeError("the script's own fault")


def wait_for_sigterm(process: Process) -> None:
    say("ready", os.getpid())
    time.sleep(60)


def exit_in_a_handler(process: Process) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    wait_for_sigterm(process)


def fork_in_mid_run(process: Process) -> None:
    """Data-loader workers, and a child that leaves through `sys.exit` and so runs what was registered for the exit."""
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
    assert [int(number) for number in loader] == [0, 1, 2, 3]
    if (child := os.fork()) == 0:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for _ in range(3):
        process.step(drain=False)
    status = process.ckpt.status()
    assert status.failure is None and not status.lost_copies
    assert [int(number) for number in loader] == [0, 1, 2, 3]


WAYS: dict[str, Callable[[Process], None]] = {
    function.__name__: function for function in (run_off_the_end, raise_an_error, wait_for_sigterm, exit_in_a_handler, fork_in_mid_run)
}


def main() -> None:
    process = Process(Path(sys.argv[1]))
    process.ckpt.restore()
    for _ in range(STEPS):
        process.step(drain=False)
    WAYS[sys.argv[2]](process)


if __name__ == "__main__":
    main()
