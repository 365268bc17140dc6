"""Where the bytes of increments that are not applied yet can be read again: the NVMe log, or this process's memory.

What is on NVMe does not stay in memory; without NVMe, or once it has stopped, memory holds all of it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from adacheck.backends.base import Backend
from adacheck.backends.errors import NotFound
from adacheck.backends.memory import MemoryBackend
from adacheck.digest import digest
from adacheck.errors import DamagedCut
from adacheck.manifests import keys
from adacheck.manifests.record import Increment, Segment


@dataclass(frozen=True, slots=True)
class Logged:
    """An increment in the window. `comparable`: see `Draft`; empty for increments read back from NVMe."""

    increment: Increment
    comparable: frozenset[int] = frozenset()


class Window:
    """Increments by step, and their segments' bytes, verified when read."""

    def __init__(self, generation: int, nvme: Backend | None) -> None:
        self.generation, self.nvme = generation, nvme
        self.memory = MemoryBackend()
        self._logged: dict[int, Logged] = {}
        self._memory_bytes: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, logged: Logged, memory_bytes: int = 0) -> None:
        """Take an increment in whose segments are all stored; `memory_bytes` of them only in memory."""
        with self._lock:
            self._logged[logged.increment.step] = logged
            self._memory_bytes[logged.increment.step] = memory_bytes

    def get(self, step: int) -> Logged:
        """The increment of a step that is in the window."""
        with self._lock:
            return self._logged[step]

    def drop(self, step: int) -> None:
        """Every state has applied this increment."""
        with self._lock:
            self._logged.pop(step, None)
            self._memory_bytes.pop(step, None)
        for key in list(self.memory.list(keys.increment(self.generation, step) + "/")):
            self.memory.delete(key)

    def memory_bytes(self) -> int:
        """What the window keeps in memory."""
        with self._lock:
            return sum(self._memory_bytes.values())

    def read(self, step: int, segment: Segment) -> bytes:
        """The stored bytes of a segment.

        Raises:
            DamagedCut: they are missing or do not match their digest.
        """
        key = keys.increment_slot(self.generation, step, segment.slot)
        content = self._get(key)
        if content is None or len(content) != segment.stored_bytes or digest(content) != segment.digest:
            found = "nothing" if content is None else f"{len(content)} bytes with another digest"
            raise DamagedCut(
                f"step {step}: segment {key} ({segment.tensor}) should have {segment.stored_bytes} bytes with digest "
                f"{segment.digest.hex()[:16]}, found {found}; run adacheck-fsck --read-data"
            )
        return content

    def _get(self, key: str) -> bytes | None:
        for backend in (self.memory, self.nvme):
            if backend is not None:
                try:
                    return backend.get(key)
                except NotFound:
                    continue
        return None
