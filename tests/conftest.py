"""What all tests share: one thread per process, hypothesis without time limits or luck, and the mark `slow`."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported anywhere: two cores, many processes, and bits that must not depend on the machine's core count.
os.environ["OMP_NUM_THREADS"] = "1"

from hypothesis import HealthCheck, settings

# `derandomize` makes a failure on one machine a failure on all; HYPOTHESIS_PROFILE=search looks for new ones instead.
settings.register_profile("repeat", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True, max_examples=1_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_collection_finish() -> None:
    """Take the hundreds of thousands of objects that imports and collection leave out of what the collector goes through.

    Each checkpointer asks once who refers to its optimizers, which goes through all that is not frozen, as full collections do.
    """
    if "torch" in sys.modules:
        import torch._dynamo  # noqa: F401 - half of them; the first optimizer would import it

    gc.collect()
    gc.freeze()


@pytest.fixture
def fast() -> Iterator[Path]:
    """A directory in memory where there is one: what is synced is decided by the simulation, not by this disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)
