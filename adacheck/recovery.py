"""Chooses the cut a start or a tool restores, and reads it: whoever reaches it, the cheapest intact source first.

This is the part of a restore that only reads (see `start.py` for what a trainer does around it). A source with bad bytes falls
through to the next; a cut that nobody can read falls to an older one; each rejection is one line with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import dataclass, field

from adacheck import catalogue
from adacheck.backends.base import Backend
from adacheck.errors import DamagedCut, NoCut, ReplayRefused, StateMismatch
from adacheck.full_reader import read_full
from adacheck.incarnations import read_forks
from adacheck.keeper.apply import Applier, ReadSegment, load_state
from adacheck.keeper.cut import Choice, ForkEntry, Offer, choose_cut, reach
from adacheck.keeper.protocol import Kind, applicable
from adacheck.keeper.scan import Scan, held_of, scan
from adacheck.keeper.stored import read_verified, slot_key
from adacheck.manifests import keys
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Certificate, Fork, FullEntry, Segment
from adacheck.states import State

_log = logging.getLogger("adacheck")


@dataclass
class Cut:
    """A cut as read, every byte verified.

    Attributes:
        step: which cut.
        source: where it came from, for people.
        kind: the tier.
        states: by number; opaque: items by name.
        certificates: what needs no proof again.
        replayed: increments replayed per state (those that were replayed at all).
        proven: whether it is known to be exact.
    """

    step: int
    source: str
    kind: Kind
    states: dict[int, State]
    opaque: dict[str, bytes]
    certificates: tuple[Certificate, ...]
    replayed: dict[int, int] = field(default_factory=dict)
    proven: bool = False


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


def gather(run: str, objects: Backend, nvme: Backend | None) -> Sources:
    """Look at every source of a run; reads records only.

    Raises:
        DamagedCut: the fork table cannot be read.
    """
    head = catalogue.head(objects, run)
    rejected = [f"version {r.key}: {r.reason}" for r in head.rejected]
    found: Scan | None = None
    if nvme is not None:
        try:
            found = scan(nvme, run)
        except FormatError as error:
            rejected.append(f"chain record of {nvme.name}: {error}")
        else:
            rejected += [f"{nvme.name}: {line}" for line in (found.rejected if found else ())]
    return Sources(run, objects, nvme, read_forks(objects, run), head.fulls, found, rejected)


def read_newest(sources: Sources, *, step: int | None = None, only: Container[int] | None = None) -> Cut | None:
    """Read the newest cut that can be read, or exactly `step`; `None` if there is none at all.

    Every rejected source is logged and added to `sources.rejected`.

    Raises:
        NoCut: `step`, or a cut in `only`, was asked for and nobody reaches it; or there were cuts, and none could be read.
    """
    offers = sources.offers()
    asked = step is not None or only is not None
    had_any = bool(offers)
    while (choice := choose_cut({0: offers}, exactly=step, only=only)) is not None:
        cut, offers = _read(sources, choice, offers)
        if cut is not None:
            return cut
    if had_any or asked:
        what = f"step {step}" if step is not None else "a proven cut" if only is not None else "a cut"
        reached = sorted({s for offer in sources.offers() for s in offer.steps})
        steps = f"steps {reached[0]} to {reached[-1]} are offered" if reached else "no step is offered"
        why = "; ".join(sources.rejected[-5:]) or "nothing was rejected"
        raise NoCut(f"run {sources.run} has {what} that can be restored nowhere: {steps}; {why}")
    return None


def _read(sources: Sources, choice: Choice, offers: list[Offer]) -> tuple[Cut | None, list[Offer]]:
    """Try the sources of a choice in order; gives the cut, or the offers that are left without what was found bad."""
    for offer in choice.sources[0]:
        try:
            if offer.kind is Kind.NVME:
                return read_nvme(sources, choice.step), offers
            entry = next(full for full in sources.fulls if full.folder == offer.source)
            return read_object(sources.objects, entry), offers
        except (DamagedCut, ReplayRefused, StateMismatch, FormatError) as error:
            sources.rejected.append(f"cut {choice.step} from {offer.source}: {error}")
            _log.warning("rejected: cut %d from %s: %s", choice.step, offer.source, error)
            offers = _without(offers, offer, choice.step, error)
    return None, offers


def _without(offers: list[Offer], bad: Offer, step: int, error: Exception) -> list[Offer]:
    """The offers without steps that must fail for the same reason."""
    if isinstance(error, ReplayRefused) or not isinstance(bad.steps, range):
        return [offer for offer in offers if offer is not bad]
    limit = min(step, error.step if isinstance(error, DamagedCut) and error.step is not None else step)
    shorter = Offer(bad.source, bad.kind, range(bad.steps.start, limit))
    return [shorter if offer is bad else offer for offer in offers]


def read_nvme(sources: Sources, step: int) -> Cut:
    """Rebuild a cut from an NVMe copy: bases, then increments, through the same code that moves a shadow.

    Raises:
        DamagedCut: bytes are missing or wrong (`step` of the error: which increment's).
        ReplayRefused: gradients were recorded with a kernel that cannot be had here.
    """
    found, nvme = sources.scan, sources.nvme
    assert found is not None and nvme is not None
    generation = found.chain.generation
    shadow: dict[int, State] = {}
    for number, base in found.bases.items():
        key = keys.base(generation, number, base.step)

        def read_base(segment: Segment, key: str = key) -> bytes:
            return read_verified(nvme, slot_key(key, segment.slot), segment)

        shadow[number] = load_state(f"base at step {base.step}", base.spec, base.segments, base.digest, read_base)
    applier, replayed = Applier(shadow), dict[int, int]()
    inexact = False
    for at, states in applicable(found.copy, step):
        increment = found.increments[at]
        applied = applier.apply(increment, _increment_reader(nvme, generation, at), states | held_of(increment).whole)
        inexact |= any(not compared.equal for compared in applied.compared)
        for gradient in increment.gradients:
            if gradient.state in states:
                replayed[gradient.state] = replayed.get(gradient.state, 0) + 1
    opaque = _opaque(sources, step)
    if inexact:
        _log.warning("the cut at step %d is inexact: a comparison on the way to it found other bytes in the trainer", step)
    return Cut(step, nvme.name, Kind.NVME, shadow, opaque, found.chain.certificates, replayed)


def _increment_reader(nvme: Backend, generation: int, step: int) -> ReadSegment:
    key = keys.increment(generation, step)

    def read(segment: Segment) -> bytes:
        try:
            return read_verified(nvme, slot_key(key, segment.slot), segment)
        except DamagedCut as error:
            raise DamagedCut(str(error), step) from error

    return read


def _opaque(sources: Sources, step: int) -> dict[str, bytes]:
    found, nvme = sources.scan, sources.nvme
    assert found is not None and nvme is not None
    read = _increment_reader(nvme, found.chain.generation, step)
    items: dict[str, bytes] = {}
    for segment in found.increments[step].opaque:
        items[segment.tensor] = items.get(segment.tensor, b"") + read(segment)
    return items


def read_object(objects: Backend, entry: FullEntry) -> Cut:
    """Read a full checkpoint whole.

    Raises:
        DamagedCut: an object is missing or wrong.
    """
    reader = read_full(objects, entry)
    states = {spec.state: reader.state(at) for at, spec in enumerate(reader.manifest.states)}
    proven = entry.status == "proven"
    return Cut(entry.step, entry.folder, Kind.OBJECT, states, reader.opaque(), reader.manifest.certificates, {}, proven)
