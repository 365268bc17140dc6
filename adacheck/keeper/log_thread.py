"""The keeper's log thread: takes the trainer's pieces, has them stored on NVMe (or in memory), acks, and gives the blocks back."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Mapping

from adacheck.backends.errors import BackendError
from adacheck.capture.blocks import Blocks
from adacheck.errors import Detached, Superseded
from adacheck.history import Row
from adacheck.keeper.assembly import payload_bytes
from adacheck.keeper.log import Batch, LogWriter, Message
from adacheck.keeper.progress import acknowledge, declare_lost, may_catch_up
from adacheck.keeper.proof import newest_proven
from adacheck.keeper.protocol import Kind, receive
from adacheck.keeper.rejoin import rejoin
from adacheck.keeper.scan import held_of
from adacheck.keeper.shared import MEMORY, NVME, Shared
from adacheck.keeper.submission import Draft
from adacheck.keeper.window import Logged, Window
from adacheck.manifests.record import Increment

PAYLOADS_KEPT = 1000
REJOIN_STEPS, REJOIN_STEPS_MAX = 2, 1024
"""Steps between tries to use NVMe again: doubled after each that failed, up to the second number."""

_log = logging.getLogger("adacheck")


class LogThread:
    """The body of the thread is `run`; everything else is called from it, but for `submit`."""

    def __init__(self, shared: Shared, window: Window, blocks: Blocks, memory_budget_bytes: int, zstd_level: int | None = None) -> None:
        self._shared, self._window, self._blocks = shared, window, blocks
        self._memory_budget_bytes = memory_budget_bytes
        self._writer = LogWriter(shared.chain.name, shared.chain.cut, shared.chain.link, shared.chain.history, self._row, zstd_level)
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._ending = False
        self._rejoin_at, self._pause = 0, REJOIN_STEPS
        self.payloads: dict[int, Mapping[str, int]] = {}
        """Stored bytes of the newest steps, by payload."""
        self.cpu_s = 0.0

    def submit(self, message: Message | None) -> None:
        """Queue a message; `None` ends the thread once all before it is stored."""
        self._queue.put(message)

    def run(self) -> None:
        """Store batch after batch until the end."""
        while not self._ending and (first := self._queue.get()) is not None:
            batch = self._store(first)
            self._account(batch)
            self.cpu_s = time.thread_time()
            if not self._shared.nvme_alive and isinstance(batch.consumed[-1], Draft) and batch.consumed[-1].step >= self._rejoin_at:
                self._rejoin(batch.consumed[-1].step)

    def _more(self) -> Message | None:
        try:
            message = self._queue.get_nowait()
        except queue.Empty:
            return None
        self._ending = message is None
        return message

    def _store(self, first: Message) -> Batch:
        batch, copy = Batch(), self._shared.chain.nvme_copy
        if self._shared.nvme_alive and copy is not None:
            try:
                if self._writer.write_nvme(copy.backend, copy.expect, first, self._more, batch):
                    return batch
                raise Superseded(f"{copy.backend.name} belongs to a later incarnation of run {copy.chain.run}; stop this process")
            except BackendError as error:
                lose_nvme(self._shared, error)
        messages, batch = batch.consumed or [first], Batch()
        self._writer.write_memory(self._window.memory, messages, batch)
        return batch

    def _account(self, batch: Batch) -> None:
        if batch.finished:
            self._show_generation()
        for logged in batch.finished:
            self._window.add(logged)
            self.payloads[logged.increment.step] = payload_bytes(logged.increment)
            self.payloads.pop(logged.increment.step - PAYLOADS_KEPT, None)
        with self._shared.changed:
            for logged in batch.finished:
                self._receive(logged)
            self._shared.chain.history = self._writer.history
        for message in batch.consumed:
            if isinstance(message, Draft):
                self._shared.allow(message.committed, message.durable)
        for piece in batch.done:
            self._blocks.give(piece.where)
        if self._window.memory_bytes() > self._memory_budget_bytes:
            raise Detached(
                f"increments waiting in memory passed the budget of {self._memory_budget_bytes} bytes; "
                "raise memory_budget, or give the run an NVMe directory (nvme=DIR)"
            )

    def _row(self, draft: Draft, increment: Increment) -> Row:
        """What the history keeps of a step."""
        with self._shared.changed:
            progress, proven = self._shared.chain.progress, newest_proven(self._shared.chain.proof, self._shared.committed)
        stored = payload_bytes(increment)
        return Row(
            draft.step,
            time.time(),
            gradient_bytes=stored["gradient"],
            value_bytes=stored["value"],
            derived_tensors=len(increment.derived),
            refresh_bytes=stored["refresh"],
            opaque_bytes=stored["opaque"],
            blocked_us=draft.blocked_us,
            acked=progress.acked,
            committed=progress.committed,
            durable=progress.durable,
            proven=-1 if proven is None else proven,
        )

    def _show_generation(self) -> None:
        """The first increment of a new generation is stored: make it what a restore reads, before it is acked."""
        copy = self._shared.chain.nvme_copy
        if self._shared.nvme_alive and copy is not None and not copy.stored:
            try:
                copy.replace_generation()
            except BackendError as error:
                lose_nvme(self._shared, error)

    def _receive(self, logged: Logged) -> None:
        """Both copies hold the increment now: the protocol learns it, and they ack."""
        chain, increment, held = self._shared.chain, logged.increment, held_of(logged.increment)
        chain.memory, _ = receive(chain.memory, chain.name.incarnation, increment.step, held)
        chain.progress = acknowledge(chain.progress, MEMORY, Kind.MEMORY, chain.memory.top, chain.memory.floor)
        if self._shared.nvme_alive and chain.nvme is not None and chain.nvme_copy is not None:
            chain.nvme_copy.logged(increment, logged.linked.link)
            chain.nvme, _ = receive(chain.nvme, chain.name.incarnation, increment.step, held)
            chain.progress = acknowledge(chain.progress, NVME, Kind.NVME, chain.nvme.top, chain.nvme.floor)

    def _rejoin(self, step: int) -> None:
        """Bring NVMe back in with a new base, between two steps of the log; if that fails, try again some steps later.

        What is there goes first, so a full checkpoint must have taken all of it over: whatever stops this half way costs nothing
        durable then. And an increment above the new base must be there, since the opaque state of a cut is in its increment.
        """
        shared, chain = self._shared, self._shared.chain
        if chain.nvme_copy is None or chain.nvme is None or chain.progress.published < chain.nvme.top:
            return
        with shared.applying:
            served = max(chain.nvme.top, chain.progress.synced)
            covered = chain.progress.published >= served and chain.memory.least_base > served
            if not covered or chain.memory.least_base >= chain.memory.top:
                return
            if not may_catch_up(chain.progress, Kind.NVME, chain.nvme, chain.memory):
                return
            try:
                fresh = rejoin(chain.nvme_copy, chain.memory, chain.shadow, self._window, chain.certifier)
            except BackendError as error:
                self._pause = min(2 * self._pause, REJOIN_STEPS_MAX)
                self._rejoin_at = step + self._pause
                shared.report(f"NVMe cannot be used again yet, the next try is at step {self._rejoin_at}: {error}")
                return
            self._pause = REJOIN_STEPS
            with shared.changed:
                chain.nvme, shared.nvme_alive = fresh, True
                chain.progress = acknowledge(chain.progress, NVME, Kind.NVME, fresh.top, fresh.floor)
        _log.warning("NVMe is used again from step %d on", fresh.floor)


def lose_nvme(shared: Shared, error: BackendError) -> None:
    """NVMe cannot be written: commitment goes on in memory, and a full checkpoint takes over what NVMe kept durable."""
    with shared.changed:
        if shared.nvme_alive:
            shared.nvme_alive, shared.full_wanted = False, True
            shared.chain.progress = declare_lost(shared.chain.progress, NVME)
            shared.report(f"NVMe stopped: the chain goes on in memory alone, under-replicated, until it can be written again: {error}")
            shared.changed.notify_all()
