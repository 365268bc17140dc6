"""The rounds in which the trainers compute the committed and the durable step together.

A round reduces a short vector of integers with MIN over all ranks, in the background of training. With one process the reduction
is the identity; what stays is its timing: what a round learns is carried to the copies by the next step's announcement.
"""

from __future__ import annotations


class SingleProcess:
    """Rounds of a world of one: finished as soon as they are begun."""

    def __init__(self) -> None:
        self._finished: list[tuple[int, ...]] = []

    def begin(self, vector: tuple[int, ...]) -> None:
        """Start a round with this rank's vector."""
        self._finished.append(vector)

    def take_finished(self) -> list[tuple[int, ...]]:
        """Results of the rounds that finished since the last call, in order."""
        finished, self._finished = self._finished, []
        return finished
