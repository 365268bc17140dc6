"""Notices writes behind the optimizer's back: identity, address and version counter of every tensor of every state.

What moved between the optimizer's step and `ckpt.step()`, or between that and the next optimizer step, goes as `value`. In-place
writes through `.data` or NumPy move nothing that can be watched; the rolling verification finds those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from adacheck.capture.inventory import LiveState

Mark = tuple[object, ...]


def mark(live: LiveState) -> Mark:
    """What can be seen of a state without reading its bytes: equal marks, no visible write."""
    tensor = live.current()
    marks: list[object] = [live.kind == "parameter" and tensor.requires_grad, *_tensor_mark(tensor)]
    for name, entry in live.optimizer_entries().items():
        if isinstance(entry, torch.Tensor):
            marks += (name, *_tensor_mark(entry))
        else:
            marks += (name, id(entry) if isinstance(entry, (dict, list)) else entry)
    return tuple(marks)


def _tensor_mark(tensor: torch.Tensor) -> tuple[int, ...]:
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        return (id(tensor), tensor.data_ptr(), tensor._version)
    return (id(tensor), local.data_ptr(), tensor._version, local._version)


@dataclass
class Watch:
    """The marks as last seen, and which states moved since the last `collect`."""

    marks: dict[int, Mark] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)

    def check(self, states: Iterable[LiveState]) -> None:
        """Note every state whose mark differs from the last one seen. A state never seen before has not moved."""
        for live in states:
            now = mark(live)
            before = self.marks.setdefault(live.state, now)
            if before != now:
                self.moved.add(live.state)
                self.marks[live.state] = now

    def accept(self, states: Iterable[LiveState]) -> None:
        """Take the present marks as right: these changes are accounted for (the optimizer's own step)."""
        for live in states:
            self.marks[live.state] = mark(live)

    def collect(self) -> frozenset[int]:
        """The states that moved since the last call."""
        moved, self.moved = frozenset(self.moved), set()
        return moved
