"""The hash chain of increments and of versions, and what can be wrong with it, each fault under its own name.

Pure: contents come in, values go out. Each entry carries the link before it, so after a fault the walk goes on from what the
next entry claims, and one fault is one `Problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import blake3
import msgpack

from adacheck.manifests.encoding import decode, encode
from adacheck.manifests.errors import BitFlip, FormatError, Malformed, NewerFormat, NotARecord, Truncated, WrongRecord, ZeroLength
from adacheck.manifests.record import DIGEST_BYTES, Gradient, Increment, Linked, Refresh, Segment, Value, Version

Buffer = bytes | bytearray | memoryview

NO_LINK = bytes(DIGEST_BYTES)
"""What the first version of a run names as its predecessor."""


class Kind(StrEnum):
    """The kinds of fault; each calls for another explanation, and some for another remedy."""

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


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of one object: what should be there, and what is. `step` is that of the entry (of a version: its number)."""

    kind: Kind
    step: int
    expected: str
    found: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Expect:
    """Whose increments a chain should hold. `newest`: the step it should reach, `None` where nobody knows."""

    run: str
    generation: int
    chain: int
    newest: int | None = None


_KINDS: dict[type[FormatError], Kind] = {
    ZeroLength: Kind.ZERO_LENGTH,
    Truncated: Kind.TRUNCATED,
    BitFlip: Kind.WRONG_BYTES,
    WrongRecord: Kind.SWAPPED,
    NewerFormat: Kind.NEWER_FORMAT,
    NotARecord: Kind.NOT_A_RECORD,
    Malformed: Kind.MALFORMED,
}


def genesis(run: str, generation: int, chain: int) -> bytes:
    """The link before the first increment of a chain: it binds all later ones to run, generation and chain."""
    return blake3.blake3(b"adacheck chain\0" + msgpack.packb([run, generation, chain])).digest()


def link(previous: bytes, entry: bytes) -> bytes:
    """`BLAKE3(previous ‖ entry)`.

    Raises:
        Malformed: `previous` is not 32 bytes, so where it ends would be open.
    """
    if len(previous) != DIGEST_BYTES:
        raise Malformed(f"a link has {DIGEST_BYTES} bytes, this one has {len(previous)}")
    return blake3.blake3(previous).update(entry).digest()


def append(increment: Increment, previous: bytes) -> Linked:
    """The increment as it is stored after the entry whose link is `previous` (`genesis` for the first)."""
    entry = encode(increment)
    return Linked(entry, previous, link(previous, entry))


def seal_version(version: Version) -> Version:
    """The version with its `link` filled in: over `previous` and the record encoded with an empty link."""
    return replace(version, link=link(version.previous, encode(replace(version, link=b""))))


def problem_of(error: FormatError, step: int) -> Problem:
    """The `Problem` that a failed `decode` stands for."""
    return Problem(_KINDS.get(type(error), Kind.MALFORMED), step, "an intact record", str(error))


def verify(
    entries: Iterable[tuple[int, Buffer | None]],
    anchor_step: int,
    anchor_link: bytes,
    expect: Expect,
    senseless: Callable[[Increment], str | None] = lambda _: None,
) -> Iterator[Problem]:
    """Walk a chain's `Linked` records in the order of their keys and yield every fault.

    Args:
        entries: step in the key, and content; `None` for one that was listed but cannot be found.
        anchor_step, anchor_link: the entry before the first kept one (`genesis` and its step at the start of a chain).
        expect: whose chain it is.
        senseless: why an increment that is where it belongs makes no sense by itself, in words.
    """
    at = anchor_step
    previous: bytes | None = anchor_link if len(anchor_link) == DIGEST_BYTES else None
    if previous is None:
        yield Problem(Kind.MALFORMED, anchor_step, f"an anchor link of {DIGEST_BYTES} bytes", f"{len(anchor_link)} bytes")
    incarnation = 0
    for step, content in entries:
        if step != at + 1:
            yield Problem(Kind.GAP, at + 1, f"step {at + 1} after step {at}", f"step {step}")
            previous = None
        at = step
        if content is None:
            yield Problem(Kind.MISSING, step, "an entry", "no object")
            previous = None
            continue
        try:
            linked = decode(content, Linked)
            increment = decode(linked.entry, Increment)
        except FormatError as error:
            yield problem_of(error, step)
            previous = None
            continue
        problem = _misplaced(increment, step, incarnation, expect) or _unlinked(linked, step, previous)
        if problem:
            yield problem
        elif (reason := senseless(increment)) is not None:
            yield Problem(Kind.MALFORMED, step, "an increment that makes sense", reason)
        trusted = problem is None or problem.kind is Kind.BROKEN_LINK
        previous = link(linked.previous, linked.entry) if trusted else None
        incarnation = increment.incarnation if trusted else incarnation
    if expect.newest is not None and at < expect.newest:
        yield Problem(Kind.MISSING, at + 1, f"entries up to step {expect.newest}", f"the last at step {at}")


def _misplaced(increment: Increment, step: int, incarnation: int, expect: Expect) -> Problem | None:
    """An intact increment that belongs elsewhere."""
    for what in ("run", "generation", "chain"):
        right, found = getattr(expect, what), getattr(increment, what)
        if right != found:
            return Problem(Kind.SPLICED, step, f"an increment of {what} {right}", f"one of {what} {found}")
    if increment.step != step:
        return Problem(Kind.SWAPPED, step, f"the increment of step {step}", f"that of step {increment.step}")
    if increment.incarnation < incarnation:
        what = f"an increment of incarnation {incarnation} or later, as before it"
        return Problem(Kind.SPLICED, step, what, f"one of incarnation {increment.incarnation}")
    return None


def _unlinked(linked: Linked, step: int, previous: bytes | None) -> Problem | None:
    """An entry whose links are wrong; `previous` is `None` where the entry before it could not be trusted."""
    if len(linked.previous) != DIGEST_BYTES:
        return Problem(Kind.MALFORMED, step, f"a previous link of {DIGEST_BYTES} bytes", f"{len(linked.previous)} bytes")
    if previous is not None and linked.previous != previous:
        return Problem(Kind.BROKEN_LINK, step, f"previous link {_short(previous)}", _short(linked.previous))
    right = link(linked.previous, linked.entry)
    if linked.link != right:
        return Problem(Kind.BROKEN_LINK, step, f"link {_short(right)}", _short(linked.link))
    return None


def segments(increment: Increment) -> Iterator[Segment]:
    """Every segment of an increment, in the order of the record: gradients, values, refreshes, opaque."""
    parts: tuple[Gradient | Value | Refresh, ...] = (*increment.gradients, *increment.values, *increment.refreshes)
    for part in parts:
        yield from part.segments
    yield from increment.opaque


def places(step: int, described: Iterable[Segment]) -> dict[bytes, str]:
    """Digest -> where those bytes belong, in words; what `check_segment` looks up to tell a swap from damage."""
    return {segment.digest: f"slot {segment.slot} of step {step}" for segment in described}


def check_segment(step: int, segment: Segment, content: Buffer | None, others: Mapping[bytes, str]) -> Problem | None:
    """Compare the bytes in a segment's slot with what its record says.

    Args:
        step: of the increment or base, for the `Problem`.
        content: the bytes, flat; `None` where there is no object.
        others: digests of other segments -> where they belong (`places`).
    """
    expected = f"the {segment.stored_bytes} bytes of slot {segment.slot} ({segment.tensor} {segment.start}:{segment.stop})"
    if content is None:
        return Problem(Kind.MISSING, step, expected, "no object")
    size = memoryview(content).nbytes
    digest = blake3.blake3(content).digest()
    if digest == segment.digest:
        return None if size == segment.stored_bytes else Problem(Kind.MALFORMED, step, expected, f"{size} bytes with the right digest")
    if size == 0:
        return Problem(Kind.ZERO_LENGTH, step, expected, "an empty object")
    if digest in others:
        return Problem(Kind.SWAPPED, step, expected, f"the bytes of {others[digest]}")
    if size < segment.stored_bytes:
        return Problem(Kind.TRUNCATED, step, expected, f"{size} bytes")
    return Problem(Kind.WRONG_BYTES, step, f"{expected} with digest {_short(segment.digest)}", f"{size} bytes with digest {_short(digest)}")


def _short(digest: bytes) -> str:
    return digest.hex()[:16] or "nothing"
