"""The fork table, reach, and the choice of a cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adacheck.keeper.cut import (
    NO_CUT,
    ForkEntry,
    Offer,
    bring_in,
    choose_cut,
    common_steps,
    fork_limit,
    is_live,
    live_starts,
    proven_since,
    reach,
    unstarted,
    void_fork,
)
from adacheck.keeper.protocol import Copy, Kind, Refused, advance, applicable, fence, rebuilt, receive

FORKS = [ForkEntry(1, NO_CUT), ForkEntry(2, 8), ForkEntry(3, 5, proven=False), ForkEntry(4, 11)]


def holding(incarnation: int, floor: int, top: int) -> Copy:
    copy = rebuilt(incarnation, incarnation, floor, [0])
    for step in range(floor + 1, top + 1):
        copy, _ = receive(copy, incarnation, step)
    return copy


def test_the_limit_is_the_least_cut_of_all_later_incarnations() -> None:
    assert [fork_limit(FORKS, incarnation) for incarnation in (1, 2, 3, 4, 5)] == [5, 5, 11, None, None]
    assert is_live(FORKS, 1, 5) and not is_live(FORKS, 1, 6) and is_live(FORKS, 3, 11) and is_live(FORKS, 4, 999)


def test_reach_ends_at_the_fork_and_is_empty_beyond_it() -> None:
    assert reach(holding(1, 2, 9), FORKS) == range(2, 6)
    assert not reach(holding(1, 6, 9), FORKS), "applied beyond the fork"
    assert reach(holding(4, 11, 14), FORKS) == range(11, 15)
    assert not reach(holding(1, 0, 3), [*FORKS, ForkEntry(5, NO_CUT)]), "a start from nothing leaves nothing live, not even step 0"


def test_reach_begins_at_the_highest_base() -> None:
    copy = rebuilt(1, 1, 0, [0, 1])
    for step in (1, 2, 3, 4):
        copy, _ = receive(copy, 1, step)
    copy = advance(copy, 1, dict(applicable(copy, 1))[1])
    assert reach(advance(copy, 2, [0]), []) == range(2, 5)


def test_full_checkpoints_of_a_dead_branch_do_not_count() -> None:
    fulls = [(1, 4), (1, 6), (2, 5), (2, 8), (3, 9), (4, 20)]
    assert [step for incarnation, step in fulls if is_live(FORKS, incarnation, step)] == [4, 5, 9, 20]


def test_the_lineage_is_unbroken_since_the_newest_unproven_live_start() -> None:
    assert proven_since(FORKS) == 5
    assert proven_since([ForkEntry(1, NO_CUT), ForkEntry(2, 8)]) == 0
    assert proven_since([*FORKS, ForkEntry(5, 3)]) == 0, "that start is cut off"


def test_a_proof_learns_of_every_live_start_above_it() -> None:
    assert live_starts([*FORKS, void_fork(5)], 4) == (5, 11) and live_starts(FORKS, 5) == (11,)


def test_an_incarnation_that_stalled_in_its_restore_can_be_shut_out() -> None:
    assert unstarted(FORKS, 7) == (5, 6) and unstarted(FORKS, 4) == ()
    assert fork_limit([*FORKS, void_fork(5), void_fork(6)], 4) == void_fork(5).cut, "limits nothing"
    assert reach(holding(4, 11, 14), [*FORKS, void_fork(5)]) == range(11, 15)
    assert proven_since([void_fork(1)]) == 0


def test_the_newest_common_step_from_the_cheapest_sources() -> None:
    offers = {
        0: [Offer("log", Kind.NVME, range(2, 9)), Offer("peer", Kind.MEMORY, range(7, 12)), Offer("full", Kind.OBJECT, frozenset({4, 8}))],
        1: [Offer("full", Kind.OBJECT, frozenset({4, 8})), Offer("log", Kind.NVME, range(3, 9))],
    }
    choice = choose_cut(offers)
    assert choice is not None and choice.step == 8
    assert {chain: [offer.source for offer in found] for chain, found in choice.sources.items()} == {
        0: ["peer", "log", "full"],
        1: ["log", "full"],
    }
    assert common_steps(offers) == set(range(3, 9))
    older = choose_cut(offers, at_most=6)
    assert older is not None and older.step == 6 and [offer.source for offer in older.sources[0]] == ["log"]
    exact = choose_cut(offers, exactly=4)
    assert exact is not None and exact.step == 4
    proven = choose_cut(offers, only={3, 5, 11})
    assert proven is not None and proven.step == 5
    assert choose_cut(offers, exactly=2) is None and choose_cut(offers, only=()) is None
    assert choose_cut({**offers, 2: []}) is None and choose_cut({}) is None


@given(st.dictionaries(st.integers(0, 3), st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 9), st.integers(0, 9)), max_size=3)))
def test_the_choice_is_a_step_that_every_chain_offers_and_no_newer_one_is(raw: dict[int, list[tuple[Kind, int, int]]]) -> None:
    offers = {c: [Offer(str(i), kind, range(a, b)) for i, (kind, a, b) in enumerate(found)] for c, found in raw.items()}
    choice = choose_cut(offers)
    everywhere = [n for n in range(10) if offers and all(any(n in offer.steps for offer in found) for found in offers.values())]
    assert (choice.step if choice else None) == max(everywhere, default=None)
    cost = [Kind.MEMORY, Kind.NVME, Kind.OBJECT]
    for found in choice.sources.values() if choice else ():
        assert found and [cost.index(offer.kind) for offer in found] == sorted(cost.index(offer.kind) for offer in found)


def test_a_copy_that_lags_keeps_what_it_reaches_and_can_be_filled_up() -> None:
    copy = bring_in(holding(1, 2, 4), 5, 10, FORKS)
    assert isinstance(copy, Copy) and (copy.floor, copy.top, copy.incarnation) == (2, 4, 5)
    copy, _ = receive(copy, 5, 5)
    assert copy.top == 5
    ahead = bring_in(holding(1, 2, 9), 5, 10, FORKS)
    assert isinstance(ahead, Copy) and ahead.top == 5, "what is beyond an earlier fork is another lineage"


def test_a_copy_of_no_use_is_rebuilt_and_a_late_restore_is_fenced() -> None:
    beyond, above = bring_in(holding(1, 6, 9), 5, 10, FORKS), bring_in(holding(4, 12, 14), 5, 11, FORKS)
    assert isinstance(beyond, Refused) and not beyond.fenced
    assert isinstance(above, Refused) and not above.fenced
    fenced = fence(holding(1, 6, 9), 7)
    assert isinstance(fenced, Copy)
    late = bring_in(fenced, 5, 10, FORKS)
    assert isinstance(late, Refused) and late.fenced
