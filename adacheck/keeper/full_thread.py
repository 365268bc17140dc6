"""Full checkpoints in the background: copied out of the shadow at one step, uploaded and published by a thread of its own.

With NVMe a cut is staged there and read back piece by piece; without, it is copied in memory, which then needs room for all states
once more. A slow or failing object tier never holds up the log or the shadow.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence

from adacheck import catalogue, incarnations, retention
from adacheck.backends.base import Backend
from adacheck.backends.errors import BackendError
from adacheck.digest import Buffer
from adacheck.errors import DamagedCut, Superseded
from adacheck.full_checkpoint import CutId, StateSource, write_full
from adacheck.history import whole
from adacheck.keeper.nvme import NvmeCopy
from adacheck.keeper.progress import publish
from adacheck.keeper.proof import Proof, Verdict, verdict
from adacheck.keeper.shared import Shared
from adacheck.manifests.record import Base, Certificate, FullEntry
from adacheck.states import State, segment_ranges, tensor_bytes

NEWEST_CHECK_STEPS = 100
"""Steps between two looks for a later incarnation: a full checkpoint may be far away, and what a superseded process does is lost."""

Opaque = Sequence[tuple[str, bytes]]
_STATUS = {Verdict.PROVEN: "proven", Verdict.INEXACT: "inexact"}


class FullThread:
    """Takes cuts from the apply thread, one at a time, and learns from it which of them are proven.

    Args:
        shared: the chain it works for.
        backend: the object tier.
        full_every, keep: as in `StoreConfig`.
        retry_steps: how many steps to wait after a failure; after each further one twice as many, up to `full_every`.
        listed: what the head lists at the start.
    """

    def __init__(
        self, shared: Shared, backend: Backend, full_every: int, keep: int, retry_steps: int, listed: Iterable[FullEntry] = ()
    ) -> None:
        self._shared, self._backend = shared, backend
        self._full_every, self._keep, self._retry_steps = full_every, keep, retry_steps
        self._taken = self._before = max((entry.step for entry in listed), default=-1)
        self._retry_at: int | None = None
        self._failures = 0
        self._pending: dict[int, str] = {}
        self._verdicts: dict[str, str] = {}
        self._check_queued = False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._busy = False
        self.failure: str | None = None
        """Why the newest use of the object tier failed, `None` while the last one succeeded."""
        self.cpu_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a cut is being uploaded."""
        return self._busy

    @property
    def pending_steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints whose proof is still to come."""
        return tuple(self._pending)

    def due(self, step: int, *, wanted: bool) -> bool:
        """Whether the cut at `step`, where the shadow is now, is to be taken: a multiple was passed, or somebody wants one."""
        if self._busy or step <= max(self._taken, 0):
            return False
        if wanted or self._retry_at is not None:
            return wanted or step >= (self._retry_at or 0)
        return step // self._full_every > self._taken // self._full_every

    def take_staged(
        self, step: int, states: Sequence[State], opaque: Opaque, certificates: tuple[Certificate, ...], copy: NvmeCopy
    ) -> None:
        """Stage the cut on NVMe and upload it from there.

        Raises:
            BackendError: it cannot be staged; nothing was taken.
        """
        records = copy.stage(states, step)
        sources = [StateSource(base.spec, _staged_reader(copy, base), base.digest) for base in records]
        self._start(step, sources, opaque, certificates, lambda: self._unstage(copy, step))

    def take_copied(self, step: int, states: Sequence[State], opaque: Opaque, certificates: tuple[Certificate, ...]) -> None:
        """Copy the cut in memory and upload it from there."""
        copies = [State(s.spec, {name: tensor.clone() for name, tensor in s.tensors.items()}, {}) for s in states]
        sources = [StateSource(state.spec, _memory_reader(state), state.digest()) for state in copies]
        self._start(step, sources, opaque, certificates, lambda: None)

    def learn(self, proof: Proof) -> None:
        """Publish what has become known of checkpoints whose proof was pending; now and then see whether a later start exists."""
        if proof.step % NEWEST_CHECK_STEPS == 0 and not self._check_queued:  # one at a time, however long the object tier is away
            self._check_queued = True
            self._queue.put(self._look)
        for step, folder in list(self._pending.items()):
            known = verdict(proof, step)
            if known is not Verdict.PENDING:
                del self._pending[step]
            if (status := _STATUS.get(known)) is not None:
                self._queue.put(lambda status=status, folder=folder: self._tell(folder, status))  # type: ignore[misc]

    def run(self) -> None:
        """The thread's body."""
        while (job := self._queue.get()) is not None:
            try:
                job()
                if self._retry_at is None:  # else a full checkpoint is still owed
                    self.failure = None
            except Superseded as error:
                self._shared.fail(error)
                return
            except (BackendError, DamagedCut) as error:
                self._failed(f"the object tier could not be brought up to date: {error}")
            self.cpu_s = time.thread_time()

    def stop(self) -> None:
        """End the thread after what it does now."""
        self._queue.put(None)

    def _start(
        self,
        step: int,
        sources: Sequence[StateSource],
        opaque: Opaque,
        certificates: tuple[Certificate, ...],
        finish: Callable[[], None],
    ) -> None:
        self._busy, self._before, self._taken, self._retry_at = True, self._taken, step, None
        self._queue.put(lambda: self._upload(step, sources, opaque, certificates, finish))

    def _upload(
        self,
        step: int,
        sources: Sequence[StateSource],
        opaque: Opaque,
        certificates: tuple[Certificate, ...],
        finish: Callable[[], None],
    ) -> None:
        name = self._shared.chain.name
        try:
            cut = CutId(name.run, name.generation, name.incarnation, step)
            entry = write_full(self._backend, cut, sources, opaque, certificates=certificates, history=whole(self._shared.chain.history))
            self._publish(catalogue.listing(entry))
        except (BackendError, DamagedCut) as error:
            wait_steps = min(self._retry_steps << self._failures, max(self._full_every, self._retry_steps))
            self._taken, self._retry_at, self._failures = self._before, step + wait_steps, self._failures + 1
            self._failed(f"the full checkpoint at step {step} failed, the next try is at step {self._retry_at}: {error}")
        else:
            self._failures = 0
            self._pending[step] = entry.folder
            self._published(step)
            retention.prune(self._backend, name.run, name.incarnation, self._keep)
        finally:
            try:
                finish()
            finally:
                with self._shared.changed:
                    self._busy = False
                    self._shared.changed.notify_all()

    def _unstage(self, copy: NvmeCopy, step: int) -> None:
        """Remove what was staged. NVMe that fails at it fails for the log as well, which deals with that; no fault of the object tier."""
        try:
            copy.unstage(step)
        except BackendError as error:
            self._shared.report(f"what was staged on NVMe for the full checkpoint at step {step} could not be removed: {error}")

    def check_newest(self) -> None:
        """Find out whether this process still owns the run.

        Raises:
            Superseded: a later incarnation has started.
        """
        incarnations.check_newest(self._backend, self._shared.chain.name.incarnation)

    def _look(self) -> None:
        self._check_queued = False
        self.check_newest()
        if self._verdicts:
            self._publish()

    def _tell(self, folder: str, status: str) -> None:
        self._verdicts[folder] = status
        self._publish()

    def _failed(self, text: str) -> None:
        self.failure = text
        self._shared.report(text)

    def keep_identity(self) -> None:
        """Put back the records that say whose the object tier is, if they are gone."""
        if (lost := incarnations.keep_identity(self._backend, *self._shared.chain.identity)) is not None:
            self._shared.report(lost)

    def _publish(self, change: Callable[[catalogue.Fulls], catalogue.Fulls] = lambda fulls: fulls) -> None:
        """Publish a change, and with it the verdicts that an earlier publication could not."""
        name, told = self._shared.chain.name, dict(self._verdicts)

        def changed(fulls: catalogue.Fulls) -> catalogue.Fulls:
            fulls = change(fulls)
            for folder, status in told.items():
                fulls = catalogue.with_status(status, [folder])(fulls)
            return fulls

        self.keep_identity()
        catalogue.publish(self._backend, name.run, name.incarnation, changed)
        for folder in told:
            del self._verdicts[folder]

    def _published(self, step: int) -> None:
        shared = self._shared
        with shared.changed:
            shared.chain.progress = publish(shared.chain.progress, step)
            if not shared.nvme_alive and shared.chain.nvme is not None and step < shared.chain.nvme.top:
                shared.full_wanted = True  # NVMe may be used again only when a full checkpoint covers what it holds
            shared.changed.notify_all()


def _staged_reader(copy: NvmeCopy, base: Base) -> Callable[[str], Iterable[Buffer]]:
    def read(tensor: str) -> Iterable[Buffer]:
        return (copy.read_staged(base.step, base.spec.state, segment) for segment in base.segments if segment.tensor == tensor)

    return read


def _memory_reader(state: State) -> Callable[[str], Iterable[Buffer]]:
    described = {tensor.name: tensor for tensor in state.spec.tensors}

    def read(tensor: str) -> Iterable[Buffer]:
        view, size = tensor_bytes(state.tensors[tensor]), state.tensors[tensor].element_size()
        return (view[start * size : stop * size] for start, stop in segment_ranges(described[tensor]))

    return read
