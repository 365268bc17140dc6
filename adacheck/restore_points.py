"""The cuts that can be restored, as a list for people: from records alone, and without torch, so that listing them takes no time."""

from __future__ import annotations

from dataclasses import dataclass

from adacheck.keeper.protocol import Kind
from adacheck.sources import Sources


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A cut that can be restored.

    Attributes:
        step: which.
        tiers: where it is (`nvme`, `object`).
        intact: its records link up; the bytes are checked when they are read (or by `adacheck-fsck --read-data`).
        proven: known to be exact; `exact` is False if it was found not to be.
    """

    step: int
    tiers: tuple[str, ...]
    intact: bool
    proven: bool
    exact: bool


def restore_points(sources: Sources) -> list[RestorePoint]:
    """What the sources offer, as a list of cuts."""
    tiers: dict[int, set[str]] = {}
    for offer in sources.offers():
        for step in offer.steps:
            tiers.setdefault(step, set()).add(str(Kind(offer.kind)))
    status = {full.step: full.status for full in sources.fulls}
    return [
        RestorePoint(step, tuple(sorted(tiers[step])), True, status.get(step) == "proven", status.get(step) != "inexact")
        for step in sorted(tiers)
    ]
