"""Puts an increment together: from the segments its pieces became, and the draft that says what they mean. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from adacheck.digest import state_digest, tensor_digest
from adacheck.keeper.submission import Draft, DraftValue
from adacheck.manifests.record import Derived, Gradient, Increment, Refresh, Segment, StateSpec, Value

Target = tuple[str, int, int]
"""What a segment belongs to: role, state, event."""


@dataclass(frozen=True, slots=True)
class ChainName:
    """Which chain increments are written for, and by whom."""

    run: str
    generation: int
    incarnation: int
    chain: int


@dataclass
class Assembly:
    """The segments of one step so far, by what they belong to.

    Attributes:
        segments: as stored.
        raw_digests: of values that are not stored raw, the digest of their raw bytes, by slot.
    """

    segments: dict[Target, list[Segment]] = field(default_factory=dict)
    raw_digests: dict[int, bytes] = field(default_factory=dict)

    def add(self, target: Target, segment: Segment) -> None:
        """Note one stored segment."""
        self.segments.setdefault(target, []).append(segment)

    def of(self, role: str, state: int, event: int = 0) -> tuple[Segment, ...]:
        """The segments of one target, in tensor order."""
        found = self.segments.get((role, state, event), [])
        return tuple(sorted(found, key=lambda s: (s.tensor, s.start)))

    def value_digest(self, spec: StateSpec, omitted: Collection[str] = ()) -> bytes:
        """Digest of a state from the segments it was shipped in, without its `omitted` tensors."""
        return value_digest(spec, self.of("value", spec.state), self.raw_digests, omitted)

    def increment(self, name: ChainName, draft: Draft, unchanged: Mapping[int, bytes]) -> Increment:
        """The record of the step. `unchanged` are values whose bytes were left out, with their digests."""
        gradients = tuple(Gradient(g.state, g.event, g.dtype, self.of("gradient", g.state, g.event)) for g in draft.gradients)
        omitted = left_out(draft.derived)
        values = tuple(self._value(v, unchanged, omitted[v.spec.state]) for v in draft.values)
        refreshes = tuple(Refresh(state, self.of("refresh", state)) for state in draft.refreshes)
        return Increment(
            name.run, name.generation, name.incarnation, name.chain, draft.step,
            draft.events, gradients, values, draft.derived, refreshes, draft.removed, self.of("opaque", 0),
        )  # fmt: skip

    def _value(self, value: DraftValue, unchanged: Mapping[int, bytes], omitted: Collection[str]) -> Value:
        state = value.spec.state
        if state in unchanged:
            return Value(value.spec, unchanged[state], True, value.reason, ())
        return Value(value.spec, self.value_digest(value.spec, omitted), False, value.reason, self.of("value", state))


def left_out(derived: Iterable[Derived]) -> Mapping[int, Collection[str]]:
    """The tensors of each state that an increment derives, and so leaves out of the state's value; empty for every other state."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    for one in derived:
        found[one.state].add(one.tensor)
    return found


def value_digest(spec: StateSpec, segments: Sequence[Segment], raw_digests: Mapping[int, bytes], omitted: Collection[str] = ()) -> bytes:
    """`state_digest` of a state shipped in canonical segments, from their digests; `omitted` tensors are not in it.

    `raw_digests`: for the slots whose stored bytes are not the raw ones, the digest of those.
    """
    shipped = replace(spec, tensors=tuple(tensor for tensor in spec.tensors if tensor.name not in omitted))
    by_tensor: dict[str, list[bytes]] = {tensor.name: [] for tensor in shipped.tensors}
    for segment in sorted(segments, key=lambda s: (s.tensor, s.start)):
        by_tensor[segment.tensor].append(raw_digests.get(segment.slot, segment.digest))
    return state_digest(shipped, [tensor_digest(by_tensor[tensor.name]) for tensor in shipped.tensors])


def payload_bytes(increment: Increment) -> dict[str, int]:
    """Stored bytes of an increment by payload: `gradient`, `value`, `refresh`, `opaque`. A superseded gradient counts too."""
    stored = {
        "gradient": [s for g in increment.gradients for s in g.segments],
        "value": [s for v in increment.values for s in v.segments],
        "refresh": [s for r in increment.refreshes for s in r.segments],
        "opaque": list(increment.opaque),
    }
    return {name: sum(s.stored_bytes for s in segments) for name, segments in stored.items()}
