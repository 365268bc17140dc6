"""What `adacheck-fsck` says: one `Finding` for each thing that is not as it should be, with what it costs and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """`damage`: something is lost, or will be when it is needed. `note`: worth knowing, and nothing is lost by it now."""

    DAMAGE = "damage"
    NOTE = "note"


class Kind(StrEnum):
    """The kinds of finding, each with another cause. The first eleven are those of `manifests.chain.Kind`."""

    MISSING = "missing"
    ZERO_LENGTH = "zero length"
    TRUNCATED = "truncated"
    WRONG_BYTES = "wrong bytes"
    SWAPPED = "swapped"
    GAP = "gap"
    SPLICED = "spliced"
    BROKEN_LINK = "broken link"
    NEWER_FORMAT = "newer format"
    NOT_A_RECORD = "not a record"
    MALFORMED = "malformed"
    UNREADABLE = "unreadable"
    """The file of a whole copy cannot be opened."""
    NO_CUT = "no cut"
    """Nothing can be restored."""
    ORPHAN = "orphan"
    """A name that this project never writes, or an object that no record names."""
    UNLISTED = "unlisted"
    """A folder of a full checkpoint that the newest version does not list."""
    NO_FULL = "no full checkpoint"
    """The object tier holds none, and a cut can be restored all the same: from NVMe, on one host."""
    STALE_UPLOAD = "stale upload"
    NOT_LIVE = "not live"
    """Intact, and cut off by a later incarnation that started from an earlier cut."""
    SET_ASIDE = "set aside"
    """What a repair, or a start that could not read it, put out of the way."""
    NO_COPY = "no copy"
    """There is no NVMe copy on this host."""


class Tier(StrEnum):
    """Where an object is."""

    NVME = "nvme"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        severity: whether anything is lost.
        kind: in one or two words.
        tier, name: the object.
        expected, found: what should be there, and what is.
        lost: what cannot be restored because of it.
        remedy: what to do.
    """

    severity: Severity
    kind: Kind
    tier: Tier
    name: str
    expected: str
    found: str
    lost: str
    remedy: str


def note(kind: Kind, tier: Tier, name: str, expected: str, found: str, remedy: str) -> Finding:
    """Something worth knowing by which nothing is lost."""
    return Finding(Severity.NOTE, kind, tier, name, expected, found, "nothing", remedy)
