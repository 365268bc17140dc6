"""Reads objects for a check: bytes or nothing, and for records the one fault each has, as a `Finding`. Without torch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from adacheck.backends.base import Backend
from adacheck.backends.errors import NotFound
from adacheck.finding import Finding, Kind, Severity, Tier, note
from adacheck.manifests import keys
from adacheck.manifests.chain import Problem, problem_of
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Record
from adacheck.sense import read

R = TypeVar("R", bound=Record)
_EXCUSABLE = (keys.Kind.INCREMENT_SLOT, keys.Kind.HISTORY, keys.Kind.HISTORY_COPY)


@dataclass(frozen=True, slots=True)
class Sample:
    """Whose bytes are read and digested: a share of all objects, others for each `seed`. Records are always read.

    Attributes:
        fraction: 0 for no object, 1 for all.
        seed: which of the many samples of this size.
    """

    fraction: float = 0.0
    seed: int = 0

    def has(self, key: str) -> bool:
        """Whether this object is read."""
        drawn = int.from_bytes(hashlib.blake2s(f"{self.seed} {key}".encode(), digest_size=7).digest()) / (1 << 56)
        return drawn < self.fraction


@dataclass(frozen=True, slots=True)
class Consequence:
    """What a fault of an object costs, and what to do about it."""

    lost: str
    remedy: str


@dataclass
class Look:
    """One tier under check.

    Attributes:
        backend: only read from.
        findings: what was found so far.
        excused: names of what is missed, and is no damage: a repair set it aside, and no cut that is left needs it.
        objects, read_bytes: how much was looked at.
    """

    backend: Backend
    tier: Tier
    sample: Sample = field(default_factory=Sample)
    findings: list[Finding] = field(default_factory=list)
    objects: int = 0
    read_bytes: int = 0
    excused: set[str] = field(default_factory=set)

    def excuse(self, aside: Iterable[str]) -> None:
        """Do not call damage what was set aside and is of a kind that not every cut needs."""
        self.excused |= {name for name in aside if (parsed := keys.parse(name)) is not None and parsed.kind in _EXCUSABLE}

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes | None:
        """The bytes of an object, `None` if there is none."""
        try:
            content = self.backend.get(key, byte_range)
        except NotFound:
            return None
        self.read_bytes += len(content)
        return content

    def size(self, key: str) -> int | None:
        """The length of an object in bytes, `None` if there is none."""
        found = self.backend.stat(key)
        return None if found is None else found.size_bytes

    def damage(self, name: str, problem: Problem, consequence: Consequence) -> None:
        """Note a fault of an object."""
        self.add(Kind(problem.kind.value), name, problem.expected, problem.found, consequence)

    def add(self, kind: Kind, name: str, expected: str, found: str, consequence: Consequence) -> None:
        """Note damage, in words."""
        if kind is Kind.MISSING and name in self.excused:
            self.findings.append(
                note(Kind.SET_ASIDE, self.tier, name, expected, "a repair set it aside", "nothing: the newest cut does not need it")
            )
            return
        self.findings.append(Finding(Severity.DAMAGE, kind, self.tier, name, expected, found, consequence.lost, consequence.remedy))

    def record(
        self, key: str, content: bytes | None, kind: type[R], misplaced: Callable[[R], Problem | None], consequence: Consequence
    ) -> R | None:
        """The record in `content`, or `None` after its fault was noted; `misplaced` says whether it belongs elsewhere."""
        self.objects += 1
        if content is None:
            self.add(Kind.MISSING, key, f"a {kind.__name__} record", "no object", consequence)
            return None
        try:
            record = read(content, kind)
        except FormatError as error:
            self.damage(key, problem_of(error, 0), consequence)
            return None
        problem = misplaced(record)
        if problem is not None:
            self.damage(key, problem, consequence)
            return None
        return record


def note_set_aside(look: Look, names: Iterable[str]) -> set[str]:
    """Note what repairs put out of the way, once for each repair; gives the names it had."""
    found: dict[str, set[str]] = {}
    for name in names:
        parsed = keys.parse_quarantined(name)
        if parsed is not None:
            found.setdefault(name.removesuffix(f"/{parsed[1]}"), set()).add(parsed[1])
    for folder, before in found.items():
        begun = time.gmtime(int(folder.removeprefix(keys.QUARANTINE_PREFIX)))
        what = f"{len(before)} objects that a repair set aside at {time.strftime('%Y-%m-%d %H:%M:%S', begun)} UTC"
        where = "they are keys within data.mdb, no files; " if look.tier is Tier.NVME else ""
        remedy = f"nothing: {where}--gc removes them when they are old"
        look.findings.append(note(Kind.SET_ASIDE, look.tier, folder, "nothing set aside", what, remedy))
    return set().union(*found.values())


def persistent(first: list[Finding], second: list[Finding]) -> list[Finding]:
    """What two looks in a row found: what a running trainer changed between two reads is not found twice."""
    again = {(finding.tier, finding.name, finding.kind) for finding in second}
    return [finding for finding in first if (finding.tier, finding.name, finding.kind) in again]
