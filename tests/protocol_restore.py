"""The state machine's crashes and restores, in the linear order of the protocol; what must hold is `protocol_promises.py`."""

from __future__ import annotations

import random
from dataclasses import dataclass

from adacheck.keeper import progress as trainer
from adacheck.keeper.cut import (
    NO_CUT,
    Choice,
    ForkEntry,
    Offer,
    bring_in,
    choose_cut,
    common_steps,
    is_live,
    live_starts,
    reach,
    unstarted,
    void_fork,
)
from adacheck.keeper.proof import begin_proof, resume
from adacheck.keeper.protocol import Copy, Kind, Refused, fence, is_copied, rebuilt
from tests.protocol_promises import Promises
from tests.protocol_values import TENSORS, Place, Values


@dataclass
class Restore:
    """A restore under way: what it decided, so that it can stall anywhere and go on when it is too late."""

    incarnation: int
    cut: int
    values: list[Values]
    forks: list[ForkEntry]
    proven: bool
    asked: bool = False
    recorded: bool = False


class Restoring(Promises):
    """Crashes and restores of the cluster."""

    names = ("local", "peer", "nvme")

    def __init__(self, rand: random.Random, variant: str = "", chains: int = 3) -> None:
        super().__init__(rand, variant, chains)
        start = Restore(1, NO_CUT, [self.fresh() for _ in range(chains)], [], True)
        self.record(start)
        for chain in range(chains):
            for name in self.names:
                self.bring(start, chain, name)
        self.start(start)

    def fresh(self) -> Values:
        return {state: (self.random.getrandbits(60), self.random.getrandbits(60)) for state in range(2)}

    def start(self, done: Restore) -> None:
        """Training begins at the cut: what was restored is what the trainers have."""
        cut = max(done.cut, 0)
        self.incarnation, self.step = done.incarnation, [cut] * self.chains
        self.rounds: dict[int, dict[int, tuple[int, ...]]] = {}
        self.live = [dict(values) for values in done.values]
        self.learned, self.progress = [cut] * self.chains, []
        for places in self.places:
            mine = {name: (p.kind, p.copy) for name, p in places.items() if p.copy.incarnation == self.incarnation}
            self.progress.append(trainer.begin(cut, mine, self.published))
        if self.random.random() < 0.7:  # the round that ends the restore; else a later one takes its place
            reduced = [min(column) for column in zip(*map(trainer.vector, self.progress), strict=True)]
            self.progress = [trainer.after_round(now, reduced) for now in self.progress]
            self.promise(self.progress[0])

    def record(self, under_way: Restore) -> None:
        """The fork record is written: from now on the cut's bytes are those that were read, and no promise is above it."""
        self.forks.append(ForkEntry(under_way.incarnation, under_way.cut, under_way.proven))
        under_way.recorded, cut = True, max(under_way.cut, 0)
        for chain in range(self.chains):
            keep = range(under_way.cut)  # from nothing: no step of before is left
            self.truth[chain] = {n: v for n, v in self.truth[chain].items() if n in keep} | {cut: dict(under_way.values[chain])}
            self.dirty[chain] = {n: d for n, d in self.dirty[chain].items() if n in keep} | {cut: set()}
        if under_way.asked or under_way.cut < max(self.committed, self.durable):  # what is beyond it serves no promise now
            for chain, places in enumerate(self.places):
                beyond = {name for name, place in places.items() if place.copy.floor > under_way.cut}
                self.configured[chain] -= beyond
                self.void[chain] |= "nvme" in beyond
        self.committed, self.durable = min(self.committed, under_way.cut), min(self.durable, under_way.cut)
        self.published = max(self.full_steps(self.forks), default=NO_CUT)

    def destroy(self, chain: int, name: str) -> None:
        self.places[chain].pop(name, None)
        self.configured[chain].discard(name)
        self.void[chain] |= name == "nvme"

    def drop_full(self) -> None:
        self.full = None
        for place in (place for places in self.places for place in places.values()):
            place.hold = None

    def crash(self) -> None:
        self.configured = [set(trainer.configured(now)) for now in self.progress]
        if self.full is not None:
            held = [p for places in self.places if (p := places.get("local")) is not None and p.hold is not None]
            if len(held) == self.chains and all(p.hold is not None and is_copied(p.copy, p.hold) for p in held):
                self.late.append(self.full)
            self.drop_full()
        self.kill()
        while not self.restore({self.random.randrange(self.chains)} if self.random.random() < 0.3 else set()):
            self.counts["crashed half way"] += 1
            self.kill()

    def kill(self) -> None:
        kind = self.random.choices(["trainers", "host", "two hosts", "all agents"], weights=[3, 3, 2, 3])[0]
        count = {"trainers": 0, "host": 1, "two hosts": 2, "all agents": self.chains}[kind]
        dead = set(self.random.sample(range(self.chains), min(count, self.chains)))
        for chain in range(self.chains):
            for name in list(self.places[chain]):
                gone = name != "nvme" or (kind != "all agents" and self.random.random() < 0.3)
                if self.host(chain, name) in dead and gone:
                    self.destroy(chain, name)

    def host(self, chain: int, name: str) -> int:
        return (chain + (name == "peer")) % self.chains

    def restore(self, away: set[int]) -> bool:
        """The linear order of a restore; False if it crashed (or stalled) half way."""
        self.newest = incarnation = self.newest + 1
        here = [{n: p for n, p in places.items() if self.host(c, n) not in away} for c, places in enumerate(self.places)]
        for place in (place for places in here for place in places.values()):
            fenced = fence(place.copy, incarnation)
            assert isinstance(fenced, Copy)
            place.copy = fenced
            self.deliver()
        for number in unstarted(self.forks, incarnation):
            self.forks.append(void_fork(number))
        forks = [] if self.variant == "no-forks" else list(self.forks)
        offers = {c: self.offers(places, forks) for c, places in enumerate(here)}
        for _ in range(self.random.randrange(4)):
            self.deliver()  # zombies write while the restore goes on
        self.check_proofs(here, forks)
        only = None
        if self.random.random() < 0.1:
            only = {step for step in common_steps(offers) if self.is_proven(step)}
        choice = choose_cut(offers, only=only)
        if only is None or choice is None:
            self.check_cut(choice.step if choice else NO_CUT, here) if only is None else None
            if only is not None:
                choice = choose_cut(offers)
        under_way = self.decide(incarnation, choice, forks)
        under_way.asked = only is not None
        if self.random.random() < 0.05:
            self.stalled.append(under_way)
            return False
        todo = [(c, name) for c in range(self.chains) for name in self.names if self.host(c, name) not in away]
        return self.carry_out(under_way, self.random.sample(todo, len(todo)))

    def full_steps(self, forks: list[ForkEntry]) -> frozenset[int]:
        """Steps of the full checkpoints on the live lineage."""
        return frozenset(step for incarnation, step in self.fulls if is_live(forks, incarnation, step))

    def offers(self, places: dict[str, Place], forks: list[ForkEntry]) -> list[Offer]:
        fulls = Offer("full", Kind.OBJECT, self.full_steps(forks))
        return [*(Offer(name, place.kind, reach(place.copy, forks)) for name, place in places.items()), fulls]

    def decide(self, incarnation: int, choice: Choice | None, forks: list[ForkEntry]) -> Restore:
        """Read the cut from every source that offers it: (A)."""
        self.counts["restores"] += 1
        if choice is None:
            self.counts["from nothing"] += 1
            return Restore(incarnation, NO_CUT, [self.fresh() for _ in range(self.chains)], forks, True)
        cut, values = choice.step, []
        for chain, sources in choice.sources.items():
            read = []
            for offer in sources:
                same = [key for key in self.fulls if key[1] == cut and is_live(forks, *key)]
                got = self.fulls[same[0]][0][chain] if offer.kind is Kind.OBJECT else self.places[chain][offer.source].at(cut)
                truth, dirty = self.truth[chain].get(cut, {}), self.dirty[chain].get(cut, set())
                assert got.keys() == truth.keys(), f"A: {offer.source} has other states at cut {cut} of chain {chain}"
                wrong = {state for state in got if got[state] != truth[state]}
                assert wrong <= dirty, f"A: {offer.source} rebuilds wrong bytes of states {wrong} at cut {cut} of chain {chain}"
                read.append(got)
            assert all(got == read[0] for got in read), f"A: sources of chain {chain} disagree at cut {cut}"
            self.counts["from full"] += sources[0].kind is Kind.OBJECT
            values.append(read[0])
        proven = self.is_proven(cut)
        self.counts["proven" if proven else "unproven"] += 1
        return Restore(incarnation, cut, values, forks, proven)

    def carry_out(self, under_way: Restore, todo: list[tuple[int, str]]) -> bool:
        """Fork record, then the copies one by one; a crash between any two leaves a stalled restore behind."""
        self.record(under_way)
        for chain, name in todo:
            if self.random.random() < 0.02:
                self.stalled.append(under_way)
                return False
            self.bring(under_way, chain, name)
            self.early_bird(under_way, chain)
            if self.random.random() < 0.3:
                self.deliver()
        self.start(under_way)
        return True

    def early_bird(self, done: Restore, chain: int) -> None:
        """A rank that is ready before the others: its keeper does what its progress allows so far."""
        mine = {name: (p.kind, p.copy) for name, p in self.places[chain].items() if p.copy.incarnation == done.incarnation}
        now = trainer.begin(max(done.cut, 0), mine, self.published)
        for name in mine:
            place = self.places[chain][name]
            if place.kind is Kind.MEMORY and self.random.random() < 0.5:
                place.apply(max(place.committed, now.committed))

    def bring(self, to: Restore, chain: int, name: str) -> None:
        """Bring one copy into the incarnation: adopt, fill up from another, or rebuild."""
        place, others = self.places[chain].get(name), list(self.places[chain].values())
        answer = bring_in(place.copy, to.incarnation, to.cut, to.forks) if place else None
        if place is not None and isinstance(answer, Copy):
            place.copy, place.hold, place.durable = answer, None, NO_CUT
            place.committed = min(place.committed, to.cut)
            place.forget_above(answer.top)
            for step in range(answer.top + 1, to.cut + 1):
                found = [p.log[step] for p in others if step in p.log and to.cut in reach(p.copy, to.forks)]
                if not found or place.stopped:
                    break
                place.take(to.incarnation, step, found[0])
            lags = place.copy.top < to.cut
            place.proof = None if place.proof is None or lags else resume(place.proof, live_starts(self.forks, place.proof.step - 1))
            return
        if (isinstance(answer, Refused) and answer.fenced) or (place is None and self.random.random() < 0.1):
            return  # superseded; or the host does not come back
        self.places[chain].pop(name, None)
        if place is None or not place.stopped:
            kind, cut = (Kind.NVME if name == "nvme" else Kind.MEMORY), max(to.cut, 0)
            copy = rebuilt(to.incarnation, to.incarnation, cut, to.values[chain])
            states = dict.fromkeys(to.values[chain], TENSORS)
            proof = begin_proof(cut, states, unproven=not to.proven) if kind is Kind.MEMORY else None
            self.places[chain][name] = Place(kind, copy, dict(to.values[chain]), proof=proof)

    def go_on(self, stalled: Restore) -> None:
        """A restore that was overtaken goes on: it may not lose anything any more."""
        if not stalled.recorded:
            assert any(fork.incarnation == stalled.incarnation for fork in self.forks), "nobody took the record of a stalled restore"
            return  # its record is taken: superseded
        for chain in range(self.chains):
            for name in list(self.places[chain]):
                self.bring(stalled, chain, name)

    def deliver(self) -> None:
        raise NotImplementedError
