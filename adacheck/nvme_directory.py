"""Where a run's chain lies on NVMe, whether that directory is this run's, and who in this process has it open. Without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from adacheck.backends.errors import Damaged
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.os_errors import translated
from adacheck.config import StoreConfig
from adacheck.errors import ForeignRun, NoCut

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
    """Where this run's chain lies on NVMe: the log in use, or the one set aside that `aside` asks for."""
    if config.nvme is None:
        return None
    path = Path(config.nvme) / run / str(CHAIN)
    return aside_path(path, config.aside) if config.aside else path


def check_nvme_run(config: StoreConfig, run: str | None) -> None:
    """Refuse an NVMe directory that holds another run than the object tier (`None`: it holds none).

    Raises:
        ForeignRun: names both.
        Denied: this user may not look into it.
    """
    folder = None if config.nvme is None else Path(config.nvme)
    if folder is None:
        return
    with translated(f"look at the NVMe directory {folder}"):
        if not folder.is_dir():
            return
        found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and _looks_like_run(entry.name))
    if found and run not in found:
        what = f"the object tier {config.address} has run {run}" if run else f"the object tier {config.address} has no run at all"
        raise ForeignRun(
            f"the NVMe directory {folder} belongs to run {found[0]}, but {what}; give this run another nvme=DIR, or open its own URI"
        )


def open_copy(path: Path, opened: Callable[[Path], LmdbBackend] = LmdbBackend) -> tuple[LmdbBackend, str | None]:
    """Open a chain's directory for writing. One that cannot be read is moved aside first, and the text that comes back says where.

    Raises:
        Busy: another process, or this one, writes to it; the message names the pid.
        BackendError: it cannot be made, or read at all.
    """
    try:
        nvme = opened(path)
        try:
            sum(1 for _ in nvme.list(""))  # its keys can be read
        except Damaged:
            nvme.close()
            raise
        return nvme, None
    except Damaged as error:
        aside = free_aside(path)
        path.rename(aside)
        os.utime(aside)  # its age is counted from now on
        return opened(path), f"{path} cannot be read and was moved to {aside}: {error}"


def aside_path(path: Path, number: int) -> Path:
    """Where the log of the chain at `path` is set aside."""
    return path.with_name(f"{path.name}.damaged-{number}")


def free_aside(path: Path) -> Path:
    """A name to set the log at `path` aside under: later than all there are."""
    last = max((int(found.name.rpartition("-")[2]) for found in set_aside(path)), default=0)
    return aside_path(path, last + 1)


def no_aside(config: StoreConfig, run: str) -> NoCut:
    """The error that no log was set aside under the number asked for, with those there are."""
    used = nvme_path(replace(config, aside=0), run)
    there = [] if used is None else [found.name.rpartition("-")[2] for found in set_aside(used)]
    have = f"there is aside={', '.join(there)}" if there else "none was"
    return NoCut(f"no log of run {run} was set aside as number {config.aside} in {config.nvme}: {have}")


def set_aside(path: Path) -> tuple[Path, ...]:
    """What was set aside of the chain at `path`, oldest first."""
    folder, pattern = path.parent, re.compile(rf"{re.escape(path.name)}\.damaged-(\d+)")
    found = [(int(match[1]), entry) for entry in folder.iterdir() if (match := pattern.fullmatch(entry.name))] if folder.is_dir() else []
    return tuple(entry for _, entry in sorted(found))


def _looks_like_run(name: str) -> bool:
    return len(name) == 36 and name.count("-") == 4
