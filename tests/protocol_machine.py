"""Invariant 9 under random schedules: chains, copies and the object tier with values instead of bytes, driven by the real core.

    python tests/protocol_machine.py 2000 [no-gate | no-forks | no-durable] [first seed]

`protocol_restore.py` has the crash and the restore with what is checked there; here is what happens while the trainers run.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from adacheck.keeper import progress as trainer
from adacheck.keeper.cut import is_live, live_starts
from adacheck.keeper.proof import Verdict, begin_proof, must_ship
from adacheck.keeper.protocol import Ack, Hold, Kind, adopt, is_copied, to_copy
from adacheck.keeper.refresh import ELEMENTS_MULTIPLE, due, rolling, schedule
from adacheck.manifests.record import FullEntry
from adacheck.retention import retained
from tests.protocol_restore import Restoring
from tests.protocol_values import LAYOUT, PIECE_BYTES, TENSORS, Payload, Place, Values, replay

EVENTS = {
    "train": 30,
    "deliver": 45,
    "learn": 20,
    "roll": 10,
    "lose_copy": 1.5,
    "catch_up": 5,
    "crash_copy": 1,
    "fill_disk": 0.3,
    "empty_disk": 0.5,
    "start_full": 8,
    "copy_out": 14,
    "publish": 5,
    "judge": 3,
    "fail_round": 0.03,
    "zombie": 2,
    "crash": 1,
}


class Cluster(Restoring):
    """Everything between restores. Each event picks what it does with `self.random`, so a schedule is its seed."""

    def run(self, events: int) -> None:
        for name in self.random.choices(list(EVENTS), weights=list(EVENTS.values()), k=events):
            getattr(self, name)()

    def train(self) -> None:
        slowest = min(self.step)  # collectives keep ranks within a step of each other
        chain = self.random.choice([chain for chain, step in enumerate(self.step) if step == slowest])
        step = slowest + 1
        live, payload = self.live[chain], self.one_step(chain, step)
        dirty = self.dirty[chain][step - 1] - payload.whole.keys() - payload.removed
        for state in payload.whole.keys() - payload.removed:
            live[state] = payload.whole[state]
        if self.random.random() < 0.04 and (quiet := sorted(live.keys() - payload.whole.keys())):
            state = self.random.choice(quiet)
            live[state] = self.written(live[state])  # behind everybody's back
            dirty |= {state}
        turn = due(schedule([(s, LAYOUT) for s in sorted(live)], 3, PIECE_BYTES), step, payload.whole)
        sent = tuple((piece, live[piece.state][piece.start // ELEMENTS_MULTIPLE]) for piece in turn)
        payload = Payload(payload.gradients, payload.whole, payload.removed, sent)
        self.step[chain], self.truth[chain][step], self.dirty[chain][step] = step, dict(live), dirty
        now = self.progress[chain]
        for place in self.names:
            if place in trainer.configured(now) or self.random.random() < 0.5:
                self.messages.append((self.incarnation, chain, place, step, payload, now.committed, now.durable))
        self.rounds.setdefault(step, {})[chain] = trainer.vector(now)

    def one_step(self, chain: int, step: int) -> Payload:
        """Gradients for most states; some go whole because they were written visibly, drifted, or are new; some end."""
        live, whole = self.live[chain], dict[int, tuple[int, int]]()
        gradients = {state: self.random.getrandbits(60) for state in sorted(live) if self.random.random() < 0.9}
        for state, gradient in gradients.items():
            live[state] = replay(live[state], gradient)
        removed = frozenset({self.random.choice(sorted(live))} if len(live) > 1 and self.random.random() < 0.02 else ())
        for state in removed:
            del live[state]
        drifted = {s for place in self.here(chain, Kind.MEMORY) if place.proof for s in must_ship(place.proof)}
        for state in sorted(live):
            if state in drifted or self.random.random() < 0.08:
                whole[state] = self.written(live[state]) if self.random.random() < 0.5 else live[state]
        if self.random.random() < 0.03:
            born = self.random.randrange(4)
            if born not in live and born not in removed:
                whole[born] = (self.random.getrandbits(60), self.random.getrandbits(60))
        return Payload(gradients, whole, removed, ())

    def written(self, value: tuple[int, int]) -> tuple[int, int]:
        piece, bits = self.random.randrange(2), self.random.getrandbits(60)
        return (bits, value[1]) if piece == 0 else (value[0], bits)

    def deliver(self) -> None:
        for _ in range(min(self.random.randrange(1, 5), len(self.messages))):
            self.deliver_one()

    def deliver_one(self) -> None:
        at = self.random.randrange(len(self.messages))
        incarnation, chain, name, step, payload, committed, durable = self.messages[at]
        fate = self.random.random()
        if fate > 0.05:
            self.messages.pop(at)  # else it will arrive once more
        place = self.places[chain].get(name)
        if fate > 0.993 or place is None or place.stopped:
            return
        answer = place.take(incarnation, step, payload)
        if not isinstance(answer, Ack):
            return
        place.committed, place.durable = max(place.committed, committed), max(place.durable, durable)
        if place.kind is Kind.MEMORY:
            place.apply(place.copy.top if self.variant == "no-gate" else place.committed)
        if incarnation == self.incarnation:
            member = self.progress[chain].copies.get(name)
            if member is not None and (member.standing is not trainer.Standing.LOST or self.random.random() < 0.5):
                self.acknowledge(chain, name)

    def acknowledge(self, chain: int, name: str) -> None:
        place = self.places[chain][name]
        self.progress[chain] = trainer.acknowledge(self.progress[chain], name, place.kind, place.copy.top, place.copy.floor)

    def learn(self) -> None:
        chain = self.random.randrange(self.chains)
        for step in range(self.learned[chain] + 1, self.step[chain] + 1):
            now, values = self.progress[chain], self.rounds[step]
            if len(values) < self.chains or self.random.random() < 0.2:
                return
            reduced = [min(column) for column in zip(*values.values(), strict=True)]
            after = trainer.after_round(now, reduced)
            assert after.committed >= now.committed and after.durable >= now.durable, "a watermark went back"
            self.progress[chain], self.learned[chain] = after, step
            self.promise(after)

    def fail_round(self) -> None:
        self.progress = [trainer.round_failed(now) for now in self.progress]

    def roll(self) -> None:
        chain = self.random.randrange(self.chains)
        log, memory = self.places[chain].get("nvme"), self.places[chain].get("local")
        if log is None or memory is None or log.stopped or {log.copy.incarnation, memory.copy.incarnation} != {self.incarnation}:
            return
        if log.copy.fence > self.incarnation:
            return  # every transaction checks the fence
        plan = rolling([(state, 1) for state in sorted(memory.copy.bases)], 3)
        durable = log.committed if self.variant == "no-durable" else log.durable
        log.roll(plan, memory, log.committed, durable)

    def lose_copy(self) -> None:
        chain = self.random.randrange(self.chains)  # declared lost after its deadline; it keeps what it has
        if names := sorted(self.progress[chain].copies):
            self.progress[chain] = trainer.declare_lost(self.progress[chain], self.random.choice(names))

    def crash_copy(self) -> None:
        chain = self.random.randrange(self.chains)
        if names := sorted(self.places[chain]):
            name = self.random.choice(names)
            self.destroy(chain, name)
            if name in self.progress[chain].copies:
                self.progress[chain] = trainer.declare_lost(self.progress[chain], name)

    def fill_disk(self) -> None:
        chain = self.random.randrange(self.chains)
        if (place := self.places[chain].get("nvme")) is not None:
            place.stopped = True
            if "nvme" in self.progress[chain].copies:
                self.progress[chain] = trainer.declare_lost(self.progress[chain], "nvme")

    def empty_disk(self) -> None:
        for places in self.places:
            if "nvme" in places:
                places["nvme"].stopped = False

    def catch_up(self) -> None:
        chain = self.random.randrange(self.chains)
        now, places = self.progress[chain], self.places[chain]
        sources = sorted(trainer.configured(now) & places.keys())
        missing = sorted(set(self.names) - trainer.configured(now))
        if not sources or not missing:
            return
        source, name = places[self.random.choice(sources)], self.random.choice(missing)
        old, kind = places.get(name), Kind.NVME if name == "nvme" else Kind.MEMORY
        if (old is not None and old.stopped) or not trainer.may_catch_up(now, kind, old.copy if old else None, source.copy):
            return
        copy = adopt(source.copy, self.incarnation, source.copy.top)
        assert not hasattr(copy, "reason")
        proof = source.proof
        if kind is Kind.MEMORY and proof is None:
            floor = copy.floor
            states, starts = dict.fromkeys(source.at(floor), TENSORS), live_starts(self.forks, floor)
            proof = begin_proof(floor, states, unproven=True, restored=starts)
        log = {n: payload for n, payload in source.log.items() if n in copy.held}
        place = Place(kind, copy, dict(source.values), log, proof if kind is Kind.MEMORY else None)
        place.results = {n: list(compared) for n, compared in source.results.items()}
        place.committed, place.durable = now.committed, now.durable
        places[name] = place
        self.counts["caught up"] += 1
        self.progress[chain] = trainer.declare_lost(now, name) if name in now.copies else now
        self.acknowledge(chain, name)

    def start_full(self) -> None:
        step = max(self.step) + 1
        if self.full is None and all("local" in p and p["local"].copy.incarnation == self.incarnation for p in self.places):
            self.full = (self.incarnation, step, [{} for _ in range(self.chains)])
            for places in self.places:
                places["local"].hold = Hold(step)

    def copy_out(self) -> None:
        if self.full is None:
            return
        _, step, parts = self.full
        for chain, places in enumerate(self.places):
            place = places.get("local")
            if place is None or place.hold is None:
                self.drop_full()
                return
            if ready := to_copy(place.copy, place.hold):
                state = self.random.choice(ready)
                parts[chain][state] = place.values[state]
                place.hold = Hold(step, place.hold.copied | {state})
                place.apply(place.committed)

    def publish(self) -> None:
        """The version of a full checkpoint is put once every chain's part is there; a zombie may do it long after."""
        if self.full is not None:
            incarnation, step, parts = self.full
            held = [place for places in self.places if (place := places.get("local")) is not None and place.hold is not None]
            if len(held) == self.chains and all(is_copied(place.copy, place.hold) for place in held if place.hold):
                self.drop_full()
                if self.random.random() < 0.2:
                    self.late.append((incarnation, step, parts))
                    return
                self.add_full(incarnation, step, parts)
                rank = self.random.randrange(self.chains)
                self.progress[rank] = trainer.publish(self.progress[rank], step)
                self.promise(self.progress[rank])

    def add_full(self, incarnation: int, step: int, parts: list[Values]) -> None:
        self.fulls[incarnation, step] = (parts, Verdict.PENDING)
        self.counts["fulls"] += 1
        if incarnation == self.incarnation:  # only the newest incarnation deletes
            live = {key: verdict for key, (_, verdict) in self.fulls.items() if is_live(self.forks, *key)}
            proven = [(s, i) for (i, s), verdict in live.items() if verdict is Verdict.PROVEN]
            kept = retained(tuple(FullEntry(*key, "", b"", 0, verdict) for key, verdict in live.items()), 2)
            self.fulls = {(full.incarnation, full.step): self.fulls[full.incarnation, full.step] for full in kept}
            assert not proven or max(proven)[::-1] in self.fulls, "the newest proven full checkpoint was pruned"

    def zombie(self) -> None:
        """Somebody of an earlier incarnation publishes what it had, or goes on with a restore that another one overtook."""
        if self.late and self.random.random() < 0.5:
            incarnation, step, parts = self.late.pop()
            self.add_full(incarnation, step, parts)
        elif self.stalled:
            self.go_on(self.stalled.pop())


def main(seeds: str = "200", variant: str = "", first: str = "0") -> None:
    """Run that many schedules; prints the totals, or the first seed that breaks something."""
    totals: dict[str, int] = {}
    for seed in range(int(first), int(first) + int(seeds)):
        cluster = Cluster(random.Random(seed), variant)
        try:
            cluster.run(400)
        except AssertionError as error:
            sys.exit(f"seed {seed}: {error}")
        for key, count in cluster.counts.items():
            totals[key] = totals.get(key, 0) + count
    print("holds:", totals)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
