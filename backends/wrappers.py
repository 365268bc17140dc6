"""What goes around a backend without the backend's knowledge: trying again, and going slow.

Put `Retrying` outside and `Limited` inside: `Retrying(Limited(ObjectStore(...)))`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from adacheck.backends.base import Backend, Buffer, Created, Exists, Expect, Item, Parts, Stat, Upload, each_part
from adacheck.backends.errors import NotFound, Unavailable
from adacheck.backends.retry import Retry

_PIECE_BYTES = 1 << 20


class Wrapper(Backend):
    """Passes every call on; base of the wrappers here and of fault injection in tests."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.traits = backend.traits
        self.name = backend.name

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        """As `Backend.put`."""
        return self._backend.put(key, parts, exclusive=exclusive)

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        """As `Backend.put_many`."""
        return self._backend.put_many(items, expect=expect)

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        """As `Backend.get`."""
        return self._backend.get(key, byte_range)

    def stat(self, key: str) -> Stat | None:
        """As `Backend.stat`."""
        return self._backend.stat(key)

    def list(self, prefix: str) -> Iterator[str]:
        """As `Backend.list`."""
        return self._backend.list(prefix)

    def delete(self, key: str) -> None:
        """As `Backend.delete`."""
        self._backend.delete(key)

    def uploads(self) -> Iterator[Upload]:
        """As `Backend.uploads`."""
        return self._backend.uploads()

    def discard_upload(self, upload: str) -> None:
        """As `Backend.discard_upload`."""
        self._backend.discard_upload(upload)

    def check_writable(self) -> None:
        """As `Backend.check_writable`."""
        self._backend.check_writable()

    def close(self) -> None:
        """As `Backend.close`."""
        self._backend.close()


def _can_repeat(parts: Parts) -> bool:
    """Whether parts can be taken a second time: anything but an iterator (a generator, an open file)."""
    return not isinstance(parts, Iterator)


class Retrying(Wrapper):
    """Tries again what was `Unavailable`, as `retry` says; other errors pass at once.

    A put can be tried again only if its parts can be taken again: a buffer, a list, or what makes them anew for each iteration. A
    generator gets one attempt, since keeping its bytes would have no bound. So does an atomic batch with `expect`, whose own first
    attempt may have changed the key.

    An exclusive put whose first attempt's outcome is unknown may find its own object. Then the contents are compared, and equal
    is `Created`. So what is put exclusively must differ between writers (host, pid, a random id), or two could both win.
    """

    def __init__(self, backend: Backend, retry: Retry | None = None) -> None:
        super().__init__(backend)
        self._retry = retry or Retry()

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        """As `Backend.put`."""
        failures = 0

        def once() -> Created | Exists:
            nonlocal failures
            try:
                outcome = self._backend.put(key, parts, exclusive=exclusive)
                if isinstance(outcome, Exists) and failures and self._holds(key, parts):
                    return Created()
                return outcome
            except Unavailable:
                failures += 1
                raise

        return self._retry(once) if _can_repeat(parts) else once()

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        """As `Backend.put_many`. Where batches are atomic, one that is a list (or tuple) of such parts is tried again as a whole.

        Elsewhere each item is tried again by itself.
        """
        if not self.traits.atomic_batch:
            return self._each(items, expect)
        if expect is not None or not isinstance(items, (list, tuple)) or not all(p is None or _can_repeat(p) for _, p in items):
            return self._backend.put_many(items, expect=expect)
        return self._retry(lambda: self._backend.put_many(items))

    def _each(self, items: Iterable[Item], expect: Expect | None) -> Created | Exists:
        if expect is not None:
            outcome = self._retry(lambda: self._backend.put_many((), expect=expect))
            if isinstance(outcome, Exists):
                return outcome
        for key, parts in items:
            if parts is None:
                self.delete(key)
            else:
                self.put(key, parts)
        return Created()

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        """As `Backend.get`."""
        return self._retry(lambda: self._backend.get(key, byte_range))

    def stat(self, key: str) -> Stat | None:
        """As `Backend.stat`."""
        return self._retry(lambda: self._backend.stat(key))

    def list(self, prefix: str) -> Iterator[str]:
        """As `Backend.list`, gathered before the first key is given out."""
        return iter(self._retry(lambda: tuple(self._backend.list(prefix))))

    def delete(self, key: str) -> None:
        """As `Backend.delete`."""
        self._retry(lambda: self._backend.delete(key))

    def uploads(self) -> Iterator[Upload]:
        """As `Backend.uploads`, gathered before the first is given out."""
        return iter(self._retry(lambda: tuple(self._backend.uploads())))

    def discard_upload(self, upload: str) -> None:
        """As `Backend.discard_upload`."""
        self._retry(lambda: self._backend.discard_upload(upload))

    def _holds(self, key: str, parts: Parts) -> bool:
        """Whether the object's content is exactly `parts`; read piece by piece."""
        at = 0
        try:
            for part in each_part(parts):
                content = memoryview(part).cast("B")
                if self._backend.get(key, (at, at + len(content))) != content:
                    return False
                at += len(content)
            found = self._backend.stat(key)
        except NotFound:
            return False
        return found is not None and found.size_bytes == at


class Limited(Wrapper):
    """Keeps the bytes written and read, together, to `bytes_per_s` on average, over all threads that use it.

    Args:
        clock, sleep: seconds, for tests.
    """

    def __init__(
        self,
        backend: Backend,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(backend)
        self._bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        """As `Backend.put`."""
        return self._backend.put(key, self._slowed(parts), exclusive=exclusive)

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        """As `Backend.put_many`."""
        slowed = ((key, None if parts is None else self._slowed(parts)) for key, parts in items)
        return self._backend.put_many(slowed, expect=expect)

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        """As `Backend.get`; the wait comes after the read, whose size is known only then."""
        content = self._backend.get(key, byte_range)
        self._take(len(content))
        return content

    def _slowed(self, parts: Parts) -> Iterator[Buffer]:
        for part in each_part(parts):
            content = memoryview(part).cast("B")
            for at in range(0, len(content), _PIECE_BYTES):
                piece = content[at : at + _PIECE_BYTES]
                self._take(len(piece))
                yield piece

    def _take(self, size_bytes: int) -> None:
        """Wait until this many bytes may pass. Each caller reserves its time first, so that many threads share one rate."""
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + size_bytes / self._bytes_per_s
            wait_s = self._free_at - now
        if wait_s > 0:
            self._sleep(wait_s)
