"""Which row ranges are refreshed at which step: every byte of every state once in `refresh` steps, spread evenly.

A schedule is made once per layout; asking it what is due costs nothing. What comparisons of refreshes prove is `proof.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from adacheck.manifests.record import SEGMENT_BYTES_MAX

ELEMENTS_MULTIPLE = 64
"""Pieces begin at multiples of this: cuts elsewhere change bits in vectorised kernels."""

CROWDED = 3
"""Whole values above a state's base on NVMe for which a new base is written before its turn: as many as a certificate takes."""

PIECE_BYTES_MIN = 64 << 10
"""Smaller pieces would cost more in bookkeeping than they spread; tensors below it are one piece."""

Layout = Sequence[tuple[int, Sequence[tuple[str, int, int]]]]
"""States in order: (state, [(tensor, elements, bytes an element)])."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of elements of one tensor of a state, half open; `size_bytes` of it."""

    state: int
    tensor: str
    start: int
    stop: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The pieces due at each step modulo `refresh`; every piece is in exactly one turn."""

    refresh: int
    turns: tuple[tuple[Piece, ...], ...]
    size_bytes: int


def pieces(layout: Layout, piece_bytes: int = SEGMENT_BYTES_MAX) -> tuple[Piece, ...]:
    """Cut every tensor into pieces of at most `piece_bytes`, at multiples of 64 elements. Tensors without elements have none."""
    cut: list[Piece] = []
    for state, tensors in layout:
        for tensor, elements, itemsize in tensors:
            step = max(piece_bytes // itemsize // ELEMENTS_MULTIPLE, 1) * ELEMENTS_MULTIPLE
            ranges = ((start, min(start + step, elements)) for start in range(0, elements, step))
            cut.extend(Piece(state, tensor, start, stop, (stop - start) * itemsize) for start, stop in ranges)
    return tuple(cut)


def schedule(layout: Layout, refresh: int, piece_bytes: int | None = None) -> Schedule:
    """Plan a layout: the pieces are as large as one step's share, at most 4 MiB, and are dealt out by bytes in layout order.

    Any `refresh` consecutive steps send every byte once; one step sends its share, give or take a piece.
    """
    total = sum(elements * itemsize for _, tensors in layout for _, elements, itemsize in tensors)
    size = piece_bytes or min(max(total // refresh, PIECE_BYTES_MIN), SEGMENT_BYTES_MAX)
    cut = pieces(layout, size)
    turns: list[list[Piece]] = [[] for _ in range(refresh)]
    for piece, turn in zip(cut, spread([piece.size_bytes for piece in cut], refresh), strict=True):
        turns[turn].append(piece)
    return Schedule(refresh, tuple(tuple(turn) for turn in turns), total)


def due(plan: Schedule, step: int, whole: Collection[int] = ()) -> tuple[Piece, ...]:
    """The pieces to refresh at a step, without those of states that the increment ships whole anyway."""
    return tuple(piece for piece in plan.turns[step % plan.refresh] if piece.state not in whole)


def spread(sizes_bytes: Sequence[int], turns: int) -> tuple[int, ...]:
    """Deal items out over turns in their order, evenly by bytes: the turn in which the middle of each item falls."""
    total, before, dealt = max(sum(sizes_bytes), 1), 0, []
    for size in sizes_bytes:
        dealt.append(min((2 * before + size) * turns // (2 * total), turns - 1))
        before += size
    return tuple(dealt)


@dataclass(frozen=True, slots=True)
class Rolling:
    """The turn of each state, modulo `log_steps`, in which its shadow is written to NVMe as its new base."""

    log_steps: int
    turns: Mapping[int, int]


def rolling(sizes_bytes: Iterable[tuple[int, int]], log_steps: int) -> Rolling:
    """Plan the bases of (state, bytes) pairs: each state once every `log_steps`, evenly by bytes."""
    pairs = list(sizes_bytes)
    return Rolling(log_steps, dict(zip((s for s, _ in pairs), spread([size for _, size in pairs], log_steps), strict=True)))


def bases_due(plan: Rolling, bases: Mapping[int, int], applied: int) -> tuple[int, ...]:
    """States whose base on NVMe is older than their last turn, when the shadow is at `applied`; oldest base first.

    A turn that could not be taken (durable step too low) is made up for at the next step.
    """
    late = [
        (bases.get(state, -1), state)
        for state, turn in plan.turns.items()
        if bases.get(state, -1) < applied - (applied - turn) % plan.log_steps
    ]
    return tuple(state for _, state in sorted(late))


def crowded(bases: Mapping[int, int], whole: Mapping[int, Collection[int]], applied: int) -> tuple[int, ...]:
    """States of which several whole values lie in the log above their base, and that now go by gradient: a base frees all of them.

    `whole` are the states shipped whole at each step up to `applied`. One that is whole at every step waits for its turn.
    """
    counts = Counter(state for step, states in whole.items() for state in states if step > bases.get(state, -1))
    return tuple(sorted(state for state, count in counts.items() if count >= CROWDED and state not in whole.get(applied, ())))
