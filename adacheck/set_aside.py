"""Keeps the log on NVMe that a start could not read whole: a copy beside it, for a repair, since the start goes on in its place.

The fork record of that start ends the log's lineage, so the copy is looked at by itself (`aside=N` in the URI), by the forks there were.
There is one at a time, and beside it one that cannot even be opened: a disk that damages log after log is not filled with them. Nothing
depends on what is in the way here: a start goes on where it can be neither kept nor removed, and says so. Without torch.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adacheck.backends.errors import BackendError, Full
from adacheck.backends.lmdb_directory import DATA_FILE, free_bytes
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.local_files import LocalFiles
from adacheck.backends.os_errors import translate_os_error
from adacheck.config import StoreConfig
from adacheck.nvme_directory import free_aside, set_aside

_log = logging.getLogger("adacheck")


def keep_log(config: StoreConfig, path: Path, steps: list[int]) -> str:
    """Copy the log at `path`, to which nobody writes now; gives a line that says where it is and what can be done, or why it is not.

    Args:
        steps: those on it that this start did not read, in order.
    """
    held = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    what = f"the log at {path}, which may still hold {held}, goes on without"
    try:
        kept = _copy(path)
    except BackendError as error:
        return f"{what}, and could not be kept for a repair: {error}"
    return f"{what}; what it was is kept in {kept}: {look_aside(config, kept)}, or the next start that cannot read its log"


def forget_earlier(path: Path, *, unopenable: bool = False) -> None:
    """Keep only what was set aside last of the log at `path`; with `unopenable`, of what cannot be opened, and all that can."""
    with _only_warned(f"what was set aside before beside {path}"):
        for old in set_aside(path)[:-1]:
            if not (unopenable and _opens(old)):
                shutil.rmtree(old)


def _opens(folder: Path) -> bool:
    try:
        with LmdbBackend(folder, read_only=True) as log:
            return any(True for _ in log.list(""))
    except BackendError:
        return False


def forget_half(path: Path) -> None:
    """Remove what a start left that was killed while it copied the log at `path`, which is still there."""
    part = _part_of(path)
    with _only_warned(part):
        if part.exists():
            shutil.rmtree(part)


@contextmanager
def _only_warned(what: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("%s is not needed any more and could not be removed: %s", what, error)


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.copying")


def look_aside(config: StoreConfig, kept: Path) -> str:
    """What can be done with a log that was set aside."""
    uri = f"'{config.uri}&aside={kept.name.rpartition('-')[2]}'"
    mend = f"adacheck-fsck {uri} --repair mends what can be mended there"
    return f"{mend}, adacheck-restore {uri} --list shows what it holds then; --gc removes it when it is old"


def _copy(path: Path) -> Path:
    """The directory of the copy. What was set aside before goes last, or first where its room is needed.

    Raises:
        Full: the log would have no room left to grow by as much. BackendError: it cannot be read or written.
    """
    earlier, kept, part = set_aside(path), free_aside(path), _part_of(path)
    try:
        need = (path / DATA_FILE).stat().st_size
        free = free_bytes(path.parent)
        room = free + sum(file.stat().st_size for old in earlier for file in old.iterdir())
        if room < 2 * need:
            raise Full(f"{path.parent} has room for {room} bytes, and it needs {need}, and as much for the new log")
        for old in earlier if free < 2 * need else ():
            shutil.rmtree(old)
        part.mkdir(exist_ok=True)
        shutil.copyfile(path / DATA_FILE, part / DATA_FILE)
        with (part / DATA_FILE).open("rb+") as file:
            os.fsync(file.fileno())
        part.rename(kept)
        LocalFiles().fsync_dir(path.parent)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise translate_os_error(error, f"copy {path / DATA_FILE} to {kept}") from error
    forget_earlier(path)
    return kept
