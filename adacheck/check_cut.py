"""Which cut a restore would return, given what a check found bad: the same functions, the same order, without reading the bytes again."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from adacheck.errors import DamagedCut
from adacheck.keeper.cut import Offer, choose_cut
from adacheck.keeper.protocol import Kind, applicable, underivable
from adacheck.keeper.stored import slot_key
from adacheck.manifests import keys
from adacheck.manifests.record import Increment, Segment
from adacheck.sources import Sources, without


@dataclass(frozen=True, slots=True)
class NewestCut:
    """The cut a restore returns now: its step, and the source it reads (`lmdb:…`, or a folder of the object tier)."""

    step: int
    source: str
    tier: str


def newest_cut(sources: Sources, bad: Collection[str]) -> NewestCut | None:
    """The newest cut that does not need any object in `bad` (keys of either tier, whose names never meet); `None` if none is left."""
    offers = sources.offers()
    while (choice := choose_cut({0: offers})) is not None:
        for offer in choice.sources[0]:
            fault = _fault(sources, offer, choice.step, bad)
            if fault is None:
                return NewestCut(choice.step, offer.source, str(offer.kind))
            offers = without(offers, offer, choice.step, fault)
    return None


def _fault(sources: Sources, offer: Offer, step: int, bad: Collection[str]) -> DamagedCut | None:
    """What a restore of `step` from this source would stumble over."""
    if offer.kind is Kind.OBJECT:
        needed = (name for name in bad if name != keys.history_copy(offer.source))
        return DamagedCut(offer.source) if any(name.startswith(f"{offer.source}/") for name in needed) else None
    assert sources.scan is not None
    generation = sources.scan.chain.generation
    for state, base in sources.scan.bases.items():
        key = keys.base(generation, state, base.step)
        if key in bad or any(slot_key(key, segment.slot) in bad for segment in base.segments):
            return DamagedCut(key)
    for lost_at in underivable(sources.scan.copy, step).values():
        return DamagedCut(keys.increment(generation, lost_at), lost_at)
    for at, states in applicable(sources.scan.copy, step):
        key = keys.increment(generation, at)
        if any(slot_key(key, segment.slot) in bad for segment in _read(sources.scan.increments[at], states)):
            return DamagedCut(key, at)
    key = keys.increment(generation, step)
    if any(slot_key(key, segment.slot) in bad for segment in sources.scan.increments[step].opaque):
        return DamagedCut(key, step)
    return None


def _read(increment: Increment, states: Collection[int]) -> Iterator[Segment]:
    """The segments that bringing `states` over an increment reads."""
    whole = {value.spec.state for value in increment.values}
    for gradient in increment.gradients:
        if gradient.state in states and gradient.state not in whole:
            yield from gradient.segments
    for value in increment.values:
        if value.spec.state in states:
            yield from value.segments
    for refresh in increment.refreshes:
        if refresh.state in states:
            yield from refresh.segments
