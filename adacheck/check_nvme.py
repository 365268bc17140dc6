"""Checks a chain's copy on NVMe: head record, fence, bases, increments and their links, staged states, and every slot.

Records are looked at as they are at one moment; slots are read afterwards one by one, and what a running trainer has dropped or
replaced meanwhile is not held against it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from adacheck.check_advice import BY_NEWEST_CUT
from adacheck.check_history import check_chunks
from adacheck.check_records import Consequence, Look, note_set_aside
from adacheck.errors import DamagedCut
from adacheck.finding import Kind, note
from adacheck.keeper.cut import ForkEntry, is_live
from adacheck.keeper.stored import slot_key
from adacheck.manifests import chain as links
from adacheck.manifests import keys
from adacheck.manifests.chain import Kind as Fault
from adacheck.manifests.chain import Problem, check_segment
from adacheck.manifests.encoding import decode
from adacheck.manifests.record import Base, Chain, Incarnation, Increment, Linked, Segment
from adacheck.nvme_directory import CHAIN, GENERATION
from adacheck.planes import unpack
from adacheck.sense import senseless
from adacheck.sense_chain import unfounded

_SLOTS = (keys.Kind.INCREMENT_SLOT, keys.Kind.BASE_SLOT, keys.Kind.STAGED_SLOT)
_COPY = Consequence("every cut of this NVMe copy", BY_NEWEST_CUT)
_FENCE = Consequence("the guard against a process of an older incarnation that still writes", "restart the run: it writes a new one")


@dataclass
class CopyRecords:
    """What was readable.

    Attributes:
        chain: head record, `None` if it is damaged or missing.
        increments, bases, staged: intact records by their key, in order.
        contents: the bytes of those records, by key.
        names: every key there is; `aside`: names that objects had before a repair set them aside.
    """

    names: list[str] = field(default_factory=list)
    aside: set[str] = field(default_factory=set)
    chain: Chain | None = None
    fence: Incarnation | None = None
    increments: dict[str, Increment] = field(default_factory=dict)
    bases: dict[str, Base] = field(default_factory=dict)
    staged: dict[str, Base] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    def incarnations(self) -> set[int]:
        """Every incarnation that wrote here."""
        found = {increment.incarnation for increment in self.increments.values()}
        return found | ({self.chain.incarnation} if self.chain is not None else set())

    def described(self) -> Iterator[tuple[str, int, tuple[Segment, ...]]]:
        """Key, step and segments of every record that has slots."""
        for key, increment in self.increments.items():
            yield key, increment.step, tuple(links.segments(increment))
        for key, base in (*self.bases.items(), *self.staged.items()):
            yield key, base.step, base.segments


def check_records(look: Look, run: str, forks: Collection[ForkEntry]) -> CopyRecords:
    """Check every record of a copy; `look.backend` is a view of one moment."""
    listed = list(look.backend.list(""))
    found = CopyRecords([name for name in listed if keys.parse_quarantined(name) is None], note_set_aside(look, listed))
    look.excuse(found.aside)
    if not any(name.startswith("g") or name == keys.CHAIN for name in found.names):
        return found  # a copy that was opened and not begun

    def misplaced(chain: Chain) -> Problem | None:
        return _foreign(chain, run, "a head record") or _wrong_chain(chain)

    found.chain = look.record(keys.CHAIN, look.get(keys.CHAIN), Chain, misplaced, _COPY)
    _check_fence(look, found, run)
    if found.chain is not None:
        _check_bases(look, found, found.chain)
        _check_staged(look, found, found.chain)
        _check_increments(look, found, found.chain, forks)
        check_chunks(look, run, found.names, logged=bool(found.increments))
    return found


def _foreign(record: Chain | Base | Incarnation, run: str, what: str) -> Problem | None:
    return None if record.run == run else Problem(Fault.SPLICED, 0, f"{what} of run {run}", f"one of run {record.run}")


def _wrong_chain(chain: Chain) -> Problem | None:
    if chain.chain != CHAIN or chain.generation < GENERATION:
        what = f"one of chain {chain.chain}, generation {chain.generation}"
        return Problem(Fault.SPLICED, 0, f"the head of chain {CHAIN}, generation {GENERATION} or later", what)
    return None


def _check_fence(look: Look, found: CopyRecords, run: str) -> None:
    def misplaced(fence: Incarnation) -> Problem | None:
        wrong = _foreign(fence, run, "a fence")
        if wrong is None and found.chain is not None and fence.incarnation < found.chain.incarnation:
            wrong = Problem(Fault.SWAPPED, 0, f"incarnation {found.chain.incarnation} or later", f"incarnation {fence.incarnation}")
        return wrong

    found.fence = look.record(keys.FENCE, look.get(keys.FENCE), Incarnation, misplaced, _FENCE)


def _check_bases(look: Look, found: CopyRecords, chain: Chain) -> None:
    for state, step in zip(chain.base_states, chain.base_steps, strict=True):
        key = keys.base(chain.generation, state, step)
        _take_base(look, found, found.bases, key, chain, state, step, _COPY)
    listed = set(zip(chain.base_states, chain.base_steps, strict=True))
    for name in found.names:
        parsed = keys.parse(name)
        mine = parsed is not None and parsed.kind is keys.Kind.BASE and parsed.generation == chain.generation
        if parsed is not None and mine and (parsed.state, parsed.step) not in listed:
            expected = "only the bases that the head record lists"
            look.findings.append(note(Kind.ORPHAN, look.tier, name, expected, "another base", "nothing; the next start sweeps it"))


def _check_staged(look: Look, found: CopyRecords, chain: Chain) -> None:
    consequence = Consequence("the full checkpoint that was to be uploaded from it", "nothing; the next one is staged anew")
    for name in found.names:
        parsed = keys.parse(name)
        if parsed is not None and parsed.kind is keys.Kind.STAGED and parsed.generation == chain.generation:
            _take_base(look, found, found.staged, name, chain, parsed.state, parsed.step, consequence)


def _take_base(
    look: Look, found: CopyRecords, into: dict[str, Base], key: str, chain: Chain, state: int, step: int, consequence: Consequence
) -> None:
    def misplaced(base: Base) -> Problem | None:
        if base.run != chain.run or (base.generation, base.chain) != (chain.generation, chain.chain):
            what = f"one of chain {base.chain}, generation {base.generation} of run {base.run}"
            return Problem(Fault.SPLICED, step, f"a base of chain {chain.chain}, generation {chain.generation} of run {chain.run}", what)
        if (base.spec.state, base.step) != (state, step):
            return Problem(Fault.SWAPPED, step, f"state {state} at step {step}", f"state {base.spec.state} at step {base.step}")
        return None

    content = look.get(key)
    base = look.record(key, content, Base, misplaced, consequence)
    if base is not None and content is not None:
        into[key], found.contents[key] = base, content


def _check_increments(look: Look, found: CopyRecords, chain: Chain, forks: Collection[ForkEntry]) -> None:
    parsed = [(name, keys.parse(name)) for name in found.names]
    steps = [(n.step, key) for key, n in parsed if n is not None and n.kind is keys.Kind.INCREMENT and n.generation == chain.generation]
    contents = {step: look.get(key) for step, key in steps}
    look.objects += len(contents)
    needed = max(chain.base_steps, default=None)
    expect = links.Expect(chain.run, chain.generation, chain.chain, needed)
    bad: set[int] = set()
    for problem in links.verify(sorted(contents.items()), chain.anchor_step, chain.anchor_link, expect, senseless):
        bad.add(problem.step)
        lost = f"the cuts of this NVMe copy from step {problem.step} on; those before it are intact"
        look.damage(keys.increment(chain.generation, problem.step), problem, Consequence(lost, BY_NEWEST_CUT))
    for step, key in steps:
        content = contents[step]
        if step in bad or content is None:
            continue
        increment = decode(decode(content, Linked).entry, Increment)
        found.increments[key], found.contents[key] = increment, content
        if not is_live(forks, increment.incarnation, step):
            expected = "no steps above the cut that a later incarnation started from"
            what = f"an increment of incarnation {increment.incarnation}"
            look.findings.append(note(Kind.NOT_LIVE, look.tier, key, expected, what, "nothing; the next start of the run removes it"))
    _check_founded(look, found, chain, min(bad, default=None))


def _check_founded(look: Look, found: CopyRecords, chain: Chain, first_bad: int | None) -> None:
    """What increments say of states that are not there, where it is not a missing base or increment that makes it so."""
    if len(found.bases) == len(chain.base_states):
        bases = {base.spec.state: base for base in found.bases.values()}
        increments = {i.step: i for i in found.increments.values() if first_bad is None or i.step < first_bad}
        for step, reason in unfounded(bases, increments):
            lost = f"the cuts of this NVMe copy from step {step} on; those before it are intact"
            problem = Problem(Fault.MALFORMED, step, "states that are there", reason)
            look.damage(keys.increment(chain.generation, step), problem, Consequence(lost, BY_NEWEST_CUT))


def check_slots(look: Look, found: CopyRecords) -> None:
    """Check every slot of the records in `found`, by length or, for those in the sample, byte by byte."""
    names = set(found.names)
    elsewhere: dict[bytes, str] = {}
    for key, step, segments in found.described():
        for segment in segments:
            look.objects += 1
            slot = slot_key(key, segment.slot)
            if _right_length(look, slot, segment, names) and not look.sample.has(slot):
                continue
            elsewhere = elsewhere or {s.digest: slot_key(k, s.slot) for k, _, some in found.described() for s in some}
            content = look.get(slot)
            problem = check_segment(step, segment, content, elsewhere) or _not_unpacked(step, segment, content)
            if problem is not None and look.get(key) == found.contents[key]:  # else it was dropped or replaced meanwhile
                look.damage(slot, problem, _slot_consequence(key, found))


def _not_unpacked(step: int, segment: Segment, content: bytes | None) -> Problem | None:
    """What is wrong with bytes that have the right digest, if they cannot be unpacked: no writer of this project stored them."""
    try:
        unpack(segment, content or b"")
    except DamagedCut as error:
        return Problem(Fault.MALFORMED, step, f"bytes of codec {segment.codec}", str(error))
    return None


def _right_length(look: Look, slot: str, segment: Segment, names: Collection[str]) -> bool:
    return slot in names and look.size(slot) == segment.stored_bytes


def _slot_consequence(key: str, found: CopyRecords) -> Consequence:
    if key in found.bases:
        return _COPY
    if key in found.staged:
        return Consequence("the full checkpoint that was to be uploaded from it", "nothing; the next one is staged anew")
    step = found.increments[key].step
    return Consequence(f"the cut of step {step} on this NVMe copy, and every later one that is replayed through it", BY_NEWEST_CUT)


def note_unreferenced(look: Look, found: CopyRecords) -> None:
    """Note slots that no record names, and names that are not ours. A damaged record is not asked for its slots."""
    records = {key for key, _, _ in found.described()}
    known = {slot_key(key, segment.slot) for key, _, segments in found.described() for segment in segments}
    present, owners = set(found.names), dict[str, int]()
    for name in found.names:
        parsed, owner = keys.parse(name), name.rpartition("/")[0]
        if parsed is None:
            look.findings.append(note(Kind.ORPHAN, look.tier, name, "only names of this project", "another name", "move it away"))
        elif parsed.kind in _SLOTS and name not in known and (owner in records or owner not in present):
            owners[owner] = owners.get(owner, 0) + 1
    for owner, count in owners.items():
        what = f"{count} slots that it does not name" if owner in present else f"{count} slots without a record"
        remedy = "nothing: it is being written, or was left by a process that was killed; the next start of the run removes it"
        look.findings.append(note(Kind.ORPHAN, look.tier, owner, "only slots that a record names", what, remedy))
