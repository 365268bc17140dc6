"""States that begin and end within a chain: what NVMe must hold for them while they have no base of their own."""

from __future__ import annotations

from adacheck.keeper.protocol import Copy, Held, applicable, prune, rebase, rebuilt, receive, retirable, retire


def taken(copy: Copy, *increments: Held) -> Copy:
    for step, held in enumerate(increments, start=copy.top + 1):
        copy, _ = receive(copy, 1, step, held)
    return copy


def test_states_that_began_at_the_least_base_start_from_there() -> None:
    """A new run: all states are shipped whole at step 1, and the first one gets its base while the others wait for their turn."""
    copy = taken(rebuilt(1, 1, 0, ()), Held(frozenset({0, 1, 2})), Held())
    copy = rebase(copy, (0,), 1)
    assert applicable(copy, 2) == ((1, frozenset({1, 2})), (2, frozenset({0, 1, 2})))
    copy, dropped = prune(rebase(copy, (0,), 2))
    assert dropped == ()
    assert applicable(copy, 2) == ((1, frozenset({1, 2})), (2, frozenset({1, 2})))


def test_a_state_that_was_shipped_whole_before_it_ended_holds_no_increment_back() -> None:
    whole, ended = Held(frozenset({1})), Held(removed=frozenset({1}))
    copy = taken(rebuilt(1, 1, 3, (0, 1)), whole, whole, ended, Held(), Held())
    copy = rebase(copy, (0,), 8)
    assert retirable(copy, committed=8, durable=8) == ((1, 6),)
    copy, dropped = prune(retire(copy, 1, 6))
    assert dropped == (4, 5, 6, 7)


def test_a_state_that_began_again_is_kept_from_its_second_beginning_on() -> None:
    whole, ended = Held(frozenset({1})), Held(removed=frozenset({1}))
    copy = taken(rebuilt(1, 1, 3, (0, 1)), whole, ended, Held(), whole, Held())
    copy = retire(rebase(copy, (0,), 8), 1, 5)
    copy, dropped = prune(copy)
    assert dropped == (4, 5, 6)
    assert applicable(copy, 8) == ((7, frozenset({1})), (8, frozenset({1})))
