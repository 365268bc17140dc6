"""Keeps trainer and keeper together: the rounds that tell the keeper how far it may apply, and waiting until it has."""

from __future__ import annotations

import time

from adacheck.capture.blocks import Blocks, PoolEmpty
from adacheck.commit import SingleProcess
from adacheck.deadline import Deadline
from adacheck.keeper.driver import Keeper


class Pace:
    """The trainer's side of the watermarks; one for all keepers of a checkpointer."""

    def __init__(self) -> None:
        self._rounds = SingleProcess()

    def round(self, keeper: Keeper) -> None:
        """Learn the rounds that finished, and in a world of one run one at once."""
        self._rounds.begin(keeper.vector())
        for reduced in self._rounds.take_finished():
            keeper.learn(reduced)

    def wait_applied(self, keeper: Keeper, step: int, deadline_s: float) -> bool:
        """Wait until the shadow is at `step`, running the round that lets it get there; whether it is in time."""
        deadline, shared = Deadline.after(deadline_s), keeper.shared
        shared.wait(lambda: shared.chain.progress.acked >= step, deadline_s)
        self.round(keeper)
        progress = keeper.progress()
        shared.allow(progress.committed, progress.durable)
        return shared.wait(lambda: shared.chain.memory.least_base >= step, deadline.left_s())

    def keep(self, keeper: Keeper, most: int, blocks: Blocks) -> None:
        """Wait while more than `most` steps are not applied yet, so that the log does not outgrow what it is said to need.

        Raises:
            PoolEmpty: none was applied within the blocks' deadline.
        """
        behind = keeper.submitted - keeper.shared.chain.memory.least_base
        if behind <= most:
            return
        begun = time.perf_counter()
        caught_up = self.wait_applied(keeper, keeper.submitted - most, blocks.deadline_s)
        blocks.blocked_s += time.perf_counter() - begun
        if not caught_up and keeper.failure is None:
            raise PoolEmpty(f"{behind} steps wait to be applied, {most} may, and none was for {blocks.deadline_s:.0f} s")
