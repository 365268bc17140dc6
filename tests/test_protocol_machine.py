"""Invariant 9 of the protocol, over seeded schedules and as a hypothesis state machine; and three tests that it can fail."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.protocol_machine import EVENTS, Cluster

SCHEDULES = 1000


def test_invariant_holds_under_random_schedules() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        cluster = Cluster(random.Random(seed))
        cluster.run(400)
        counts += cluster.counts
    seen = {"restores": 2500, "crashed half way": 300, "proven": 100, "unproven": 1000, "from full": 50, "fulls": 100, "caught up": 1000}
    assert {what for what, least in seen.items() if counts[what] < least} == set(), f"the schedules do too little: {counts}"


@pytest.mark.parametrize(("variant", "broken"), [("no-gate", "B"), ("no-forks", "A"), ("no-durable", "C")])
def test_each_rule_is_needed(variant: str, broken: str) -> None:
    """Without the commit gate, the fork table or the durable step, the invariant that it is there for breaks."""
    found = Counter[str]()
    for seed in range(400):
        try:
            Cluster(random.Random(seed), variant).run(400)
        except AssertionError as error:
            found[str(error)[:2]] += 1
            if str(error).startswith(f"{broken}:"):
                return
    pytest.fail(f"{variant}: 400 schedules broke only {dict(found)}")


class Machine(RuleBasedStateMachine):
    """The same events in an order that hypothesis chooses, and shrinks."""

    @initialize(rand=st.randoms(use_true_random=False), chains=st.integers(1, 4))
    def begin(self, rand: random.Random, chains: int) -> None:
        self.cluster = Cluster(rand, chains=chains)

    @rule(rand=st.randoms(use_true_random=False), event=st.sampled_from([name for name in EVENTS if name != "fail_round"]))
    def happen(self, rand: random.Random, event: str) -> None:
        self.cluster.random = rand
        getattr(self.cluster, event)()

    @rule(rand=st.randoms(use_true_random=True), events=st.integers(1, 40))
    def go_on(self, rand: random.Random, events: int) -> None:
        """A stretch of ordinary running, so that few decisions lead far."""
        self.cluster.random = rand
        self.cluster.run(events)


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase
