"""How a trainer starts an incarnation: lock, incarnation, fence, cut, and after the installation fork record and copies.

The order is the protocol's (DESIGN: "Restore"); a crash anywhere in it loses nothing, since no copy is touched before the fork
record that makes it right is written.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import dataclass, field
from math import prod

from adacheck import incarnations
from adacheck.backends.base import Backend, Created, Expect
from adacheck.backends.errors import Busy, NotFound
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.config import StoreConfig
from adacheck.errors import NoCut, StoreBusy, Superseded
from adacheck.fallen_back import fallen_back, unread
from adacheck.history_sources import resume
from adacheck.keeper.assembly import ChainName
from adacheck.keeper.certify import Certifier, certificates, reused
from adacheck.keeper.cut import NO_CUT, ForkEntry, bring_in, proven_since, void_fork
from adacheck.keeper.nvme import NvmeCopy
from adacheck.keeper.progress import begin
from adacheck.keeper.proof import begin_proof
from adacheck.keeper.protocol import Copy, Kind, Refused, rebuilt
from adacheck.keeper.shared import MEMORY, NVME, ChainState
from adacheck.lineage import check_lineage
from adacheck.manifests import chain as links
from adacheck.manifests import keys
from adacheck.manifests.encoding import encode
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Chain, Fork, Incarnation
from adacheck.nvme_directory import CHAIN, GENERATION, check_nvme_run, note_trained, nvme_path, open_copy, trained_here
from adacheck.recovery import Cut, Sources, gather, read_newest
from adacheck.sense import read
from adacheck.set_aside import forget_earlier, forget_half, keep_log
from adacheck.unlisted import unlisted_fulls

_log = logging.getLogger("adacheck")


@dataclass
class Start:
    """An incarnation that has been taken; its copies are fenced, and not yet brought in.

    Attributes:
        before: the incarnation that took the copy on NVMe last.
        unread: steps on NVMe after the cut that was found, which it should have been and could not be read from.
        spent: it was used to bring copies in, or has declared itself void: what it knows is not true any more.
        claim: the next incarnation, while it is being taken (`reattach.py`): some of its records may have been written unseen.
        released: whether this process has ended it, and writes nothing for it any more.
    """

    config: StoreConfig
    objects: Backend
    nvme: LmdbBackend | None
    incarnation: Incarnation
    sources: Sources
    before: Incarnation | None = None
    unread: list[int] = field(default_factory=list)
    spent: bool = False
    claim: Incarnation | None = None
    released: bool = False

    def release(self) -> None:
        """Close NVMe and give up its lock."""
        self.released = True
        if self.nvme is not None:
            self.nvme.close()
            if (path := nvme_path(self.config, self.sources.run)) is not None:
                note_trained(path, None)


def take(config: StoreConfig, objects: Backend) -> Start:
    """Lock the NVMe directory, take the next incarnation, fence the copy, and look at what there is.

    Raises:
        ForeignRun: the NVMe directory and the object tier belong to different runs, or to copies of one that went on apart.
        StoreBusy: another process has the NVMe directory open; it is not disturbed.
        BackendError: a tier cannot be reached or written.
    """
    run = _run_of(config, objects)
    nvme = _open_nvme(config, run)
    try:
        before = check_lineage(config, objects, nvme) if nvme is not None else None
        incarnation = incarnations.take_incarnation(objects, run, config.nvme)
        if nvme is not None:
            _fence(nvme, incarnation)
        incarnations.void_unstarted(objects, run, incarnation.incarnation)
        sources = gather(run, objects, nvme)
    except BaseException:
        if nvme is not None:
            nvme.close()
        raise
    if nvme is not None and (path := nvme_path(config, run)) is not None:
        note_trained(path, nvme)
    return Start(config, objects, nvme, incarnation, sources, before)


def _run_of(config: StoreConfig, objects: Backend) -> str:
    known = incarnations.read_run(objects)
    check_nvme_run(config, known.run if known else None)
    return (known or incarnations.open_run(objects, incarnations.new_run())).run


def _open_nvme(config: StoreConfig, run: str) -> LmdbBackend | None:
    path = nvme_path(config, run)
    if path is None:
        return None
    try:
        nvme, aside = open_copy(path, LmdbBackend)
    except Busy as error:
        hint = "; in a notebook, call close() on the earlier checkpointer or restart the kernel" if trained_here(path) is not None else ""
        raise StoreBusy(f"run {run} is being trained on this host already: {error}{hint}") from error
    forget_half(path)
    if aside is not None:
        _log.warning("rejected: %s", aside)
        forget_earlier(path, unopenable=True)
    return nvme


def _fence(nvme: Backend, incarnation: Incarnation) -> None:
    """Store the fence: from here on no older incarnation writes to this copy."""
    try:
        before: bytes | None = nvme.get(keys.FENCE)
    except NotFound:
        before = None
    if before is not None:
        try:
            read(before, Incarnation)
        except FormatError as error:
            _log.warning("the fence of %s cannot be read and is replaced: %s", nvme.name, error)
    if not isinstance(nvme.put_many([(keys.FENCE, encode(incarnation))], expect=Expect(keys.FENCE, before)), Created):
        raise Superseded(f"{nvme.name} was taken by another incarnation at the same moment; start again")


def find_cut(start: Start, *, step: int | None, only: Container[int] | None) -> Cut | None:
    """The cut to restore; `None` on a run without any.

    Raises:
        NoCut: no such cut; or the run would begin anew, though it has full checkpoints that only a lost version listed.
        Superseded: a later incarnation has started meanwhile.
    """
    for line in start.sources.rejected:
        _log.warning("rejected: %s", line)
    cut = read_newest(start.sources, step=step, only=only)
    if cut is None:
        _refuse_anew(start)
    if step is None and only is None:
        start.unread = unread(start.sources, cut)
        if (fallen := fallen_back(start.config, start.sources, cut, start.before)) is not None:
            _log.warning("%s", fallen)
    return cut


def _refuse_anew(start: Start) -> None:
    """Not to begin at step 0 beside checkpoints that a repair can list again: the fork record would end their lineage.

    One of the very first step may also be what a process left that was killed while it published its first: that is begun anew.
    """
    sources = start.sources
    folders = unlisted_fulls(sources.objects, sources.run, sources.fulls, sources.forks)
    if any(name.step > 1 for folder in folders if (name := keys.parse(keys.manifest(folder))) is not None):
        void = void_fork(start.incarnation.incarnation)  # so that a repair need not fear that this start is still under way
        start.spent = True
        incarnations.write_fork(start.objects, Fork(sources.run, void.incarnation, void.cut, void.proven))
        raise NoCut(
            f"run {sources.run} has full checkpoints that no version lists any more ({', '.join(folders)}), and nothing else to begin "
            f"from: adacheck-fsck '{start.config.uri}' --repair lists those that are whole; for a new run, give another URI"
        )


def bring_copies_in(start: Start, cut: Cut | None) -> ChainState:
    """Write the fork record, then bring the NVMe copy into the incarnation, and give what the keeper starts from.

    Raises:
        Superseded: a later incarnation has started meanwhile.
    """
    start.spent = True
    if start.unread and start.nvme is not None:  # before the fork record: after it those steps are not live, and a next start misses none
        _log.warning("%s", keep_log(start.config, start.nvme.path, start.unread))
    scanned = start.sources.scan
    generation = GENERATION if scanned is None else scanned.chain.generation
    name = ChainName(start.sources.run, generation, start.incarnation.incarnation, CHAIN)
    step = 0 if cut is None else cut.step
    before = start.sources.fork_table
    proven = cut is None or cut.proven
    fork = Fork(name.run, name.incarnation, NO_CUT if cut is None else step, proven)
    incarnations.write_fork(start.objects, fork)
    identity = (start.incarnation, (*start.sources.forks, fork))
    shadow = {} if cut is None else cut.states
    memory = rebuilt(name.incarnation, name.incarnation, step, shadow)
    certifier = reused(cut.certificates) if cut else Certifier()
    link, copy, stored = _bring_nvme(start, name, cut, before, certifier)
    copies: dict[str, tuple[Kind, Copy]] = {MEMORY: (Kind.MEMORY, memory)}
    if copy is not None:
        copies[NVME] = (Kind.NVME, copy)
    published = max((full.step for full in start.sources.fulls if full.step <= step), default=NO_CUT)
    tensors = {number: [(t.name, prod(t.shape)) for t in state.spec.tensors] for number, state in shadow.items()}
    proof = begin_proof(step, tensors, unproven=not proven, since=proven_since(before))
    opaque = [] if cut is None else list(cut.opaque.items())
    progress, history = begin(step, copies, published), resume(start.sources, name.incarnation)
    return ChainState(name, step, shadow, memory, copy, stored, link, opaque, progress, certifier, proof, identity, history)


def _bring_nvme(
    start: Start, name: ChainName, cut: Cut | None, forks: list[ForkEntry], certifier: Certifier
) -> tuple[bytes, Copy | None, NvmeCopy | None]:
    genesis = links.genesis(name.run, name.generation, name.chain)
    if start.nvme is None:
        return genesis, None, None
    step, scanned = (0 if cut is None else cut.step), start.sources.scan
    fence = encode(start.incarnation)
    # A copy that reaches the cut, and was not what it could be read from, holds damage below it: what was added there would be lost.
    if cut is not None and scanned is not None and cut.kind is Kind.NVME:
        brought = bring_in(scanned.copy, name.incarnation, step, forks)
        if not isinstance(brought, Refused) and brought.top >= step and step in scanned.links:
            stored = NvmeCopy(start.nvme, scanned.chain, fence, scanned.stored_increments(), scanned.stored_bases())
            stored.truncate(step, name.incarnation, certificates(certifier))
            return scanned.links[step], brought, stored
    chain = Chain(name.run, name.generation, name.chain, name.incarnation, name.incarnation, step, genesis, (), (), certificates(certifier))
    stored = NvmeCopy(start.nvme, chain, fence)
    stored.clear(step, genesis)
    shadow = {} if cut is None else cut.states
    stored.roll([state for _, state in sorted(shadow.items())], step, certificates(certifier))
    return genesis, rebuilt(name.incarnation, name.incarnation, step, shadow), stored
