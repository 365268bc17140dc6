"""Notices writes behind the optimizer's back: identity, address and version of every tensor of every state, its parameter's layout too.

What moved between the optimizer's step and `ckpt.step()`, or between that and the next optimizer step, goes as `value`. In-place
writes through `.data` or NumPy move nothing that can be watched; the rolling verification finds those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import NoneType

import torch

from adacheck.capture.inventory import LiveState
from adacheck.errors import UnsupportedTensor


@dataclass(frozen=True)
class Mark:
    """What can be seen of a state without reading its bytes: equal `seen`, no visible write.

    `held` keeps the tensors, their memory, and other objects alive as long as the mark, so that no address in `seen` can be used
    again meanwhile.
    """

    seen: tuple[object, ...]
    held: tuple[object, ...] = field(compare=False)


def mark(live: LiveState) -> Mark:
    """The present mark of a state.

    Raises:
        UnsupportedTensor: one of its tensors has no memory of its own (sparse, or of a subclass that hides it).
    """
    tensor = live.current()
    seen: list[object] = [live.aliases, live.optimizer_name, live.kind == "parameter" and tensor.requires_grad]
    held: list[object] = []
    try:
        _add(tensor, seen, held)
        seen += (tensor.shape, tensor.stride())  # `.data = .data.t()` moves nothing else
        for name, entry in live.optimizer_entries().items():
            seen.append(name)
            if isinstance(entry, torch.Tensor):
                _add(entry, seen, held)
            elif isinstance(entry, (int, str, bytes, NoneType)):
                seen.append(entry)
            else:  # containers and arrays do not compare as one, and NaN equals nothing
                seen.append(id(entry))
                held.append(entry)
    except (RuntimeError, NotImplementedError) as error:
        live.tensors()  # refuses by name what is sparse or of an unknown class
        raise UnsupportedTensor(f"{live.fqn}, or an optimizer entry of it, cannot be stored: {error}") from error
    return Mark(tuple(seen), tuple(held))


def _add(tensor: torch.Tensor, seen: list[object], held: list[object]) -> None:
    local = getattr(tensor, "_local_tensor", tensor)
    seen += (id(tensor), local.data_ptr(), version(tensor))
    held += (tensor, local.detach())


def version(tensor: torch.Tensor) -> int:
    """The tensor's version counter, with that of its local part; inference tensors have none, and nothing can be seen of writes to them."""
    if tensor.is_inference():
        return -1
    local = getattr(tensor, "_local_tensor", None)
    return tensor._version if local is None else tensor._version + version(local)


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
