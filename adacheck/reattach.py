"""Begins again after the keeper had to give up, without stopping the training: a new generation with a new base.

The old chain's newest cut stays restorable until the new generation has its first: it becomes the fork's cut, and the old log is
deleted only when the new head record is written.
"""

from __future__ import annotations

from dataclasses import replace

from adacheck import history, incarnations
from adacheck.backends.base import Created, Expect
from adacheck.errors import Superseded
from adacheck.keeper.cut import NO_CUT
from adacheck.keeper.nvme import NvmeCopy
from adacheck.keeper.progress import begin
from adacheck.keeper.proof import begin_proof
from adacheck.keeper.protocol import Copy, Kind, rebuilt
from adacheck.keeper.shared import MEMORY, NVME, ChainState
from adacheck.manifests import chain as links
from adacheck.manifests import keys
from adacheck.manifests.encoding import encode
from adacheck.manifests.record import Chain, Fork
from adacheck.start import Start


def begin_generation(start: Start, old: ChainState, step: int) -> ChainState:
    """The chain of the next generation, which begins after `step` with every state shipped whole; `old` has ended.

    Raises:
        Superseded: a later incarnation has started elsewhere.
        BackendError: a tier does not answer; the next try may succeed.
    """
    incarnations.check_newest(start.objects, start.incarnation.incarnation)
    before = encode(start.incarnation)
    incarnation = incarnations.take_incarnation(start.objects, old.name.run)
    nvme = start.nvme
    if nvme is not None:
        outcome = nvme.put_many([(keys.FENCE, encode(incarnation))], expect=Expect(keys.FENCE, before))
        if not isinstance(outcome, Created):
            raise Superseded(f"{nvme.name} belongs to a later incarnation of run {old.name.run}; stop this process")
    start.incarnation = incarnation
    reached = max(old.memory.top if not old.nvme else old.nvme.top, old.progress.published, NO_CUT)
    incarnations.void_unstarted(start.objects, old.name.run, incarnation.incarnation)
    fork = Fork(old.name.run, incarnation.incarnation, reached, True)
    incarnations.write_fork(start.objects, fork)
    name = replace(old.name, generation=old.name.generation + 1, incarnation=incarnation.incarnation)
    genesis = links.genesis(name.run, name.generation, name.chain)
    memory = rebuilt(name.incarnation, name.incarnation, step, ())
    copies: dict[str, tuple[Kind, Copy]] = {MEMORY: (Kind.MEMORY, memory)}
    stored = None
    if nvme is not None:
        head = Chain(name.run, name.generation, name.chain, name.incarnation, name.incarnation, step, genesis, (), (), ())
        stored = NvmeCopy(nvme, head, encode(incarnation), stored=False)
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
        (incarnation, (*old.identity[1], fork)),
        history.resumed(old.history, name.incarnation),
    )
