"""What a store offers to a restore: its sources, the steps each reaches, and which of them are left when one turned out bad.

Records only, and without torch: a restore, `steps()` and `adacheck-fsck` ask the same functions, so they cannot disagree.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from adacheck import catalogue
from adacheck.backends.base import Backend
from adacheck.backends.errors import NotFound
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.errors import DamagedCut, ReplayRefused
from adacheck.incarnations import read_forks
from adacheck.keeper.cut import NO_LIMIT, ForkEntry, Offer, reach
from adacheck.keeper.protocol import Kind
from adacheck.keeper.scan import Scan, scan
from adacheck.manifests import keys
from adacheck.manifests.encoding import decode
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Fork, FullEntry, Incarnation


@dataclass
class Sources:
    """What a store offers: the object tier's full checkpoints, and one chain's NVMe copy, on the live lineage."""

    run: str
    objects: Backend
    nvme: Backend | None
    forks: tuple[Fork, ...]
    fulls: tuple[FullEntry, ...]
    scan: Scan | None
    rejected: list[str]

    @property
    def fork_table(self) -> list[ForkEntry]:
        """As the protocol's functions take it."""
        return [ForkEntry(fork.incarnation, fork.cut, fork.proven) for fork in self.forks]

    def offers(self) -> list[Offer]:
        """Every source of the one chain, and the steps it can restore."""
        found: list[Offer] = []
        if self.scan is not None and self.nvme is not None and self.scan.copy.held:
            steps = reach(self.scan.copy, self.fork_table)
            found.append(Offer(self.nvme.name, Kind.NVME, range(max(steps.start, min(self.scan.increments)), steps.stop)))
        found += [Offer(full.folder, Kind.OBJECT, frozenset([full.step])) for full in reversed(self.fulls)]
        return found

    def full(self, offer: Offer) -> FullEntry:
        """The full checkpoint that an offer of the object tier stands for."""
        return next(full for full in self.fulls if full.folder == offer.source)


def moment_of(nvme: Backend) -> AbstractContextManager[Backend]:
    """A view of NVMe that does not change while it is read."""
    return nvme.snapshot() if isinstance(nvme, LmdbBackend) else nullcontext(nvme)


def gather(run: str, objects: Backend, nvme: Backend | None, *, aside: bool = False) -> Sources:
    """Look at every source of a run; reads records only, those on NVMe as they are at one moment.

    Args:
        aside: the copy on NVMe was set aside: the lineage is that of the start that did so, before it.

    Raises:
        DamagedCut: the fork table cannot be read.
    """
    head = catalogue.head(objects, run)
    rejected = [f"version {r.key}: {r.reason}" for r in head.rejected]
    found: Scan | None = None
    if nvme is not None:
        try:
            with moment_of(nvme) as moment:
                found = scan(moment, run)
        except FormatError as error:
            rejected.append(f"chain record of {nvme.name}: {error}")
        else:
            rejected += [f"{nvme.name}: {line}" for line in (found.rejected if found else ())]
    forks, fulls = read_forks(objects, run), head.fulls
    if aside and nvme is not None:
        until = set_aside_by(nvme)
        forks = tuple(fork for fork in forks if fork.incarnation < until)
        fulls = tuple(full for full in fulls if full.incarnation < until)
    return Sources(run, objects, nvme, forks, fulls, found, rejected)


def set_aside_by(nvme: Backend) -> int:
    """The incarnation whose start set this copy aside, which it had fenced; beyond all others if its fence cannot be read."""
    try:
        return decode(nvme.get(keys.FENCE), Incarnation).incarnation
    except (NotFound, FormatError):
        return NO_LIMIT


def without(offers: list[Offer], bad: Offer, step: int, error: Exception) -> list[Offer]:
    """The offers without steps that must fail for the same reason."""
    if isinstance(error, ReplayRefused) or not isinstance(bad.steps, range):
        return [offer for offer in offers if offer is not bad]
    limit = min(step, error.step if isinstance(error, DamagedCut) and error.step is not None else step)
    shorter = Offer(bad.source, bad.kind, range(bad.steps.start, limit))
    return [shorter if offer is bad else offer for offer in offers]
