"""Objects as files of a local (or mounted) directory, each written beside its place, synced, and only then named.

fsspec's own local files offer neither a sync nor an exclusive name, so the scheme `file` does without them.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adacheck.backends.base import Parts, Stat, Traits, Upload, each_part, is_key
from adacheck.backends.errors import Denied, NotFound, Unavailable
from adacheck.backends.local_files import LocalFiles, make_directories
from adacheck.backends.mounts import FilesystemType, filesystem_type, is_network
from adacheck.backends.os_errors import translate_os_error

_TEMPORARY = re.compile(r"~[0-9a-f]{16}\.tmp\Z")
_ATTEMPTS = 10


class LocalObjects:
    """What `ObjectStore` needs of a place, on local files. A temporary's name begins with `~`, which no key may hold.

    `read_only`: for tools that only look; the directory must exist. Else it is made; whether one that exists can be written is not asked.
    """

    def __init__(
        self, root: Path, files: LocalFiles | None = None, filesystem: FilesystemType = filesystem_type, *, read_only: bool = False
    ) -> None:
        self.name = f"file://{root}"
        self._root = root
        self._files = files or LocalFiles()
        self._directories = threading.Lock()
        self.traits = Traits(
            atomic_put=True,
            atomic_batch=False,
            exclusive_put=True,
            durable=True,
            survives_process=True,
            survives_host=is_network(filesystem(root)),
        )
        if not read_only:
            with self._translated("make the directory", root):
                make_directories(self._files, root)
        if not root.is_dir():
            raise Denied(f"{root} does not exist or is no directory; check the address")

    def check_writable(self) -> None:
        """Raise `Denied` if this user may not write here."""
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise Denied(f"{self._root} is not writable; check its permissions")

    def write(self, key: str, parts: Parts, *, exclusive: bool) -> bool:
        """Store an object durably; `False` if `exclusive` and the key is taken."""
        target = self._root / key
        descriptor, temporary = self._create(target)
        try:
            self._fill(descriptor, temporary, parts)
            with self._translated("name", target):
                return self._publish(temporary, target, exclusive=exclusive)
        except BaseException:
            with suppress(OSError):
                self._files.unlink(temporary)
            raise

    def read(self, key: str, byte_range: tuple[int, int] | None) -> bytes:
        """The object's bytes, or some of them."""
        path = self._root / key
        try:
            with path.open("rb") as file:
                if byte_range is None:
                    return file.read()
                file.seek(byte_range[0])
                return file.read(max(byte_range[1] - byte_range[0], 0))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise NotFound(f"{self.name} has no object {key!r}") from error
        except OSError as error:
            raise translate_os_error(error, f"read {path}") from error

    def stat(self, key: str) -> Stat | None:
        """Size and time of an object."""
        path = self._root / key
        with self._translated("look at", path):
            try:
                found = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return None if path.is_dir() else Stat(found.st_size, found.st_mtime)

    def names(self, prefix: str) -> list[str]:
        """All keys with the prefix, sorted."""
        directory = prefix.rpartition("/")[0]
        if directory and not is_key(directory):
            return []
        return sorted(name for name in self._walk(directory) if name.startswith(prefix) and is_key(name))

    def remove(self, key: str) -> None:
        """Remove an object durably, and the directories that it leaves empty."""
        path = self._root / key
        with self._translated("remove", path):
            try:
                self._files.unlink(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return
            self._files.fsync_dir(path.parent)
            with suppress(OSError):  # not empty: somebody else's objects are in there
                for parent in path.parents:
                    if parent == self._root:
                        break
                    self._files.remove_dir(parent)

    def uploads(self) -> Iterator[Upload]:
        """Temporaries, by their names relative to the root."""
        for name in sorted(self._walk("")):
            with suppress(FileNotFoundError):
                if _TEMPORARY.search(name):
                    yield Upload(name, name.rpartition("/")[0], (self._root / name).stat().st_mtime)

    def discard(self, upload: str) -> None:
        """Remove one of `uploads`."""
        if not _TEMPORARY.search(upload):
            raise Denied(f"{upload!r} is not a temporary of {self.name}")
        with self._translated("remove", self._root / upload), suppress(FileNotFoundError):
            self._files.unlink(self._root / upload)

    def close(self) -> None:
        """Nothing is held."""

    def _create(self, target: Path) -> tuple[int, Path]:
        """A new temporary beside `target`. Its directory is made durably; whoever removes empty ones may come in between."""
        directory = target.parent
        with self._translated("make a temporary for", target):
            for _ in range(_ATTEMPTS):
                temporary = directory / f"~{secrets.token_hex(8)}.tmp"
                with self._directories:
                    make_directories(self._files, directory)
                with suppress(FileNotFoundError):
                    return self._files.create(temporary), temporary
        raise Unavailable(f"{directory} was removed {_ATTEMPTS} times while it was being written to")

    def _fill(self, descriptor: int, path: Path, parts: Parts) -> None:
        size_bytes = 0
        try:
            for part in each_part(parts):
                size_bytes += memoryview(part).nbytes
                with self._translated("write", path, size_bytes):
                    self._files.write(descriptor, part)
            with self._translated("sync", path, size_bytes):
                self._files.fsync(descriptor)
        finally:
            self._files.close(descriptor)

    def _publish(self, temporary: Path, target: Path, *, exclusive: bool) -> bool:
        created = True
        if exclusive:
            try:
                self._files.link(temporary, target)
            except FileExistsError:
                created = False
            self._files.unlink(temporary)
        else:
            self._files.replace(temporary, target)
        self._files.fsync_dir(target.parent)  # of one that exists, too: what is reported must not vanish
        return created

    def _walk(self, directory: str) -> Iterator[str]:
        """Names of all files below a directory, relative to the root."""

        def fail(error: OSError) -> None:
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                raise translate_os_error(error, f"list {error.filename}") from error

        for folder, _, names in os.walk(self._root / directory, onerror=fail):
            relative = Path(folder).relative_to(self._root).as_posix()
            for name in names:
                yield name if relative == "." else f"{relative}/{name}"

    @contextmanager
    def _translated(self, what: str, path: Path, need_bytes: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise translate_os_error(error, f"{what} {path}", need_bytes) from error
