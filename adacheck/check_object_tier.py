"""Checks the records at the top of the object tier: run, incarnations, forks and versions, and what should be there and is not.

Every number is accounted for: incarnations count up without gaps, a later fork proves that all earlier ones were written, and a
version names the one before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from adacheck.catalogue import Fulls, live
from adacheck.check_records import Consequence, Look
from adacheck.finding import Finding, Kind, Severity, Tier
from adacheck.manifests import keys
from adacheck.manifests.chain import NO_LINK, Problem, seal_version
from adacheck.manifests.chain import Kind as Fault
from adacheck.manifests.encoding import decode
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Fork, Incarnation, Run, Version
from adacheck.retention import VERSIONS_KEPT

_RUN = Consequence(
    "every restore: nobody can tell whose run this is",
    "put the object back from a copy of the object tier",
)
_INCARNATIONS_MAX = 1_000_000
_INCARNATION = Consequence(
    "no cut; if it is missing, a start refuses the log that this incarnation took last", "run --repair, or put the object back from a copy"
)
_AHEAD = Consequence(
    "a start, which refuses the log: it was written under an incarnation that this object tier does not know",
    "if this object tier was put back from an older copy, --repair makes it know what the log says, and a start goes on from the log; if "
    "a copy of it, or the one it is a copy of, trains with this NVMe directory, give this one another nvme=DIR",
)
_FORK = Consequence(
    "every restore while it is damaged; if it is missing, steps that a later incarnation left behind count as live",
    "put the object back from a copy of the object tier before anything is restored",
)
_VERSION = Consequence(
    "its list of full checkpoints; a restore uses the newest version that can be read",
    "put the object back from a copy, or move it away; the next full checkpoint writes a new version",
)


@dataclass
class TopRecords:
    """What was readable.

    Attributes:
        run: the run's name, also where only its incarnations know it; `None` where nobody does. `run_intact`: `run.msgpack` says so.
        names: every key of the tier that is a name of ours, in order; `strange`: the others.
        aside: names that objects had before a repair set them aside.
    """

    names: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    aside: set[str] = field(default_factory=set)
    run: str | None = None
    run_intact: bool = False
    incarnations: dict[int, Incarnation] = field(default_factory=dict)
    forks: dict[int, Fork] = field(default_factory=dict)
    versions: list[Version] = field(default_factory=list)

    @property
    def head(self) -> str:
        """Key of the newest version that is readable, of no characters without one."""
        return keys.version(self.versions[-1].incarnation, self.versions[-1].number) if self.versions else ""

    @property
    def fulls(self) -> Fulls:
        """The full checkpoints of the newest version that are on the live lineage, as a restore sees them."""
        return live(self.versions[-1].fulls, self.forks.values()) if self.versions else ()


def check_top(look: Look, hidden: str | None) -> TopRecords:
    """Check everything but the full checkpoints. `hidden`: prefix of keys that are not ours (an NVMe directory inside the tier)."""
    found = TopRecords()
    listed = [key for key in look.backend.list("") if hidden is None or not key.startswith(hidden)]
    found.aside = {parsed[1] for key in listed if (parsed := keys.parse_quarantined(key)) is not None}
    found.names = [key for key in listed if keys.parse(key) is not None]
    found.strange = [key for key in listed if keys.parse(key) is None]
    if not found.names:
        return found
    found.run = _check_run(look, found)
    _check_incarnations(look, found)
    _check_forks(look, found)
    _check_versions(look, found)
    return found


def _of(found: TopRecords, kind: keys.Kind) -> list[tuple[str, keys.Name]]:
    parsed = [(key, keys.parse(key)) for key in found.names]
    return [(key, name) for key, name in parsed if name is not None and name.kind is kind]


def _check_run(look: Look, found: TopRecords) -> str | None:
    record = look.record(keys.RUN, look.get(keys.RUN), Run, lambda _: None, _RUN)
    votes: Counter[str] = Counter()
    for key, _ in _of(found, keys.Kind.INCARNATION):
        try:
            votes[decode(look.get(key) or b"", Incarnation).run] += 1
        except FormatError:
            continue  # it is noted when its turn comes
    most = votes.most_common(1)
    if record is not None and most and votes[record.run] == 0:
        look.add(Kind.SPLICED, keys.RUN, f"run {most[0][0]}, as the incarnations say", f"run {record.run}", _RUN)
        return most[0][0]
    found.run_intact = record is not None
    return record.run if record is not None else most[0][0] if most else None


def _foreign(found: TopRecords, run: str, what: str) -> Problem | None:
    if found.run is None or run == found.run:
        return None
    return Problem(Fault.SPLICED, 0, f"{what} of run {found.run}", f"one of run {run}")


def _swapped(what: str, expected: int, number: int) -> Problem | None:
    return None if expected == number else Problem(Fault.SWAPPED, 0, f"{what} {expected}", f"that of {number}")


def _check_incarnations(look: Look, found: TopRecords) -> None:
    for key, name in _of(found, keys.Kind.INCARNATION):

        def misplaced(record: Incarnation, expected: int = name.incarnation) -> Problem | None:
            return _foreign(found, record.run, "an incarnation") or _swapped("incarnation", expected, record.incarnation)

        record = look.record(key, look.get(key), Incarnation, misplaced, _INCARNATION)
        if record is not None:
            found.incarnations[name.incarnation] = record


def _check_forks(look: Look, found: TopRecords) -> None:
    for key, name in _of(found, keys.Kind.FORK):

        def misplaced(record: Fork, expected: int = name.incarnation) -> Problem | None:
            return _foreign(found, record.run, "a fork") or _swapped("the fork of incarnation", expected, record.incarnation)

        record = look.record(key, look.get(key), Fork, misplaced, _FORK)
        if record is not None:
            found.forks[name.incarnation] = record


def _check_versions(look: Look, found: TopRecords) -> None:
    listed = _of(found, keys.Kind.VERSION)
    trusted: set[bytes] | None = None  # links of earlier versions; None where the one before could not be read, or was pruned
    for at, (key, name) in enumerate(listed):

        def misplaced(record: Version, expected: keys.Name = name) -> Problem | None:
            problem = _foreign(found, record.run, "a version") or _swapped(
                "a version of incarnation", expected.incarnation, record.incarnation
            )
            return problem or _swapped("version", expected.number, record.number)

        version = look.record(key, look.get(key), Version, misplaced, _VERSION)
        if version is None:
            trusted = None
            continue
        right = seal_version(version).link if len(version.previous) == len(NO_LINK) else b""
        if version.link != right:
            look.add(Kind.BROKEN_LINK, key, f"link {right.hex()[:16]}", version.link.hex()[:16], _VERSION)
            trusted = None
            continue
        first = at == 0 and (version.number == 1 or len(listed) <= VERSIONS_KEPT)
        before = {NO_LINK} if first else trusted
        if at == 0 and any(key.startswith(keys.VERSIONS_PREFIX) for key in found.aside):
            before = None  # what it links to may be among them
        if before is not None and version.previous not in before:
            _unlinked(look, found, key, version)
        found.versions.append(version)
        trusted = {known.link for known in found.versions}


def _unlinked(look: Look, found: TopRecords, key: str, version: Version) -> None:
    """The version before this one is not there, or is another."""
    absent = keys.version(version.incarnation, max(version.number - 1, 0))
    if version.previous == NO_LINK or version.number == 1 or absent in found.names:
        look.add(Kind.BROKEN_LINK, key, "the link of the version before it", version.previous.hex()[:16], _VERSION)
    else:
        look.add(Kind.MISSING, absent, f"version {version.number - 1}, to which version {version.number} links", "no object", _VERSION)


def check_complete(look: Look, found: TopRecords, elsewhere: Collection[int], fence: int = 0) -> None:
    """Incarnations and forks that must exist because of what else does.

    Args:
        elsewhere: incarnations that wrote to NVMe. fence: the one that took the copy there, and may not have written yet.
    """
    parsed = [name for key in found.names if (name := keys.parse(key)) is not None]
    wrote = {name.incarnation for name in parsed if name.kind in (keys.Kind.VERSION, keys.Kind.SHARD, keys.Kind.OPAQUE, keys.Kind.MANIFEST)}
    forked = {name.incarnation for name in parsed if name.kind is keys.Kind.FORK}
    taken = {name.incarnation for name in parsed if name.kind is keys.Kind.INCARNATION}
    newest = max([0, *wrote, *forked, *taken, *elsewhere])
    if fence > newest:
        expected, what = f"an incarnation up to {newest}, the newest that was taken", f"incarnation {fence}"
        look.findings.append(Finding(Severity.DAMAGE, Kind.SWAPPED, Tier.NVME, keys.FENCE, expected, what, _AHEAD.lost, _AHEAD.remedy))
    if newest > _INCARNATIONS_MAX:
        expected = f"incarnations up to {_INCARNATIONS_MAX}, more than any run has"
        look.add(Kind.MALFORMED, keys.INCARNATIONS_PREFIX, expected, f"a record of incarnation {newest}", _INCARNATION)
        return
    for number in set(range(1, newest + 1)) - taken:
        expected = f"incarnation {number}; objects of it or of a later one exist"
        ahead = number > max([0, *wrote, *forked, *taken])
        look.add(Kind.MISSING, keys.incarnation(number), expected, "no object", _AHEAD if ahead else _INCARNATION)
    started = wrote | set(elsewhere) | set(range(1, max(forked, default=0)))
    for number in sorted(started - forked - {0}):
        look.add(Kind.MISSING, keys.fork(number), f"the cut that incarnation {number} started from", "no object", _FORK)
