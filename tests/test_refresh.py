"""Schedules: every byte once in `refresh` steps, every base once in `log_steps`, evenly."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from adacheck.keeper.refresh import Layout, bases_due, due, pieces, rolling, schedule, spread
from adacheck.manifests.record import SEGMENT_BYTES_MAX

TENSOR = st.tuples(
    st.sampled_from(["param", "exp_avg", "step"]), st.sampled_from([0, 1, 63, 64, 65, 5000, 300_001]), st.sampled_from([1, 2, 4, 8])
)
LAYOUTS = st.lists(st.lists(TENSOR, max_size=3, unique_by=lambda t: t[0]), max_size=8).map(lambda raw: list(enumerate(raw)))


def size_bytes(layout: Layout) -> int:
    return sum(elements * itemsize for _, tensors in layout for _, elements, itemsize in tensors)


@given(LAYOUTS, st.integers(1, 20), st.integers(0, 1000), st.sampled_from([None, 256, 4096, SEGMENT_BYTES_MAX]))
def test_any_window_sends_every_element_exactly_once(layout: Layout, refresh: int, begin: int, piece_bytes: int | None) -> None:
    plan = schedule(layout, refresh, piece_bytes)
    seen: Counter[tuple[int, str, int]] = Counter()
    sent = 0
    for step in range(begin, begin + refresh):
        for piece in due(plan, step):
            sent += piece.size_bytes
            assert piece.start % 64 == 0 and 0 < piece.size_bytes <= max(piece_bytes or SEGMENT_BYTES_MAX, 64 * 8)
            seen.update((piece.state, piece.tensor, block) for block in range(piece.start // 64, -(-piece.stop // 64)))
    blocks = {(s, t, b) for s, tensors in layout for t, elements, _ in tensors for b in range(-(-elements // 64))}
    assert seen == Counter(dict.fromkeys(blocks, 1)) and sent == size_bytes(layout) == plan.size_bytes


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 40))
def test_work_is_dealt_out_in_order_and_evenly(sizes: list[int], turns: int) -> None:
    dealt = spread(sizes, turns)
    assert list(dealt) == sorted(dealt) and all(0 <= turn < turns for turn in dealt)
    load = Counter[int]()
    for size, turn in zip(sizes, dealt, strict=True):
        load[turn] += size
    share, largest = sum(sizes) / turns, max(sizes, default=0)
    assert all(load[turn] <= share + largest for turn in range(turns))


def test_large_states_are_cut_so_that_a_step_sends_its_share() -> None:
    layout = [(0, [("param", 30_000_000, 4)]), (1, [("param", 1000, 4), ("step", 1, 4)])]
    plan = schedule(layout, 100)
    loads = [sum(piece.size_bytes for piece in turn) for turn in plan.turns]
    assert max(loads) <= 2 * 120_004_004 // 100 + 4004 and min(loads) > 0
    assert max(piece.size_bytes for piece in pieces([(0, [("param", 90_000_000, 4)])])) == SEGMENT_BYTES_MAX


def test_a_state_that_goes_whole_is_not_refreshed() -> None:
    plan = schedule([(0, [("param", 640, 4)]), (1, [("param", 640, 4)])], 1)
    assert [piece.state for piece in due(plan, 7)] == [0, 1] and [piece.state for piece in due(plan, 7, {0})] == [1]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 9))
def test_every_base_rolls_once_in_log_steps(sizes: list[int], log_steps: int) -> None:
    plan, bases, rolled = rolling(enumerate(sizes), log_steps), dict.fromkeys(range(len(sizes)), 0), Counter[int]()
    for applied in range(1, 5 * log_steps + 1):
        for state in bases_due(plan, bases, applied):
            bases[state] = applied
            rolled[state] += 1
        assert applied - min(bases.values()) <= max(log_steps, applied if applied < log_steps else 0)
    assert set(rolled.values()) == {5}


def test_a_turn_that_was_not_taken_is_made_up_for_oldest_first() -> None:
    plan = rolling([(0, 1), (1, 1), (2, 1), (3, 1)], 4)
    assert plan.turns == {0: 0, 1: 1, 2: 2, 3: 3}
    assert bases_due(plan, {0: 8, 1: 5, 2: 2, 3: 7}, 10) == (2, 1)
    assert bases_due(plan, {0: 8, 2: 10, 3: 7}, 10) == (1,), "a state without a base is due at once"
    assert bases_due(plan, {0: 8, 1: 9, 2: 10, 3: 7}, 10) == ()
