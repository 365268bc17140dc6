"""What a run needs of its host, computed before the first step and compared with what there is: one message instead of a crash."""

from __future__ import annotations

from pathlib import Path

from adacheck.errors import ConfigError
from adacheck.manifests.record import SEGMENT_BYTES_MAX

_UNLIMITED = 1 << 60


def available_bytes() -> int:
    """Memory this process may still use: what the host has available, or what is left below the cgroup's limit."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    host = int(meminfo["MemAvailable"].split()[0]) * 1024
    return min(host, _cgroup_left())


def _cgroup_left(root: Path = Path("/sys/fs/cgroup")) -> int:
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return _UNLIMITED
    return _UNLIMITED if limit == "max" else max(int(limit) - used, 0)


def block_count(gradient_bytes: int, state_bytes: int, refresh: int) -> int:
    """Blocks for one whole step, so that the trainer need not wait for the keeper in the middle of one; at least 64 MiB."""
    step_bytes = gradient_bytes + -(-state_bytes // refresh)
    return max(16, -(-step_bytes * 5 // 4 // SEGMENT_BYTES_MAX) + 2)


def memory_budget(asked_bytes: int | None, blocks: int, state_bytes: int, available: int) -> int:
    """Bytes that increments waiting in memory may use, after blocks and shadow have theirs.

    Raises:
        ConfigError: not even blocks and shadow fit; names need and limit.
    """
    need = blocks * SEGMENT_BYTES_MAX + state_bytes
    if need > available:
        raise ConfigError(
            f"checkpointing needs {need} bytes of memory ({state_bytes} for the shadow of all states, {blocks * SEGMENT_BYTES_MAX} for blocks), "
            f"and {available} are available; use a host with more memory"
        )
    return asked_bytes if asked_bytes is not None else max((available - need) // 2, SEGMENT_BYTES_MAX)
