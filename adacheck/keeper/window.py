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
from adacheck.manifests.record import Increment, Linked, Segment
from adacheck.planes import unpack


@dataclass(frozen=True, slots=True)
class Logged:
    """An increment in the window, and its record as stored.

    `comparable`: see `Draft`. `memory_bytes`: how much of it is in memory only.
    """

    increment: Increment
    linked: Linked
    comparable: frozenset[int] = frozenset()
    memory_bytes: int = 0


class Window:
    """Increments by step, and their segments' bytes, verified when read."""

    def __init__(self, generation: int, nvme: Backend | None) -> None:
        self.generation, self.nvme = generation, nvme
        self.memory = MemoryBackend()
        self._logged: dict[int, Logged] = {}
        self.last: Logged | None = None
        """The newest increment that was taken in, also when it was dropped since."""
        self._lock = threading.Lock()

    def add(self, logged: Logged) -> None:
        """Take an increment in whose segments are all stored."""
        with self._lock:
            self._logged[logged.increment.step] = self.last = logged

    def steps(self) -> list[int]:
        """Steps of the increments held, in order."""
        with self._lock:
            return sorted(self._logged)

    def get(self, step: int) -> Logged:
        """The increment of a step that is in the window."""
        with self._lock:
            return self._logged[step]

    def drop(self, step: int) -> None:
        """Every state has applied this increment."""
        with self._lock:
            self._logged.pop(step, None)
        for key in list(self.memory.list(keys.increment(self.generation, step) + "/")):
            self.memory.delete(key)

    def memory_bytes(self) -> int:
        """What the window keeps in memory."""
        with self._lock:
            return sum(logged.memory_bytes for logged in self._logged.values())

    def read(self, step: int, segment: Segment) -> bytes:
        """The bytes of a segment, unpacked.

        Raises:
            DamagedCut: as `stored`, or they cannot be unpacked.
        """
        return unpack(segment, self.stored(step, segment))

    def stored(self, step: int, segment: Segment) -> bytes:
        """The bytes of a segment as they are stored.

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
