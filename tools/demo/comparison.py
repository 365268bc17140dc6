"""Compares what training processes told with what the uninterrupted one told: pure functions over their events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from adacheck.tools.demo.process import Event

Witness = Mapping[str, str]
"""Digests by what they are of (`parameters`, `optimizer`, ...)."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The uninterrupted run: its exact loss, and its digests, after each step."""

    losses: dict[int, str]
    witnesses: dict[int, Witness]


@dataclass(frozen=True, slots=True)
class Figures:
    """What checkpoints cost one variant, over the `steps` steps that went as gradients alone: medians, and the mean of the refresh,
    which goes in pieces that not every step has. Bytes are those stored a step.
    """

    steps: int
    payload_bytes: float
    refresh_bytes: float
    blocked_ms: float
    step_ms: float
    recovery_s: float
    state_bytes: int
    parameters: int


def reference_of(events: Iterable[Event]) -> Reference:
    """The reference, from the events of its process."""
    told = list(events)
    return Reference({e["step"]: e["loss"] for e in told}, {e["step"]: e["witness"] for e in told})


def losses_of(events: Iterable[Event]) -> dict[int, str]:
    """The loss of each step a process trained."""
    return {e["step"]: e["loss"] for e in events if e["event"] == "trained"}


def joined_losses(killed: Mapping[int, str], step: int, resumed: Mapping[int, str]) -> dict[int, str]:
    """The loss curve of a run that was killed and restored at `step`."""
    return {at: loss for at, loss in killed.items() if at <= step} | dict(resumed)


def differing(ours: Witness, reference: Witness) -> list[str]:
    """What is not equal, by name; something that only one of the two has is not equal."""
    return sorted(name for name in ours.keys() | reference.keys() if ours.get(name) != reference.get(name))


def is_gradient_step(event: Event) -> bool:
    """Whether a step's increment held gradients, and no state as a value."""
    return event["event"] == "checkpointed" and event["payload_bytes"].get("gradient", 0) > 0 and not event["payload_bytes"].get("value", 0)


def figures_of(steps: Iterable[Event], recovery_s: float, finished: Event) -> Figures:
    """The figures of a variant.

    Args:
        steps: events of its processes; those that are gradient steps count.
        finished: the last event, which tells the sizes.

    Raises:
        ValueError: not one was a gradient step.
    """
    counted = [event for event in steps if is_gradient_step(event)]
    if not counted:
        raise ValueError("no step went as gradients alone; the optimizer's replay was not certified")
    payloads = [event["payload_bytes"] for event in counted]
    return Figures(
        len(counted),
        median(sum(stored for kind, stored in payload.items() if kind != "refresh") for payload in payloads),
        fmean(payload["refresh"] for payload in payloads),
        median(event["blocked_ms"] for event in counted),
        median(event["step_ms"] for event in counted),
        recovery_s,
        finished["state_bytes"],
        finished["parameters"],
    )
