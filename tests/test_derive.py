"""Rules come from bytes seen equal twice, are never more than hints, and never cost a base that somebody is derived from."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck.keeper.derive import MISSES_MAX, PAUSE_STEPS_MAX, WIDTHS, Derivations, Tensor, castable, forget, observe, shipped, to_compare
from adacheck.keeper.protocol import (
    Copy,
    Held,
    applicable,
    may_replace_base,
    prune,
    rebase,
    rebuilt,
    receive,
    retirable,
    retire,
    with_derived,
)
from adacheck.manifests.record import Derived, Increment, Segment, StateSpec, TensorSpec, Value


def spec(state: int, **tensors: str) -> StateSpec:
    shapes = tuple(TensorSpec(name, dtype, (4,), (4,), (0,)) for name, dtype in tensors.items())
    return StateSpec(state, f"s{state}", (), "parameter", "", True, shapes, b"")


WEIGHT: Tensor = (0, "param")
SPECS = {
    0: spec(0, param="bfloat16"),
    1: spec(1, param="float32", exp_avg="float32", step="float64"),
    2: spec(2, param="bfloat16", master="float32"),
}
SOURCES = ((1, "param"), (1, "exp_avg"), (1, "step"), (2, "master"))


def run(steps: list[tuple[bytes | None, set[Tensor]]]) -> list[Derivations]:
    """The weight's history: what it was shipped as (`None`: not at all), and what it equals; gives what is known after each."""
    known, after = Derivations(), []
    for step, (digest, equal) in enumerate(steps, 1):
        whole = {} if digest is None else {WEIGHT: digest}
        asked = to_compare(known, step, whole, SPECS)
        known = observe(known, step, whole, {t: [s for s in sources if s in equal] for t, sources in asked.items()})
        after.append(known)
    return after


HISTORY = st.lists(st.tuples(st.sampled_from([None, b"a", b"b", b"c"]), st.sets(st.sampled_from(SOURCES))), max_size=30)


@given(HISTORY)
def test_a_rule_takes_two_changes_in_a_row_that_ended_equal(steps: list[tuple[bytes | None, set[Tensor]]]) -> None:
    before: dict[Tensor, Tensor] = {}
    for at, known in enumerate(run(steps)):
        if WEIGHT in known.rules and WEIGHT not in before:
            digests = [digest for digest, _ in steps[at - 2 : at + 1]]
            assert None not in digests and digests[0] != digests[1] != digests[2]
            assert known.rules[WEIGHT] in steps[at - 1][1] & steps[at][1]
        before = dict(known.rules)


def test_two_equal_changes_are_enough() -> None:
    master = (1, "param")
    after = run([(b"a", {master}), (b"b", {master}), (b"c", {master})])
    assert [dict(known.rules) for known in after] == [{}, {}, {WEIGHT: master}]


def test_only_fitting_tensors_are_compared() -> None:
    step = dict.fromkeys(((0, "param"), (1, "param"), (2, "param")), b"1")
    known = observe(Derivations(), 1, step, {})
    asked = to_compare(known, 2, dict.fromkeys(step, b"2"), SPECS)
    assert asked == {(0, "param"): SOURCES, (1, "param"): ((1, "step"),), (2, "param"): ((2, "master"),)}


TENSORS = st.dictionaries(
    st.sampled_from(["param", "master", "step"]),
    st.tuples(st.sampled_from(["bfloat16", "float16", "float32", "float64", "int64"]), st.sampled_from([(4,), (2, 2), ()])),
    min_size=1,
)


@given(st.lists(TENSORS, max_size=4))
def test_castable_is_what_might_be_compared(states: list[dict[str, tuple[str, tuple[int, ...]]]]) -> None:
    specs = {
        n: StateSpec(n, f"s{n}", (), "parameter", "", True, tuple(TensorSpec(name, *of, of[1], ()) for name, of in tensors.items()), b"")
        for n, tensors in enumerate(states)
    }
    every = [(n, tensor.name) for n, spec in specs.items() for tensor in spec.tensors if tensor.dtype in WIDTHS]
    known = observe(Derivations(), 1, dict.fromkeys(every, b"1"), {})
    assert castable(specs) == to_compare(known, 2, dict.fromkeys(every, b"2"), specs).keys()


def test_only_what_is_wanted_is_digested() -> None:
    segments = tuple(Segment(name, 0, 4, "raw", 1.0, 0, 8, name.encode() * 4) for name in ("param", "master"))
    value = Value(SPECS[2], b"", False, "certify", segments)
    increment = Increment("r", 1, 1, 0, 1, (), (), (value,), (), (), (), ())
    assert shipped(increment, ()) == {}
    assert shipped(increment, {WEIGHT}) == {}
    assert shipped(increment, {(2, "param")}) == {(2, "param"): blake3.blake3(b"param" * 4).digest()}


def test_a_tensor_without_source_is_looked_at_less_and_less() -> None:
    known, asked = Derivations(), []
    for step in range(1, 5 * PAUSE_STEPS_MAX):
        whole = {WEIGHT: step.to_bytes(4)}
        if pairs := to_compare(known, step, whole, SPECS):
            asked.append(step)
        known = observe(known, step, whole, dict.fromkeys(pairs, ()))
    gaps = [b - a for a, b in pairwise(asked)]
    assert gaps == [min(1 << n, PAUSE_STEPS_MAX) for n in range(len(gaps))] and gaps[-1] == PAUSE_STEPS_MAX


def test_a_rule_that_misses_again_and_again_goes() -> None:
    master = (1, "param")
    known = run([(b"a", {master}), (b"b", {master}), (b"c", {master})])[-1]
    for step in range(4, 5 + 2 * MISSES_MAX):  # a clamp at every other step is no reason
        now = () if step % 2 else [Derived(*WEIGHT, *master)]
        known = observe(known, step, {WEIGHT: step.to_bytes(4)} if step % 2 else {}, {}, now)
        assert known.rules == {WEIGHT: master}
    for step in range(20, 20 + MISSES_MAX):
        assert WEIGHT in known.rules
        known = observe(known, step, {WEIGHT: step.to_bytes(4)}, {})
    assert not known.rules and not known.misses


@pytest.mark.parametrize("state", [0, 1])
def test_drift_of_either_end_takes_the_rule_back(state: int) -> None:
    master = (1, "param")
    known = run([(b"a", {master}), (b"b", {master}), (b"c", {master})])[-1]
    assert forget(known, {2}) == known
    assert not forget(known, {state}).rules


def test_no_source_is_derived_itself() -> None:
    """fp64 -> fp32 -> bf16: whichever rule is found first stands alone."""
    middle, top, known = (1, "param"), (1, "step"), Derivations()
    for step in range(1, 6):
        whole = {WEIGHT: step.to_bytes(4), middle: step.to_bytes(4)}
        asked = to_compare(known, step, whole, SPECS)
        known = observe(known, step, whole, {t: [s for s in sources if s in (middle, top)] for t, sources in asked.items()})
        assert not known.rules.keys() & set(known.rules.values())
    assert known.rules


class Log:
    """A copy on NVMe of a source (0), its derived states (1, 2), and what each held at each step, as numbers."""

    def __init__(self) -> None:
        self.copy: Copy = rebuilt(1, 1, 0, range(3))
        self.truth: list[dict[int, Any]] = [{0: 0, 1: 0, 2: 0}]
        self.bases: dict[int, Any] = dict(self.truth[0])
        self.increments: dict[int, tuple[Held, dict[int, Any]]] = {}

    def train(self, how: dict[int, str]) -> None:
        """One more step; each state is `derived`, `whole`, `kept` or `ended`. The source is replayed."""
        step, now = len(self.truth), dict(self.truth[-1])
        now[0] = step
        for state, what in how.items():
            now |= {state: ("cast", step)} if what == "derived" else {state: ("own", step)} if what == "whole" else {}
            if what == "ended" or (what == "kept" and state not in self.truth[-1]):
                now.pop(state, None)
        at = {what: frozenset(state for state, it in how.items() if it == what) for what in ("derived", "whole", "ended")}
        derived = at["derived"] & self.truth[-1].keys()
        for state in at["derived"] - derived:
            del now[state]
        held = Held(at["whole"], at["ended"] & self.truth[-1].keys(), {0: derived} if derived else {})
        self.truth.append(now)
        self.increments[step] = held, {state: now[state] for state in at["whole"]}
        self.copy, _ = receive(self.copy, 1, step, held)

    def roll(self, wanted: list[int], step: int) -> None:
        """What the apply thread does at a step; a crash may come between any two bases."""
        allowed = {"committed": step, "durable": step}
        for state in with_derived(self.copy, wanted, step):
            if state in self.truth[step] and may_replace_base(self.copy, state, step, **allowed):
                self.bases[state] = self.truth[step][state]
                self.copy = rebase(self.copy, (state,), step)
                self.check()
        for state, at in retirable(self.copy, **allowed):
            self.copy = retire(self.copy, state, at)
            del self.bases[state]
        self.copy, _ = prune(self.copy)
        self.check()

    def check(self) -> None:
        """Every cut the copy reaches is rebuilt, by the rules of `Applier`."""
        for cut in range(self.copy.floor, self.copy.top + 1):
            shadow = {state: content for state, content in self.bases.items() if self.copy.bases[state] <= cut}
            for step, states in applicable(self.copy, cut):
                held, whole = self.increments[step]
                shadow |= {state: content for state, content in whole.items() if state in states}
                if 0 in states:
                    shadow[0] = step
                for state in held.derived.get(0, frozenset()) & states & shadow.keys():
                    if 0 in states:
                        shadow[state] = ("cast", step)
                    else:
                        del shadow[state]
                for state in held.removed & states:
                    shadow.pop(state, None)
            assert shadow == self.truth[cut], f"cut {cut}"


HOW = st.sampled_from(["derived", "derived", "derived", "whole", "kept", "ended"])
SCHEDULE = st.lists(st.tuples(HOW, HOW, st.lists(st.sampled_from([0, 1, 2]), max_size=2, unique=True), st.integers(0, 3)), max_size=25)


@given(SCHEDULE)
def test_bases_never_leave_a_derived_state_without_its_source(schedule: list[tuple[str, str, list[int], int]]) -> None:
    log = Log()
    applied = 0
    for one, two, wanted, late in schedule:
        log.train({1: one, 2: two})
        applied = max(applied, log.copy.top - late)
        log.roll(wanted, applied)
