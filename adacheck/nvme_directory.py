"""Where a run's chain lies on NVMe, whether that directory is this run's, and who in this process has it open. Without torch."""

from __future__ import annotations

import os
from pathlib import Path

from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.config import StoreConfig
from adacheck.errors import ForeignRun

GENERATION, CHAIN = 1, 0
"""This release trains in one process: one chain, one generation."""

_trained: dict[Path, tuple[int, LmdbBackend]] = {}


def trained_here(path: Path) -> LmdbBackend | None:
    """The backend of a chain's directory that a trainer of this process has open: LMDB is open once in a process, so it is shared."""
    pid, nvme = _trained.get(path, (0, None))
    return nvme if pid == os.getpid() else None


def note_trained(path: Path, nvme: LmdbBackend | None) -> None:
    """Let `trained_here` give a trainer's backend from now on; `None` when it is closed."""
    if nvme is None:
        _trained.pop(path, None)
    else:
        _trained[path] = (os.getpid(), nvme)


def nvme_path(config: StoreConfig, run: str) -> Path | None:
    """Where this run's chain lies on NVMe."""
    return None if config.nvme is None else Path(config.nvme) / run / str(CHAIN)


def check_nvme_run(config: StoreConfig, run: str | None) -> None:
    """Refuse an NVMe directory that holds another run than the object tier (`None`: it holds none).

    Raises:
        ForeignRun: names both.
    """
    folder = None if config.nvme is None else Path(config.nvme)
    if folder is None or not folder.is_dir():
        return
    found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and _looks_like_run(entry.name))
    if found and run not in found:
        what = f"the object tier {config.address} has run {run}" if run else f"the object tier {config.address} has no run at all"
        raise ForeignRun(
            f"the NVMe directory {folder} belongs to run {found[0]}, but {what}; give this run another nvme=DIR, or open its own URI"
        )


def _looks_like_run(name: str) -> bool:
    return len(name) == 36 and name.count("-") == 4
