"""The hash chain: an intact chain has no problem, and each fault is one problem of its own kind."""

from __future__ import annotations

from dataclasses import replace

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck.manifests import chain
from adacheck.manifests.chain import NO_LINK, Expect, Kind, Problem
from adacheck.manifests.encoding import decode, encode
from adacheck.manifests.errors import Malformed
from adacheck.manifests.record import Base, FullEntry, Gradient, Increment, Linked, Refresh, Segment, StateSpec, Value, Version
from tests.record_strategies import of_class

RUN, OTHER_RUN = "6a7c1d5e-0000-4000-8000-000000000001", "6a7c1d5e-0000-4000-8000-000000000002"
ANCHOR = 10
EXPECT = Expect(RUN, 2, 1)
Entries = list[tuple[int, bytes | None]]


def increment(step: int, *, run: str = RUN, generation: int = 2, number: int = 1, incarnation: int = 4, seed: int = 0) -> Increment:
    opaque = Segment("rng", 0, 8, "raw", 1.0, 0, 8, blake3.blake3(bytes([seed, step])).digest())
    return Increment(run, generation, incarnation, number, step, (), (), (), (), (), (), (opaque,))


def stored(increments: list[Increment], previous: bytes | None = None) -> Entries:
    """Increments as they lie in the store, linked from `previous` or from the chain's beginning."""
    at = previous if previous is not None else chain.genesis(RUN, 2, 1)
    entries: Entries = []
    for each in increments:
        linked = chain.append(each, at)
        entries.append((each.step, encode(linked)))
        at = linked.link
    return entries


def good(count: int = 8) -> Entries:
    return stored([increment(ANCHOR + 1 + n) for n in range(count)])


def found(entries: Entries, expect: Expect = EXPECT) -> list[Problem]:
    return list(chain.verify(entries, ANCHOR, chain.genesis(RUN, 2, 1), expect))


def kinds(entries: Entries, expect: Expect = EXPECT) -> list[tuple[Kind, int]]:
    return [(problem.kind, problem.step) for problem in found(entries, expect)]


def content(entries: Entries, at: int) -> bytes:
    it = entries[at][1]
    assert it is not None
    return it


def put(entries: Entries, at: int, it: bytes | None) -> Entries:
    return [(step, it if n == at else old) for n, (step, old) in enumerate(entries)]


def linked_at(entries: Entries, at: int) -> Linked:
    return decode(content(entries, at), Linked)


def test_links_are_blake3_of_previous_and_entry() -> None:
    linked = chain.append(increment(11), bytes(range(32)))
    assert linked.entry == encode(increment(11))
    assert linked.previous == bytes(range(32))
    assert linked.link == blake3.blake3(bytes(range(32)) + linked.entry).digest()
    with pytest.raises(Malformed, match="31"):
        chain.link(bytes(31), b"entry")


def test_genesis_binds_run_generation_and_chain() -> None:
    beginnings = [chain.genesis(*of) for of in ((RUN, 2, 1), (OTHER_RUN, 2, 1), (RUN, 3, 1), (RUN, 2, 2), (RUN, 1, 2))]
    assert len({*beginnings}) == 5
    assert all(len(it) == 32 for it in beginnings)
    assert chain.genesis(RUN, 2, 1) == beginnings[0]


@given(st.lists(of_class(Increment), min_size=1, max_size=4), st.integers(0, 10**9), st.binary(min_size=32, max_size=32))
def test_an_intact_chain_has_no_problem(increments: list[Increment], anchor: int, anchor_link: bytes) -> None:
    own = [replace(it, run=RUN, generation=2, chain=1, incarnation=n, step=anchor + 1 + n) for n, it in enumerate(increments)]
    expect = replace(EXPECT, newest=anchor + len(own))
    assert list(chain.verify(stored(own, anchor_link), anchor, anchor_link, expect)) == []


def test_an_empty_chain_is_intact_unless_more_is_expected() -> None:
    assert found([]) == []
    assert kinds([], replace(EXPECT, newest=12)) == [(Kind.MISSING, 11)]


@given(st.integers(0, 7), st.data())
def test_any_bit_flip_is_one_bit_flip(at: int, data: st.DataObject) -> None:
    entries = good()
    damaged = bytearray(content(entries, at))
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    assert kinds(put(entries, at, bytes(damaged))) == [(Kind.WRONG_BYTES, 11 + at)]


@given(st.integers(0, 7), st.data())
def test_any_truncation_is_one_truncation(at: int, data: st.DataObject) -> None:
    entries = good()
    size = data.draw(st.integers(1, len(content(entries, at)) - 1))
    assert kinds(put(entries, at, content(entries, at)[:size])) == [(Kind.TRUNCATED, 11 + at)]


@given(st.integers(0, 7), st.integers(0, 7))
def test_a_swap_is_found_at_both_places(one: int, other: int) -> None:
    entries = good()
    swapped = put(put(entries, one, content(entries, other)), other, content(entries, one))
    expected = sorted({one, other}) if one != other else []
    assert kinds(swapped) == [(Kind.SWAPPED, 11 + at) for at in expected]


@given(st.integers(0, 6), st.integers(1, 7))
def test_a_gap_is_one_gap(at: int, count: int) -> None:
    entries = good()
    count = min(count, 7 - at)
    assert kinds(entries[:at] + entries[at + count :]) == [(Kind.GAP, 11 + at)]


@given(st.integers(0, 7), st.sampled_from(["run", "generation", "chain"]))
def test_a_splice_is_one_splice(at: int, what: str) -> None:
    foreign = {
        "run": stored([increment(11 + n, run=OTHER_RUN) for n in range(8)], chain.genesis(OTHER_RUN, 2, 1)),
        "generation": stored([increment(11 + n, generation=3) for n in range(8)], chain.genesis(RUN, 3, 1)),
        "chain": stored([increment(11 + n, number=2) for n in range(8)], chain.genesis(RUN, 2, 2)),
    }[what]
    [problem] = found(put(good(), at, content(foreign, at)))
    assert (problem.kind, problem.step) == (Kind.SPLICED, 11 + at)
    assert what in problem.expected and what in problem.found


def test_a_zombie_that_writes_after_its_successor_is_a_splice() -> None:
    incarnations = [4, 4, 5, 4, 5]
    entries = stored([increment(11 + n, incarnation=i) for n, i in enumerate(incarnations)])
    [problem] = found(entries)
    assert (problem.kind, problem.step) == (Kind.SPLICED, 14)
    assert "incarnation 5" in problem.expected and "incarnation 4" in problem.found


def test_another_history_of_the_same_chain_is_a_broken_link() -> None:
    """A stretch that some earlier incarnation wrote, intact in itself, between entries of the live one."""
    entries, other = good(), stored([increment(11 + n, seed=1) for n in range(8)])
    assert kinds(entries[:3] + other[3:]) == [(Kind.BROKEN_LINK, 14)]
    assert kinds(entries[:3] + other[3:5] + entries[5:]) == [(Kind.BROKEN_LINK, 14), (Kind.BROKEN_LINK, 16)]


def test_a_first_entry_must_follow_the_anchor() -> None:
    assert [(p.kind, p.step) for p in chain.verify(good(), ANCHOR, bytes(32), EXPECT)] == [(Kind.BROKEN_LINK, 11)]
    assert [(p.kind, p.step) for p in chain.verify(good(), ANCHOR, b"short", EXPECT)] == [(Kind.MALFORMED, 10)]
    pruned = good()[3:]
    assert list(chain.verify(pruned, 13, linked_at(good(), 2).link, EXPECT)) == []


def test_a_record_with_a_wrong_link_of_its_own_is_a_broken_link() -> None:
    wrong = encode(replace(linked_at(good(), 4), link=bytes(32)))
    assert kinds(put(good(), 4, wrong)) == [(Kind.BROKEN_LINK, 15)]
    short = encode(replace(linked_at(good(), 4), previous=b"", link=bytes(32)))
    assert kinds(put(good(), 4, short)) == [(Kind.MALFORMED, 15)]


def newer() -> bytes:
    body = content(good(), 3)[:-32]
    body = body[:8] + b"\x02\x00" + body[10:]
    return body + blake3.blake3(body).digest()


BASE = Base(RUN, 2, 1, 14, StateSpec(0, "w", (), "parameter", "", True, (), b""), bytes(32), ())
FAULTS: dict[Kind, Entries] = {
    Kind.MISSING: put(good(), 3, None),
    Kind.ZERO_LENGTH: put(good(), 3, b""),
    Kind.TRUNCATED: put(good(), 3, content(good(), 3)[:100]),
    Kind.WRONG_BYTES: put(good(), 3, content(good(), 3)[:-1] + b"?"),
    Kind.SWAPPED: put(good(), 3, encode(BASE)),
    Kind.GAP: good()[:3] + good()[4:],
    Kind.SPLICED: put(good(), 3, encode(chain.append(increment(14, run=OTHER_RUN), linked_at(good(), 2).link))),
    Kind.BROKEN_LINK: put(good(), 3, encode(chain.append(increment(14), NO_LINK))),
    Kind.NEWER_FORMAT: put(good(), 3, newer()),
    Kind.NOT_A_RECORD: put(good(), 3, b"<!DOCTYPE html>" * 20),
    Kind.MALFORMED: put(good(), 3, encode(replace(linked_at(good(), 3), previous=b""))),
}


@pytest.mark.parametrize("kind", Kind)
def test_each_fault_has_a_kind_of_its_own(kind: Kind) -> None:
    problems = found(FAULTS[kind])
    assert problems[0].kind == kind and problems[0].step == 14
    assert str(problems[0]).startswith(f"step 14: {kind}: expected ")
    # A wholly different record at step 14 also breaks the link of step 15; no other fault is reported twice.
    rest = [(problem.kind, problem.step) for problem in problems[1:]]
    assert rest == ([(Kind.BROKEN_LINK, 15)] if kind is Kind.BROKEN_LINK else [])


def test_what_should_follow_the_last_entry_is_missing() -> None:
    [problem] = found(good(), replace(EXPECT, newest=20))
    assert problem == Problem(Kind.MISSING, 19, "entries up to step 20", "the last at step 18")
    assert found(good(), replace(EXPECT, newest=18)) == []


def test_two_faults_are_two_problems() -> None:
    entries = put(put(good(), 1, b""), 5, content(good(), 6))
    assert kinds(entries) == [(Kind.ZERO_LENGTH, 12), (Kind.SWAPPED, 16)]


def version(number: int, previous: bytes, run: str = RUN) -> Version:
    entry = FullEntry(4, 1000, "full/i00000004/step-000000001000-ab", bytes(32), 5_000, "pending")
    return chain.seal_version(Version(run, 4, number, (entry,), previous, b""))


def test_the_link_of_a_version_is_over_the_one_before_and_its_content() -> None:
    first = version(1, NO_LINK)
    second = version(2, first.link)
    assert second.previous == first.link
    assert first.link == blake3.blake3(NO_LINK + encode(replace(first, link=b""))).digest()
    assert second.link == blake3.blake3(first.link + encode(replace(second, link=b""))).digest()


BYTES = bytes(range(200))
SEGMENT = Segment("grad", 64, 114, "raw", 1.0, 7, 200, blake3.blake3(BYTES).digest())
NEIGHBOUR = bytes(reversed(BYTES))
OTHERS = chain.places(9, [SEGMENT, replace(SEGMENT, slot=8, digest=blake3.blake3(NEIGHBOUR).digest())])


@pytest.mark.parametrize(
    ("stored_bytes", "kind", "text"),
    [
        (None, Kind.MISSING, "no object"),
        (b"", Kind.ZERO_LENGTH, "an empty object"),
        (BYTES[:199], Kind.TRUNCATED, "199 bytes"),
        (NEIGHBOUR, Kind.SWAPPED, "the bytes of slot 8 of step 9"),
        (b"\x01" + BYTES[1:], Kind.WRONG_BYTES, "200 bytes with digest"),
        (BYTES + b"\0", Kind.WRONG_BYTES, "201 bytes with digest"),
    ],
)
def test_each_fault_of_a_segment_has_a_kind_of_its_own(stored_bytes: bytes | None, kind: Kind, text: str) -> None:
    problem = chain.check_segment(9, SEGMENT, stored_bytes, OTHERS)
    assert problem is not None
    assert (problem.kind, problem.step) == (kind, 9)
    assert problem.expected.startswith("the 200 bytes of slot 7 (grad 64:114)")
    assert text in problem.found


def test_an_intact_segment_has_no_problem() -> None:
    assert chain.check_segment(9, SEGMENT, BYTES, {}) is None
    assert chain.check_segment(9, SEGMENT, memoryview(bytearray(BYTES)), OTHERS) is None
    short = chain.check_segment(9, replace(SEGMENT, stored_bytes=201), BYTES, OTHERS)
    assert short is not None and short.kind is Kind.MALFORMED


@given(st.integers(0, 8 * len(BYTES) - 1))
def test_any_bit_flip_of_a_segment_is_found(bit: int) -> None:
    damaged = bytearray(BYTES)
    damaged[bit // 8] ^= 1 << bit % 8
    problem = chain.check_segment(9, SEGMENT, damaged, OTHERS)
    assert problem is not None and problem.kind is Kind.WRONG_BYTES


def test_segments_lists_every_segment_of_an_increment() -> None:
    def numbered(slot: int) -> tuple[Segment, ...]:
        return (replace(SEGMENT, slot=slot), replace(SEGMENT, slot=slot + 1))

    full = replace(
        increment(11),
        gradients=(Gradient(0, 0, "float32", numbered(0)), Gradient(1, 0, "float32", numbered(2))),
        values=(Value(BASE.spec, bytes(32), False, "first", numbered(4)),),
        refreshes=(Refresh(0, numbered(6)),),
        opaque=numbered(8),
    )
    assert [segment.slot for segment in chain.segments(full)] == list(range(10))
