"""What the demo asks of a training process, and how the two talk: one JSON task in, one JSON line an event out. No torch."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

VARIANTS = {"autocast": "bf16 autocast, fp32 AdamW", "bf16": "bf16 parameters and AdamW"}
"""The two training jobs of the demo (`training.Precision`), for people."""


@dataclass(frozen=True, slots=True)
class Task:
    """One training process.

    Attributes:
        precision: which of `VARIANTS`.
        small: a tiny model, for tests.
        steps: train up to this step; it also sets the learning rate's schedule.
        uri, options: of the store; empty for the uninterrupted run.
        wait_after: go on waiting after this step, to be killed; 0 for no such step.
    """

    precision: str
    small: bool
    steps: int
    uri: str = ""
    options: dict[str, str | int] = field(default_factory=dict)
    wait_after: int = 0

    def to_json(self) -> str:
        """For the command line of the process."""
        return json.dumps(asdict(self))


def task_of(text: str) -> Task:
    """The inverse of `Task.to_json`."""
    return Task(**json.loads(text))


def emit(event: str, **values: Any) -> None:
    """Tell the parent, at once: what was written before a SIGKILL can still be read from the pipe."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()
