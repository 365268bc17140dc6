"""Values for the protocol's state machine: a place that keeps one copy of a chain, with numbers where a driver has bytes.

A state is one tensor of two pieces. Every decision is the core's; only the arithmetic is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from adacheck.keeper.proof import Compared, Proof, observe
from adacheck.keeper.protocol import Ack, Copy, Held, Hold, Kind, Refused, advance, applicable, prune, rebase, receive, retirable, retire
from adacheck.keeper.protocol import may_replace_base as may_replace
from adacheck.keeper.refresh import ELEMENTS_MULTIPLE, Piece, Rolling, bases_due

TENSORS = (("param", 2 * ELEMENTS_MULTIPLE),)
LAYOUT = (("param", 2 * ELEMENTS_MULTIPLE, 4),)
PIECE_BYTES = 4 * ELEMENTS_MULTIPLE
Value = tuple[int, int]
Values = dict[int, Value]


def replay(value: Value, gradient: int) -> Value:
    """One optimizer step: it forgets nothing, so a difference stays."""
    first, second = ((v * 6364136223846793005 + (gradient + p) * 1442695040888963407 + 1) % (1 << 61) for p, v in enumerate(value))
    return first, second


@dataclass(frozen=True)
class Payload:
    """An increment's content."""

    gradients: dict[int, int]
    whole: Values
    removed: frozenset[int]
    refreshes: tuple[tuple[Piece, int], ...]

    def held(self) -> Held:
        return Held(frozenset(self.whole), self.removed)

    def bring(self, state: int, value: Value | None) -> Value | None:
        """The state's value after this increment; None while it does not exist."""
        if state in self.removed:
            return None
        if state in self.whole:
            return self.whole[state]
        return value if value is None or state not in self.gradients else replay(value, self.gradients[state])


@dataclass
class Place:
    """A copy with its bytes: a keeper's memory, or an NVMe log."""

    kind: Kind
    copy: Copy
    values: Values
    log: dict[int, Payload] = field(default_factory=dict)
    proof: Proof | None = None
    results: dict[int, list[Compared]] = field(default_factory=dict)
    hold: Hold | None = None
    committed: int = -1
    durable: int = -1
    stopped: bool = False

    def take(self, incarnation: int, step: int, payload: Payload) -> Ack | Refused:
        before = self.copy.held
        self.copy, answer = receive(self.copy, incarnation, step, payload.held())
        if step in self.copy.held and step not in before:
            self.log[step] = payload
        return answer

    def apply(self, committed: int) -> None:
        """Memory: apply to the shadow what the gate allows, and compare the refreshes."""
        for step, states in applicable(self.copy, committed, self.hold):
            payload = self.log[step]
            for state in states:
                value = payload.bring(state, self.values.pop(state, None))
                if value is not None:
                    self.values[state] = value
            for piece, sent in payload.refreshes:
                if piece.state in states:
                    equal = self.values[piece.state][piece.start // ELEMENTS_MULTIPLE] == sent
                    self.results.setdefault(step, []).append(Compared(piece.state, piece.tensor, piece.start, piece.stop, equal))
            self.copy = advance(self.copy, step, states)
        while self.proof is not None and self.proof.step < self.copy.least_base:
            step = self.proof.step + 1
            payload, compared = self.log[step], self.results.pop(step, [])
            self.proof = observe(self.proof, step, whole=dict.fromkeys(payload.whole, TENSORS), compared=compared, removed=payload.removed)
        self.shed()

    def roll(self, plan: Rolling, memory: Place, committed: int, durable: int) -> None:
        """NVMe: write the shadow's states that are due as new bases."""
        for state in bases_due(plan, self.copy.bases, memory.copy.floor):
            at = memory.copy.bases.get(state)
            if at is not None and may_replace(self.copy, state, at, committed=committed, durable=durable):
                self.copy = rebase(self.copy, (state,), at)
                self.values[state] = memory.values[state]
        for state, step in retirable(self.copy, committed=committed, durable=durable):
            self.copy = retire(self.copy, state, step)
            self.values.pop(state)
        self.shed()

    def shed(self) -> None:
        self.copy, dropped = prune(self.copy)
        for step in dropped:
            del self.log[step]

    def forget_above(self, step: int) -> None:
        """Bytes of increments that an adoption dropped."""
        self.log = {n: payload for n, payload in self.log.items() if n <= step}
        self.results = {n: compared for n, compared in self.results.items() if n <= step}

    def at(self, cut: int) -> Values:
        """The cut rebuilt from bases and increments."""
        out = {state: value for state, value in self.values.items() if self.copy.bases[state] <= cut}
        for step in range(self.copy.first_needed, cut + 1):
            payload = self.log[step]
            for state in {*out, *payload.whole}:
                if self.copy.bases.get(state, -1) >= step:
                    continue
                value = payload.bring(state, out.pop(state, None))
                if value is not None:
                    out[state] = value
        return out
