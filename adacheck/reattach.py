"""Begins again after the keeper had to give up, without stopping the training: a new generation with a new base.

The old chain's newest cut stays restorable until the new generation has its first: it becomes the fork's cut, and the old log is
deleted only when the new head record is written. What must be asked of the object tier, and written there, is done by a thread of its own:
a bucket that does not answer costs the trainer no time, only the checkpoints until it does.

Its number is its own plus one and no other: one above what is listed could be below its own in a tier that was emptied, or above that
of a later start. A try that failed may have written some of its records unseen, so the next one claims the same again.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace

from adacheck import catalogue, history, incarnations
from adacheck.backends.base import Backend, Created, Exists, Expect, Parts
from adacheck.backends.wrappers import Wrapper
from adacheck.background import Background
from adacheck.errors import Closed, Superseded
from adacheck.keeper.cut import NO_CUT
from adacheck.keeper.nvme import NvmeCopy
from adacheck.keeper.progress import begin
from adacheck.keeper.proof import begin_proof
from adacheck.keeper.protocol import Copy, Kind, rebuilt
from adacheck.keeper.shared import MEMORY, NVME, ChainState
from adacheck.manifests import chain as links
from adacheck.manifests import keys
from adacheck.manifests.encoding import encode
from adacheck.manifests.record import Chain, Fork, FullEntry, Incarnation
from adacheck.start import Start

_log = logging.getLogger("adacheck")


@dataclass(frozen=True, slots=True)
class Taken:
    """The next incarnation: all its records are written, and nothing of its chain. `fulls`: what the head lists."""

    incarnation: Incarnation
    fork: Fork
    fulls: tuple[FullEntry, ...]


class Taking:
    """Takes the next incarnation after `old` has ended, in a thread that runs from the first look on, until `done`."""

    def __init__(self, start: Start, old: ChainState) -> None:
        self._start, self._old = start, old
        self._taken: Taken | None = None
        self._error: Exception | None = None
        self._thread = Background(self._run, "adacheck-again")
        self.done = threading.Event()

    @property
    def running(self) -> bool:
        """Whether the object tier has not answered yet."""
        self._thread.start()
        return not self.done.is_set()

    def result(self) -> Taken:
        """What was taken, once it does not run any more.

        Raises:
            Superseded: a later incarnation has started elsewhere.
            AdacheckError, BackendError, FormatError: a tier does not answer, refuses, or cannot be read; the next try may succeed.
        """
        if self._error is not None:
            raise self._error
        assert self._taken is not None
        return self._taken

    def _run(self) -> None:
        try:
            self._taken = take_next(self._start, self._old)
        except Exception as error:  # for the trainer, which asks for the result
            self._error = error
        self.done.set()


def take_next(start: Start, old: ChainState) -> Taken:
    """Take the incarnation, fence the copy, write the fork: in this order, as at a start. Raises as `Taking.result`.

    After an error it is called again, and finds what it has written already.
    """
    run, objects = old.name.run, _UntilReleased(start)
    if (lost := incarnations.keep_identity(objects, *old.identity)) is not None:
        _log.warning("%s", lost)
    claim = start.claim = start.claim or incarnations.begun_now(run, start.incarnation.incarnation + 1, start.config.nvme)
    incarnations.take_claimed(objects, claim)
    if start.nvme is not None:
        _fence(start.nvme, start.incarnation, claim)
    reached = max(old.memory.top if not old.nvme else old.nvme.top, old.progress.published, NO_CUT)
    incarnations.void_unstarted(objects, run, claim.incarnation)
    fork = Fork(run, claim.incarnation, reached, True)
    incarnations.write_fork(objects, fork)
    taken = Taken(claim, fork, catalogue.head(objects, run).fulls)
    start.incarnation, start.claim = claim, None
    return taken


def _fence(nvme: Backend, before: Incarnation, claim: Incarnation) -> None:
    outcome = nvme.put_many([(keys.FENCE, encode(claim))], expect=Expect(keys.FENCE, encode(before)))
    if not isinstance(outcome, Created) and nvme.get(keys.FENCE) != encode(claim):
        raise Superseded(f"{nvme.name} belongs to a later incarnation of run {claim.run}; stop this process")


class _UntilReleased(Wrapper):
    """The object tier as long as the checkpointer is not closed: `close()` does not wait for a thread that hangs in it."""

    def __init__(self, start: Start) -> None:
        super().__init__(start.objects)
        self._start = start

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        """As `Backend.put`, and `Closed` once another start may have the run."""
        if self._start.released:
            raise Closed(f"{key} is not written: the checkpointer was closed while checkpoints were to begin again")
        return super().put(key, parts, exclusive=exclusive)


def begin_generation(start: Start, old: ChainState, taken: Taken, step: int) -> ChainState:
    """The chain of the next generation, which begins after `step` with every state shipped whole; `old` has ended. Writes nothing."""
    name = replace(old.name, generation=old.name.generation + 1, incarnation=taken.incarnation.incarnation)
    genesis = links.genesis(name.run, name.generation, name.chain)
    memory = rebuilt(name.incarnation, name.incarnation, step, ())
    copies: dict[str, tuple[Kind, Copy]] = {MEMORY: (Kind.MEMORY, memory)}
    stored = None
    if start.nvme is not None:
        head = Chain(name.run, name.generation, name.chain, name.incarnation, name.incarnation, step, genesis, (), (), ())
        stored = NvmeCopy(start.nvme, head, encode(taken.incarnation), stored=False)
        copies[NVME] = (Kind.NVME, memory)
    progress = begin(step, copies, old.progress.published)
    proof = begin_proof(step, {})
    return ChainState(
        name,
        step,
        {},
        memory,
        memory if stored else None,
        stored,
        genesis,
        [],
        progress,
        old.certifier,
        proof,
        (taken.incarnation, (*old.identity[1], taken.fork)),
        history.resumed(old.history, name.incarnation),
    )
