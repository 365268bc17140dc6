"""Whether `ckpt.step()` stands where it belongs: once after each optimizer step. Judged by the first calls of a process."""

from __future__ import annotations

from dataclasses import dataclass

JUDGED_CALLS = 12
"""After so many calls it is clear how they lie to the optimizer's steps."""

IDLE_CALLS_MAX = 3
"""Calls after nothing that are taken for steps a gradient scaler skipped, or iterations without an update."""


@dataclass
class Placement:
    """Counts calls.

    Attributes:
        calls: of `ckpt.step()`.
        trained: those since whose predecessor an attached optimizer stepped, or gradients came.
        idle: the others, after the first that trained.
    """

    calls: int = 0
    trained: int = 0
    idle: int = 0

    def call(self, stepped: bool, backward: bool) -> str | None:
        """Count one call; what is wrong with where it stands, if that became clear.

        Args:
            stepped: an attached optimizer has stepped since the last call.
            backward: there may have been a backward pass that no step has followed yet.
        """
        self.calls += 1
        self.idle += not (stepped or backward) and self.trained > 0
        self.trained += stepped or backward
        if self.calls == 1 and self.trained == 0:
            return (
                "ckpt.step() was called before anything was trained: call it at the end of each iteration, after optimizer.step(); "
                "otherwise each checkpoint lacks the iteration it is named for"
            )
        if self.calls == JUDGED_CALLS and self.trained == 0:
            return (
                f"no attached optimizer has stepped in the first {self.calls} calls of ckpt.step(), and no attached parameter has a "
                "gradient: give store.attach the model and the optimizer that are trained"
            )
        if self.calls == JUDGED_CALLS and self.idle > IDLE_CALLS_MAX:
            return (
                f"at {self.idle} of the first {self.calls} calls of ckpt.step() nothing had been trained since the call before: call it "
                "once at the end of each iteration; restore() returns the number of calls"
            )
        return None
