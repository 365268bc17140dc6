"""One moment of an LMDB store, for whoever must see several objects together while another process goes on writing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from adacheck.backends.base import Backend, Created, Exists, Expect, Item, Parts, Stat, Traits, check_key
from adacheck.backends.errors import Damaged, Denied, NotFound

Reading = Callable[[str], AbstractContextManager[None]]


class LmdbSnapshot(Backend):
    """The store as one read transaction sees it; made by `LmdbBackend.snapshot`, used by one thread at a time."""

    def __init__(self, name: str, traits: Traits, transaction: Any, reading: Reading) -> None:
        self.name, self.traits = name, traits
        self._transaction, self._reading = transaction, reading

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        """As `Backend.get`."""
        with self._reading(f"read {key!r}"):
            value = self._transaction.get(check_key(key).encode())
            if value is None:
                raise NotFound(f"{self.name} has no object {key!r}")
            return bytes(value) if byte_range is None else bytes(value[byte_range[0] : byte_range[1]])

    def stat(self, key: str) -> Stat | None:
        """As `Backend.stat`."""
        with self._reading(f"read {key!r}"):
            value = self._transaction.get(check_key(key).encode())
            return None if value is None else Stat(len(value), 0.0)

    def list(self, prefix: str) -> Iterator[str]:
        """As `Backend.list`."""
        with self._reading(f"list {prefix!r}"):
            cursor = self._transaction.cursor()
            found = cursor.set_range(prefix.encode()) if prefix else cursor.first()
            keys = []
            while found and bytes(cursor.key()).startswith(prefix.encode()):
                keys.append(text_of(bytes(cursor.key()), self.name))
                found = cursor.next()
        yield from keys

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        """Refused."""
        raise Denied(f"this view of {self.name} only reads")

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        """Refused."""
        raise Denied(f"this view of {self.name} only reads")

    def delete(self, key: str) -> None:
        """Refused."""
        raise Denied(f"this view of {self.name} only reads")

    def close(self) -> None:
        """Nothing: it ends with the `with` that made it."""


def text_of(name: bytes, store: str) -> str:
    """A key as text.

    Raises:
        Damaged: it is none, and every key that was ever written is.
    """
    try:
        return name.decode("ascii")
    except UnicodeDecodeError as error:
        raise Damaged(f"{store} has a key {name!r} that nobody wrote; restore from another tier and move the directory away") from error
