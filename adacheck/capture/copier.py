"""Copies gradients into blocks while the optimizer steps: both only read them, so neither has to wait for the other.

The trainer hands over ranges in its pre-step hook and waits for what is left of them in its post-step hook. A gradient that the
step itself wrote into (its version counter moved) was not captured; the caller finds that out and sends the state whole.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from adacheck.errors import Detached
from adacheck.keeper.submission import Piece
from adacheck.threads import set_threads

_Job = tuple[torch.Tensor, Piece]


class Copier:
    """One thread that copies, and submits when it has caught up; started with the first range."""

    def __init__(self, submit: Callable[[Piece], None]) -> None:
        self._submit = submit
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open = 0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def copy(self, source: torch.Tensor, piece: Piece) -> None:
        """Have a flat uint8 tensor copied to where `piece` says, and the piece submitted. `source` must not change before `wait`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adacheck-copy", daemon=True)
            self._thread.start()
        with self._changed:
            self._open += 1
        self._queue.put((source, piece))

    def wait(self) -> None:
        """Until everything handed over is copied."""
        if self._thread is None:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0)
            if self._failure is not None:
                raise Detached(f"a gradient could not be copied: {self._failure}") from self._failure

    def stop(self) -> None:
        """End the thread after what it has."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        set_threads(1)
        copied: list[Piece] = []
        while (job := self._queue.get()) is not None:
            source, piece = job
            try:
                piece.where.tensor().copy_(source)
            except BaseException as error:
                self._failure = error
            del source, job
            copied.append(piece)
            if self._open == 1:  # caught up; sooner, the keeper's work on them would take this thread's core
                for piece in copied:
                    self._submit(piece)
                copied.clear()
            with self._changed:
                self._open -= 1
                if self._open == 0:
                    assert not copied, "whoever waits relies on every piece being submitted"
                    self._changed.notify_all()
