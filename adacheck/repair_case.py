"""A store under repair, as the last check found it: what is damaged, what is intact, and the few ways to change anything.

Nothing is deleted that can be set aside: `move` puts a copy under `quarantine/<time>/` of the same tier before the name goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from adacheck.backends.base import Backend, Item
from adacheck.backends.errors import NotFound
from adacheck.check import Check
from adacheck.finding import Finding, Tier
from adacheck.keeper.stored import slot_key
from adacheck.manifests import keys
from adacheck.manifests.record import Full, FullEntry, Segment

MOVED_BYTES = 64 << 20
"""Bytes after which a transaction of a move is committed."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a repair did, in words; `given_up`: a cut that could not be mended is lost by it."""

    tier: Tier
    name: str
    what: str
    given_up: bool = False


@dataclass
class Case:
    """What a stage of a repair works on.

    Attributes:
        objects, nvme: the tiers, for writing; NVMe is locked, `None` without a copy here.
        check: a check whose findings were all taken. damage: those of them that are damage.
        now_unix_s: names what is set aside.
        actions: what was done so far.
    """

    objects: Backend
    nvme: Backend | None
    check: Check
    damage: list[Finding]
    now_unix_s: int
    actions: list[Action] = field(default_factory=list)

    @property
    def run(self) -> str:
        """Of the store; a repair is not begun without it."""
        assert self.check.run is not None
        return self.check.run

    def tier(self, tier: Tier) -> Backend | None:
        """The backend of a tier."""
        return self.objects if tier is Tier.OBJECT else self.nvme

    def damaged(self, tier: Tier, *kinds: keys.Kind) -> Iterator[tuple[str, keys.Name]]:
        """Damaged objects of some kinds (of all, if none is given), each once."""
        for name in dict.fromkeys(finding.name for finding in self.damage if finding.tier is tier):
            parsed = keys.parse(name)
            if parsed is not None and (not kinds or parsed.kind in kinds):
                yield name, parsed

    def content(self, tier: Tier, key: str) -> bytes | None:
        """The bytes of an object as they are."""
        backend = self.tier(tier)
        try:
            return None if backend is None else backend.get(key)
        except NotFound:
            return None

    def put(self, tier: Tier, key: str, content: bytes, what: str, *, keep: bool = False) -> None:
        """Put good content over bad; `keep`: the bad is set aside first."""
        backend = self.tier(tier)
        assert backend is not None
        before = self.content(tier, key) if keep else None
        items: list[Item] = [] if before is None else [(keys.quarantined(self.now_unix_s, key), before)]
        backend.put_many([*items, (key, content)])
        self.actions.append(Action(tier, key, what))

    def move(self, tier: Tier, names: Iterable[str], what: str, *, given_up: bool = False) -> None:
        """Set objects aside; of one that is gone already an empty one is left there, to say so."""
        backend, batch, batch_bytes = self.tier(tier), list[Item](), 0
        assert backend is not None
        where = "within data.mdb" if tier is Tier.NVME else f"under {keys.quarantined(self.now_unix_s, '')}"
        for name in names:
            content = self.content(tier, name)
            batch += [(keys.quarantined(self.now_unix_s, name), content or b""), (name, None)]
            batch_bytes += len(content or b"")
            if batch_bytes >= MOVED_BYTES:
                backend.put_many(batch)
                batch, batch_bytes = [], 0
            self.actions.append(Action(tier, name, f"{what}; set aside {where}", given_up))
        if batch:
            backend.put_many(batch)

    def slots(self) -> dict[str, Segment]:
        """Every slot on NVMe that an intact record names."""
        return {slot_key(key, s.slot): s for key, _, segments in self.check.copy.described() for s in segments}

    def manifests(self) -> Iterator[tuple[FullEntry, Full]]:
        """The live full checkpoints whose manifest is intact, newest first."""
        for entry in reversed(self.check.top.fulls):
            if entry.folder in self.check.manifests:
                yield entry, self.check.manifests[entry.folder]
