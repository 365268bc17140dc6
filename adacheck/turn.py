"""One thread at a time: what the trainer's thread does for a checkpoint is not made for two, and a second one is told so.

Two at once would mix their pieces, and a cut would hold bytes that were never live together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from adacheck.errors import AdacheckError


class Turn:
    """Whose turn it is. An interrupt at any line leaves it to nobody, or to the thread that was interrupted, which takes it again."""

    def __init__(self) -> None:
        self._inside: dict[str, tuple[threading.Thread, str]] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """The body is `what`, as in "step()".

        Raises:
            AdacheckError: another thread is inside such a body.
        """
        mine = (threading.current_thread(), what)
        try:
            thread, other = self._inside.setdefault("", mine)  # atomic, and never waits
            if thread is not mine[0]:
                raise AdacheckError(
                    f"{what} was called by thread {mine[0].name} while thread {thread.name} was in {other}: "
                    "call them from one thread at a time"
                )
            self._inside[""] = mine
            yield
        finally:
            if self._inside.get("") is mine:
                del self._inside[""]
