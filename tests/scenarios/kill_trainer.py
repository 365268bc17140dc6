"""The process tree of the kill test: imports torch once, then forks a fresh trainer for each line `go STEPS` that it reads.

A trainer prints `pid P`, `restored STEP DIGEST`, then `step STEP DURABLE DIGEST` after each iteration, and `closed` at the end. Its
parent here reaps it and prints `exit STATUS`. Forking is safe: nothing in this process has started a thread.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import blake3
import torch._dynamo  # noqa: F401 - the first optimizer would import it, again in every fork

from tests.tiny_run import Process, Snapshot

OPTIONS = {"full_every": 15, "log_steps": 6, "refresh": 5}


def say(*words: object) -> None:
    """Print a line at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def digest(snapshot: Snapshot) -> str:
    """One line for all bytes of a snapshot."""
    hasher = blake3.blake3()
    for name in sorted(snapshot):
        hasher.update(b"%s %d\n" % (name.encode(), len(snapshot[name])))
        hasher.update(snapshot[name])
    return hasher.hexdigest()


def train(root: Path, steps: int) -> None:
    """Restore, and train on to `steps`."""
    say("pid", os.getpid())
    process = Process(root, options=OPTIONS)
    start = process.ckpt.restore()
    say("restored", start, digest(process.run.snapshot()))
    for step in range(start + 1, steps + 1):
        process.step(drain=False)
        say("step", step, process.ckpt.status().durable, digest(process.run.snapshot()))
    process.ckpt.close()
    say("closed")


def main() -> None:
    root = Path(sys.argv[1])
    assert threading.active_count() == 1, "a fork would copy a lock that another thread holds"
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            train(root, int(line.split()[1]))
            os._exit(0)
        say("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
