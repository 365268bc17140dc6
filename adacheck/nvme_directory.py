"""Where a run's chain lies on NVMe, and whether that directory is this run's. Without torch."""

from __future__ import annotations

from pathlib import Path

from adacheck.config import StoreConfig
from adacheck.errors import ForeignRun

GENERATION, CHAIN = 1, 0
"""This release trains in one process: one chain, one generation."""


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
