"""Where the records of a chain lie on NVMe, and how their segments are read; no torch, so that fsck can use it too."""

from __future__ import annotations

from dataclasses import dataclass

from adacheck.backends.base import Backend
from adacheck.backends.errors import NotFound
from adacheck.digest import digest
from adacheck.errors import DamagedCut
from adacheck.manifests import chain as links
from adacheck.manifests.record import Increment, Segment
from adacheck.planes import unpack


@dataclass
class Stored:
    """Where an increment or base lies: its step, how many slots it has, and (increments) its link."""

    step: int
    slots: int
    link: bytes = b""


def slot_count(increment: Increment) -> int:
    """How many slots an increment's objects may use: one more than the highest it names."""
    return max((segment.slot for segment in links.segments(increment)), default=-1) + 1


def slot_key(key: str, slot: int) -> str:
    """The key of a slot of the increment, base or staged state at `key`."""
    return f"{key}/{slot:06d}"


def read_verified(backend: Backend, key: str, segment: Segment) -> bytes:
    """The bytes of a segment stored under `key`, unpacked.

    Raises:
        DamagedCut: they are missing, not those that were stored, or cannot be unpacked.
    """
    try:
        content = backend.get(key)
    except NotFound as error:
        raise DamagedCut(f"{key} is missing from {backend.name}; run adacheck-fsck") from error
    if len(content) != segment.stored_bytes or digest(content) != segment.digest:
        raise DamagedCut(f"{key} in {backend.name} does not match its digest; run adacheck-fsck --read-data")
    return unpack(segment, content)
