"""How often and how long a passing fault is tried again: the one place that decides it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import TypeVar

from adacheck.backends.errors import Unavailable

_Result = TypeVar("_Result")
_chance = Random()  # of its own: the global generator is the training script's, whose numbers must not depend on a network


@dataclass(frozen=True, slots=True)
class Retry:
    """Calls again what was `Unavailable`, at growing intervals that are spread by chance.

    Attributes:
        attempts: most calls in all.
        base_delay_s: the first interval is half to all of this, each further one of twice as much, up to `max_delay_s`.
        total_s: no call begins later than this after the first one did. So it takes at most this and one call.
        sleep, random, clock: for tests; `random()` is in [0, 1), the clock counts seconds.
    """

    attempts: int = 6
    base_delay_s: float = 0.5
    max_delay_s: float = 10.0
    total_s: float = 120.0
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = _chance.random
    clock: Callable[[], float] = time.monotonic

    def __call__(self, call: Callable[[], _Result]) -> _Result:
        """What `call` returns.

        Raises:
            Unavailable: as the last call did, saying how often it was tried.
        """
        begun = self.clock()
        for failed in count(1):
            try:
                return call()
            except Unavailable as error:
                delay_s = min(self.base_delay_s * 2 ** (failed - 1), self.max_delay_s) * (0.5 + 0.5 * self.random())
                elapsed_s = self.clock() - begun
                if failed >= self.attempts or elapsed_s + delay_s > self.total_s:
                    if failed == 1:
                        raise
                    raise Unavailable(f"{error}; given up after {failed} attempts in {elapsed_s:.0f} s") from error
            self.sleep(delay_s)
        raise AssertionError("count() has no end")
