"""The state machine's cluster and what was promised in it: which cuts a restore may not fall below, and what proven means.

(A) every source that offers the chosen cut rebuilds it exactly, but for states written invisibly, and no cut with one is proven;
(B) while a configured copy of each chain can be reached, the cut is not below the committed step; (C) while each chain's NVMe copy
can be reached, or a full checkpoint serves it, the cut is not below the durable step.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from adacheck.keeper import progress as trainer
from adacheck.keeper.cut import NO_CUT, ForkEntry, is_live, reach
from adacheck.keeper.proof import Verdict, verdict
from adacheck.keeper.protocol import Kind
from tests.protocol_values import Place, Values

if TYPE_CHECKING:
    from tests.protocol_restore import Restore


class Promises:
    """State of the cluster, and its checks."""

    def __init__(self, rand: random.Random, variant: str = "", chains: int = 3) -> None:
        self.random, self.variant, self.chains = rand, variant, chains
        self.incarnation = self.newest = 1
        self.forks: list[ForkEntry] = []
        self.messages: list[Any] = []
        self.fulls: dict[tuple[int, int], tuple[list[Values], Verdict]] = {}
        self.full: tuple[int, int, list[Values]] | None = None
        self.late: list[tuple[int, int, list[Values]]] = []
        self.stalled: list[Restore] = []
        self.places: list[dict[str, Place]] = [{} for _ in range(chains)]
        self.configured: list[set[str]] = [set() for _ in range(chains)]
        self.void = [False] * chains
        self.committed = self.durable = self.published = NO_CUT
        self.counts: Counter[str] = Counter()
        self.progress: list[trainer.Progress] = []
        self.truth, self.dirty = [dict[int, Values]() for _ in range(chains)], [dict[int, set[int]]() for _ in range(chains)]

    def here(self, chain: int, kind: Kind) -> list[Place]:
        return [p for p in self.places[chain].values() if p.kind is kind and p.copy.incarnation == self.incarnation]

    def promise(self, now: trainer.Progress) -> None:
        self.published = max(self.published, now.published)
        if now.durable > max(self.durable, self.published):  # promised with what is on NVMe now
            for chain, places in enumerate(self.places):
                reported = max(now.durable, self.progress[chain].synced_most)  # the round may be older than the content
                self.void[chain] &= "nvme" not in places or places["nvme"].copy.top < reported
        self.committed, self.durable = max(self.committed, now.committed), max(self.durable, now.durable)

    def check_cut(self, cut: int, here: list[dict[str, Place]]) -> None:
        """(B) and (C)."""
        if all(self.configured[c] & here[c].keys() for c in range(self.chains)):
            assert cut >= self.committed, f"B: cut {cut} is below the committed step {self.committed}"
        for chain, place in ((c, here[c]["nvme"]) for c in range(self.chains) if "nvme" in here[c]):
            self.void[chain] &= not place.copy.floor <= self.durable <= place.copy.top
        serving = all("nvme" in here[c] and not self.void[c] for c in range(self.chains))
        durable = self.durable if serving else self.published
        assert cut >= durable, f"C: cut {cut} is below the durable step {durable}"

    def check_proofs(self, here: list[dict[str, Place]], forks: list[ForkEntry]) -> None:
        """No cut that is called proven differs from what the trainers had."""
        for chain, places in enumerate(here):
            for place in places.values():
                steps = reach(place.copy, forks)
                for step, dirty in self.dirty[chain].items() if steps and place.proof else ():
                    if place.proof and step < steps.stop and verdict(place.proof, step) is Verdict.PROVEN:
                        assert not dirty, f"A: cut {step} of chain {chain} is wrong in states {dirty}, yet proven"
        for (incarnation, step), (parts, status) in self.fulls.items():
            if status is Verdict.PROVEN and is_live(forks, incarnation, step):
                assert parts == [truth.get(step) for truth in self.truth], f"A: full checkpoint {step} is wrong, yet proven"

    def is_proven(self, step: int) -> bool:
        """On every chain some keeper says so; or a full checkpoint of that step is marked."""
        marked = any(s == step and status is Verdict.PROVEN and is_live(self.forks, i, s) for (i, s), (_, status) in self.fulls.items())
        return marked or all(Verdict.PROVEN in self.verdicts(chain, step) for chain in range(self.chains))

    def verdicts(self, chain: int, step: int) -> set[Verdict]:
        live = (p for p in self.places[chain].values() if p.proof and is_live(self.forks, p.copy.incarnation, p.proof.step))
        return {verdict(place.proof, step) for place in live if place.proof}

    def judge(self) -> None:
        """Full checkpoints wait for the refreshes after them."""
        for (incarnation, step), (parts, status) in self.fulls.items():
            if status is Verdict.PENDING and is_live(self.forks, incarnation, step):
                found = [self.verdicts(chain, step) for chain in range(self.chains)]
                if all(Verdict.PROVEN in verdicts for verdicts in found):
                    self.fulls[incarnation, step] = (parts, Verdict.PROVEN)
                elif any(Verdict.INEXACT in verdicts for verdicts in found):
                    self.fulls[incarnation, step] = (parts, Verdict.INEXACT)
