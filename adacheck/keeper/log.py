"""Turns the trainer's pieces into a logged increment: narrow, pack, digest, store, then the record that links it into the chain.

A batch of pieces goes into one transaction, computed inside it piece by piece, so nothing is copied twice and one fsync serves
all that was waiting. Blocks go back to the trainer when the transaction is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

from adacheck.backends.base import Backend, Created, Expect, Item
from adacheck.backends.memory import MemoryBackend
from adacheck.digest import digest
from adacheck.history import History, Row, add, unstored
from adacheck.keeper.assembly import Assembly, ChainName, left_out
from adacheck.keeper.narrow import RAW, Narrower
from adacheck.keeper.submission import Draft, Piece
from adacheck.keeper.window import Logged
from adacheck.manifests import chain, keys
from adacheck.manifests.encoding import encode
from adacheck.manifests.record import Increment, Segment, StateSpec
from adacheck.planes import Packer, packed
from adacheck.states import dtype_of

BATCH_BYTES = 64 << 20
"""Raw bytes after which a transaction is committed, so that LMDB's copy of it and the blocks it keeps stay bounded."""

SMALL_BYTES = 64 << 10
"""Values up to this size wait for the end of the step, and are left out if they equal those of the step before."""

SMALL_HELD_BYTES = 8 << 20
"""Most bytes of such values that wait; the others are stored at once, or they would keep every block of the pool."""

Message = Piece | Draft
MakeRow = Callable[[Draft, Increment], Row]


@dataclass
class Batch:
    """What one transaction took in.

    Attributes:
        consumed: every message, in order; after an error the same messages can be written elsewhere.
        done: pieces whose blocks may go back to the trainer.
        finished: increments that are complete now.
    """

    consumed: list[Message] = field(default_factory=list)
    done: list[Piece] = field(default_factory=list)
    finished: list[Logged] = field(default_factory=list)


@dataclass
class _Progress:
    """Where the writer stands within the chain; copied before a batch, so that a failed one can be done again elsewhere."""

    link: bytes
    step: int
    history: History
    slot: int = 0
    assembly: Assembly = field(default_factory=Assembly)
    small: dict[int, list[Piece]] = field(default_factory=dict)  # values that may be left out, by state
    small_bytes: int = 0
    previous_values: dict[int, bytes] = field(default_factory=dict)  # digest of each value of the step before
    memory_bytes: int = 0

    def copy(self) -> _Progress:
        segments = {target: list(segments) for target, segments in self.assembly.segments.items()}
        assembly = Assembly(segments, dict(self.assembly.raw_digests))
        return replace(self, assembly=assembly, small={s: list(p) for s, p in self.small.items()})


class LogWriter:
    """Writes one chain. Single-threaded: the keeper's log thread owns it.

    Args:
        name: whose chain it is.
        step, link: of the last increment before the first that will come.
        history, row: of the steps before, and what gives the row of one that is complete.
        zstd_level: with which tensors are packed, `None` for not at all.
    """

    def __init__(self, name: ChainName, step: int, link: bytes, history: History, row: MakeRow, zstd_level: int | None) -> None:
        self.name, self._row = name, row
        self._at = _Progress(link, step + 1, history)
        self._narrower = Narrower()
        self._packer = Packer(zstd_level) if zstd_level is not None else None

    @property
    def link(self) -> bytes:
        """Of the last increment stored."""
        return self._at.link

    @property
    def history(self) -> History:
        """Of all steps up to the last increment stored."""
        return self._at.history

    def write_nvme(self, backend: Backend, fence: Expect, first: Message, more: Callable[[], Message | None], batch: Batch) -> bool:
        """Store `first`, and what `more` gives until it gives `None` or the batch is full, in one transaction.

        Returns:
            Whether the fence still held; if not, nothing was stored.
        Raises:
            BackendError: nothing of the batch is stored, and the writer stands where it stood; `batch.consumed` has the messages.
        """
        before, stored = self._at.copy(), False
        try:
            stored = isinstance(backend.put_many(self._items(first, more, batch), expect=fence), Created)
        finally:
            if not stored:
                self._at = before
                batch.done.clear()
                batch.finished.clear()
        return stored

    def write_memory(self, backend: MemoryBackend, messages: list[Message], batch: Batch) -> None:
        """Store messages in this process's memory instead; the history goes to NVMe with the next increment there."""
        on_nvme = self._at.history.stored
        for message in messages:
            ended = len(batch.finished)
            for key, content in self._items(message, lambda: None, batch):
                if content is None:
                    backend.delete(key)
                elif len(batch.finished) == ended:  # what comes after that: the record itself is in the window
                    assert isinstance(content, (bytes, memoryview)), "log items are single buffers"
                    backend.put(key, bytes(content))
                    self._at.memory_bytes += len(content)
            if len(batch.finished) > ended:
                batch.finished[-1] = replace(batch.finished[-1], memory_bytes=self._at.memory_bytes)
                self._at.memory_bytes = 0
        self._at.history = replace(self._at.history, stored=on_nvme)

    def _items(self, first: Message, more: Callable[[], Message | None], batch: Batch) -> Iterator[Item]:
        message: Message | None = first
        raw_bytes = 0
        while message is not None:
            batch.consumed.append(message)
            if isinstance(message, Piece):
                raw_bytes += message.where.size_bytes
                size_bytes = message.where.size_bytes
                if message.role == "value" and size_bytes <= SMALL_BYTES and self._at.small_bytes + size_bytes <= SMALL_HELD_BYTES:
                    self._at.small.setdefault(message.state, []).append(message)
                    self._at.small_bytes += size_bytes
                else:
                    yield self._store(message)
                    batch.done.append(message)
            else:
                yield from self._finish(message, batch)
            message = more() if raw_bytes < BATCH_BYTES else None

    def _store(self, piece: Piece) -> Item:
        codec, coefficient, stored = RAW, 1.0, piece.where.view()
        if piece.role == "gradient":
            narrowed = self._narrower.narrow(stored, piece.dtype, piece.coefficient)
            codec, coefficient, stored = narrowed.codec, narrowed.coefficient, narrowed.stored
        slot, self._at.slot = self._at.slot, self._at.slot + 1
        if self._packer is not None and piece.role != "opaque":
            width = dtype_of(piece.dtype).itemsize if codec == RAW else 2
            if (frame := self._packer.pack(stored, width)) is not None:
                if piece.role == "value":
                    self._at.assembly.raw_digests[slot] = digest(stored)
                codec, stored = packed(codec, width), memoryview(frame)
        found = digest(stored)
        segment = Segment(piece.tensor, piece.start, piece.stop, codec, coefficient, slot, len(stored), found)
        self._at.assembly.add((piece.role, piece.state, piece.event), segment)
        return keys.increment_slot(self.name.generation, self._at.step, slot), stored

    def _finish(self, draft: Draft, batch: Batch) -> Iterator[Item]:
        at = self._at
        assert draft.step == at.step, f"step {draft.step} was submitted where step {at.step} was due"
        unchanged: dict[int, bytes] = {}
        omitted = left_out(draft.derived)
        for value in draft.values:
            state, pieces = value.spec.state, at.small.pop(value.spec.state, [])
            shipped = at.assembly.of("value", state)
            if not shipped and _digest_of(pieces, value.spec, omitted[state]) == at.previous_values.get(state):
                unchanged[state] = at.previous_values[state]
            else:
                for piece in pieces:
                    yield self._store(piece)
            batch.done.extend(pieces)
        increment = at.assembly.increment(self.name, draft, unchanged)
        linked = chain.append(increment, at.link)
        batch.finished.append(Logged(increment, linked, draft.comparable))
        named = {segment.slot for segment in chain.segments(increment)}
        for slot in set(range(at.slot)) - named:  # gradients of states that went whole after all
            yield keys.increment_slot(self.name.generation, draft.step, slot), None
        past = add(at.history, self._row(draft, increment))
        for number, content in unstored(past):
            yield keys.history(number), content
        yield keys.increment(self.name.generation, draft.step), encode(linked)
        values = {v.spec.state: v.digest for v in increment.values}
        past = replace(past, stored=past.number)
        self._at = _Progress(linked.link, draft.step + 1, past, previous_values=values, memory_bytes=at.memory_bytes)


def _digest_of(pieces: list[Piece], spec: StateSpec, omitted: Collection[str]) -> bytes:
    """Digest of a state whose values are all small pieces, without its `omitted` tensors."""
    whole = Assembly()
    for piece in pieces:
        raw = piece.where.view()
        whole.add(("value", spec.state, 0), Segment(piece.tensor, piece.start, piece.stop, "raw", 1.0, 0, len(raw), digest(raw)))
    return whole.value_digest(spec, omitted)
