"""One writer for a directory: a lock that dies with its process and names the process that holds it.

A POSIX record lock, because a forked child does not inherit it: a data-loader worker that outlives a killed trainer must
not keep the next trainer out. Such a lock is lost when its process closes *any* descriptor of the file, hence the table
of those held here, which is consulted before the file is opened a second time.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from adacheck.backends.errors import Busy
from adacheck.backends.os_errors import translate_os_error

_held: dict[tuple[int, int], int] = {}
_table = threading.Lock()
os.register_at_fork(before=_table.acquire, after_in_parent=_table.release, after_in_child=_table.release)


class DirectoryLock:
    """Held from construction to `release()`. The file stays: removing it would let two processes lock two files of one name.

    Raises:
        Busy: held already; the message names the holder's pid.
        Denied, Full: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _table:
            self._refuse_own()
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise translate_os_error(error, f"open the lock {path}") from error
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)
            except OSError as error:
                holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
                os.close(self._descriptor)
                if isinstance(error, (BlockingIOError, PermissionError)):
                    who = f"process {holder or 'unknown'}"
                    raise Busy(f"{path.parent} is in use by {who}; stop it, or choose another directory", holder=who) from error
                raise translate_os_error(error, f"lock {path}") from error
            self._pid = os.getpid()
            status = os.fstat(self._descriptor)
            self._file = (status.st_dev, status.st_ino)
            _held[self._file] = self._pid

    def release(self) -> None:
        """Let the next one in; a second call does nothing, and so does one in a forked child."""
        with _table:
            if self._pid == os.getpid() and self._descriptor >= 0:
                _held.pop(self._file, None)
                os.close(self._descriptor)
                self._descriptor = -1

    def _refuse_own(self) -> None:
        try:
            status = self._path.stat()
        except OSError:
            return
        holder = _held.get((status.st_dev, status.st_ino))
        if holder == os.getpid():
            message = f"{self._path.parent} is open already in this process ({holder}); close that one first, or share it"
            raise Busy(message, holder=f"this process ({holder})")
