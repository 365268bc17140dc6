"""The object tier: one backend for local files, S3 and fsspec's memory, which differ in where the bytes go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from adacheck.backends.base import Backend, Created, Exists, Expect, Item, Parts, Stat, Upload, check_key
from adacheck.backends.errors import Denied, NotFound, UnknownScheme
from adacheck.backends.gate import Gate
from adacheck.backends.local_objects import LocalObjects
from adacheck.backends.memory_objects import MemoryObjects
from adacheck.backends.s3_objects import S3Objects


class ObjectStore(Backend):
    """Objects under `file:///directory`, `s3://bucket/prefix` or `memory://folder`. Every listing is fresh.

    On local files a key below an object (`a/b` beside `a`) is `Denied`: no layout may need both.

    Args:
        url: the address.
        options: for `file`, those of `LocalObjects` (`files`, `read_only`); for `s3`, s3fs's own (`endpoint_url`, `key`, `secret`,
            `profile`, ...), `part_bytes` and `request_timeout_s`.

    Raises:
        UnknownScheme: none of the three.
        Denied: no such bucket, no permission, or a file where a directory should be.
        Unavailable: the server does not answer.
    """

    def __init__(self, url: str, **options: Any) -> None:
        scheme, separator, address = url.partition("://")
        self._place: LocalObjects | S3Objects | MemoryObjects
        if not separator or scheme not in ("file", "s3", "memory"):
            raise UnknownScheme(f"{url!r} is no address of an object store; use file:///directory, s3://bucket/prefix or memory://folder")
        if scheme == "file":
            if not address.startswith("/"):
                raise Denied(f"{url!r} is not absolute; write file:///directory")
            self._place = LocalObjects(Path(address), **options)
        elif scheme == "memory":
            self._place = MemoryObjects(address, **options)
        elif not address.strip("/"):
            raise Denied(f"{url!r} names no bucket; write s3://bucket/prefix")
        else:
            self._place = S3Objects(address, **options)
        self.name = self._place.name
        self.traits = self._place.traits
        self._gate = Gate(self.name)

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        """As `Backend.put`. An exception of the parts' generator leaves nothing under the key."""
        with self._gate.call():
            created = self._place.write(check_key(key), parts, exclusive=exclusive)
            return Created() if created else Exists(key)

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        """As `Backend.put_many`, one after the other: not atomic, and `expect` is checked before the first only."""
        with self._gate.call():
            if expect is not None and self._content(check_key(expect.key)) != expect.content:
                return Exists(expect.key)
            for key, parts in items:
                if parts is None:
                    self._place.remove(check_key(key))
                else:
                    self._place.write(check_key(key), parts, exclusive=False)
            return Created()

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        """As `Backend.get`."""
        with self._gate.call():
            return self._place.read(check_key(key), byte_range)

    def stat(self, key: str) -> Stat | None:
        """As `Backend.stat`."""
        with self._gate.call():
            return self._place.stat(check_key(key))

    def list(self, prefix: str) -> Iterator[str]:
        """As `Backend.list`."""
        with self._gate.call():
            return iter(self._place.names(prefix))

    def delete(self, key: str) -> None:
        """As `Backend.delete`."""
        with self._gate.call():
            self._place.remove(check_key(key))

    def close(self) -> None:
        """As `Backend.close`; waits for calls of other threads."""
        if self._gate.close():
            self._place.close()

    def check_writable(self) -> None:
        """As `Backend.check_writable`; asks the permissions of a local directory."""
        with self._gate.call():
            if isinstance(self._place, LocalObjects):
                self._place.check_writable()

    def uploads(self) -> Iterator[Upload]:
        """Temporaries and multipart uploads, of puts under way and of puts that were killed; how old they are tells them apart."""
        with self._gate.call():
            return iter(tuple(self._place.uploads()))

    def discard_upload(self, upload: str) -> None:
        """Remove one of `uploads`, by its name; one that is gone already is no error."""
        with self._gate.call():
            self._place.discard(upload)

    def _content(self, key: str) -> bytes | None:
        try:
            return self._place.read(key, None)
        except NotFound:
            return None
