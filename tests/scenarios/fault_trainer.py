"""Trains 500 steps against an object tier that fails, and prints what it was at two moments and at the end."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from adacheck.backends import s3_objects
from adacheck.backends.object_store import ObjectStore
from adacheck.backends.retry import Retry
from adacheck.backends.wrappers import Retrying
from tests.scenarios.test_long_run import sizes
from tests.tiny_run import Process, Snapshot

FIRST, LAST, FULL_EVERY, WIDTH = 160, 500, 20, 60_000
"""A state of 6.5 MB, which goes up in two parts."""

OPTIONS = {"full_every": FULL_EVERY, "log_steps": 8, "refresh": 20, "deadline_s": 60}


def fingerprint(snapshot: Snapshot) -> str:
    """Of every byte."""
    return hashlib.blake2s(repr(sorted(snapshot.items())).encode()).hexdigest()


def objects(url: str, **options: Any) -> Retrying:
    """The object tier, with short times."""
    retry = Retry(attempts=6, base_delay_s=0.02, max_delay_s=0.1)
    return Retrying(ObjectStore(url, part_bytes=5 << 20, part_retry=retry, **options), retry)


def main(root: Path, url: str, options: dict[str, Any]) -> None:
    """Train; the keeper is left to finish its uploads every `FULL_EVERY` steps, so that there are many."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("adacheck").addHandler(handler)
    s3_objects.LEAST_BYTES_PER_S = 100 << 20  # what stalls is given up soon
    process = Process(root, objects(url, **options), options=OPTIONS, width=WIDTH)
    process.ckpt.restore()
    found: dict[int, dict[str, int]] = {}
    for step in range(1, LAST + 1):
        process.step(drain=step % FULL_EVERY == 0)
        if step in (FIRST, LAST):
            process.ckpt.publish_full()
            found[step] = sizes(root)
    status = process.ckpt.status()
    process.ckpt.close()
    report = {
        "sizes": [found[FIRST], found[LAST]],
        "fingerprint": fingerprint(process.run.snapshot()),
        "published": status.published,
        "durable": status.durable,
        "failure": status.failure,
        "warnings": warnings[-20:],
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
