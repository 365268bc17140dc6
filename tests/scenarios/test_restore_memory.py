"""The most memory of a restore, and of the first step after it, is at most that of a fresh start, one segment, and what reading holds.

A fresh start certifies replays on copies of the states, so that bound is wide. `restore()` itself is held to a narrower one: what is
there when it returns (live moments and shadow), one segment, and what reading holds. A copy more of the states does not fit into that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adacheck.full_reader import WINDOW_BYTES, WINDOWS_MAX
from adacheck.keeper import replay
from adacheck.keeper.nvme import BATCH_BYTES
from adacheck.manifests import keys
from adacheck.manifests.record import SEGMENT_BYTES_MAX
from tests.damaged_store import Copy, flip
from tests.scenarios.memory_of_start import MALLOC, MOMENTS_BYTES, STATES_BYTES
from tests.tidy import ROOT

DEADLINE_S = 120
REPLAYED = 8

READ_BYTES = SEGMENT_BYTES_MAX + max(WINDOWS_MAX * WINDOW_BYTES, replay.BATCH_BYTES)
"""Reading a cut holds a segment, and beside it either windows of the object it lies in, or the gradients that are replayed together."""

TRANSACTION_BYTES = min(BATCH_BYTES, STATES_BYTES)
"""A restore that did not read the log begins a new one: LMDB holds what is written to it until it is committed."""


def start(root: Path, steps: int) -> dict[str, Any]:
    """What a process on this store says of itself."""
    uri = f"file://{root}/objects?nvme={root / 'nvme'}"
    environment = {**os.environ, **MALLOC, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "tests.scenarios.memory_of_start", uri, str(steps)]
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.slow
def test_a_restore_needs_no_more_than_a_fresh_start(tmp_path: Path) -> None:
    assert STATES_BYTES > 50_000_000 > READ_BYTES + SEGMENT_BYTES_MAX
    fresh = start(tmp_path, 5)
    assert fresh["start"] == 0
    limit = max(fresh["restored"], fresh["trained"]) + SEGMENT_BYTES_MAX + READ_BYTES

    def check(found: dict[str, Any], source: str, *, more: int = 0) -> None:
        assert source in found["source"]
        assert max(found["restored"], found["trained"]) <= limit, (found, fresh)
        assert found["restored"] - found["before"] <= MOMENTS_BYTES + STATES_BYTES + SEGMENT_BYTES_MAX + READ_BYTES + more, found

    shutil.rmtree(tmp_path / "nvme")
    check(start(tmp_path, REPLAYED), "full/", more=TRANSACTION_BYTES)  # a new host
    logged = start(tmp_path, 1)
    assert logged["replayed"] == REPLAYED
    check(logged, "lmdb")

    store = Copy(tmp_path)  # the newest increment's last object is damaged: that is found when all states were rebuilt
    newest = store.names(keys.Kind.INCREMENT_SLOT)[-1]
    store.write(keys.Kind.INCREMENT_SLOT, newest, flip(store.read(keys.Kind.INCREMENT_SLOT, newest)))
    check(start(tmp_path, 1), "full/", more=TRANSACTION_BYTES)
