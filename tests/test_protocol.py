"""The copy and the trainer's watermarks, one rule at a time; their interplay is `test_protocol_machine.py`."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from adacheck.keeper import progress as trainer
from adacheck.keeper.progress import Progress, Standing
from adacheck.keeper.protocol import (
    Ack,
    Copy,
    Held,
    Hold,
    Kind,
    Refused,
    adopt,
    advance,
    applicable,
    fence,
    is_copied,
    may_replace_base,
    prune,
    rebase,
    rebuilt,
    receive,
    recovered,
    retirable,
    retire,
    to_copy,
)
from adacheck.keeper.refresh import bases_due, rolling


def filled(steps: int, states: tuple[int, ...] = (0, 1), held: dict[int, Held] | None = None) -> Copy:
    copy = rebuilt(1, 1, 0, states)
    for step in range(1, steps + 1):
        copy, _ = receive(copy, 1, step, (held or {}).get(step))
    return copy


def applied(copy: Copy, committed: int, hold: Hold | None = None) -> Copy:
    for step, states in applicable(copy, committed, hold):
        copy = advance(copy, step, states)
    return copy


@given(st.lists(st.integers(1, 12), max_size=40))
def test_any_order_and_number_acks_the_last_contiguous_step(steps: list[int]) -> None:
    copy, seen = rebuilt(1, 1, 0, [0]), set[int]()
    for step in steps:
        copy, answer = receive(copy, 1, step)
        seen.add(step)
        assert answer == Ack(next(n for n in range(14) if n + 1 not in seen))
    assert set(copy.held) == seen


def test_a_gap_closes_late() -> None:
    copy = filled(2)
    copy, answer = receive(copy, 1, 4)
    assert answer == Ack(2)
    assert receive(copy, 1, 3)[1] == Ack(4)


def test_other_incarnations_are_refused_and_change_nothing() -> None:
    copy = filled(2)
    fenced = fence(copy, 3)
    assert isinstance(fenced, Copy)
    for sender, is_fenced in ((1, True), (2, True), (3, False), (4, False)):
        after, answer = receive(fenced, sender, 3)
        assert isinstance(answer, Refused) and answer.fenced is is_fenced and after == fenced
    assert isinstance(fence(fenced, 2), Refused)
    assert isinstance(adopt(fenced, 2, 1), Refused)
    again = fence(fenced, 3)
    assert again == fenced


def test_the_gate_holds_back_what_is_not_committed() -> None:
    copy = filled(5)
    assert [step for step, _ in applicable(copy, 3)] == [1, 2, 3]
    copy = applied(copy, 3)
    assert copy.bases == {0: 3, 1: 3} and copy.floor == 3 and copy.top == 5
    assert applicable(copy, 3) == () and [step for step, _ in applicable(copy, 99)] == [4, 5]


def test_states_begin_and_end_where_an_increment_says_so() -> None:
    held = {2: Held(frozenset({7})), 4: Held(removed=frozenset({0}))}
    copy = filled(5, held=held)
    assert applicable(copy, 5) == tuple(
        (step, frozenset(states)) for step, states in [(1, {0, 1}), (2, {0, 1, 7}), (3, {0, 1, 7}), (4, {0, 1, 7}), (5, {1, 7})]
    )
    assert applied(copy, 5).bases == {1: 5, 7: 5}


def test_a_full_checkpoint_holds_each_state_at_its_step_and_only_until_it_is_copied() -> None:
    held = {3: Held(frozenset({7})), 5: Held(frozenset({8}), frozenset({1}))}
    copy, hold = filled(6, held=held), Hold(3)
    assert not is_copied(copy, hold)
    copy = applied(copy, 2, hold)
    assert to_copy(copy, hold) == () and not is_copied(copy, hold)
    copy = applied(copy, 6, hold)
    assert copy.bases == {0: 3, 1: 3, 7: 3, 8: 6} and to_copy(copy, hold) == (0, 1, 7)
    hold = Hold(3, frozenset({0, 1}))
    copy = applied(copy, 6, hold)
    assert copy.bases == {0: 6, 7: 3, 8: 6} and to_copy(copy, hold) == (7,) and not is_copied(copy, hold)
    hold = Hold(3, frozenset({0, 1, 7}))
    assert is_copied(copy, hold) and applied(copy, 6, hold).bases == {0: 6, 7: 6, 8: 6}


def test_a_chain_without_states_advances_by_its_increments() -> None:
    copy = filled(3, states=())
    assert applicable(copy, 2) == ((1, frozenset()), (2, frozenset()))
    copy = applied(copy, 2)
    assert copy.floor == copy.least_base == 2 and prune(copy)[1] == (1,)


def test_a_base_is_replaced_only_at_or_below_the_durable_step() -> None:
    copy = filled(6)
    assert may_replace_base(copy, 0, 4, committed=5, durable=4)
    assert not may_replace_base(copy, 0, 5, committed=5, durable=4)
    assert not may_replace_base(copy, 0, 5, committed=4, durable=9)
    assert not may_replace_base(copy, 0, 7, committed=9, durable=9), "above what it holds a base would leave a gap"
    assert not may_replace_base(rebase(copy, (0,), 4), 0, 4, committed=9, durable=9)
    assert may_replace_base(copy, 7, 0, committed=0, durable=0), "a state without a base gets its first one"
    later = rebuilt(1, 1, 5, [0])
    assert not may_replace_base(later, 7, 4, committed=9, durable=9), "nothing below the log leads on from there"


def test_pruning_keeps_the_increment_at_the_least_base_and_all_after_it() -> None:
    copy = rebase(filled(6), (0,), 5)
    assert prune(copy) == (copy, ()), "the other state still needs them"
    copy, dropped = prune(rebase(copy, (1,), 3))
    assert dropped == (1, 2) and sorted(copy.held) == [3, 4, 5, 6] and copy.floor == 5 and copy.top == 6


def test_pruning_keeps_the_birth_of_a_state_without_a_base() -> None:
    copy = filled(6, held={3: Held(frozenset({7}))})
    copy, dropped = prune(rebase(rebase(copy, (0,), 5), (1,), 5))
    assert dropped == (1, 2)
    assert copy.first_needed == 3 and copy.floor == 5
    assert applicable(copy, 6) == tuple((n, frozenset(states)) for n, states in [(3, {7}), (4, {7}), (5, {7}), (6, {0, 1, 7})])
    assert applied(copy, 6).bases == {0: 6, 1: 6, 7: 6}
    assert prune(rebase(copy, (7,), 6))[1] == (3, 4)


def test_the_base_of_an_ended_state_goes_when_no_promised_cut_needs_it() -> None:
    copy = filled(6, held={4: Held(removed=frozenset({1}))})
    assert retirable(copy, committed=6, durable=6) == (), "the floor would be lost: no other base is at 4 or above"
    copy = rebase(copy, (0,), 4)
    assert retirable(copy, committed=6, durable=3) == () and retirable(copy, committed=6, durable=4) == ((1, 4),)
    copy = retire(copy, 1, 4)
    assert copy.floor == 4 and retirable(copy, committed=6, durable=6) == ()
    assert recovered(1, 1, copy.bases, copy.held) == copy


@given(st.randoms(use_true_random=False))
def test_a_scan_of_the_log_finds_the_copy_that_was_written(rand: random.Random) -> None:
    held = {
        rand.randrange(1, 9): Held(frozenset({rand.randrange(3)})),
        rand.randrange(1, 9): Held(removed=frozenset({rand.randrange(2)})),
    }
    copy = filled(9, held=held)
    for _ in range(rand.randrange(6)):
        state, step = rand.randrange(2), rand.randrange(1, 9)
        ended = any(n <= step and state in increment.removed for n, increment in copy.held.items())
        if not ended and may_replace_base(copy, state, step, committed=9, durable=9):
            copy = rebase(copy, (state,), step)
        for state, step in retirable(copy, committed=9, durable=rand.randrange(9)):
            copy = retire(copy, state, step)
        copy, _ = prune(copy)
    assert recovered(copy.incarnation, copy.fence, copy.bases, copy.held, floor=copy.floor if not copy.bases else 0) == copy


def test_adoption_cuts_off_what_is_above_the_cut() -> None:
    copy, _ = receive(applied(filled(6), 3), 1, 8)
    adopted = adopt(copy, 4, 5)
    assert isinstance(adopted, Copy)
    assert (adopted.incarnation, adopted.fence, adopted.top, sorted(adopted.held)) == (4, 4, 5, [1, 2, 3, 4, 5])
    assert isinstance(adopt(copy, 4, 2), Refused) and isinstance(adopt(copy, 4, 7), Refused)
    assert receive(adopted, 4, 6)[1] == Ack(6)


def begun(cut: int = 10) -> Progress:
    memory, log = rebuilt(1, 1, cut, [0]), rebuilt(1, 1, cut, [0])
    return trainer.begin(cut, {"memory": (Kind.MEMORY, memory), "nvme": (Kind.NVME, log)})


def acked(now: Progress, name: str, step: int, floor: int = 10) -> Progress:
    return trainer.acknowledge(now, name, Kind.NVME if name == "nvme" else Kind.MEMORY, step, floor)


def alone(now: Progress) -> Progress:
    return trainer.after_round(now, trainer.vector(now))


def test_acked_is_what_every_configured_copy_holds() -> None:
    now = acked(begun(), "memory", 12)
    assert now.acked == 10 and acked(now, "nvme", 11).acked == 11
    now = trainer.declare_lost(now, "nvme")
    assert now.acked == 12 and trainer.lost(now) == ("nvme",) and trainer.configured(now) == {"memory"}


def test_only_a_round_commits_and_nothing_is_durable_before_the_first() -> None:
    now = acked(acked(begun(), "memory", 12), "nvme", 11)
    assert (now.committed, now.durable) == (-1, -1)
    after = trainer.after_round(now, [min(a, b) for a, b in zip(trainer.vector(now), (10, 9, -8, 1, 0), strict=True)])
    assert (after.committed, after.durable) == (10, -1), "one chain's NVMe ends at 9, another's begins at 10: no cut is on all"
    after = alone(after)
    assert (after.committed, after.durable, after.rounds) == (11, 11, 2)
    assert alone(trainer.round_failed(acked(after, "memory", 20))).committed == 11


def test_watermarks_never_go_back() -> None:
    now = alone(acked(acked(begun(), "memory", 14), "nvme", 14))
    after = trainer.after_round(now, (3, 3, 0, 1, 0))
    assert (after.committed, after.durable, after.published) == (14, 14, -1)


def test_a_lost_copy_counts_fully_only_with_all_that_was_acked() -> None:
    now = trainer.declare_lost(alone(acked(acked(begun(), "memory", 12), "nvme", 12)), "nvme")
    now = acked(now, "memory", 15)
    assert now.acked == 15
    assert acked(now, "nvme", 11).copies["nvme"].standing is Standing.LOST, "below the committed step"
    now = acked(now, "nvme", 13)
    assert now.copies["nvme"].standing is Standing.JOINING and trainer.lost(now) == ("nvme",)
    now = acked(now, "memory", 17)
    assert now.acked == 15, "a copy that joins holds acking back, so that it can reach it"
    now = acked(now, "nvme", 16)
    assert now.acked == 16 and trainer.lost(now) == ()


def test_a_lost_copy_may_come_back_with_less() -> None:
    now = acked(trainer.declare_lost(alone(acked(acked(begun(), "memory", 12), "nvme", 12)), "nvme"), "nvme", 11)
    assert now.copies["nvme"].acked == 11 and now.copies["nvme"].standing is Standing.LOST


def test_nvme_that_comes_back_with_less_is_not_reported_as_more() -> None:
    now = trainer.declare_lost(alone(acked(acked(begun(), "memory", 12), "nvme", 14)), "nvme")
    assert trainer.vector(now)[:3] == (12, 14, -10), "lost is not gone: what it synced is still there"
    now = acked(now, "nvme", 12, floor=11)
    assert trainer.vector(now)[:3] == (12, 12, -11) and now.synced_most == 14
    assert trainer.after_round(now, (12, 12, -11, 1, 0)).durable == 14, "but what was learned stays"


def test_a_full_disk_keeps_the_durable_step_until_a_full_checkpoint_is_published() -> None:
    now = trainer.declare_lost(alone(acked(acked(begun(), "memory", 12), "nvme", 12)), "nvme")
    now = alone(acked(now, "memory", 40))
    assert (now.committed, now.durable) == (40, 12)
    other = trainer.publish(now, 30)
    assert other.durable == 30
    now = trainer.after_round(now, [min(a, b) for a, b in zip(trainer.vector(now), trainer.vector(other), strict=True)])
    assert (now.durable, now.published) == (30, 30), "every rank learns of it in the next round"


def test_an_error_reaches_every_rank_in_the_same_round() -> None:
    now = begun()
    reduced = [min(a, b) for a, b in zip(trainer.vector(now), trainer.vector(trainer.report(now, 3)), strict=True)]
    assert trainer.after_round(now, reduced).error == 3


def test_what_is_held_is_given_up_only_for_as_much() -> None:
    now, source = alone(acked(acked(begun(), "memory", 20), "nvme", 12)), applied(rebuilt(1, 1, 10, [0]), 10)
    for step in range(11, 21):
        source, _ = receive(source, 1, step)
    low, high = applied(source, 12), applied(source, 15)
    assert trainer.may_catch_up(now, Kind.MEMORY, None, high) and trainer.may_catch_up(now, Kind.MEMORY, high, low)
    longer, _ = receive(high, 1, 21)
    assert not trainer.may_catch_up(now, Kind.MEMORY, longer, high), "it holds more"
    assert now.durable == 12 and trainer.may_catch_up(now, Kind.NVME, None, low)
    assert not trainer.may_catch_up(now, Kind.NVME, None, high), "the durable step is below its floor"
    assert trainer.may_catch_up(trainer.publish(now, 20), Kind.NVME, high, high), "a full checkpoint serves what it served"
    assert not trainer.may_catch_up(trainer.publish(now, 19), Kind.NVME, high, replace(high, floor=20))


def test_before_the_first_round_old_content_is_kept() -> None:
    old, source = filled(5), rebuilt(2, 2, 10, [0])
    now = trainer.begin(10, {"memory": (Kind.MEMORY, source)})
    assert not trainer.may_catch_up(now, Kind.MEMORY, old, source), "another rank may still need the old cut"
    assert trainer.may_catch_up(alone(now), Kind.MEMORY, old, source)
    assert trainer.may_catch_up(now, Kind.MEMORY, None, source)


@given(st.randoms(use_true_random=False), st.integers(2, 8))
def test_the_log_stays_short_and_can_always_be_read_back(rand: random.Random, log_steps: int) -> None:
    """Two `log_steps` of increments, whatever goes whole, begins and ends; the shadow is one step behind."""
    copy, shadow, longest = rebuilt(1, 1, 0, range(4)), rebuilt(1, 1, 0, range(4)), 0
    for step in range(1, 12 * log_steps):
        alive = sorted(shadow.bases)
        removed = frozenset(rand.sample(alive, 1) if len(alive) > 1 and rand.random() < 0.1 else ())
        whole = frozenset(state for state in range(6) if rand.random() < 0.2) - removed
        copy, _ = receive(copy, 1, step, Held(whole, removed))
        shadow, _ = receive(shadow, 1, step, Held(whole, removed))
        shadow, _ = prune(applied(shadow, step - 1))
        for state in bases_due(rolling([(state, 1) for state in sorted(shadow.bases)], log_steps), copy.bases, step - 1):
            if may_replace_base(copy, state, shadow.bases[state], committed=step - 1, durable=step - 1):
                copy = rebase(copy, (state,), shadow.bases[state])
        for state, at in retirable(copy, committed=step - 1, durable=step - 1):
            copy = retire(copy, state, at)
        copy, _ = prune(copy)
        longest = max(longest, len(copy.held))
        assert recovered(1, 1, copy.bases, copy.held, floor=copy.floor if not copy.bases else 0) == copy
        assert copy.top == step
    assert longest <= 2 * log_steps + 2
