"""Notes on tensors of the script, kept beside them: nothing is put on a tensor that the script may pickle or copy.

`torch.utils.weak.WeakIdKeyDictionary` does the same in eight times the time (0.7 ms instead of 0.08 for 300 gradients), at every step.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

_Note = TypeVar("_Note")


class Beside(Generic[_Note]):
    """One note for each of some tensors, which is gone when the tensor is; a copy of the tensor has none."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[torch.Tensor], _Note]] = {}

    def get(self, tensor: torch.Tensor) -> _Note | None:
        """The note on this very tensor, if there is one."""
        found = self._notes.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]

    def put(self, tensor: torch.Tensor, note: _Note) -> None:
        """Keep this note on the tensor, instead of the one before."""
        number = id(tensor)
        self._notes[number] = (weakref.ref(tensor, lambda gone: self._forget(number, gone)), note)

    def _forget(self, number: int, gone: weakref.ref[torch.Tensor]) -> None:
        found = self._notes.get(number)
        if found is not None and found[0] is gone:
            del self._notes[number]
