"""Who may use a backend right now: not after `close()`, not in a forked child, and `close()` waits for calls under way.

Every backend of this folder holds one gate, so that closing from one thread while others are inside is an error for
them at their next call, never a crash.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from adacheck.backends.errors import BackendClosed, Busy


class Gate:
    """Counts the calls in progress of one backend; `name` is used in messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._state = threading.Condition()
        self._calls = 0
        self._closed = False
        self._own = threading.local()

    def check(self) -> None:
        """Raise unless a call may begin.

        Raises:
            Busy: this is a child forked from the process that opened the backend.
            BackendClosed: `close()` was called.
        """
        if os.getpid() != self._pid:
            raise Busy(f"{self._name} was opened by process {self._pid}; a forked child ({os.getpid()}) must open its own, or use spawn")
        if self._closed:
            raise BackendClosed(f"{self._name} is closed")

    @contextmanager
    def call(self) -> Iterator[None]:
        """Held during one call of the backend. Raises as `check` does."""
        self.check()
        with self._state:
            self.check()
            self._calls += 1
        self._own.depth = getattr(self._own, "depth", 0) + 1
        try:
            yield
        finally:
            self._own.depth -= 1
            with self._state:
                self._calls -= 1
                self._state.notify_all()

    def close(self) -> bool:
        """Let no call begin any more, wait for those under way, and say whether the caller may release things.

        `False` in a forked child, whose parent goes on using what is shared. What is released must bear it twice: an interrupt may
        come between, and the next close then does the rest.

        Raises:
            Busy: called from inside a call of the same backend (by the generator of a batch), which could never end.
        """
        if os.getpid() != self._pid:
            return False
        if getattr(self._own, "depth", 0):
            raise Busy(f"{self._name} cannot be closed from inside one of its own calls; close it after the batch")
        with self._state:
            self._closed = True
            self._state.wait_for(lambda: self._calls == 0)
        return True
