"""What a run remembers of its steps once they have left the log: one row a step, in chunks, the oldest dropped. Pure, without torch.

Rows are appended in the order in which steps were logged: a step that was lost and done again has a row of each time. A chunk is
of one incarnation; the one that is being filled is written anew with each row, and is small enough for one page of LMDB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from adacheck.manifests.encoding import decode, encode, split
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import HistoryChunk

CHUNK_ROWS = 32
"""So few that a chunk fits one page of LMDB whatever its numbers are."""

CHUNKS_KEPT = 3200
"""So the newest 102,400 steps are kept, fewer if the run is started again and again: each start begins a chunk."""

BYTES_MAX = CHUNKS_KEPT * 4096
"""Most that all chunks take, 13 MB and about half of that as a rule: in memory, in the log's file, and beside each full checkpoint."""


@dataclass(frozen=True, slots=True)
class Row:
    """One step, as it was when its increment was written.

    Attributes:
        step, unix_s: which, and when.
        gradient_bytes, value_bytes, refresh_bytes, opaque_bytes: stored bytes of the increment, by payload.
        derived_tensors: how many tensors took no bytes, since they are derived from others.
        blocked_us: what the step *before* cost the trainer, in microseconds (this one has not ended yet); 0 for the first of a start.
        acked, committed, durable, proven: the watermarks then; -1 for none.
    """

    step: int
    unix_s: float
    gradient_bytes: int
    value_bytes: int
    derived_tensors: int
    refresh_bytes: int
    opaque_bytes: int
    blocked_us: int
    acked: int
    committed: int
    durable: int
    proven: int


_COLUMNS = tuple(field.name for field in fields(Row))


Intact = tuple[HistoryChunk, bytes]
"""A chunk, and the bytes it was decoded from."""


@dataclass(frozen=True, slots=True)
class History:
    """All rows that are kept, as one writer has them.

    Attributes:
        run, incarnation: whose steps are added.
        chunks: the finished ones, by number and encoded, oldest first.
        number, rows: of the chunk that is being filled.
        stored: chunks below this number need not be stored any more.
    """

    run: str
    incarnation: int
    chunks: tuple[tuple[int, bytes], ...] = ()
    number: int = 0
    rows: tuple[Row, ...] = ()
    stored: int = 0


def begin(run: str, incarnation: int, chunks: Iterable[Intact], *, stored: bool) -> History:
    """A history that goes on after the chunks there are. `stored`: whether they are where new ones will be put."""
    kept = tuple(sorted((chunk.number, content) for chunk, content in chunks))[-CHUNKS_KEPT + 1 :]
    number = kept[-1][0] + 1 if kept else 0
    return History(run, incarnation, kept, number, (), number if stored else 0)


def intact(contents: Iterable[bytes], run: str) -> list[Intact]:
    """The chunks of this run among `contents`, in order; those that are damaged, or another run's, are left out."""
    found: dict[int, Intact] = {}
    for content in contents:
        try:
            chunk = decode(content, HistoryChunk)
        except FormatError:
            continue
        if chunk.run == run and even(chunk):
            found[chunk.number] = chunk, content
    return [found[number] for number in sorted(found)]


def add(history: History, row: Row) -> History:
    """One more step."""
    if len(history.rows) < CHUNK_ROWS:
        return replace(history, rows=(*history.rows, row))
    chunks = (*history.chunks, (history.number, current(history)))[-CHUNKS_KEPT + 1 :]
    return replace(history, chunks=chunks, number=history.number + 1, rows=(row,))


def resumed(history: History, incarnation: int) -> History:
    """The same history in the hands of a later incarnation, which begins a chunk of its own."""
    if not history.rows:
        return replace(history, incarnation=incarnation)
    chunks = (*history.chunks, (history.number, current(history)))[-CHUNKS_KEPT + 1 :]
    return replace(history, incarnation=incarnation, chunks=chunks, number=history.number + 1, rows=())


def unstored(history: History) -> Iterator[tuple[int, bytes | None]]:
    """What to put under which number after a row was added, and the number whose chunk goes (`None`)."""
    for number, content in history.chunks:
        if number >= history.stored:
            yield number, content
    yield history.number, current(history)
    if len(history.rows) == 1 and history.number >= CHUNKS_KEPT:
        yield history.number - CHUNKS_KEPT, None


def current(history: History) -> bytes:
    """The chunk that is being filled, encoded."""
    columns = [tuple(getattr(row, name) for row in history.rows) for name in _COLUMNS]
    return encode(HistoryChunk(history.run, history.incarnation, history.number, *columns))


def whole(history: History) -> bytes:
    """All chunks one after the other: the copy beside a full checkpoint. Empty for no rows."""
    contents = [content for _, content in history.chunks]
    return b"".join([*contents, current(history)] if history.rows else contents)


def parts(content: bytes) -> list[bytes]:
    """The chunks of such a copy, not decoded."""
    return [bytes(part) for part in split(content)]


def rows(chunk: HistoryChunk) -> list[Row]:
    """The rows of a chunk that is `even`."""
    return [Row(*figures) for figures in zip(*_columns(chunk), strict=True)]


def even(chunk: HistoryChunk) -> bool:
    """Whether all columns are equally long."""
    return len({len(column) for column in _columns(chunk)}) == 1


def _columns(chunk: HistoryChunk) -> list[tuple[int, ...] | tuple[float, ...]]:
    names = ("steps" if name == "step" else name for name in _COLUMNS)
    return [getattr(chunk, name) for name in names]
