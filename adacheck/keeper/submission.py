"""What the trainer hands to its keeper: pieces of bytes as they are captured, then the draft of the increment they make up."""

from __future__ import annotations

from dataclasses import dataclass

from adacheck.capture.blocks import Slice
from adacheck.manifests.record import Derived, Event, StateSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """One captured range, raw.

    Attributes:
        role: `gradient`, `value`, `refresh` or `opaque`.
        state, event: which state, and for gradients which event of this step (else 0).
        tensor, dtype, start, stop: the range, as in `manifests.record.Segment`.
        coefficient: the k that `clip_grad_norm_` multiplied this gradient with, `None` where it was not clipped.
        where: the bytes.
    """

    role: str
    state: int
    event: int
    tensor: str
    dtype: str
    start: int
    stop: int
    coefficient: float | None
    where: Slice


@dataclass(frozen=True, slots=True)
class DraftGradient:
    """A gradient whose pieces were submitted."""

    state: int
    event: int
    dtype: str


@dataclass(frozen=True, slots=True)
class DraftValue:
    """A state shipped whole, and why."""

    spec: StateSpec
    reason: str


@dataclass(frozen=True, slots=True)
class Draft:
    """The end of a step: what its pieces mean, and the watermarks the trainers agreed on.

    `comparable` are the states shipped whole whose gradients are complete too: a replay of them can be compared with the value.
    `derived` tensors were found equal to the cast of their source at this step; their pieces were not submitted.
    `refreshes` are the states of which ranges were sent to compare. `blocked_us`: what the step before cost the trainer.
    """

    step: int
    events: tuple[Event, ...]
    gradients: tuple[DraftGradient, ...]
    values: tuple[DraftValue, ...]
    derived: tuple[Derived, ...]
    refreshes: tuple[int, ...]
    removed: tuple[int, ...]
    comparable: frozenset[int]
    committed: int
    durable: int
    blocked_us: int = 0
