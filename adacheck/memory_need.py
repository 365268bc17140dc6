"""What a run needs of its host, computed before the first step and compared with what there is: one message instead of a crash."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from adacheck import history
from adacheck.backends.lmdb_directory import DATA_FILE, free_bytes
from adacheck.config import StoreConfig
from adacheck.errors import ConfigError
from adacheck.manifests.record import SEGMENT_BYTES_MAX

DESCRIPTORS = 32
"""Most files that checkpointing has open at once: LMDB's, its lock, an object's, and the connections of an upload."""

CERTIFYING_STEPS = 4
"""Steps at the beginning that ship every state whole, until its replay is certified."""

_UNLIMITED = 1 << 60
_log = logging.getLogger("adacheck")


def fit(config: StoreConfig, gradient_bytes: int, state_bytes: int, held_bytes: int, refresh: int, nvme: Path | None) -> tuple[int, int]:
    """How many blocks a run gets, and how many bytes may wait in memory, after everything it needs was found to be there.

    Args:
        gradient_bytes, state_bytes: of one step, and of all states.
        held_bytes: what a restore has read of the states already: it becomes the shadow, and is no longer available.
        refresh: steps in which all states are sent once to compare.
        nvme: the directory of the log, `None` for none.

    Raises:
        ConfigError: something does not fit; names need and limit.
    """
    blocks = block_count(gradient_bytes, state_bytes, refresh)
    budget = memory_budget(config.memory_budget_bytes, blocks, state_bytes, available_bytes() + held_bytes, nvme=nvme is not None)
    check_descriptors()
    if nvme is not None:
        check_disk(nvme, state_bytes, step_bytes(gradient_bytes, state_bytes, refresh), config.log_steps)
    return blocks, budget


def available_bytes(root: Path = Path("/")) -> int:
    """Memory this process may still use: what the host has available, or what is left below a limit of its cgroups."""
    meminfo = _numbers(root / "proc/meminfo")
    host = meminfo["MemAvailable"] * 1024 if "MemAvailable" in meminfo else _UNLIMITED
    return min([host, *_cgroups_left(root)])


def _cgroups_left(root: Path) -> Iterator[int]:
    """What each cgroup from the process's own up to the top leaves; file pages that can be dropped count as free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        unified = not controllers
        if not unified and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" if unified else root / "sys/fs/cgroup/memory"
        limit_name, used_name = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        own = top / path.strip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(top):
                break
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                statistics = _numbers(folder / "memory.stat")
                droppable = statistics.get("inactive_file" if unified else "total_inactive_file", 0)
                yield max(limit - max(used - droppable, 0), 0)


def _number(file: Path) -> int | None:
    """The number in a file; `None` for no file, or a word (`max`)."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _numbers(file: Path) -> Mapping[str, int]:
    """The first number of each line by its first word (`MemAvailable:  123 kB`); empty for no file."""
    try:
        words = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {first: int(second) for first, second, *_ in (w for w in words if len(w) > 1) if second.isdecimal()}


def step_bytes(gradient_bytes: int, state_bytes: int, refresh: int) -> int:
    """Raw bytes of one increment, once replay is certified: gradients, and the part of all states that is refreshed."""
    return gradient_bytes + -(-state_bytes // refresh)


def block_count(gradient_bytes: int, state_bytes: int, refresh: int) -> int:
    """Blocks for one whole step, so that the trainer need not wait for the keeper in the middle of one; at least 64 MiB."""
    return max(16, -(-step_bytes(gradient_bytes, state_bytes, refresh) * 5 // 4 // SEGMENT_BYTES_MAX) + 2)


def memory_budget(asked_bytes: int | None, blocks: int, state_bytes: int, available: int, *, nvme: bool = True) -> int:
    """Bytes that increments waiting in memory may use, after blocks and shadow have theirs.

    Args:
        nvme: whether full checkpoints are staged there; otherwise all states are in memory twice while one is uploaded.

    Raises:
        ConfigError: not even blocks and shadow fit; names need and limit.
    """
    states = state_bytes if nvme else 2 * state_bytes
    need = blocks * SEGMENT_BYTES_MAX + states
    if need > available:
        what = "the shadow of all states" if nvme else "the shadow of all states and, without NVMe, their copy for full checkpoints"
        raise ConfigError(
            f"checkpointing needs {need} bytes of memory ({states} for {what}, {blocks * SEGMENT_BYTES_MAX} for blocks), "
            f"and {available} are available; use a host or a cgroup with more memory, or a smaller model"
        )
    return asked_bytes if asked_bytes is not None else max((available - need) // 2, SEGMENT_BYTES_MAX)


def check_disk(folder: Path, state_bytes: int, one_step_bytes: int, log_steps: int) -> None:
    """Compare the space that the log in `folder` will need with what its filesystem (and the limit of a file's size) leaves.

    Warns if there is less than the log grows to; what is in its file already counts, since pages are used again.

    Raises:
        ConfigError: not even all states and a few steps fit; names need and limit.
    """
    file = folder / DATA_FILE
    have = free_bytes(folder) + (file.stat().st_size if file.exists() else 0)
    least = state_bytes + CERTIFYING_STEPS * one_step_bytes
    # A full checkpoint is staged beside the log, and at the beginning every state is in the log as often as its replay is tried.
    steps_bytes = max(round(2.2 * log_steps * one_step_bytes), CERTIFYING_STEPS * (state_bytes + one_step_bytes))
    need = 2 * state_bytes + steps_bytes + history.BYTES_MAX
    if have < least:
        raise ConfigError(
            f"{folder} has room for {have} bytes, and the log of every step needs {need} ({state_bytes} for all states, "
            f"{one_step_bytes} for a step, about {2.2 * log_steps:.0f} of them): make room, use another nvme=DIR, or nvme=none"
        )
    if have < need:
        _log.warning(
            "%s has room for %d bytes, and the log of every step grows to about %d (log_steps=%d): if it fills up, only full "
            "checkpoints are durable until there is room; make some, or lower log_steps",
            folder,
            have,
            need,
            log_steps,
        )


def check_descriptors(root: Path = Path("/")) -> None:
    """Compare the files that will be opened with the limit of this process.

    Raises:
        ConfigError: too few are left; names need and limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = sum(1 for _ in (root / "proc/self/fd").iterdir())
    except OSError:
        return
    if limit != resource.RLIM_INFINITY and used + DESCRIPTORS > limit:
        raise ConfigError(
            f"checkpointing opens up to {DESCRIPTORS} files, and this process has {used} of at most {limit} open; "
            f"raise the limit to {used + DESCRIPTORS} or more (ulimit -n)"
        )
