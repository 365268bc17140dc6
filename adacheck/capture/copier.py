"""Copies gradients into blocks while the optimizer steps: both only read them, so neither has to wait for the other.

The trainer hands over ranges in its pre-step hook and waits for what is left of them in its post-step hook. A gradient that the
step itself wrote into (its version counter moved) was not captured; the caller finds that out and sends the state whole.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from adacheck.background import Background
from adacheck.errors import Detached
from adacheck.keeper.submission import Piece
from adacheck.threads import set_threads

_Job = tuple[torch.Tensor, Piece] | threading.Event
"""A range to copy, or what to set when all before it is copied. Nothing is counted: an interrupt may come between any two lines."""


class Copier:
    """One thread that copies, and submits when it has caught up; started with the first range."""

    def __init__(self, submit: Callable[[Piece], None]) -> None:
        self._submit = submit
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waited = True
        self._failure: BaseException | None = None
        self._thread = Background(self._run, "adacheck-copy")

    def copy(self, source: torch.Tensor, piece: Piece) -> None:
        """Have a flat uint8 tensor copied to where `piece` says, and the piece submitted. `source` must not change before `wait`."""
        self._thread.start()
        self._waited = False
        self._queue.put((source, piece))

    def wait(self) -> None:
        """Until everything handed over is copied."""
        if self._waited:
            return
        copied = threading.Event()
        self._queue.put(copied)
        copied.wait()
        self._waited = True
        if self._failure is not None:
            raise Detached(f"a gradient could not be copied: {self._failure}") from self._failure

    def stop(self) -> None:
        """End the thread after what it has."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        set_threads(1)
        copied: list[Piece] = []
        while (job := self._queue.get()) is not None:
            done = job if isinstance(job, threading.Event) else None
            if not isinstance(job, threading.Event):
                source, piece = job
                try:
                    piece.where.tensor().copy_(source)
                except BaseException as error:
                    self._failure = error
                del source
                copied.append(piece)
            del job
            if done is not None or self._queue.empty():  # sooner, the keeper's work on them would take this thread's core
                for piece in copied:
                    self._submit(piece)
                copied.clear()
            if done is not None:
                done.set()
