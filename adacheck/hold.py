"""Keeps something open between two calls of somebody else's, and no longer than a bound: nobody says whether the second one comes."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

T = TypeVar("T")


class Hold:
    """One context at a time, entered by its user and left by it; or by a timer, never while it is used.

    The lock is reentrant: the collection of garbage may end a hold, also on the timer's own thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stack = ExitStack()
        self._timer: threading.Timer | None = None

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Leave what is held, then enter this one, without a bound."""
        self.leave()
        return self._stack.enter_context(context)

    def leave(self) -> None:
        """Leave what is held; nothing where nothing is."""
        with self._lock:
            self.resume()
            self._stack.close()

    def lend(self, bound_s: float) -> None:
        """Leave by itself when so many seconds have passed without `resume`. Until then it is not to be used."""
        timer = threading.Timer(bound_s, lambda: self._expire(timer))
        timer.name, timer.daemon = "adacheck-hold", True
        with self._lock:
            self.resume()
            self._timer = timer
            timer.start()

    def resume(self) -> bool:
        """Take back what was lent: whether it is still held, now without a bound."""
        with self._lock:
            timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()
            return timer is not None

    def _expire(self, timer: threading.Timer) -> None:
        with self._lock:
            if self._timer is timer:  # else it was taken back while this thread waited for the lock
                self.leave()
