"""One chain's copy on NVMe: the log of increments, rolling bases, and what is staged for a full checkpoint, in one LMDB.

Knows keys and records, decides nothing: what may be replaced or dropped comes from `keeper/protocol.py`. Every transaction
carries the fence, so an incarnation that was superseded writes nothing more.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace

from adacheck.backends.base import Backend, Created, Expect, Item
from adacheck.digest import digest, state_digest, tensor_digest
from adacheck.errors import Superseded
from adacheck.keeper.stored import Stored, read_verified, slot_count, slot_key
from adacheck.manifests import keys
from adacheck.manifests.encoding import encode
from adacheck.manifests.record import Base, Certificate, Chain, Increment, Segment
from adacheck.states import State, segment_ranges, tensor_bytes

BATCH_BYTES = 64 << 20
"""Bytes of states after which a transaction is committed."""


@dataclass
class NvmeCopy:
    """The copy in `backend`, as owned by one incarnation.

    Attributes:
        chain: head record as stored.
        fence: what the `fence` key holds while this incarnation is the newest.
        increments, bases: what is stored, by step and by state.
        stored: whether the head record in the backend is of this generation already.
    """

    backend: Backend
    chain: Chain
    fence: bytes
    increments: dict[int, Stored] = field(default_factory=dict)
    bases: dict[int, Stored] = field(default_factory=dict)
    stored: bool = True

    @property
    def expect(self) -> Expect:
        """The condition of every transaction."""
        return Expect(keys.FENCE, self.fence)

    def logged(self, increment: Increment, link: bytes) -> None:
        """The log writer stored this increment."""
        self.increments[increment.step] = Stored(increment.step, slot_count(increment), link)

    def roll(self, states: Iterable[State], step: int, certificates: tuple[Certificate, ...]) -> None:
        """Replace the bases of `states` by their present bytes, which are of `step`.

        Raises:
            Superseded: a later incarnation has taken the copy.
            BackendError: nothing of the last batch is stored.
        """
        for batch in _batches(states):
            bases = dict(self.bases)
            self._put_with_chain(self._replacing(batch, step, bases), bases, (self.chain.anchor_step, self.chain.anchor_link), certificates)

    def prune(self, dropped: Iterable[int], retired: Iterable[int], certificates: tuple[Certificate, ...]) -> None:
        """Delete increments and the bases of ended states, and move the anchor, in one transaction."""
        dropped, gone = sorted(dropped), set(retired)
        anchor = (self.chain.anchor_step, self.chain.anchor_link)
        if dropped:
            anchor = (dropped[-1], self.increments[dropped[-1]].link)
        bases = {state: stored for state, stored in self.bases.items() if state not in gone}
        if not dropped and not gone and certificates == self.chain.certificates:
            return
        deleted = [(keys.increment(self.chain.generation, step), self.increments[step].slots) for step in dropped]
        deleted += [(keys.base(self.chain.generation, state, self.bases[state].step), self.bases[state].slots) for state in gone]
        items = (item for key, slots in deleted for item in _deletions(key, slots))
        self._put_with_chain(items, bases, anchor, certificates)
        for step in dropped:
            del self.increments[step]

    def _put_with_chain(
        self, items: Iterable[Item], bases: dict[int, Stored], anchor: tuple[int, bytes], certificates: tuple[Certificate, ...]
    ) -> None:
        """One transaction of `items`, with the head record that is right after it; `bases` may be filled while items are taken."""
        chain: list[Chain] = []

        def every() -> Iterator[Item]:
            yield from items
            listed = sorted((state, stored.step) for state, stored in bases.items())
            states, steps = tuple(state for state, _ in listed), tuple(step for _, step in listed)
            chain.append(
                replace(
                    self.chain,
                    anchor_step=anchor[0],
                    anchor_link=anchor[1],
                    base_states=states,
                    base_steps=steps,
                    certificates=certificates,
                )
            )
            yield keys.CHAIN, encode(chain[0])

        self.put_many(every())
        self.chain, self.bases = chain[0], bases

    def _replacing(self, states: list[State], step: int, bases: dict[int, Stored]) -> Iterator[Item]:
        generation = self.chain.generation
        for state in states:
            number = state.spec.state
            if (old := bases.get(number)) is not None:
                yield from _deletions(keys.base(generation, number, old.step), old.slots)
            base = yield from self._state_items(keys.base(generation, number, step), state, step)
            bases[number] = Stored(step, len(base.segments))

    def replace_generation(self) -> None:
        """Make this generation the one a restore reads, and delete the older ones; its first cut must be here already."""
        self._put_with_chain((), dict(self.bases), (self.chain.anchor_step, self.chain.anchor_link), self.chain.certificates)
        mine = keys.generation_prefix(self.chain.generation)
        self._delete([name for name in self.backend.list("g") if not name.startswith(mine)])
        self.stored = True

    def truncate(self, cut: int, incarnation: int, certificates: tuple[Certificate, ...]) -> None:
        """Bring the copy into an incarnation that starts from `cut`: what is above it goes, and whatever was staged."""
        self.unstage()
        above = [step for step in self.increments if step > cut]
        items = (item for step in above for item in _deletions(keys.increment(self.chain.generation, step), self.increments[step].slots))
        anchor = (self.chain.anchor_step, self.chain.anchor_link)
        self.chain = replace(self.chain, incarnation=incarnation, fence=incarnation)
        self._put_with_chain(items, dict(self.bases), anchor, certificates)
        for step in above:
            del self.increments[step]
        self._sweep()

    def _sweep(self) -> None:
        """Delete what a killed process left: segments of an increment or base whose record was never written."""
        generation = self.chain.generation
        known = {keys.CHAIN, keys.FENCE, *self.backend.list(keys.HISTORY_PREFIX)}
        known.update(keys.increment(generation, step) for step in self.increments)
        known.update(keys.base(generation, state, stored.step) for state, stored in self.bases.items())
        self._delete([name for name in self._names() if name not in known and name.rpartition("/")[0] not in known])

    def _names(self) -> list[str]:
        """All but what a repair set aside."""
        return [name for name in self.backend.list("") if not name.startswith(keys.QUARANTINE_PREFIX)]

    def clear(self, step: int, link: bytes) -> None:
        """Drop all increments and bases, and begin again after `step`, whose link is `link`. The history stays."""
        kept = {keys.CHAIN, keys.FENCE, *self.backend.list(keys.HISTORY_PREFIX)}
        self._delete([name for name in self._names() if name not in kept])
        self.increments.clear()
        self._put_with_chain((), {}, (step, link), self.chain.certificates)

    def _delete(self, names: list[str]) -> None:
        for at in range(0, len(names), 1000):
            self.put_many((name, None) for name in names[at : at + 1000])

    def stage(self, states: Iterable[State], step: int) -> list[Base]:
        """Copy states out for the full checkpoint at `step`; gives their records."""
        records: list[Base] = []
        for batch in _batches(states):
            self.put_many(self._staging(batch, step, records))
        return records

    def _staging(self, states: list[State], step: int, records: list[Base]) -> Iterator[Item]:
        for state in states:
            key = keys.staged(self.chain.generation, step, state.spec.state)
            records.append((yield from self._state_items(key, state, step)))

    def _state_items(self, key: str, state: State, step: int) -> Generator[Item, None, Base]:
        segments: list[Segment] = []
        digests: list[bytes] = []
        for tensor in state.spec.tensors:
            view, size = tensor_bytes(state.tensors[tensor.name]), state.tensors[tensor.name].element_size()
            first = len(segments)
            for start, stop in segment_ranges(tensor):
                part = view[start * size : stop * size]
                segment = Segment(tensor.name, start, stop, "raw", 1.0, len(segments), len(part), digest(part))
                segments.append(segment)
                yield slot_key(key, segment.slot), part
            digests.append(tensor_digest([segment.digest for segment in segments[first:]]))
        whole = state_digest(state.spec, digests)
        base = Base(self.chain.run, self.chain.generation, self.chain.chain, step, state.spec, whole, tuple(segments))
        yield key, encode(base)
        return base

    def read_staged(self, step: int, state: int, segment: Segment) -> bytes:
        """The bytes of a staged segment, verified."""
        return read_verified(self.backend, slot_key(keys.staged(self.chain.generation, step, state), segment.slot), segment)

    def unstage(self, step: int | None = None) -> None:
        """Remove what was staged for one full checkpoint, or for all."""
        generation = self.chain.generation
        prefix = keys.all_staged_prefix(generation) if step is None else keys.staged_prefix(generation, step)
        self._delete(list(self.backend.list(prefix)))

    def put_many(self, items: Iterable[Item]) -> None:
        """One transaction under the fence."""
        outcome = self.backend.put_many(items, expect=self.expect)
        if not isinstance(outcome, Created):
            raise Superseded(
                f"incarnation {self.chain.incarnation} of run {self.chain.run} was superseded: "
                f"{self.backend.name} belongs to a later one; this process must stop"
            )


def _deletions(key: str, slots: int) -> Iterator[Item]:
    yield key, None
    for slot in range(slots):
        yield slot_key(key, slot), None


def _batches(states: Iterable[State]) -> Iterator[list[State]]:
    batch: list[State] = []
    batch_bytes = 0
    for state in states:
        batch.append(state)
        batch_bytes += state.size_bytes
        if batch_bytes >= BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch
