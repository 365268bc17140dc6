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

from adacheck import install, start
from adacheck.backends.errors import BackendError
from adacheck.capture.blocks import PoolEmpty
from adacheck.capture.forgotten import Forgotten
from adacheck.capture.inventory import Inventory
from adacheck.deadline import Deadline
from adacheck.errors import AdacheckError, Closed, Detached, NotDurable, NotRestored
from adacheck.generations import Generations
from adacheck.install import Stateful
from adacheck.keeper import proof, refresh
from adacheck.keeper.driver import Keeper
from adacheck.preemption import finish_on_sigterm, forget
from adacheck.recovery import Cut
from adacheck.reports import Reports
from adacheck.restore_notes import notes
from adacheck.status import Status, status_of
from adacheck.undisturbed import undisturbed

if TYPE_CHECKING:
    from adacheck.store import Store

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
        self._generations = Generations(store.config, store.objects, inventory)
        self._capture, self._pace = self._generations.capture, self._generations.pace
        self._forgotten = Forgotten(inventory, self._capture.gradients, self._extra)
        self._schedule: tuple[refresh.Layout, refresh.Schedule] | None = None
        self._reports = Reports()
        self._blocked_s = 0.0
        self._pid = os.getpid()
        self._closed = self._released = False
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
            AdacheckError: training has begun already, or this is a forked child of the process that attached.
        """
        self._refuse_closed("restore")
        self._refuse_forked("restore")
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
                install.install(cut, self._inventory, self._extra, self._capture.gradients)
            finally:
                self._capture.suspended = False
            self._step = cut.step
        self._start_keeping(begun, cut)
        if cut is not None:
            self.restored = replace(cut, states={})
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
            AdacheckError: another thread is in `step()` or in an optimizer's; with `on_error=raise`, what went wrong since the last call.
        """
        self._refuse_closed("step")
        self._refuse_forked("step")
        with self._capture.turn.of("step()"):
            self._take_step()

    def status(self) -> Status:
        """Where things stand; costs nothing, and is refused in a forked child."""
        self._refuse_forked("status")  # a thread that the fork left behind may hold the lock
        keeper = self._keeper
        if keeper is None:
            return Status(self._step)
        before_gap, waited_s = self._generations.before_gap, self._generations.blocks.blocked_s
        return status_of(self._step, keeper, before_gap, self._blocked_s * 1e3, waited_s * 1e3)

    def inexact(self, step: int) -> tuple[str, ...]:
        """Names of the states whose bytes in the cut at `step` were found to differ from the trainer's."""
        if self._keeper is None:
            return ()
        chain = self._keeper.shared.chain
        return tuple(chain.shadow[state].spec.fqn for state in proof.inexact_states(chain.proof, step) if state in chain.shadow)

    def drain(self) -> None:
        """Wait until every step so far is committed and applied to the shadow.

        Raises:
            Closed: after `close()`.
            NotDurable: the keeper failed, or did not get there within `deadline_s`. AdacheckError: in a forked child.
        """
        self._refuse_closed("drain")
        self._refuse_forked("drain")
        if self._keeper is not None:
            self._apply_all(self._keeper, Deadline.after(self._config.deadline_s))

    def publish_full(self) -> None:
        """Take a full checkpoint of the last step and wait until it is published; nothing to do if there is one.

        Raises:
            Closed: after `close()`.
            NotDurable: it could not be published within `deadline_s`; says why. AdacheckError: in a forked child.
        """
        self._refuse_closed("publish_full")
        self._refuse_forked("publish_full")
        deadline = Deadline.after(self._config.deadline_s)
        if self._keeper is not None:
            self._apply_all(self._keeper, deadline)
            self._publish(self._keeper, deadline)

    def close(self) -> None:
        """Wait until the last step is durable, then end: hooks, threads and files are released whatever happens.

        All of it takes `deadline_s` at most, and a second for the threads to end. Called again after an interrupt, it releases what
        is left. In a forked child it only takes the hooks away: keeper and files are the parent's, which goes on.

        Raises:
            NotDurable: the last step could not be made durable. AdacheckError: with `on_error=raise`, what else went wrong since.
        """
        if self._released:
            return
        deadline = Deadline.after(self._config.deadline_s)
        atexit.unregister(self._at_exit)
        forget(self._on_sigterm)
        self._capture.remove()
        if os.getpid() != self._pid:
            self._forgotten.end()
            self._closed = self._released = True
            return
        try:
            if not self._closed:
                self._closed = True
                self._finish(deadline)
        finally:
            self._release(deadline)

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
        if self._start is not None and self._start.spent and self._keeper is None:  # interrupted, or refused
            self._start.release()
            self._start = None
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
        self._start_keeping(begun, start.find_cut(begun, step=None, only=None))

    @property
    def _keeper(self) -> Keeper | None:
        return self._generations.keeper

    def _start_keeping(self, begun: start.Start, cut: Cut | None) -> None:
        atexit.register(self._at_exit)
        finish_on_sigterm(self._on_sigterm)
        self._forgotten.begin()
        self._generations.begin(begun, cut)

    def _take_step(self) -> None:
        """Called again after an interrupt at any line, it finds out what is missing from `submitted`, and begins again."""
        begun = time.perf_counter()
        if self._keeper is None:
            self._start_new_run()
        keeper = self._keeper
        assert keeper is not None, "a started checkpointer has a keeper"
        if keeper.failure is None and (self._capture.suspended or keeper.submitted != self._step):
            keeper.shared.fail(Detached(f"step {self._step} was interrupted"))
        self._step += 1
        if keeper.failure is None:
            try:
                self._make_increment(keeper)
            except PoolEmpty as error:
                self._generations.detach(error)
            except BaseException as error:  # half an increment cannot be taken back: a new base will follow
                keeper.shared.fail(Detached(f"step {self._step} could not be captured: {type(error).__name__}: {error}"))
                raise
        for line in self._forgotten.after_call():
            _log.warning("%s", line)
        self._reports.say(keeper, raising=self._config.on_error == "raise")
        if isinstance(keeper.failure, Detached):
            self._generations.go_on(self._begin(), self._step)
        self._blocked_s = self._capture.take_blocked_s() + time.perf_counter() - begun

    def _make_increment(self, keeper: Keeper) -> None:
        self._pace.round(keeper)
        progress = keeper.progress()
        plan = self._plan()
        ranges: dict[int, list[tuple[str, int, int]]] = {}
        for piece in refresh.due(plan, self._step) if plan else ():
            ranges.setdefault(piece.state, []).append((piece.tensor, piece.start, piece.stop))
        draft = self._capture.finish(self._step, ranges, keeper.drifted())
        gradients = self._capture.gradients.of_cut(self._capture.unattached)
        for name, content in install.opaque_items(self._inventory, self._extra, gradients, self._capture.unattached):
            self._capture.writer.send_opaque(name, content)
        self._capture.writer.seal()
        if keeper.failure is not None:
            return  # another thread stepped an optimizer meanwhile, say: this cut may be of no moment at all
        keeper.submit(replace(draft, committed=progress.committed, durable=progress.durable, blocked_us=round(self._blocked_s * 1e6)))
        certifying = 2 * len(draft.comparable) > len(draft.gradients)
        most = CERTIFYING_STEPS_MAX if certifying else max(self._config.log_steps // 2, CERTIFYING_STEPS_MAX)
        self._pace.keep(keeper, most, self._generations.blocks)

    def _plan(self) -> refresh.Schedule | None:
        """Which ranges are refreshed when; made anew when the states have changed."""
        layout = [
            (number, [(name, tensor.numel(), tensor.element_size()) for name, tensor in live.tensors().items()])
            for number, live in sorted(self._inventory.states.items())
        ]
        if self._schedule is None or self._schedule[0] != layout:
            self._schedule = (layout, refresh.schedule(layout, self._config.refresh_steps))
        return self._schedule[1]

    def _apply_all(self, keeper: Keeper, deadline: Deadline) -> None:
        last = keeper.submitted
        if keeper.failure or not self._pace.wait_applied(keeper, last, deadline.left_s()) or keeper.failure:
            raise NotDurable(f"step {last} is acked up to {keeper.progress().acked} and not applied: {self._reports.why(keeper)}")

    def _publish(self, keeper: Keeper, deadline: Deadline) -> None:
        if keeper.submitted > 0 and not keeper.publish(deadline.left_s()):
            raise NotDurable(f"the full checkpoint at step {keeper.submitted} is not published: {self._reports.why(keeper)}")

    def _finish(self, deadline: Deadline) -> None:
        """Make the last step durable, and say if it was not checkpointed."""
        keeper = self._keeper
        if keeper is None:
            return
        behind = keeper.submitted != self._step
        with suppress(NotDurable) if behind else nullcontext():
            self._make_durable(keeper, deadline)
        if behind:
            raise NotDurable(f"step {self._step} was not checkpointed, the last is {keeper.submitted}: {self._reports.why(keeper)}")

    def _make_durable(self, keeper: Keeper, deadline: Deadline) -> None:
        self._apply_all(keeper, deadline)
        last = keeper.submitted
        if keeper.progress().durable < last:
            self._publish(keeper, deadline)
        keeper.shared.wait(lambda: not keeper.uploading, deadline.left_s())
        keeper.keep_identity(deadline.left_s())
        if keeper.failure is not None:
            raise NotDurable(f"step {last} will not be restored: {keeper.failure}")
        late = keeper.progress().durable < last
        self._reports.say(keeper, raising=self._config.on_error == "raise" and not late)
        if late:
            raise NotDurable(
                f"step {last} is durable nowhere, the newest that is is {keeper.progress().durable}: {self._reports.why(keeper)}"
            )
        self._reports.say(keeper, raising=self._config.on_error == "raise")

    def _release(self, deadline: Deadline) -> None:
        self._forgotten.end()
        self._generations.end(deadline)
        if self._start is not None:
            self._start.release()
        self._released = True

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise Closed(f"{what}() was called after close(), which came at step {self._step}; attach again to go on")

    def _refuse_forked(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise AdacheckError(
                f"{what}() was called in a forked child, which has no keeper; open the store and attach in the process that trains"
            )

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
