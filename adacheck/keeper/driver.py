"""The keeper in process: its three threads started and stopped together, and the few things the trainer asks of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from adacheck.backends.base import Backend
from adacheck.backends.errors import BackendError
from adacheck.capture.blocks import Blocks
from adacheck.config import StoreConfig
from adacheck.deadline import Deadline
from adacheck.errors import AdacheckError, Detached, ForeignRun, Superseded
from adacheck.keeper import proof
from adacheck.keeper.apply_thread import ApplyThread
from adacheck.keeper.full_thread import FullThread
from adacheck.keeper.log import Message
from adacheck.keeper.log_thread import LogThread
from adacheck.keeper.progress import Progress, after_round, vector
from adacheck.keeper.shared import ChainState, Shared
from adacheck.keeper.submission import Draft
from adacheck.keeper.window import Window
from adacheck.manifests.record import FullEntry
from adacheck.threads import set_threads

AGAIN_S = 1.0
"""Pause before a full checkpoint that somebody waits for is tried again."""

_log = logging.getLogger("adacheck")


class Keeper:
    """Owns one chain's copies on this host, from `start` to `stop`."""

    def __init__(
        self,
        chain: ChainState,
        config: StoreConfig,
        memory_budget_bytes: int,
        blocks: Blocks,
        objects: Backend,
        fulls: tuple[FullEntry, ...],
    ) -> None:
        self.shared = Shared(chain, chain.nvme_copy is not None, chain.progress.committed, chain.progress.durable)
        window = Window(chain.name.generation, chain.nvme_copy.backend if chain.nvme_copy else None)
        self._log_thread = LogThread(self.shared, window, blocks, memory_budget_bytes, config.zstd_level)
        self._full_thread = FullThread(self.shared, objects, config.full_every, config.keep, config.log_steps, fulls)
        self._apply_thread = ApplyThread(self.shared, window, self._full_thread, config.log_steps)
        self.submitted = chain.cut
        self._started = False
        bodies = {"log": self._log_thread.run, "apply": self._apply_thread.run, "full": self._full_thread.run}
        self._threads = [
            threading.Thread(target=self._run, args=(body,), name=f"adacheck-{name}", daemon=True) for name, body in bodies.items()
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        self._started = True

    def stop(self, deadline_s: float) -> None:
        """End the threads once what is queued is logged; what is not committed is not applied. With 0, do not wait for them.

        May be called again, as an interrupt may have kept the first call from reaching all of them.
        """
        deadline = Deadline.after(deadline_s)
        with self.shared.lock:
            self.shared.stopping = True
            self.shared.changed.notify_all()
        self._log_thread.submit(None)
        self._full_thread.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=deadline.left_s())
            if thread.is_alive() and deadline_s > 0:
                _log.warning("thread %s has not ended within %.0f s and is left behind", thread.name, deadline_s)

    def submit(self, message: Message) -> None:
        """Take over a piece, or the draft that ends its step; never blocks."""
        self._log_thread.submit(message)
        if isinstance(message, Draft):
            self.submitted = message.step

    @property
    def running(self) -> bool:
        """Whether any of its threads has not ended."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def failure(self) -> AdacheckError | None:
        """What stopped the keeper, or kept it from starting."""
        return self.shared.failure or (None if self._started else Detached("the keeper's start was interrupted"))

    def progress(self) -> Progress:
        """The watermarks now."""
        with self.shared.lock:
            return self.shared.chain.progress

    def learn(self, reduced: tuple[int, ...]) -> Progress:
        """Take in a finished round of the trainers."""
        with self.shared.lock:
            self.shared.chain.progress = after_round(self.shared.chain.progress, reduced)
            return self.shared.chain.progress

    def vector(self) -> tuple[int, ...]:
        """This rank's part of the next round."""
        return vector(self.progress())

    def drifted(self) -> frozenset[int]:
        """States in which a difference was found and that were not shipped whole since."""
        return proof.must_ship(self.shared.chain.proof)

    def publish(self, deadline_s: float) -> bool:
        """Have a full checkpoint of the last step published, which is applied; tried again until the deadline. Whether it is."""
        shared, deadline = self.shared, Deadline.after(deadline_s)
        shared.wait(lambda: not self.uploading, deadline_s)
        while shared.chain.progress.published < self.submitted:
            self.request_full()
            shared.wait(lambda: not (self.uploading or shared.full_wanted), deadline.left_s())
            if shared.chain.progress.published < self.submitted:
                if self.failure is not None or deadline.left_s() < AGAIN_S:
                    return False
                time.sleep(AGAIN_S)
        return True

    def request_full(self) -> None:
        """Take a full checkpoint of the cut the shadow is at, or comes to next."""
        with self.shared.lock:
            self.shared.full_wanted = True
            self.shared.changed.notify_all()

    def keep_identity(self, deadline_s: float) -> None:
        """Before the end: the object tier still says whose it is, or the log on NVMe could not be restored with it."""
        thread = threading.Thread(target=self._keep_identity, name="adacheck-identity", daemon=True)
        thread.start()
        thread.join(timeout=deadline_s)
        if thread.is_alive():
            self.shared.report("the object tier could not be looked at: it did not answer before the deadline")

    def _keep_identity(self) -> None:
        try:
            self._full_thread.keep_identity()
            self._full_thread.check_newest()
        except (Superseded, ForeignRun) as error:
            self.shared.fail(error)
        except (BackendError, AdacheckError) as error:
            self.shared.report(f"the object tier could not be looked at: {error}")

    @property
    def object_failure(self) -> str | None:
        """Why the newest use of the object tier failed, `None` while the last one succeeded."""
        return self._full_thread.failure

    @property
    def uploading(self) -> bool:
        """Whether a full checkpoint is on its way."""
        return self._full_thread.busy

    def payloads(self) -> Mapping[int, Mapping[str, int]]:
        """Stored bytes of the newest steps, by payload."""
        return dict(self._log_thread.payloads)

    def newest_payload(self) -> Mapping[str, int]:
        """Stored bytes of the newest logged step, by payload."""
        payloads = self._log_thread.payloads
        return payloads[max(payloads)] if payloads else {}

    def cpu_s(self) -> Mapping[str, float]:
        """CPU seconds used so far, by thread."""
        return {"log": self._log_thread.cpu_s, "apply": self._apply_thread.cpu_s, "full": self._full_thread.cpu_s}

    def take_reports(self) -> list[str]:
        """What went wrong since the last call without stopping the keeper."""
        with self.shared.lock:
            reports, self.shared.reports = self.shared.reports, []
            return reports

    def _run(self, body: Callable[[], None]) -> None:
        set_threads(1)  # torch's operations here must not start threads of their own beside the trainer's
        try:
            body()
        except AdacheckError as error:
            self.shared.fail(error)
        except BaseException as error:
            _log.exception("the keeper stopped at step %d", self.submitted)
            failure = Detached(f"the keeper stopped at step {self.submitted}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.shared.fail(failure)
