"""What comparisons prove, against a model that remembers every event of every piece."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from adacheck.keeper.proof import (
    Compared,
    Proof,
    Verdict,
    begin_proof,
    forget,
    inexact_states,
    must_ship,
    newest_proven,
    observe,
    resume,
    verdict,
)

TENSORS = (("param", 128), ("exp_avg", 64), ("empty", 0))
PIECES = (("param", 0, 64), ("param", 64, 128), ("exp_avg", 0, 64))


def compared(state: int, piece: int, equal: bool = True) -> Compared:
    return Compared(state, *PIECES[piece], equal)


def after(proof: Proof, *steps: list[Compared]) -> Proof:
    for step, found in enumerate(steps, proof.step + 1):
        proof = observe(proof, step, compared=found)
    return proof


def verdicts(proof: Proof, steps: range) -> str:
    return "".join(verdict(proof, step).value[2] for step in steps)  # o proven, n pending, p unproven, e inexact


def test_a_cut_is_proven_when_every_range_was_compared_once_more() -> None:
    proof = begin_proof(10, {0: TENSORS})
    assert verdict(proof, 10) is Verdict.PROVEN and verdict(proof, 9) is Verdict.UNPROVEN
    proof = after(proof, [compared(0, 0)], [compared(0, 1)])
    assert newest_proven(proof, 99) == 10 and verdict(proof, 11) is Verdict.PENDING
    proof = after(proof, [compared(0, 2)])
    assert newest_proven(proof, 99) == 11 and newest_proven(proof, 10) == 10 and newest_proven(proof, 9) is None


def test_a_whole_shipment_proves_its_own_cut_and_leaves_what_was_not_compared_unproven_for_ever() -> None:
    proof = after(begin_proof(0, {0: TENSORS, 1: TENSORS}), [compared(0, 0)], [compared(0, 1)])
    proof = observe(proof, 3, whole={0: TENSORS, 1: TENSORS})
    assert verdicts(proof, range(4)) == "oppo" and newest_proven(proof, 2) == 0


def test_drift_is_inexact_from_its_last_equal_refresh_until_the_state_goes_whole() -> None:
    proof = after(begin_proof(0, {0: TENSORS}), [compared(0, 0)], [compared(0, 1)], [compared(0, 2)])
    proof = after(proof, [compared(0, 0, equal=False)], [compared(0, 1)])
    assert must_ship(proof) == {0} and verdicts(proof, range(8)) == "ooeeeeee" and newest_proven(proof, 99) == 1
    proof = after(observe(proof, 6, whole={0: TENSORS}), [compared(0, 0)])
    assert must_ship(proof) == set() and verdicts(proof, range(8)) == "ooeeeeon"
    assert inexact_states(proof, 5) == (0,) and inexact_states(proof, 6) == ()


def test_states_begin_and_end() -> None:
    proof = observe(begin_proof(0, {0: TENSORS}), 1, whole={7: TENSORS})
    assert verdicts(proof, range(2)) == "on"
    proof = observe(proof, 2, removed={0})
    assert verdicts(proof, range(3)) == "opn", "the ended state's last cuts are never compared"
    proof = after(proof, [compared(7, 0), compared(7, 1), compared(7, 2)])
    assert verdicts(proof, range(4)) == "opoo"
    empty = observe(observe(proof, 4, removed={7}), 5)
    assert newest_proven(empty, 99) == 5


def test_ranges_need_not_be_cut_as_before() -> None:
    proof = after(begin_proof(0, {0: (("param", 256),)}), [Compared(0, "param", 64, 192, True)])
    proof = after(proof, [Compared(0, "param", 0, 128, True)], [Compared(0, "param", 128, 256, False)])
    assert inexact_states(proof, 1) == (0,) and verdict(proof, 0) is Verdict.PROVEN
    proof = after(begin_proof(0, {0: (("param", 256),)}), [Compared(0, "param", 64, 192, True)], [Compared(0, "param", 0, 128, True)])
    proof = after(proof, [Compared(0, "param", 128, 256, True)])
    assert newest_proven(proof, 99) == 2 and len(proof.spans[0]) == 2


def test_a_restored_trainer_leaves_undecided_cuts_unproven_and_starts_a_lineage() -> None:
    proof = after(begin_proof(0, {0: TENSORS}), [compared(0, 0), compared(0, 1), compared(0, 2)], [])
    resumed = resume(proof, [2])
    assert verdicts(resumed, range(4)) == "oopn" and resumed.since == 2
    resumed = after(resumed, [compared(0, 0), compared(0, 1), compared(0, 2)])
    assert newest_proven(resumed, 99) == 3
    assert resume(proof, [1]).since == 0, "restored from a proven cut, the lineage is unbroken"


def test_increments_of_before_a_restore_still_decide_what_they_show() -> None:
    proof = resume(begin_proof(0, {0: TENSORS}), [2])
    proof = after(proof, [compared(0, 0), compared(0, 1), compared(0, 2)], [compared(0, 0, equal=False)], [])
    assert verdicts(proof, range(4)) == "ooen" and proof.since == 2 and must_ship(proof) == set()
    again = resume(resume(begin_proof(0, {0: TENSORS}), [5]), [2])
    assert again.restored == (2,), "the restore of 5 never came to train"


def test_a_keeper_that_was_away_learns_of_every_start_it_missed() -> None:
    all_equal = [compared(0, 0), compared(0, 1), compared(0, 2)]
    proof = after(resume(begin_proof(0, {0: TENSORS}), [2, 4]), [], [], all_equal, [], all_equal)
    assert verdicts(proof, range(6)) == "oppopo"


def test_restoring_an_unproven_cut_proves_nothing_of_it() -> None:
    proof = begin_proof(4, {0: TENSORS}, unproven=True)
    assert proof.since == 4 and verdict(proof, 4) is Verdict.UNPROVEN and newest_proven(proof, 99) is None
    assert begin_proof(4, {0: TENSORS}, since=3).since == 3


@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_it_agrees_with_a_model_that_remembers_everything(rand: random.Random, steps: int) -> None:
    proof = begin_proof(0, {0: TENSORS, 1: TENSORS})
    events: dict[tuple[int, int], list[tuple[int, str]]] = {(s, p): [(0, "whole")] for s in (0, 1) for p in range(3)}
    for step in range(1, steps + 1):
        whole = {state for state in (0, 1) if rand.random() < 0.15}
        found = [compared(s, p, rand.random() < 0.9) for s in (0, 1) for p in range(3) if rand.random() < 0.3]
        proof = observe(proof, step, whole=dict.fromkeys(whole, TENSORS), compared=found)
        for state, piece in events:
            if state in whole:
                events[state, piece].append((step, "whole"))
            elif one := [c for c in found if (c.state, (c.tensor, c.start, c.stop)) == (state, PIECES[piece])]:
                events[state, piece].append((step, "equal" if one[0].equal else "differs"))
        if rand.random() < 0.1:
            proof = forget(proof, rand.randrange(step))
    for cut in range(proof.begin, steps + 1):
        firsts = [next(((at, what) for at, what in seen if at >= cut), None) for seen in events.values()]
        proven = all(first is not None and (first[1] == "equal" or first == (cut, "whole")) for first in firsts)
        drifting = any(drifts(seen, cut) for seen in events.values())
        assert (verdict(proof, cut) is Verdict.PROVEN) == (proven and not drifting)
        assert (verdict(proof, cut) is Verdict.INEXACT) == drifting
        below = [n for n in range(proof.begin, cut + 1) if verdict(proof, n) is Verdict.PROVEN]
        assert newest_proven(proof, cut) == max(below, default=None)


def drifts(seen: list[tuple[int, str]], cut: int) -> bool:
    """Whether a difference covers the cut: from after the range's last arrival before it, to before the next whole shipment."""
    for index, (_, what) in enumerate(seen):
        if what == "differs":
            end = next((n for n, kind in seen[index:] if kind == "whole"), None)
            if seen[index - 1][0] < cut and (end is None or cut < end):
                return True
    return False
