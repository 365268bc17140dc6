"""What `ckpt.status()` tells: the watermarks, what the last step cost, and what is wrong, if anything is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from adacheck.keeper import proof
from adacheck.keeper.driver import Keeper
from adacheck.keeper.progress import lost


@dataclass(frozen=True, slots=True)
class Status:
    """Where a checkpointer stands.

    Attributes:
        step: last finished call of `step()` (or the step restored).
        acked, committed, durable: newest steps that every copy holds; that a restore on this host returns; that survive all processes.
        proven: newest step known to be exact, `None` if none is yet.
        published: newest full checkpoint in the object tier, `None` if there is none.
        blocked_ms: what the last step cost the trainer: hooks and `step()` together, waits included.
        waited_ms: how much of all steps' blocked time was waiting for blocks.
        payload_bytes: stored bytes of the newest logged step, by payload.
        lost_copies: copies that do not count at present; the chain is under-replicated while there are any.
        object_failure: why the newest full checkpoint (or look at the object tier) failed, `None` while the last one succeeded.
        failure: what stopped the keeper, `None` while it works.
        cpu_s: CPU seconds of the keeper's threads.
    """

    step: int
    acked: int = 0
    committed: int = 0
    durable: int = -1
    proven: int | None = None
    published: int | None = None
    blocked_ms: float = 0.0
    waited_ms: float = 0.0
    payload_bytes: Mapping[str, int] = field(default_factory=dict)
    lost_copies: tuple[str, ...] = ()
    object_failure: str | None = None
    failure: str | None = None
    cpu_s: Mapping[str, float] = field(default_factory=dict)


def status_of(step: int, keeper: Keeper, before_gap: tuple[int, int, int], blocked_ms: float, waited_ms: float) -> Status:
    """The status of a running keeper.

    Args:
        before_gap: the step after which a new generation began, and what was committed and durable then: what counts until the new
            generation has a cut of its own. (-1, 0, 0) if none was begun.
    """
    progress = keeper.progress()
    gap, committed, durable = before_gap
    if progress.committed > gap:
        committed, durable = progress.committed, progress.durable
    return Status(
        step,
        acked=max(progress.acked, 0),
        committed=max(committed, 0),
        durable=max(durable, progress.published),
        proven=proof.newest_proven(keeper.shared.chain.proof, progress.committed),
        published=progress.published if progress.published >= 0 else None,
        blocked_ms=blocked_ms,
        waited_ms=waited_ms,
        payload_bytes=keeper.newest_payload(),
        lost_copies=lost(progress),
        object_failure=keeper.object_failure,
        failure=str(keeper.failure) if keeper.failure else None,
        cpu_s=keeper.cpu_s(),
    )
