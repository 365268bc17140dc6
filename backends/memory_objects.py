"""Objects in fsspec's memory, for tests and examples: they are shared within the process and die with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import fsspec

from adacheck.backends.base import Parts, Stat, Traits, Upload, each_part, is_key
from adacheck.backends.errors import Denied, NotFound

_writing = threading.Lock()


class MemoryObjects:
    """What `ObjectStore` needs of a place, in a folder of the one memory that this process has."""

    def __init__(self, folder: str) -> None:
        self.name = f"memory://{folder}"
        self.traits = Traits(
            atomic_put=True, atomic_batch=False, exclusive_put=True, durable=False, survives_process=False, survives_host=False
        )
        self._fs = fsspec.filesystem("memory", skip_instance_cache=True)
        self._root = "/" + folder.strip("/")

    def write(self, key: str, parts: Parts, *, exclusive: bool) -> bool:
        """Store an object; `False` if `exclusive` and the key is taken. fsspec looks and then writes, so exclusive ones take turns."""
        content = bytearray()
        for part in each_part(parts):
            content += part
        try:
            with _writing:
                self._fs.pipe_file(self._path(key), bytes(content), mode="create" if exclusive else "overwrite")
        except FileExistsError:
            return False
        return True

    def read(self, key: str, byte_range: tuple[int, int] | None) -> bytes:
        """The object's bytes, or some of them."""
        start, stop = byte_range or (None, None)
        try:
            return bytes(self._fs.cat_file(self._path(key), start=start, end=stop))
        except FileNotFoundError as error:
            raise NotFound(f"{self.name} has no object {key!r}") from error

    def stat(self, key: str) -> Stat | None:
        """Size and time of an object."""
        try:
            found = self._fs.info(self._path(key))
        except FileNotFoundError:
            return None
        return Stat(int(found["size"]), found["created"].timestamp()) if found["type"] == "file" else None

    def names(self, prefix: str) -> list[str]:
        """All keys with the prefix, sorted."""
        directory = prefix.rpartition("/")[0]
        keys = (path[len(self._root) :].lstrip("/") for path in self._fs.find(self._path(directory)))
        return sorted(key for key in keys if key.startswith(prefix) and is_key(key))

    def remove(self, key: str) -> None:
        """Remove an object."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def uploads(self) -> Iterator[Upload]:
        """None: a write is whole or not there."""
        return iter(())

    def discard(self, upload: str) -> None:
        """There is none to discard."""
        raise Denied(f"{upload!r} is not an upload of {self.name}")

    def close(self) -> None:
        """Nothing is held."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/")
