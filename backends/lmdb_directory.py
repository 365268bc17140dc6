"""What a directory needs before LMDB opens it: to exist durably, one writer, an intact first file, a size for the map."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import lmdb

from adacheck.backends.directory_lock import DirectoryLock
from adacheck.backends.errors import Denied, Full, Unavailable
from adacheck.backends.local_files import LocalFiles, make_directories
from adacheck.backends.os_errors import FULL, translate_os_error

DATA_FILE = "data.mdb"
MAP_BYTES_MIN = 1 << 30
_MAP_BYTES_MAX = 1 << 44


def lock_directory(path: Path, *, create: bool) -> DirectoryLock:
    """Make the directory if `create`, lock it, and put an empty environment in it unless it has one.

    Raises:
        Busy, Denied, Full, Unavailable: as `LmdbBackend` describes.
    """
    try:
        if create:
            make_directories(LocalFiles(), path)
        elif not path.is_dir():
            raise Denied(f"{path} does not exist; check the path")
    except OSError as error:
        raise translate_os_error(error, f"make the directory {path}") from error
    lock = DirectoryLock(path / "writer.lock")
    try:
        _prepare_file(path, create=create)
    except lmdb.Error as error:
        lock.release()
        kind = Full if error.code in FULL or error.code == errno.EIO else Unavailable
        raise kind(f"make an LMDB store in {path}: {error}; {free_bytes(path)} bytes are free there") from error
    except OSError as error:
        lock.release()
        raise translate_os_error(error, f"make an LMDB store in {path}") from error
    return lock


def _prepare_file(path: Path, *, create: bool) -> None:
    """Make the data file beside its place and rename it, so that a crash leaves none, never an empty one: that is always damage."""
    new = path / "new"
    if new.exists():
        shutil.rmtree(new)
    if (path / DATA_FILE).exists() or not create:
        return
    new.mkdir()
    lmdb.open(str(new), map_size=1 << 20).close()
    with (new / DATA_FILE).open("rb+") as file:
        os.fsync(file.fileno())
    (new / DATA_FILE).replace(path / DATA_FILE)
    LocalFiles().fsync_dir(path)
    shutil.rmtree(new)


def map_bytes(path: Path, size_limit_bytes: int | None) -> int:
    """The size of the map: the limit in whole pages, or the size of the filesystem within bounds."""
    if size_limit_bytes is not None:
        return max(size_limit_bytes // 4096, 16) * 4096
    with suppress(OSError):
        found = os.statvfs(path)
        return min(max(found.f_blocks * found.f_frsize // 4096 * 4096, MAP_BYTES_MIN), _MAP_BYTES_MAX)
    return MAP_BYTES_MIN


def free_bytes(path: Path) -> int:
    """Bytes that this process may still add to the data file: what the filesystem has, or the limit of a file's size leaves."""
    found = os.statvfs(path)
    free = found.f_bavail * found.f_frsize
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return free
    with suppress(FileNotFoundError):
        limit -= (path / DATA_FILE).stat().st_size
    return max(min(free, limit), 0)
