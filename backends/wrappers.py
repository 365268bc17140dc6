"""What goes around a backend without the backend's knowledge: trying again, and going slow.

Put `Retrying` outside and `Limited` inside: `Retrying(Limited(ObjectStore(...)))`.
"""

from __future__ import annotations

import random as random_module
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from adacheck.backends.base import Backend, Buffer, Created, Exists, Expect, Item, Parts, Stat, each_part
from adacheck.backends.errors import NotFound, Unavailable

_Result = TypeVar("_Result")
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

    def close(self) -> None:
        """As `Backend.close`."""
        self._backend.close()


def _can_repeat(parts: Parts) -> bool:
    """Whether parts can be taken a second time: anything but an iterator (a generator, an open file)."""
    return not isinstance(parts, Iterator)


class Again:
    """Parts (or items) made anew each time they are taken, so that a put of a generator can be tried again.

    `store.put(key, Again(lambda: shard_bytes(path)))`
    """

    def __init__(self, make: Callable[[], Iterable[Buffer]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._make())


class Retrying(Wrapper):
    """Tries again what was `Unavailable`, at growing intervals, up to `attempts` times in all; other errors pass at once.

    A put can be tried again only if its parts can be taken again: a buffer, a list, or `Again`. A generator gets one attempt,
    since keeping its bytes would have no bound. So does an atomic batch with `expect`, whose own first attempt may have changed the key.

    An exclusive put whose first attempt's outcome is unknown may find its own object. Then the contents are compared, and equal
    is `Created`. So what is put exclusively must differ between writers (host, pid, a random id), or two could both win.

    Args:
        base_delay_s: the first interval is half to all of this, each further one of twice as much, up to `max_delay_s`.
        sleep, random: for tests; `random()` is in [0, 1).
    """

    def __init__(
        self,
        backend: Backend,
        attempts: int = 5,
        base_delay_s: float = 0.2,
        *,
        max_delay_s: float = 10.0,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = random_module.random,
    ) -> None:
        super().__init__(backend)
        self._attempts, self._base_delay_s, self._max_delay_s = attempts, base_delay_s, max_delay_s
        self._sleep, self._random = sleep, random

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        """As `Backend.put`."""
        attempts = self._attempts if _can_repeat(parts) else 1
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

        return self._repeat(once, attempts)

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        """As `Backend.put_many`. Where batches are atomic, one that is a list (or tuple) of such parts is tried again as a whole.

        Elsewhere each item is tried again by itself.
        """
        if not self.traits.atomic_batch:
            return self._each(items, expect)
        if expect is not None or not isinstance(items, (list, tuple)) or not all(p is None or _can_repeat(p) for _, p in items):
            return self._backend.put_many(items, expect=expect)
        return self._repeat(lambda: self._backend.put_many(items), self._attempts)

    def _each(self, items: Iterable[Item], expect: Expect | None) -> Created | Exists:
        if expect is not None and isinstance(
            outcome := self._repeat(lambda: self._backend.put_many((), expect=expect), self._attempts), Exists
        ):
            return outcome
        for key, parts in items:
            if parts is None:
                self.delete(key)
            else:
                self.put(key, parts)
        return Created()

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        """As `Backend.get`."""
        return self._repeat(lambda: self._backend.get(key, byte_range), self._attempts)

    def stat(self, key: str) -> Stat | None:
        """As `Backend.stat`."""
        return self._repeat(lambda: self._backend.stat(key), self._attempts)

    def list(self, prefix: str) -> Iterator[str]:
        """As `Backend.list`, gathered before the first key is given out."""
        return iter(self._repeat(lambda: tuple(self._backend.list(prefix)), self._attempts))

    def delete(self, key: str) -> None:
        """As `Backend.delete`."""
        self._repeat(lambda: self._backend.delete(key), self._attempts)

    def _repeat(self, call: Callable[[], _Result], attempts: int) -> _Result:
        for failed in range(attempts - 1):
            try:
                return call()
            except Unavailable:
                delay_s = min(self._base_delay_s * 2**failed, self._max_delay_s)
                self._sleep(delay_s * (0.5 + 0.5 * self._random()))
        return call()

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
