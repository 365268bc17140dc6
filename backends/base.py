"""What every tier of storage offers: few methods over bytes, and what differs as data.

A backend knows keys and bytes, nothing of chains or tensors. Callers that need a property (an exclusive put, a durable
batch) read it from `Traits` instead of knowing the class.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from adacheck.backends.errors import Denied, InvalidKey

Buffer = bytes | bytearray | memoryview
Parts = Buffer | Iterable[Buffer]
"""The content of one object: one buffer, or buffers that are written one after the other.

A backend takes each part before it asks for the next, so a generator may hand out the same scratch buffer again.
"""

Item = tuple[str, Parts | None]
"""One entry of a batch: a key with its new content, or with `None` to delete it."""

KEY_BYTES_MAX = 480
_KEY = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*\Z")


@dataclass(frozen=True, slots=True)
class Traits:
    """What a backend guarantees; callers decide by these, never by its class.

    Attributes:
        atomic_put: an object is seen whole or not at all, whenever the writer dies.
        atomic_batch: `put_many` is one transaction.
        exclusive_put: of several `put(exclusive=True)` of one key, exactly one is `Created`.
        durable: a put that returned survives a power cut.
        survives_process: the content outlives the process that wrote it.
        survives_host: the content outlives the host that wrote it.
    """

    atomic_put: bool
    atomic_batch: bool
    exclusive_put: bool
    durable: bool
    survives_process: bool
    survives_host: bool


@dataclass(frozen=True, slots=True)
class Created:
    """The put (or the whole batch) was carried out."""


@dataclass(frozen=True, slots=True)
class Exists:
    """An exclusive put found the key taken, or a batch's condition did not hold. Nothing was written."""

    key: str


@dataclass(frozen=True, slots=True)
class Stat:
    """Size of an object, and when it was last written (Unix time; 0.0 where the backend does not know)."""

    size_bytes: int
    modified_unix_s: float


@dataclass(frozen=True, slots=True)
class Upload:
    """A put that has not ended, or whose process was killed.

    Attributes:
        name: what `Backend.discard_upload` takes.
        folder: that its object would be in (`full/i00000003/step-…`), without a `/` at the end.
        touched_unix_s: when it was last written to, or, where nobody knows that, begun.
    """

    name: str
    folder: str
    touched_unix_s: float


@dataclass(frozen=True, slots=True)
class Expect:
    """The condition of a batch: carry it out only if `key` holds exactly `content` (`None`: only if it is absent)."""

    key: str
    content: bytes | None


class Backend(ABC):
    """A flat map from keys to bytes. Safe to use from several threads of one process.

    Raises (all methods): `InvalidKey`, `BackendClosed`, `Unavailable` (worth a retry), `Full`, `Denied`; see `errors.py`.
    """

    traits: Traits
    name: str
    """What to call this backend in messages, with its address: `lmdb:/mnt/nvme0/...`."""

    @abstractmethod
    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        """Store an object, replacing an older one unless `exclusive`."""

    @abstractmethod
    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        """Store and delete several objects in order; one transaction where `traits.atomic_batch`.

        Items are taken one at a time, so a generator may compute them on the way. An exception in it aborts the batch.
        """

    @abstractmethod
    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        """The object's bytes, or those of the half-open range `(start, stop)`, cut at the object's end.

        Raises:
            NotFound: there is no such object.
        """

    @abstractmethod
    def stat(self, key: str) -> Stat | None:
        """Size and time of an object, `None` if there is none."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with `prefix` (any string, also in mid-name), sorted; never from a listing cache."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; one that is absent already is no error."""

    def uploads(self) -> Iterator[Upload]:
        """Puts that have not ended: under way, or left by a process that was killed; none where a backend leaves no traces of them."""
        return iter(())

    def discard_upload(self, upload: str) -> None:
        """Remove what is left of one of `uploads`, by its name; one that is gone already is no error."""
        raise Denied(f"{upload!r} is no upload of {self.name}, which has none")

    def check_writable(self) -> None:
        """Raise `Denied` where it is known, without writing, that nothing can be written; most backends find out by their first put."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release what is held; a second call does nothing. Every other method then raises `BackendClosed`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def is_key(name: str) -> bool:
    """Whether `check_key` would take it."""
    return len(name) <= KEY_BYTES_MAX and _KEY.match(name) is not None and not any(part in (".", "..") for part in name.split("/"))


def check_key(key: str) -> str:
    """Refuse a key that some backend could not hold, or that could leave its root directory.

    Raises:
        InvalidKey: empty, absolute, with `.` or `..` as a name, over 480 bytes, or with other characters.
    """
    if not is_key(key):
        raise InvalidKey(f"key {key!r} is not a relative path of letters, digits, '.', '_' and '-' under {KEY_BYTES_MAX} bytes")
    return key


def each_part(parts: Parts) -> Iterable[Buffer]:
    """The buffers of `parts`, whichever of its two forms it has."""
    return (parts,) if isinstance(parts, (bytes, bytearray, memoryview)) else parts
