"""The protocol of one copy of a chain: what it takes, acks, applies, replaces and drops. Sans-io: frozen values and functions.

A copy is a keeper's memory (bases are its shadow, held increments its window) or its NVMe log (bases and increments as stored).
The trainer's side (acked, committed, durable) is `progress.py`, the choice of a cut `cut.py`. Bytes never pass through here:
a driver moves them and calls these functions to learn what it may do, and the state machine of the tests does the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Kind(StrEnum):
    """What a source is made of, cheapest to restore from first."""

    MEMORY = "memory"
    NVME = "nvme"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class Held:
    """What a copy must remember of an increment it holds: the states shipped whole in it, those that end with it, and for each source
    the other states that are derived from it."""

    whole: frozenset[int] = frozenset()
    removed: frozenset[int] = frozenset()
    derived: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Copy:
    """One holder of a chain.

    Attributes:
        incarnation: the one that last wrote here.
        fence: incarnations below it are refused.
        bases: state -> step that its complete value here is of: the shadow's applied step in memory, the stored base on NVMe.
            A state that was born in a held increment and has no base yet is absent.
        floor: lowest step that can be restored: the highest base, since a state at n needs a base at or below n.
        held: step -> increment, gaps allowed above `top`.
        top: last contiguous step: every increment from the least base up to it is held. This is what the copy acks.
    """

    incarnation: int
    fence: int
    bases: Mapping[int, int]
    floor: int
    held: Mapping[int, Held]
    top: int

    @property
    def least_base(self) -> int:
        """Step of the oldest base; increments at or below it add nothing to any state that has a base."""
        return min(self.bases.values(), default=self.floor)

    @property
    def first_needed(self) -> int:
        """The first increment that a state needs: after the least base, or the birth of a state that has no base yet."""
        return min([self.least_base + 1, *_births(self)])


@dataclass(frozen=True, slots=True)
class Ack:
    """The copy holds, digest-checked, everything up to `step` (on NVMe: and has synced it)."""

    step: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The copy took nothing; `reason` says why. `fenced`: a later incarnation exists, the sender must stop."""

    reason: str
    fenced: bool


@dataclass(frozen=True, slots=True)
class Hold:
    """A full checkpoint of the cut at `step`: each state waits there until it is in `copied`, the others go on.

    Set it while `copy.floor <= step`: a state that was applied beyond cannot be had any more.
    """

    step: int
    copied: frozenset[int] = frozenset()


def rebuilt(incarnation: int, fence: int, step: int, states: Iterable[int]) -> Copy:
    """A copy that holds a complete value of every state at `step` and no increments: a new chain, or a new base at a cut."""
    return Copy(incarnation, max(fence, incarnation), dict.fromkeys(states, step), step, {}, step)


def recovered(incarnation: int, fence: int, bases: Mapping[int, int], held: Mapping[int, Held], *, floor: int = 0) -> Copy:
    """The copy that a scan of an NVMe log found. `floor` is only for a log without any base, whose chain lost all its states."""
    floor = max(bases.values(), default=floor)
    copy = Copy(incarnation, fence, dict(bases), floor, dict(held), 0)
    return replace(copy, top=_contiguous(copy.held, copy.least_base))


def receive(copy: Copy, incarnation: int, step: int, held: Held | None = None) -> tuple[Copy, Ack | Refused]:
    """Take an increment, in any order and any number of times; what was refused changes nothing.

    The driver stores the bytes only if the result is an `Ack` and `step` was not held before, and sends the `Ack` only when
    they are digest-checked (NVMe: synced).
    """
    refused = _refusal(copy, incarnation)
    if refused is None and incarnation != copy.incarnation:
        refused = Refused(
            f"copy is of incarnation {copy.incarnation}, increment {step} is of {incarnation}: bring the copy in first", False
        )
    if refused is not None:
        return copy, refused
    if step <= copy.least_base or step in copy.held:
        return copy, Ack(copy.top)
    grown = {**copy.held, step: held or Held()}
    copy = replace(copy, held=grown, top=_contiguous(grown, copy.top))
    return copy, Ack(copy.top)


def applicable(copy: Copy, committed: int, hold: Hold | None = None) -> tuple[tuple[int, frozenset[int]], ...]:
    """What may be applied now, in order: (step, states to bring from `step - 1` to `step`), only at or below the committed step.

    States that the increment does not name are included: they advance unchanged. So are states that begin or end with it. On NVMe
    a state may have begun at or below the least base and have no base of its own yet: then it starts from there.
    """
    present, todo = dict(copy.bases), []
    for step in range(copy.first_needed, min(committed, copy.top) + 1):
        increment = copy.held[step]
        behind = {state for state, at in present.items() if at < step}
        if hold is not None and step > hold.step:
            behind -= {state for state in behind if present[state] <= hold.step and state not in hold.copied}
        moved = frozenset(behind | (increment.whole - present.keys()))
        present.update(dict.fromkeys(moved, step))
        for state in increment.removed & moved:
            del present[state]
        if moved or not copy.bases:
            todo.append((step, moved))
    return tuple(todo)


def underivable(copy: Copy, cut: int) -> Mapping[int, int]:
    """States that the copy cannot rebuild at the cut, and the step from which on: there they were derived from a state that is not at that
    step, since its oldest base is of it or later; and they were not shipped whole after."""
    lost: dict[int, int] = {}
    for step, states in applicable(copy, cut):
        increment, gone = copy.held[step], set(lost)
        gone -= increment.whole
        while more := {d for source, of in increment.derived.items() if source not in states or source in gone for d in of & states} - gone:
            gone |= more
        lost = {state: lost.get(state, step) for state in gone - increment.removed}
    return lost


def advance(copy: Copy, step: int, states: Collection[int]) -> Copy:
    """The copy after the states were applied up to `step`, one entry of `applicable`."""
    bases = dict(copy.bases)
    for state in states:
        if state in copy.held[step].removed:
            bases.pop(state, None)
        else:
            bases[state] = step
    return replace(copy, bases=bases, floor=max(copy.floor, step))


def to_copy(copy: Copy, hold: Hold) -> tuple[int, ...]:
    """States whose shadow is at the hold's step now and not copied out yet."""
    return tuple(sorted(state for state, at in copy.bases.items() if at == hold.step and state not in hold.copied))


def is_copied(copy: Copy, hold: Hold) -> bool:
    """Whether every state of the cut at the hold's step was copied out: this chain's part of the full checkpoint is complete."""
    return copy.least_base >= hold.step and not to_copy(copy, hold)


def may_replace_base(copy: Copy, state: int, at_step: int, *, committed: int, durable: int) -> bool:
    """Whether a value of the state at `at_step` may replace its base on NVMe: it is newer, and no cut that is promised needs the old one.

    Above the durable step it may not: another chain may have nothing newer than that on NVMe.
    """
    return copy.bases.get(state, copy.least_base - 1) < at_step <= min(committed, durable, copy.top)


def with_derived(copy: Copy, states: Iterable[int], at_step: int) -> tuple[int, ...]:
    """The states to give bases at `at_step` where these are to get some, in order: before each those that were derived from it since
    their own base. Once the source has only the new base, its bytes of the steps before are gone, and so would theirs be."""
    ordered: dict[int, None] = {}

    def add(state: int, path: frozenset[int]) -> None:
        if state in ordered:
            return
        for step, increment in copy.held.items():
            for other in sorted(increment.derived.get(state, frozenset()) - path):
                if copy.bases.get(other, step - 1) < step <= at_step:
                    add(other, path | {other})
        ordered[state] = None

    for state in states:
        add(state, frozenset({state}))
    return tuple(ordered)


def rebase(copy: Copy, states: Collection[int], step: int) -> Copy:
    """The copy with new bases of these states at `step`; ask `may_replace_base` first."""
    if not states:
        return copy
    return replace(copy, bases={**copy.bases, **dict.fromkeys(states, step)}, floor=max(copy.floor, step))


def retirable(copy: Copy, *, committed: int, durable: int) -> tuple[tuple[int, int], ...]:
    """(state, step) of the bases on NVMe that no promised cut needs any more, because the state ended at that step.

    Only once all other states have bases from there on: so the floor can always be read off the bases that are left.
    """
    ended = {state: step for step in sorted(copy.held) for state in copy.held[step].removed if copy.bases.get(state, step) < step}
    others = [at for state, at in copy.bases.items() if state not in ended]
    limit = min([committed, durable, copy.top, *others, *_births(copy)])
    return tuple((state, step) for state, step in sorted(ended.items()) if step <= limit)


def retire(copy: Copy, state: int, step: int) -> Copy:
    """The copy without the base of a state that ended at `step`; one entry of `retirable`."""
    bases = {other: at for other, at in copy.bases.items() if other != state}
    return replace(copy, bases=bases, floor=max(copy.floor, step))


def prune(copy: Copy) -> tuple[Copy, tuple[int, ...]]:
    """Drop the increments *below* the least base; also names them, oldest first. The one at the least base stays: it has the
    opaque state of that cut. An increment in which a state was born that has no base yet stays too, with all after it."""
    keep = min([copy.least_base, *_births(copy)])
    dropped = tuple(sorted(step for step in copy.held if step < keep))
    if not dropped:
        return copy, ()
    return replace(copy, held={step: increment for step, increment in copy.held.items() if step >= keep}), dropped


def fence(copy: Copy, incarnation: int) -> Copy | Refused:
    """Refuse every incarnation below this one from now on: stored before the reach is told, so no zombie changes it afterwards."""
    return _refusal(copy, incarnation) or replace(copy, fence=incarnation)


def adopt(copy: Copy, incarnation: int, cut: int) -> Copy | Refused:
    """Bring a copy into an incarnation that started from `cut`, which it must reach: whatever is above the cut goes.

    Use `cut.bring_in`, which looks at the fork table, also for a copy that lags.
    """
    refused = _refusal(copy, incarnation)
    if refused is None and not copy.floor <= cut <= copy.top:
        refused = Refused(f"copy holds steps {copy.floor} to {copy.top}, not cut {cut}: rebuild it", False)
    if refused is not None:
        return refused
    kept = {step: increment for step, increment in copy.held.items() if step <= cut}
    return replace(copy, incarnation=incarnation, fence=incarnation, held=kept, top=cut)


def _refusal(copy: Copy, incarnation: int) -> Refused | None:
    """Why an incarnation may not touch the copy at all."""
    if incarnation < copy.fence:
        return Refused(f"incarnation {incarnation} was superseded by {copy.fence}: stop writing", True)
    return None


def _births(copy: Copy) -> list[int]:
    """Steps in which states that have no base yet were shipped whole; not of those that have ended in every cut there is."""
    births, gone = [], set[int]()
    for step in sorted(copy.held, reverse=True):
        if step <= copy.floor:
            gone |= copy.held[step].removed
        if copy.held[step].whole - copy.bases.keys() - gone:
            births.append(step)
    return births


def _contiguous(held: Mapping[int, Held], top: int) -> int:
    """Last step of the unbroken row of increments that goes on from `top`."""
    while top + 1 in held:
        top += 1
    return top
