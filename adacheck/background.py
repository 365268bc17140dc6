"""A thread whose start may be interrupted and tried again: `threading.Thread` cannot tell afterwards whether it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs `body` in a thread called `name`, once, however often its start is repeated."""

    def __init__(self, body: Callable[[], None], name: str) -> None:
        self._body, self._name = body, name
        self._begun = False
        self._claim = threading.Lock()
        self._claimed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun: the first of the threads that were started does the work, the others end at once."""
        if not self._begun:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._begun = True

    def join(self) -> None:
        """Wait until `body` has ended, if its start was not interrupted."""
        if self._begun:
            self._claimed.wait()
            assert self._thread is not None
            self._thread.join()

    def _run(self) -> None:
        if self._claim.acquire(blocking=False):
            self._thread = threading.current_thread()
            self._claimed.set()
            self._body()
