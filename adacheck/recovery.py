"""Chooses the cut a start or a tool restores, and reads it: whoever reaches it, the cheapest intact source first.

This is the part of a restore that only reads (see `start.py` for what a trainer does around it). A source with bad bytes falls
through to the next; a cut that nobody can read falls to an older one; each rejection is one line with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import dataclass, field

from adacheck.backends.base import Backend
from adacheck.backends.errors import BackendError
from adacheck.capture import opaque
from adacheck.errors import AdacheckError, DamagedCut, NoCut
from adacheck.full_reader import read_full
from adacheck.keeper.apply import Applier, ReadSegment, load_state
from adacheck.keeper.cut import Choice, Offer, choose_cut
from adacheck.keeper.protocol import Kind, applicable
from adacheck.keeper.stored import read_verified, slot_key
from adacheck.manifests import keys
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Certificate, FullEntry, Segment
from adacheck.sources import Sources as Sources
from adacheck.sources import gather as gather
from adacheck.sources import without
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
        steps = f"offered are steps {_ranges(reached)}" if reached else "no step is offered"
        why = "; ".join(sources.rejected[-5:]) or "nothing was rejected"
        raise NoCut(f"run {sources.run} has {what} that can be restored nowhere: {steps}; {why}")
    return None


def _ranges(steps: list[int]) -> str:
    """Sorted steps for people: `1, 9 to 12`."""
    starts = [step for at, step in enumerate(steps) if at == 0 or steps[at - 1] != step - 1]
    stops = [step for at, step in enumerate(steps) if at + 1 == len(steps) or steps[at + 1] != step + 1]
    return ", ".join(f"{start}" if start == stop else f"{start} to {stop}" for start, stop in zip(starts, stops, strict=True))


_SENSELESS = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError, MemoryError)
"""What a record that is whole, but says what nobody would write, may raise deep inside torch: it is rejected like a damaged one."""


def _check_opaque(cut: Cut) -> None:
    """Every opaque item can be decoded.

    Raises:
        DamagedCut: one cannot.
    """
    for content in cut.opaque.values():
        opaque.decode(content)


def _read(sources: Sources, choice: Choice, offers: list[Offer]) -> tuple[Cut | None, list[Offer]]:
    """Try the sources of a choice in order; gives the cut, or the offers that are left without what was found bad."""
    for offer in choice.sources[0]:
        try:
            if offer.kind is Kind.NVME:
                cut = read_nvme(sources, choice.step)
            else:
                cut = read_object(sources.objects, next(full for full in sources.fulls if full.folder == offer.source))
            _check_opaque(cut)
            return cut, offers
        except (AdacheckError, BackendError, FormatError, *_SENSELESS) as error:
            sources.rejected.append(f"cut {choice.step} from {offer.source}: {error}")
            _log.warning("rejected: cut %d from %s: %s", choice.step, offer.source, error)
            offers = without(offers, offer, choice.step, error)
    return None, offers


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

        try:
            shadow[number] = load_state(f"base at step {base.step}", base.spec, base.segments, base.digest, read_base)
        except DamagedCut as error:
            raise DamagedCut(str(error), base.step) from error  # no cut of this copy can be read without it
    applier, replayed = Applier(shadow), dict[int, int]()
    inexact = False
    for at, states in applicable(found.copy, step):
        increment = found.increments[at]
        applied = applier.apply(increment, _increment_reader(nvme, generation, at), states)
        inexact |= any(not compared.equal for compared in applied.compared)
        for gradient in increment.gradients:
            if gradient.state in states:
                replayed[gradient.state] = replayed.get(gradient.state, 0) + 1
    items = _opaque(sources, step)
    if inexact:
        _log.warning("the cut at step %d is inexact: a comparison on the way to it found other bytes in the trainer", step)
    return Cut(step, nvme.name, Kind.NVME, shadow, items, found.chain.certificates, replayed)


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
