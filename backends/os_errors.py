"""Errors of the operating system in this project's words: one table for everything that touches local files."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from adacheck.backends.errors import BackendError, Denied, Full, InvalidKey, NotFound, Unavailable

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENODEV, errno.ELOOP, errno.EEXIST})


def translate_os_error(error: OSError, what: str, need_bytes: int = 0) -> BackendError:
    """The error to raise (with `from error`) for one of the operating system; `what` names the action and the path.

    `need_bytes`, where known, is what was to be written.
    """
    text = f"{what}: {error.strerror or error}"
    if error.errno in FULL:
        need = f" while {need_bytes} bytes were to be written" if need_bytes else ""
        return Full(f"{text}{need}; free some space, or raise the limit")
    if error.errno == errno.ENOENT:
        return NotFound(text)
    if error.errno == errno.ENAMETOOLONG:
        return InvalidKey(f"{text}; a name between slashes may have 255 bytes here")
    if error.errno in _DENIED:
        return Denied(f"{text}; check the path and its permissions")
    return Unavailable(text)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Around calls of the operating system that name no more than `what`: raises as `translate_os_error` says."""
    try:
        yield
    except OSError as error:
        raise translate_os_error(error, what) from error
