"""What is proven about the cuts of one chain: which comparisons with the trainer's bytes were made, and how they came out.

A range of a state is proven at cut n if the first time after n (or at n) that the trainer's bytes of it arrived, they came as a
comparison and were equal; or if the state was shipped whole at n itself. An invisible write before n would have shown then, since
nothing repairs it in between. A range that was overwritten by a whole shipment before it was compared is never proven.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

Tensors = Sequence[tuple[str, int]]
"""(tensor, elements) of all tensors of a state."""


class Verdict(StrEnum):
    """What is known of a cut. `unproven` is final, like `inexact` and `proven`; `pending` cuts still wait for a comparison."""

    PROVEN = "proven"
    PENDING = "pending"
    UNPROVEN = "unproven"
    INEXACT = "inexact"


@dataclass(frozen=True, slots=True)
class Compared:
    """A refreshed range, compared with the shadow at the same step."""

    state: int
    tensor: str
    start: int
    stop: int
    equal: bool


@dataclass(frozen=True, slots=True)
class Span:
    """Range of a tensor whose bytes last arrived from the trainer at step `seen`."""

    tensor: str
    start: int
    stop: int
    seen: int


@dataclass(frozen=True, slots=True)
class Drift:
    """Cuts `first` to `last` of a state differ (or may differ) from what the trainer had; `last` is None until it goes whole."""

    state: int
    first: int
    last: int | None


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a chain's cuts.

    Attributes:
        begin: nothing is known of cuts below this step.
        step: newest step that was observed.
        spans: state -> its ranges with the step at which each was last compared or shipped.
        unproven: disjoint intervals (first, last) of steps, in order, that can never be proven.
        drifts: what was found different.
        since: the unproven cut that this lineage started from, 0 if unbroken: a later cut is proven since then only.
        restored: cuts the trainer was restored from that the shadow has not reached yet.
    """

    begin: int
    step: int
    spans: Mapping[int, tuple[Span, ...]]
    unproven: tuple[tuple[int, int], ...] = ()
    drifts: tuple[Drift, ...] = ()
    since: int = 0
    restored: tuple[int, ...] = ()


def begin_proof(step: int, states: Mapping[int, Tensors], *, unproven: bool = False, since: int = 0, restored: Sequence[int] = ()) -> Proof:
    """Proof of a chain whose states were all shipped whole at `step`, or that was restored from the cut at `step`.

    `unproven` says that the cut was not proven when it was restored (`Fork.proven`); `since` comes from `cut.proven_since`.
    A shadow that is rebuilt below the cuts that trainers were restored from needs them: `restored` is `cut.live_starts(forks, step)`.
    """
    spans = {state: _spans(tensors, step) for state, tensors in states.items()}
    return Proof(step, step, spans, ((step, step),) if unproven else (), (), max(since, step if unproven else 0), tuple(restored))


def observe(
    proof: Proof,
    step: int,
    *,
    whole: Mapping[int, Tensors] | None = None,
    compared: Iterable[Compared] = (),
    removed: Collection[int] = (),
) -> Proof:
    """Learn what the increment at `step` showed; call it for every step, in order, after it was applied.

    Args:
        whole: states shipped whole at this step with their tensors as they are from here on, unchanged ones included.
        compared: refreshes of this step and how they came out; those of a state that is in `whole` say nothing and are ignored.
        removed: states that ended with this step.
    """
    for cut in proof.restored:
        if cut < step:
            proof = _restart(proof, cut)
    whole = whole or {}
    spans, unproven, drifts = dict(proof.spans), proof.unproven, list(proof.drifts)
    for state in {*whole, *removed}:
        unproven = _undecided(unproven, spans.pop(state, ()), step - 1)
    for state, tensors in whole.items():
        if state not in removed:
            spans[state] = _spans(tensors, step)
    for comparison in compared:
        if comparison.state in whole or comparison.state not in spans:
            continue
        before = _overlap(spans[comparison.state], comparison)
        spans[comparison.state] = _seen(spans[comparison.state], comparison, step)
        if not comparison.equal:
            first = min((span.seen for span in before), default=step - 1) + 1
            unproven = _add(unproven, first, step)
            drifts.append(Drift(comparison.state, first, None))
    closed = _close(drifts, {*whole, *removed}, step - 1)
    for drift in closed:
        if drift.last is not None:
            unproven = _add(unproven, drift.first, drift.last)
    return replace(proof, step=step, spans=spans, unproven=unproven, drifts=closed)


def resume(proof: Proof, starts: Sequence[int]) -> Proof:
    """Trainers were restored from these cuts while this keeper lived on, or was away: what the increments up to each do not decide
    never will be, and from there on the trainer's bytes are the shadow's. The shadow may still be behind them.

    `starts` is `cut.live_starts(forks, proof.step - 1)`, with the newest fork.
    """
    for cut in starts:
        if cut <= proof.step:
            proof = _restart(proof, cut)
    return replace(proof, restored=tuple(cut for cut in starts if cut > proof.step))


def _restart(proof: Proof, cut: int) -> Proof:
    """The proof when the shadow is at a cut that the trainer was restored from."""
    unproven = proof.unproven
    for spans in proof.spans.values():
        unproven = _undecided(unproven, spans, cut)
    closed = _close(proof.drifts, set(proof.spans), cut)
    for drift in closed:
        if drift.last is not None:
            unproven = _add(unproven, drift.first, drift.last)
    unproven = tuple((first, min(last, cut)) for first, last in unproven if first <= cut)
    since = cut if _inside(unproven, cut) else proof.since
    spans_now = {state: tuple(replace(span, seen=cut) for span in spans) for state, spans in proof.spans.items()}
    later = tuple(other for other in proof.restored if other > cut)
    return replace(proof, step=cut, spans=spans_now, unproven=unproven, drifts=closed, since=since, restored=later)


def verdict(proof: Proof, step: int) -> Verdict:
    """What is known of the cut at `step`: `inexact` if it was found to differ, else final or still pending."""
    if inexact_states(proof, step):
        return Verdict.INEXACT
    if step < proof.begin or _inside(proof.unproven, step):
        return Verdict.UNPROVEN
    return Verdict.PROVEN if step <= _decided(proof) else Verdict.PENDING


def newest_proven(proof: Proof, at_most: int) -> int | None:
    """The newest proven step at or below `at_most`; `None` if there is none from `begin` on."""
    step = min(at_most, _decided(proof))
    for drift in proof.drifts:
        if drift.last is None:
            step = min(step, drift.first - 1)
    for first, last in reversed(proof.unproven):
        if first <= step <= last:
            step = first - 1
    return step if step >= proof.begin else None


def inexact_states(proof: Proof, step: int) -> tuple[int, ...]:
    """States whose bytes in the cut at `step` were found to differ from the trainer's."""
    return tuple(sorted({d.state for d in proof.drifts if d.first <= step and (d.last is None or step <= d.last)}))


def must_ship(proof: Proof) -> frozenset[int]:
    """States that were found to differ and have not been shipped whole since: they go as `value` at the next step."""
    return frozenset(drift.state for drift in proof.drifts if drift.last is None)


def forget(proof: Proof, below: int) -> Proof:
    """Drop what is only about steps below `below`, which no source restores any more, so that a proof does not grow."""
    unproven = tuple((first, last) for first, last in proof.unproven if last >= below)
    drifts = tuple(drift for drift in proof.drifts if drift.last is None or drift.last >= below)
    return replace(proof, begin=max(proof.begin, below), unproven=unproven, drifts=drifts)


def _spans(tensors: Tensors, seen: int) -> tuple[Span, ...]:
    return tuple(Span(tensor, 0, elements, seen) for tensor, elements in tensors if elements)


def _decided(proof: Proof) -> int:
    """Up to here every range of every state has arrived from the trainer once more, or at that very step."""
    return min((span.seen for spans in proof.spans.values() for span in spans), default=proof.step)


def _overlap(spans: Iterable[Span], part: Compared) -> list[Span]:
    return [span for span in spans if span.tensor == part.tensor and span.start < part.stop and part.start < span.stop]


def _seen(spans: Iterable[Span], part: Compared, step: int) -> tuple[Span, ...]:
    """The spans after a range was seen at `step`; ranges need not be cut as they were before."""
    after: list[Span] = []
    for span in spans:
        start, stop = max(span.start, part.start), min(span.stop, part.stop)
        if span.tensor != part.tensor or start >= stop:
            after.append(span)
            continue
        if span.start < start:
            after.append(replace(span, stop=start))
        if after and after[-1].tensor == part.tensor and after[-1].stop == start and after[-1].seen == step:
            start = after.pop().start
        after.append(Span(part.tensor, start, stop, step))
        if stop < span.stop:
            after.append(replace(span, start=stop))
    return tuple(after)


def _undecided(unproven: tuple[tuple[int, int], ...], spans: Iterable[Span], last: int) -> tuple[tuple[int, int], ...]:
    """Add the cuts up to `last` that wait for a comparison of these spans, which will not come."""
    first = min((span.seen for span in spans), default=last) + 1
    return _add(unproven, first, last) if first <= last else unproven


def _close(drifts: Iterable[Drift], states: Collection[int], last: int) -> tuple[Drift, ...]:
    """End the open drifts of states that went whole, and join those of one state."""
    open_first: dict[int, int] = {}
    closed: list[Drift] = []
    for drift in drifts:
        if drift.last is None:
            open_first[drift.state] = min(drift.first, open_first.get(drift.state, drift.first))
        else:
            closed.append(drift)
    closed.extend(Drift(state, first, last if state in states else None) for state, first in open_first.items())
    return tuple(closed)


def _add(intervals: tuple[tuple[int, int], ...], first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Add an interval, keeping them disjoint, joined where they touch, and in order."""
    apart = [(a, b) for a, b in intervals if b + 1 < first or last + 1 < a]
    joined = [(a, b) for a, b in intervals if not (b + 1 < first or last + 1 < a)]
    return tuple(sorted([*apart, (min([first, *(a for a, _ in joined)]), max([last, *(b for _, b in joined)]))]))


def _inside(intervals: Iterable[tuple[int, int]], step: int) -> bool:
    return any(first <= step <= last for first, last in intervals)
