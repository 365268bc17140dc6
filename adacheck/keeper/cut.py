"""Which cut a restore returns: a pure function of the fork table and of what each source reaches.

Everyone who looks at a store (a restore, `steps()`, fsck, the tools) uses these functions, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from adacheck.keeper.protocol import Copy, Kind, Refused, adopt

NO_CUT = -1
"""Cut of an incarnation that started from nothing (a new run, or nothing was left): no step of an earlier one is live after it."""

NO_LIMIT = (1 << 62) - 1
"""Cut in the fork record of an incarnation that never started: it limits nothing."""

_COST = {Kind.MEMORY: 0, Kind.NVME: 1, Kind.OBJECT: 2}


@dataclass(frozen=True, slots=True)
class ForkEntry:
    """One row of the fork table: the incarnation started from this cut; `proven` as the cut was at that time."""

    incarnation: int
    cut: int
    proven: bool = True


@dataclass(frozen=True, slots=True)
class Offer:
    """What one source can restore of one chain: `steps` on the live lineage, a range or a set. `source` is a name for the driver."""

    source: str
    kind: Kind
    steps: range | frozenset[int]


@dataclass(frozen=True, slots=True)
class Choice:
    """A cut, and for each chain the sources that reach it, cheapest first: a source with bad bytes falls through to the next."""

    step: int
    sources: Mapping[int, tuple[Offer, ...]]


def unstarted(forks: Iterable[ForkEntry], incarnation: int) -> tuple[int, ...]:
    """Earlier incarnations without a fork record. A restore puts `void_fork` of each, exclusively, before it chooses its cut.

    Else such an incarnation, stalled in its restore, could still write its fork later and cut off full checkpoints that are
    live now. Whoever finds its own record taken was superseded and stops.
    """
    present = {fork.incarnation for fork in forks}
    return tuple(number for number in range(1, incarnation) if number not in present)


def void_fork(incarnation: int) -> ForkEntry:
    """The fork of an incarnation that never started, and now never will."""
    return ForkEntry(incarnation, NO_LIMIT)


def fork_limit(forks: Iterable[ForkEntry], incarnation: int) -> int | None:
    """Highest live step of what the incarnation wrote: the least cut of all later incarnations; `None` without a later one."""
    return min((fork.cut for fork in forks if fork.incarnation > incarnation), default=None)


def is_live(forks: Iterable[ForkEntry], incarnation: int, step: int) -> bool:
    """Whether a step of an incarnation (a full checkpoint, an increment) is on the live lineage."""
    limit = fork_limit(forks, incarnation)
    return limit is None or step <= limit


def proven_since(forks: Iterable[ForkEntry]) -> int:
    """Step from which on the live lineage is proven at most: the newest unproven cut that an incarnation started from, 0 if none."""
    return max((fork.cut for fork in forks if not fork.proven and is_live(forks, fork.incarnation, fork.cut)), default=0)


def live_starts(forks: Sequence[ForkEntry], above: int) -> tuple[int, ...]:
    """Cuts above a step that incarnations of the live lineage started from, in order: what a proof that begins there must know."""
    return tuple(sorted({fork.cut for fork in forks if above < fork.cut < NO_LIMIT and is_live(forks, fork.incarnation, fork.cut)}))


def reach(copy: Copy, forks: Iterable[ForkEntry]) -> range:
    """Steps this copy can restore on the live lineage; empty if it applied beyond the fork."""
    limit = fork_limit(forks, copy.incarnation)
    return range(copy.floor, (copy.top if limit is None else min(copy.top, limit)) + 1)


def common_steps(offers: Mapping[int, Sequence[Offer]]) -> frozenset[int]:
    """Every cut that can be restored: the steps that each chain has a source for. Empty without chains."""
    reached = [frozenset().union(*(offer.steps for offer in of_chain)) for of_chain in offers.values()]
    return frozenset.intersection(*reached) if reached else frozenset()


def choose_cut(
    offers: Mapping[int, Sequence[Offer]],
    *,
    at_most: int | None = None,
    exactly: int | None = None,
    only: Container[int] | None = None,
) -> Choice | None:
    """The newest common step, then for each chain its sources from the cheapest on (memory, NVMe, object; then in the order given).

    Args:
        offers: chain number -> what each source offers of it.
        at_most: go back to this step or before, after the bytes of a newer one were found bad on every source of a chain.
        exactly: this step or none.
        only: steps that qualify, for a proven cut.
    """
    steps = [
        step
        for step in common_steps(offers)
        if (at_most is None or step <= at_most) and (exactly is None or step == exactly) and (only is None or step in only)
    ]
    if not steps:
        return None
    best = max(steps)
    sources = {
        chain: tuple(sorted((offer for offer in of_chain if best in offer.steps), key=lambda offer: _COST[offer.kind]))
        for chain, of_chain in offers.items()
    }
    return Choice(best, sources)


def bring_in(copy: Copy, incarnation: int, cut: int, forks: Iterable[ForkEntry]) -> Copy | Refused:
    """Bring a copy into an incarnation that started from `cut`; `forks` as they were *without* this incarnation's own entry.

    A copy that reaches less than the cut keeps all it reaches: it is up to date once it received the increments from its
    `top + 1` to the cut out of another copy, and is lost until then. Nothing that a cut needs is given up, so a crash half way
    through all copies loses nothing. `Refused` with `fenced=False`: it reaches nothing of use, rebuild it at the cut.
    """
    steps = reach(copy, forks)
    if incarnation >= copy.fence and (not steps or steps[0] > cut):
        return Refused(f"copy reaches steps {steps.start} to {steps.stop - 1} of the live lineage, not cut {cut}: rebuild it", False)
    return adopt(copy, incarnation, min(cut, steps.stop - 1))
