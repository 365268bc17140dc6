"""The trainer's side of the protocol: which copies of its chain count, and the acked, committed and durable step.

One `Progress` a rank and incarnation. The trainers reduce `vector()` with MIN and give the result to `after_round`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from adacheck.keeper.cut import NO_CUT
from adacheck.keeper.protocol import Copy, Kind


class Standing(StrEnum):
    """How a copy counts. `joining`: it holds commitment back already, but does not yet have all that was acked before."""

    CONFIGURED = "configured"
    JOINING = "joining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Member:
    """A copy as the trainer knows it: the step it acked, its floor (lowest step it can restore) when it did, and its standing."""

    kind: Kind
    acked: int
    floor: int
    standing: Standing


@dataclass(frozen=True, slots=True)
class Progress:
    """Watermarks of one rank: acked, committed, durable and published only grow.

    Attributes:
        cut: the step this incarnation started from.
        copies: name -> member, of this rank's chain.
        acked: newest step that every configured copy holds.
        synced, synced_floor: newest step on this chain's NVMe, and the lowest that can be restored there; -1 without NVMe. A lost
            copy keeps what it has; one that comes back with less takes them back.
        synced_most: the highest synced step that this rank ever reported: the durable step may count on it.
        committed: the least acked step over all chains, as far as this rank has learned; -1 before the first round.
        durable: the least synced step over all chains, or the newest published full checkpoint if that is higher; -1: none yet.
        published: step of the newest full checkpoint known to be published on the live lineage; -1 for none.
        error: highest error code any rank reported; 0 for none.
        rounds: rounds that counted. Until the first, another rank may still be bringing in its copies.
        ended: a round failed: nothing is committed any more in this incarnation.
    """

    cut: int
    copies: Mapping[str, Member]
    acked: int
    synced: int
    synced_floor: int
    synced_most: int
    committed: int
    durable: int
    published: int
    error: int = 0
    rounds: int = 0
    ended: bool = False


def begin(cut: int, copies: Mapping[str, tuple[Kind, Copy]], published: int = NO_CUT) -> Progress:
    """Progress of an incarnation that starts from `cut`. `copies` are those brought in; one that lags behind the cut is lost for now.

    Nothing is committed before the first round, which ends the restore on every rank: only then no rank still has to bring in a
    copy that reaches less than the cut, so only then may the others apply up to it. And nothing is durable but a published full
    checkpoint.
    """
    members = {
        name: Member(kind, copy.top, copy.floor, Standing.CONFIGURED if copy.top >= cut else Standing.LOST)
        for name, (kind, copy) in copies.items()
    }
    return _settle(Progress(cut, members, cut, NO_CUT, NO_CUT, NO_CUT, NO_CUT, published, published))


def acknowledge(progress: Progress, name: str, kind: Kind, step: int, floor: int) -> Progress:
    """A copy acked `step`. A lost or new one joins once it reaches the committed step and the cut, and is configured once it has
    all that was acked: what this rank has advertised may be committed already, and every configured copy must have it."""
    old = progress.copies.get(name, Member(kind, step, floor, Standing.LOST))
    member = replace(old, acked=max(old.acked, step), floor=max(old.floor, floor))
    if member.standing is Standing.LOST and member.acked >= max(progress.committed, progress.cut):
        member = replace(member, standing=Standing.JOINING)
    return _settle(replace(progress, copies={**progress.copies, name: member}))


def declare_lost(progress: Progress, name: str) -> Progress:
    """A copy did not ack within its deadline (or said that its disk is full): commitment goes on with the others.

    What it acked is forgotten, since it may come back with less; the driver passes on no ack from before this.
    """
    member = replace(progress.copies[name], acked=NO_CUT, floor=NO_CUT, standing=Standing.LOST)
    return _settle(replace(progress, copies={**progress.copies, name: member}))


def publish(progress: Progress, step: int) -> Progress:
    """A full checkpoint at `step` was published on the live lineage; it makes that step durable whatever NVMe does."""
    return replace(progress, published=max(progress.published, step), durable=max(progress.durable, step))


def report(progress: Progress, error: int) -> Progress:
    """This rank has an error (> 0) that every rank must learn of at the same step."""
    return replace(progress, error=max(progress.error, error))


def vector(progress: Progress) -> tuple[int, ...]:
    """This rank's part of the next round, to be reduced with MIN: acked, synced, and negated: its floor, published, error code."""
    return (progress.acked, progress.synced, -progress.synced_floor, -progress.published, -progress.error)


def after_round(progress: Progress, reduced: Sequence[int]) -> Progress:
    """Learn the result of a round that completed and was successful, in the order of the rounds.

    The synced step counts only where every chain's NVMe can restore it: not below the highest floor of them.
    """
    if progress.ended:
        return progress
    acked, synced, floor, published, error = reduced[0], reduced[1], -reduced[2], -reduced[3], -reduced[4]
    on_nvme = synced if synced >= floor else NO_CUT
    return replace(
        progress,
        committed=max(progress.committed, acked),
        durable=max(progress.durable, published, on_nvme),
        published=max(progress.published, published),
        error=max(progress.error, error),
        rounds=progress.rounds + 1,
    )


def round_failed(progress: Progress) -> Progress:
    """A round failed: this ends commitment for the incarnation, never training."""
    return replace(progress, ended=True)


def lost(progress: Progress) -> tuple[str, ...]:
    """Names of the copies that do not count fully: the chain is under-replicated while there are any."""
    return tuple(sorted(name for name, member in progress.copies.items() if member.standing is not Standing.CONFIGURED))


def configured(progress: Progress) -> frozenset[str]:
    """Names of the copies that have everything this rank ever acked."""
    return frozenset(name for name, member in progress.copies.items() if member.standing is Standing.CONFIGURED)


def may_catch_up(progress: Progress, kind: Kind, old: Copy | None, source: Copy) -> bool:
    """Whether what a lost copy holds (`old`, `None` for nothing) may be replaced by what `source` holds.

    Never for less than it holds. Before the first round, not if it holds anything that no full checkpoint covers: another rank's
    restore may still crash and fall back to it. On NVMe only if the new floor still serves the durable step, or a full checkpoint
    covers all that the old content served.
    """
    if old is not None and old.incarnation == source.incarnation and old.top > source.top:
        return False
    served = NO_CUT if old is None else old.top
    if kind is Kind.NVME:
        return source.floor <= progress.durable or progress.published >= max(served, progress.synced_most)
    return progress.rounds > 0 or progress.published >= served


def _settle(progress: Progress) -> Progress:
    """Recompute acked and synced after a copy changed, and let those that joined count fully once they have all that was acked."""
    counting = [member for member in progress.copies.values() if member.standing is not Standing.LOST]
    on_nvme = [member for member in counting if member.kind is Kind.NVME]
    acked = max(progress.acked, min((member.acked for member in counting), default=NO_CUT))
    copies = {
        name: replace(member, standing=Standing.CONFIGURED) if member.standing is Standing.JOINING and member.acked >= acked else member
        for name, member in progress.copies.items()
    }
    synced = min((member.acked for member in on_nvme), default=progress.synced)
    return replace(
        progress,
        copies=copies,
        acked=acked,
        synced=synced,
        synced_floor=max((member.floor for member in on_nvme), default=progress.synced_floor),
        synced_most=max(progress.synced_most, synced),
    )
