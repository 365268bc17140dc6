"""A moment by which something must be over, however many waits it is made of."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at_s` on the monotonic clock."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The one so many seconds from now."""
        return cls(clock() + seconds)

    def left_s(self) -> float:
        """How many seconds are left; 0 afterwards."""
        return max(0.0, self.at_s - clock())


def clock() -> float:
    """Seconds since some moment; a test may put another one here."""
    return time.monotonic()
