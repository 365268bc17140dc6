"""A backend in a dict: what every other backend must behave like, and what tests of the layers above run on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

from adacheck.backends.base import Backend, Created, Exists, Expect, Item, Parts, Stat, Traits, check_key, each_part
from adacheck.backends.errors import NotFound
from adacheck.backends.gate import Gate


class MemoryBackend(Backend):
    """Objects in this process's memory; atomic in everything, durable in nothing."""

    traits = Traits(atomic_put=True, atomic_batch=True, exclusive_put=True, durable=False, survives_process=False, survives_host=False)

    def __init__(self, name: str = "memory:") -> None:
        self.name = name
        self._gate = Gate(name)
        self._lock = threading.RLock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        """As `Backend.put`."""
        expect = Expect(check_key(key), None) if exclusive else None
        return self.put_many([(key, parts)], expect=expect)

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        """As `Backend.put_many`, one transaction; reads inside the generator see what was there before the batch."""
        with self._gate.call(), self._lock:
            if expect is not None and self._content(check_key(expect.key)) != expect.content:
                return Exists(expect.key)
            changed: dict[str, bytes | None] = {}
            for key, parts in items:
                changed[check_key(key)] = None if parts is None else b"".join(bytes(part) for part in each_part(parts))
            for key, content in changed.items():
                if content is None:
                    self._objects.pop(key, None)
                else:
                    self._objects[key] = (content, time.time())
            return Created()

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        """As `Backend.get`."""
        with self._gate.call():
            content = self._content(check_key(key))
            if content is None:
                raise NotFound(f"{self.name} has no object {key!r}")
            return content if byte_range is None else content[byte_range[0] : byte_range[1]]

    def stat(self, key: str) -> Stat | None:
        """As `Backend.stat`."""
        with self._gate.call():
            entry = self._objects.get(check_key(key))
            return None if entry is None else Stat(len(entry[0]), entry[1])

    def list(self, prefix: str) -> Iterator[str]:
        """As `Backend.list`, of the keys at the time of the call."""
        with self._gate.call(), self._lock:
            return iter(sorted(key for key in self._objects if key.startswith(prefix)))

    def delete(self, key: str) -> None:
        """As `Backend.delete`."""
        self.put_many([(key, None)])

    def close(self) -> None:
        """As `Backend.close`; the content is gone."""
        if self._gate.close():
            self._objects.clear()

    def _content(self, key: str) -> bytes | None:
        entry = self._objects.get(key)
        return None if entry is None else entry[0]
