"""The keeper of a checkpointer, and the next one after it gave up: a generation each, with a pool of blocks of its own.

Training goes on meanwhile; the hooks do nothing until the new generation begins, with every state whole.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from adacheck import start
from adacheck.backends.base import Backend
from adacheck.capture.blocks import Blocks, PoolEmpty
from adacheck.capture.hooks import Capture
from adacheck.capture.inventory import Inventory
from adacheck.capture.pieces import PieceWriter
from adacheck.config import StoreConfig
from adacheck.deadline import Deadline
from adacheck.errors import Detached
from adacheck.keeper.certify import Certifier
from adacheck.keeper.driver import Keeper
from adacheck.keeper.shared import ChainState
from adacheck.manifests.record import FullEntry
from adacheck.memory_need import fit
from adacheck.nvme_directory import nvme_path
from adacheck.pace import Pace
from adacheck.reattach import Taking, begin_generation
from adacheck.recovery import Cut
from adacheck.status import status_of

RETRY_STEPS = 32
"""Steps after which a keeper that gave up is begun again."""

BLOCK_DEADLINE_S = 60.0
"""Longest the trainer waits for a block before the keeper is taken for stuck, and training goes on without it."""

END_S = 1.0
"""What a keeper's threads have to end after all else has used up the deadline: enough, unless one waits for a tier that is away."""

_log = logging.getLogger("adacheck")


@dataclass
class _GivenUp:
    """What is known of a keeper that gave up; the next keeper makes it void.

    Attributes:
        retry_at: the step at which the next keeper may begin.
        taking: takes the incarnation for it.
    """

    keeper: Keeper
    retry_at: int
    taking: Taking | None = None


class Generations:
    """One keeper after the other, and the capture that feeds them; for the trainer's thread.

    Attributes:
        keeper: the present one, which may have failed; `None` before the first.
        blocks: its pool.
        capture: the hooks on the optimizers.
        pace: the rounds with it.
        before_gap: the step after which the present generation began, and what was committed and durable then; (-1, 0, 0) in the first.
    """

    def __init__(self, config: StoreConfig, objects: Backend, inventory: Inventory) -> None:
        self._config, self._objects, self._inventory = config, objects, inventory
        self.keeper: Keeper | None = None
        self.blocks = Blocks(0, min(config.deadline_s, BLOCK_DEADLINE_S))
        self.capture = Capture(inventory, PieceWriter(self.blocks, self._submit), self._verdicts, self.detach)
        self.pace = Pace()
        self.before_gap = (-1, 0, 0)
        self._budget = 0
        self._given_up: _GivenUp | None = None

    def begin(self, begun: start.Start, cut: Cut | None) -> None:
        """Bring the copies into the incarnation at the cut, which the live tensors have been written from, and start the keeper.

        Raises:
            ConfigError: the host has less than the run needs. Superseded: a later incarnation has started meanwhile.
        """
        gradient_bytes, state_bytes = self._inventory.expected_bytes()
        held_bytes = sum(state.size_bytes for state in cut.states.values()) if cut else 0
        log = nvme_path(self._config, begun.sources.run)
        self.blocks.count, self._budget = fit(self._config, gradient_bytes, state_bytes, held_bytes, self._config.refresh_steps, log)
        keeper = self._make(start.bring_copies_in(begun, cut), begun.sources.fulls)
        self.pace.round(keeper)
        keeper.start()

    def go_on(self, begun: start.Start, step: int) -> None:
        """After the keeper gave up: begin a new generation at this step, if its threads have ended, `RETRY_STEPS` have passed,
        and the next incarnation is taken, for which no step waits.

        An interrupt may end any call of it at any line: what a call leaves behind is where the next one goes on.
        """
        failed = self.keeper
        assert failed is not None, "only a keeper that was begun can give up"
        self.capture.suspended = True
        if failed.running:
            failed.stop(0.0)
        if self._given_up is None or self._given_up.keeper is not failed:
            self._given_up = _GivenUp(failed, step + RETRY_STEPS)
        given_up = self._given_up
        if step < given_up.retry_at or failed.running:
            return
        taking = given_up.taking = given_up.taking or Taking(begun, failed.shared.chain)
        try:
            if taking.running:
                return
            taken = taking.result()
        except Exception as error:  # whatever it is, training goes on
            given_up.taking, given_up.retry_at = None, step + RETRY_STEPS
            _log.warning("checkpoints cannot begin again yet: %s (%s)", error, type(error).__name__)
            return
        chain = begin_generation(begun, failed.shared.chain, taken, step)
        old = status_of(step, failed, self.before_gap, 0.0, 0.0)
        self.before_gap = (step, old.committed, old.durable)
        self.capture.writer.close()
        self.blocks = Blocks(self.blocks.count, self.blocks.deadline_s, self.blocks.blocked_s)
        self.capture.writer = PieceWriter(self.blocks, self._submit)
        self._make(chain, taken.fulls).start()  # last: a keeper whose start was interrupted counts as one that gave up
        _log.warning("checkpoints begin again with step %d; steps %d to %d cannot be restored", step + 1, old.committed + 1, step)

    def end(self, deadline: Deadline) -> None:
        """Stop copying, and the keeper; its files are the caller's to close. Its threads have `END_S` even after the deadline."""
        self.capture.writer.close()
        if self.keeper is not None:
            self.keeper.stop(max(deadline.left_s(), END_S))

    def _make(self, chain: ChainState, fulls: tuple[FullEntry, ...]) -> Keeper:
        self.keeper = Keeper(chain, self._config, self._budget, self.blocks, self._objects, fulls)
        self._given_up = None  # the one before, with a shadow as large as this one's
        self.capture.restored(chain.shadow)
        self.capture.suspended = False
        return self.keeper

    def _submit(self, message: object) -> None:
        assert self.keeper is not None
        self.keeper.submit(message)  # type: ignore[arg-type]

    def _verdicts(self) -> Certifier:
        return self.keeper.shared.chain.certifier if self.keeper is not None else Certifier()

    def detach(self, error: Exception) -> None:
        """Take the keeper for failed, since a step could not be captured: training goes on.

        Raises:
            Exception: `error`, where there is no keeper yet.
        """
        if self.keeper is None:
            raise error
        what = "the keeper did not keep up" if isinstance(error, PoolEmpty) else "its gradients could not be captured"
        self.keeper.shared.fail(Detached(f"step {self.keeper.submitted + 1}: {what}: {error}"))
