"""Chooses the cut a start or a tool restores, and reads it: whoever reaches it, the cheapest intact source first.

This is the part of a restore that only reads (see `start.py` for what a trainer does around it). A source with bad bytes falls
through to the next; a cut that nobody can read falls to an older one; each rejection is one line with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import TypeVar

from adacheck.backends.base import Backend
from adacheck.backends.errors import BackendError, Denied, Unavailable
from adacheck.capture import opaque
from adacheck.errors import AdacheckError, NoCut
from adacheck.full_reader import read_full
from adacheck.keeper.cut import Offer, choose_cut
from adacheck.keeper.protocol import Kind
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Certificate, FullEntry
from adacheck.nvme_reader import NvmeReader
from adacheck.sources import Sources as Sources
from adacheck.sources import gather as gather
from adacheck.sources import without
from adacheck.states import State

T = TypeVar("T")

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
        proven: whether it is known to be exact; `exact` is False if it is known not to be.
    """

    step: int
    source: str
    kind: Kind
    states: dict[int, State]
    opaque: dict[str, bytes]
    certificates: tuple[Certificate, ...]
    replayed: dict[int, int] = field(default_factory=dict)
    proven: bool = False
    exact: bool = True


INEXACT = "inexact"
"""Status of a full checkpoint that is known not to be exact."""


def inexact(step: int) -> str:
    """What is said of a cut that is taken though it is known not to be exact."""
    return (
        f"the cut at step {step} is inexact: a comparison found that a tensor was written where nothing showed it, and the cut does not "
        "have all of those writes; restore(proven=True) or `--step` of one that --list calls proven takes an older one that is exact"
    )


def read_newest(sources: Sources, *, step: int | None = None, only: Container[int] | None = None) -> Cut | None:
    """Read the newest cut that can be read, or exactly `step`; `None` if there is none at all.

    Every rejected source is logged and added to `sources.rejected`.

    Raises:
        NoCut: `step`, or a cut in `only`, was asked for and nobody reaches it; or there were cuts, and none could be read.
        Unavailable, Denied: the object tier, which the newest cut must come from, does not answer or refuses.
    """

    def read(offer: Offer, at: int) -> Cut:
        cut = read_nvme(sources, at) if offer.kind is Kind.NVME else read_object(sources.objects, sources.full(offer))
        _check_opaque(cut)
        return cut

    offers = sources.offers()
    found = first_usable(sources, offers, read, step=step, only=only)
    if found is None and (offers or step is not None or only is not None):
        raise no_cut(sources, step, "a cut" if only is None else "a proven cut")
    return found[0] if found else None


def first_usable(
    sources: Sources, offers: list[Offer], use: Callable[[Offer, int], T], *, step: int | None = None, only: Container[int] | None = None
) -> tuple[T, Offer, list[Offer]] | None:
    """What `use` makes of the newest cut's cheapest source that it can use, that source, and the offers that are left; `None` if of none.

    Whatever is rejected on the way is logged, and added to `sources.rejected`.
    """
    while (choice := choose_cut({0: offers}, exactly=step, only=only)) is not None:
        for offer in choice.sources[0]:
            try:
                used = use(offer, choice.step)
            except UNUSABLE as error:
                offers = reject(sources, offers, offer, choice.step, error)
                continue
            if offer.kind is Kind.OBJECT and sources.full(offer).status == INEXACT:
                _log.warning("%s", inexact(choice.step))
            return used, offer, offers
    return None


def reject(sources: Sources, offers: list[Offer], bad: Offer, step: int, error: Exception) -> list[Offer]:
    """Say why a source is not used, and give the offers that are left.

    Raises:
        Unavailable, Denied: it is not bad, only out of reach, and an older cut in its place would end its lineage for good.
    """
    if bad.kind is Kind.OBJECT and isinstance(error, (Unavailable, Denied)):
        what = f"the cut at step {step} cannot be read: {error}"
        raise type(error)(f"{what}; try again when {sources.objects.name} answers, or name an older step to restore") from error
    left = without(offers, bad, step, error)
    still = {s for offer in left if offer.source == bad.source for s in offer.steps}
    fallen = [s for s in sorted(bad.steps) if s not in still and s <= step]
    line = f"cut {step} from {bad.source}: {error}" + (f"; cuts {ranges(fallen)} there need it" if len(fallen) > 1 else "")
    sources.rejected.append(line)
    _log.warning("rejected: %s", line)  # text: a record kept with the error would keep what was read
    return left


def no_cut(sources: Sources, step: int | None, what: str) -> NoCut:
    """The error that there is no such cut, saying which there are and what was rejected."""
    reached = sorted({s for offer in sources.offers() for s in offer.steps})
    steps = f"offered are steps {ranges(reached)}" if reached else "no step is offered"
    if step is not None:
        what = f"step {step}"
        others = [other for other in reached if other != step]
        steps += f", the nearest is {min(others, key=lambda other: abs(other - step))}" if others else ""
    why = "; ".join(sources.rejected[-5:]) or "nothing was rejected"
    return NoCut(f"run {sources.run} has {what} that can be restored nowhere: {steps}; {why}")


def ranges(steps: list[int]) -> str:
    """Sorted steps for people: `1, 9 to 12`."""
    starts = [step for at, step in enumerate(steps) if at == 0 or steps[at - 1] != step - 1]
    stops = [step for at, step in enumerate(steps) if at + 1 == len(steps) or steps[at + 1] != step + 1]
    return ", ".join(f"{start}" if start == stop else f"{start} to {stop}" for start, stop in zip(starts, stops, strict=True))


SENSELESS = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError, MemoryError)
"""What a record that is whole, but says what nobody would write, may raise deep inside torch: it is rejected like a damaged one."""

UNUSABLE = (AdacheckError, BackendError, FormatError, *SENSELESS)
"""What reading a source may raise, if it cannot be used."""


def _check_opaque(cut: Cut) -> None:
    """Every opaque item can be decoded.

    Raises:
        DamagedCut: one cannot.
    """
    for content in cut.opaque.values():
        opaque.decode(content)


def read_nvme(sources: Sources, step: int) -> Cut:
    """Rebuild a cut from an NVMe copy whole. Raises as `NvmeReader.states`."""
    found, nvme = sources.scan, sources.nvme
    assert found is not None and nvme is not None
    reader = NvmeReader(nvme, found, step)
    states = reader.states(reader.specs)
    return Cut(step, nvme.name, Kind.NVME, states, reader.opaque(), found.chain.certificates, reader.replayed, exact=not reader.inexact)


def read_object(objects: Backend, entry: FullEntry) -> Cut:
    """Read a full checkpoint whole.

    Raises:
        DamagedCut: an object is missing or wrong.
    """
    reader = read_full(objects, entry)
    states = {spec.state: reader.state(at) for at, spec in enumerate(reader.manifest.states)}
    proven, exact = entry.status == "proven", entry.status != INEXACT
    return Cut(entry.step, entry.folder, Kind.OBJECT, states, reader.opaque(), reader.manifest.certificates, {}, proven, exact)
