"""Every call that changes the local disk, in one small class, so that a test can crash the process at any of them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from adacheck.backends.base import Buffer


class LocalFiles:
    """The operating system's calls as they are, `OSError` included. What is not fsynced may be gone after a power cut."""

    def make_dir(self, path: Path) -> None:
        """Make one directory; `FileExistsError` if it is there."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Make a new file and return its descriptor; `FileExistsError` if it is there."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, content: Buffer) -> None:
        """Append all of `content`."""
        rest = memoryview(content).cast("B")
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def fsync(self, descriptor: int) -> None:
        """Make the file's content durable."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the file; makes nothing durable."""
        os.close(descriptor)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; `FileExistsError` if that name is taken."""
        os.link(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file over another."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a name; `FileNotFoundError` if it is absent."""
        path.unlink()

    def remove_dir(self, path: Path) -> None:
        """Remove an empty directory; `OSError` if it is not empty."""
        path.rmdir()

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_directories(files: LocalFiles, path: Path) -> None:
    """Make a directory and its parents, each durable in its own parent.

    A directory that is there already is taken to be durable: whoever made it synced it before using it.
    """
    if path.is_dir():
        return
    make_directories(files, path.parent)
    with suppress(FileExistsError):
        files.make_dir(path)
    files.fsync_dir(path.parent)
