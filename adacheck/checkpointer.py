"""What a training script holds: `restore()`, `step()`, `status()`, `drain()`, `close()`.

Everything the trainer itself does for a checkpoint happens in the optimizer hooks and in `step()`; the time they take is measured.
A failure of the keeper never stops training unless `on_error=raise` asks for it.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from adacheck import catalogue, install, start
from adacheck.backends.errors import BackendError
from adacheck.capture.blocks import Blocks, PoolEmpty
from adacheck.capture.forgotten import Forgotten
from adacheck.capture.hooks import Capture
from adacheck.capture.inventory import Inventory
from adacheck.capture.pieces import PieceWriter
from adacheck.errors import AdacheckError, Closed, Detached, NotDurable, NotRestored
from adacheck.install import Stateful
from adacheck.keeper import proof, refresh
from adacheck.keeper.certify import Certifier
from adacheck.keeper.driver import Keeper
from adacheck.manifests.record import FullEntry
from adacheck.memory_need import fit
from adacheck.nvme_directory import nvme_path
from adacheck.pace import Pace
from adacheck.preemption import finish_on_sigterm, forget
from adacheck.reattach import begin_generation
from adacheck.recovery import Cut
from adacheck.reports import Reports
from adacheck.restore_notes import notes
from adacheck.status import Status, status_of
from adacheck.undisturbed import undisturbed

if TYPE_CHECKING:
    from adacheck.store import Store

RETRY_STEPS = 32
"""Steps after which a keeper that gave up is begun again."""

BLOCK_DEADLINE_S = 60.0
"""Longest the trainer waits for a block before the keeper is taken for stuck, and training goes on without it."""

CERTIFYING_STEPS_MAX = 1
"""Most steps that may wait to be applied while most states go whole beside their gradients: that ends with the keeper's verdicts."""

_log = logging.getLogger("adacheck")


class Checkpointer:
    """Made by `Store.attach`; used from the thread that trains."""

    def __init__(self, store: Store, inventory: Inventory, extra: Mapping[str, Stateful]) -> None:
        self._store, self._inventory, self._extra = store, inventory, dict(extra)
        self._config = store.config
        self._step = 0
        self._start: start.Start | None = None
        self._keeper: Keeper | None = None
        self._pace = Pace()
        self._blocks = Blocks(0, min(store.config.deadline_s, BLOCK_DEADLINE_S))
        self._writer = PieceWriter(self._blocks, self._submit)
        self._capture = Capture(inventory, self._writer, self._verdicts, self._detach)
        self._forgotten = Forgotten(inventory, self._extra)
        self._schedule: tuple[refresh.Layout, refresh.Schedule] | None = None
        self._reports = Reports()
        self._blocked_s = 0.0
        self._budget, self._pid = 0, os.getpid()
        self._retry_at: int | None = None
        self._before_gap = (-1, 0, 0)  # step a new generation began after, and what was committed and durable then
        self._closed = False
        self.restored: Cut | None = None
        """The cut `restore()` returned: source, increments replayed; without its states."""
        install.opaque_items(inventory, self._extra)  # what cannot be stored is an error now, not after the first step
        self._capture.install()

    # Starting

    @undisturbed
    def restore(self, step: int | None = None, *, proven: bool = False) -> int:
        """Put the newest intact cut back into model, optimizer, `extra` and generators; gives its step, 0 for a new run.

        Args:
            step: this cut and no other.
            proven: only a cut that is known to be exact.

        Raises:
            NoCut: no such cut, or none can be read any more.
            StateMismatch: the script differs from the checkpoint; names all differences, nothing was written.
            ForeignRun, StoreBusy: the NVMe directory belongs to another run, or another process trains this one.
        """
        self._refuse_closed("restore")
        if self._keeper is not None:
            raise AdacheckError(f"restore() was called at step {self._step}, after training had begun; call it once, before the first step")
        if self._capture.stepped:
            _log.warning("restore() was called after an optimizer step, which it undoes if the run has a cut; call it before the loop")
        begun = self._begin()
        only = frozenset(full.step for full in begun.sources.fulls if full.status == "proven") if proven else None
        cut = start.find_cut(begun, step=step, only=only)
        if cut is not None:
            self._capture.suspended = True
            try:
                install.install(cut, self._inventory, self._extra)
            finally:
                self._capture.suspended = False
        self._attach_keeper(begun, cut)
        if cut is not None:
            self.restored = replace(cut, states={})
            self._step = cut.step
            for line in notes(cut, self._inventory):
                _log.warning("%s", line)
            _log.info("restored step %d from %s: go on with range(%d, total)", cut.step, cut.source, cut.step)
        return self._step

    @undisturbed
    def step(self) -> None:
        """Make this iteration a checkpoint: everything the optimizers did since the last call becomes one increment.

        Raises:
            Closed: after `close()`.
            NotRestored: the run has cuts, and `restore()` was not called.
            AdacheckError: with `on_error=raise`, what went wrong since the last call.
        """
        self._refuse_closed("step")
        self._refuse_forked("step")
        begun = time.perf_counter()
        if self._keeper is None:
            self._start_new_run()
        keeper = self._keeper
        assert keeper is not None, "a started checkpointer has a keeper"
        self._step += 1
        if keeper.failure is None and not self._capture.suspended:
            try:
                self._make_increment(keeper)
            except PoolEmpty as error:
                self._detach(error)
            except BaseException as error:  # half an increment cannot be taken back: a new base will follow
                keeper.shared.fail(Detached(f"step {self._step} could not be captured: {type(error).__name__}: {error}"))
                raise
        for line in self._forgotten.after_call():
            _log.warning("%s", line)
        self._reports.say(keeper, raising=self._config.on_error == "raise")
        if isinstance(keeper.failure, Detached):
            self._reattach(keeper)
        self._blocked_s = self._capture.take_blocked_s() + time.perf_counter() - begun

    def status(self) -> Status:
        """Where things stand; costs nothing, and is refused in a forked child."""
        self._refuse_forked("status")  # a thread that the fork left behind may hold the lock
        keeper = self._keeper
        if keeper is None:
            return Status(self._step)
        return status_of(self._step, keeper, self._before_gap, self._blocked_s * 1e3, self._blocks.blocked_s * 1e3)

    def inexact(self, step: int) -> tuple[str, ...]:
        """Names of the states whose bytes in the cut at `step` were found to differ from the trainer's."""
        if self._keeper is None:
            return ()
        chain = self._keeper.shared.chain
        return tuple(chain.shadow[state].spec.fqn for state in proof.inexact_states(chain.proof, step) if state in chain.shadow)

    def drain(self) -> None:
        """Wait until every step so far is committed and applied to the shadow.

        Raises:
            NotDurable: the keeper failed, or did not get there within `deadline_s`. AdacheckError: in a forked child.
        """
        self._refuse_forked("drain")
        keeper = self._keeper
        if keeper is None:
            return
        last = keeper.submitted
        if not self._pace.wait_applied(keeper, last, self._config.deadline_s) or keeper.failure:
            raise NotDurable(f"step {last} is acked up to {keeper.progress().acked} and not applied: {self._reports.why(keeper)}")

    def publish_full(self) -> None:
        """Take a full checkpoint of the last step and wait until it is published; nothing to do if there is one.

        Raises:
            NotDurable: it could not be published within `deadline_s`; says why. AdacheckError: in a forked child.
        """
        self._refuse_forked("publish_full")
        self.drain()
        keeper = self._keeper
        if keeper is None or keeper.submitted == 0:
            return
        if not keeper.publish(self._config.deadline_s):
            raise NotDurable(f"the full checkpoint at step {keeper.submitted} is not published: {self._reports.why(keeper)}")

    def close(self) -> None:
        """Wait until the last step is durable, then end: hooks, threads and files are released whatever happens.

        In a forked child it only takes the hooks away: keeper and files are the parent's, which goes on.

        Raises:
            NotDurable: the last step could not be made durable. AdacheckError: with `on_error=raise`, what else went wrong since.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        forget(self._on_sigterm)
        self._capture.remove()
        if os.getpid() != self._pid:
            self._forgotten.end()
            return
        try:
            behind = self._keeper is not None and self._keeper.submitted != self._step
            if self._keeper is not None:
                with suppress(NotDurable) if behind else nullcontext():
                    self._make_durable(self._keeper)
            if self._keeper is not None and behind:
                raise NotDurable(
                    f"step {self._step} was not checkpointed, the last is {self._keeper.submitted}: {self._reports.why(self._keeper)}"
                )
        finally:
            self._release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except AdacheckError as failed:
            if error is None:
                raise
            _log.error("while %s ended the block: %s", type(error).__name__, failed)

    # Parts

    def _begin(self) -> start.Start:
        if self._start is None:
            self._start = start.take(self._config, self._store.objects)
        return self._start

    def _start_new_run(self) -> None:
        begun = self._begin()
        offers = [step for offer in begun.sources.offers() for step in offer.steps]
        if offers:
            newest = max(offers)
            raise NotRestored(
                f"run {begun.sources.run} has cuts, the newest is step {newest}: write `start = ckpt.restore()` before the training loop "
                "and begin it at `start`, or give a new run another URI"
            )
        self._attach_keeper(begun, None)

    def _attach_keeper(self, begun: start.Start, cut: Cut | None) -> None:
        tensors = [t for live in self._inventory.states.values() for t in live.tensors().values()]
        trained = [live.parameter for live in self._inventory.states.values() if live.optimizer is not None]
        state_bytes = sum(t.numel() * t.element_size() for t in tensors)
        gradient_bytes = sum(p.numel() * p.element_size() for p in trained)
        state_bytes = max(state_bytes, 3 * gradient_bytes)  # optimizer tensors may be still to come
        held_bytes = sum(state.size_bytes for state in cut.states.values()) if cut else 0
        log = nvme_path(self._config, begun.sources.run)
        self._blocks.count, self._budget = fit(self._config, gradient_bytes, state_bytes, held_bytes, self._refresh_steps(), log)
        chain = start.bring_copies_in(begun, cut)
        self._keeper = Keeper(chain, self._config, self._budget, self._blocks, self._store.objects, begun.sources.fulls)
        self._capture.restored(chain.shadow)
        self._pace.round(self._keeper)
        self._keeper.start()
        self._forgotten.begin()
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        finish_on_sigterm(self._on_sigterm)

    def _reattach(self, failed: Keeper) -> None:
        """After a keeper gave up: begin a new generation at this step, if its threads have ended and `RETRY_STEPS` have passed."""
        if self._retry_at is None:
            self._retry_at = self._step + RETRY_STEPS
            self._capture.suspended = True
            failed.stop(0.0)
        if self._step < self._retry_at or failed.running or self._start is None:
            return
        self._retry_at = self._step + RETRY_STEPS
        try:
            chain = begin_generation(self._start, failed.shared.chain, self._step)
        except (AdacheckError, BackendError) as error:
            _log.warning("checkpoints cannot begin again yet: %s", error)
            return
        old, self._retry_at = self.status(), None
        self._before_gap = (self._step, old.committed, old.durable)
        self._use_new_blocks(self._blocks.count)
        self._keeper = Keeper(chain, self._config, self._budget, self._blocks, self._store.objects, self._listed())
        self._capture.restored(())
        self._capture.suspended = False
        self._schedule = None
        self._keeper.start()
        _log.warning(
            "checkpoints begin again with step %d; steps %d to %d cannot be restored", self._step + 1, old.committed + 1, self._step
        )

    def _use_new_blocks(self, count: int) -> None:
        self._writer.close()
        self._blocks = Blocks(count, self._blocks.deadline_s, self._blocks.blocked_s)
        self._writer = self._capture.writer = PieceWriter(self._blocks, self._submit)

    def _listed(self) -> tuple[FullEntry, ...]:
        assert self._start is not None
        return catalogue.head(self._store.objects, self._start.sources.run).fulls

    def _make_increment(self, keeper: Keeper) -> None:
        self._pace.round(keeper)
        progress = keeper.progress()
        plan = self._plan()
        ranges: dict[int, list[tuple[str, int, int]]] = {}
        for piece in refresh.due(plan, self._step) if plan else ():
            ranges.setdefault(piece.state, []).append((piece.tensor, piece.start, piece.stop))
        stepped = self._capture.stepped
        draft = self._capture.finish(self._step, ranges, keeper.drifted())
        for name, content in install.opaque_items(self._inventory, self._extra, self._capture.unattached, stepped=stepped):
            self._writer.send_opaque(name, content)
        self._writer.seal()
        if draft.values or draft.removed:
            self._schedule = None
        keeper.submit(replace(draft, committed=progress.committed, durable=progress.durable, blocked_us=round(self._blocked_s * 1e6)))
        certifying = 2 * len(draft.comparable) > len(draft.gradients)
        most = CERTIFYING_STEPS_MAX if certifying else max(self._config.log_steps // 2, CERTIFYING_STEPS_MAX)
        self._pace.keep(keeper, most, self._blocks)

    def _plan(self) -> refresh.Schedule | None:
        """Which ranges are refreshed when; made anew when the states have changed."""
        layout = [
            (number, [(name, tensor.numel(), tensor.element_size()) for name, tensor in live.tensors().items()])
            for number, live in sorted(self._inventory.states.items())
        ]
        if self._schedule is None or self._schedule[0] != layout:
            self._schedule = (layout, refresh.schedule(layout, self._refresh_steps()))
        return self._schedule[1]

    def _refresh_steps(self) -> int:
        return 1 if self._config.verify == "step" else self._config.refresh

    def _submit(self, message: object) -> None:
        assert self._keeper is not None
        self._keeper.submit(message)  # type: ignore[arg-type]

    def _detach(self, error: Exception) -> None:
        if self._keeper is None:
            raise error
        what = "the keeper did not keep up" if isinstance(error, PoolEmpty) else "its gradients could not be captured"
        self._keeper.shared.fail(Detached(f"step {self._step + 1}: {what}: {error}"))

    def _verdicts(self) -> Certifier:
        return self._keeper.shared.chain.certifier if self._keeper is not None else Certifier()

    def _make_durable(self, keeper: Keeper) -> None:
        self.drain()
        shared, last = keeper.shared, keeper.submitted
        progress = keeper.progress()
        if progress.durable < last and last > 0:
            self.publish_full()
        shared.wait(lambda: not keeper.uploading, self._config.deadline_s)
        keeper.keep_identity()
        if keeper.failure is not None:
            raise NotDurable(f"step {last} will not be restored: {keeper.failure}")
        late = keeper.progress().durable < last
        self._reports.say(keeper, raising=self._config.on_error == "raise" and not late)
        if late:
            raise NotDurable(
                f"step {last} is durable nowhere, the newest that is is {keeper.progress().durable}: {self._reports.why(keeper)}"
            )
        self._reports.say(keeper, raising=self._config.on_error == "raise")

    def _release(self) -> None:
        self._forgotten.end()
        self._writer.close()
        if self._keeper is not None:
            self._keeper.stop(self._config.deadline_s)
        if self._start is not None:
            self._start.release()

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise Closed(f"{what}() was called after close(), which came at step {self._step}; attach again to go on")

    def _refuse_forked(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise AdacheckError(f"{what}() was called in a forked child, which has no keeper; checkpoint in the process that attached")

    def _on_sigterm(self) -> None:
        if os.getpid() != self._pid:
            return
        _log.warning("SIGTERM: step %d is made durable before the process ends", self._step)
        self._at_exit()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has no keeper
        try:
            self.close()
        except (AdacheckError, BackendError) as error:
            _log.error("at exit: %s", error)
