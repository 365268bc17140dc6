"""Which charts a report has, and the figures in them: functions from the facts to charts, without I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from adacheck.history import Row
from adacheck.keeper.cut import NO_LIMIT
from adacheck.manifests.record import FullEntry
from adacheck.report.facts import Facts, LoggedStep
from adacheck.report.svg import Chart, Marker, Point, Series

PAYLOADS = ("gradient", "value", "refresh", "opaque")
_COLOURS = dict(zip(PAYLOADS, ("#4c78a8", "#f58518", "#9d9da3", "#b279a2"), strict=True))
_STATUS = {"proven": ("#2a9d4a", True), "pending": ("#8a6d00", False), "inexact": ("#c92a2a", True)}
_UNKNOWN_STATUS = ("#555555", False)
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def charts(facts: Facts) -> tuple[Chart, ...]:
    """All of them, in the order of the page."""
    return (timeline(facts), cuts(facts), payloads(facts), blocked(facts), watermarks(facts), proven_lag(facts))


def when(unix_s: float) -> str:
    """A time for people, in UTC."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def payload_bytes(row: Row) -> dict[str, int]:
    """Stored bytes of a step, by payload."""
    return {payload: getattr(row, f"{payload}_bytes") for payload in PAYLOADS}


def byte_unit(most: float) -> tuple[float, str]:
    """The unit in which numbers up to `most` bytes are short: how many bytes it is, and its name."""
    return next(((size, name) for size, name in _UNITS if most >= size), _UNITS[-1])


def timeline(facts: Facts) -> Chart:
    """Steps against time, a line for each start; where it falls back, steps were done again."""
    begun = min((step.row.unix_s for step in facts.steps), default=0.0)
    last = max((step.row.unix_s for step in facts.steps), default=0.0)
    seconds, unit = (3600.0, "hours") if last - begun > 7200 else (60.0, "minutes") if last - begun > 120 else (1.0, "seconds")

    def at(unix_s: float) -> float:
        return (unix_s - begun) / seconds

    lines: dict[int, list[Point]] = {}
    for step in facts.steps:
        lines.setdefault(step.incarnation, []).append((at(step.row.unix_s), float(step.row.step)))
    series = [Series("" if number else "steps", "#4c78a8", tuple(points)) for number, points in enumerate(lines.values())]
    cuts = {fork.incarnation: fork.cut for fork in facts.forks}
    rules = [
        (at(one.started_unix_s), f"incarnation {one.incarnation} started from {cut_name(cuts.get(one.incarnation))}")
        for one in facts.incarnations
    ]
    times = {step.row.step: step.row.unix_s for step in facts.live}
    markers = [_full_marker(full, at(times[full.step]), full.step) for full in facts.fulls if full.step in times]
    return Chart("Steps over time", f"{unit} since {when(begun)}", "step", tuple(series), tuple(markers), tuple(rules))


def cut_name(cut: int | None) -> str:
    """What an incarnation started from, in words."""
    if cut is None or cut >= NO_LIMIT:
        return "nothing: it never got so far"
    return f"step {cut}" if cut >= 0 else "nothing: a new run"


def _full_marker(full: FullEntry, x: float, y: float) -> Marker:
    colour, filled = _STATUS.get(full.status, _UNKNOWN_STATUS)
    finite = "" if full.finite else "; a parameter is not finite"
    return Marker(f"full, {full.status}", colour, x, y, f"full checkpoint of step {full.step}: {full.status}{finite}", filled)


def cuts(facts: Facts) -> Chart:
    """Which steps can be restored, from which tier."""
    spans = tuple(
        Series("on this host's NVMe" if at == 0 else "", "#4c78a8", ((float(first), 0.0), (float(last), 0.0)))
        for at, (first, last) in enumerate(ranges(facts.nvme_steps))
    )
    markers = tuple(_full_marker(full, float(full.step), 1.0) for full in facts.fulls)
    return Chart("What can be restored now", "step", "tier", spans, markers, y_names=("nvme", "object"))


def ranges(steps: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of steps without a gap."""
    found: list[tuple[int, int]] = []
    for step in sorted(steps):
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def payloads(facts: Facts) -> Chart:
    """Stored bytes of each step, by payload."""
    live = facts.live
    size, unit = byte_unit(max((sum(payload_bytes(step.row).values()) for step in live), default=0))
    series = tuple(
        Series(payload, _COLOURS[payload], tuple((float(s.row.step), payload_bytes(s.row)[payload] / size) for s in live))
        for payload in PAYLOADS
    )
    return Chart("Stored by each step", "step", unit, series, stacked=True)


def blocked(facts: Facts) -> Chart:
    """What each step cost the trainer."""
    points = tuple((float(step.row.step), step.blocked_ms) for step in facts.live if step.blocked_ms is not None)
    return Chart("Training blocked by each checkpoint", "step", "ms", (Series("hooks and step()", "#e45756", points),))


def watermarks(facts: Facts) -> Chart:
    """How far the watermarks were behind when a step was logged."""
    colours = {"acked": "#4c78a8", "committed": "#f58518", "durable": "#54a24b"}
    series = (Series(name, colour, _behind(facts.live, name), dashed=name == "acked") for name, colour in colours.items())
    return Chart("Behind the step being logged", "step", "steps", tuple(series))


def proven_lag(facts: Facts) -> Chart:
    """How many of the newest steps were not proven yet."""
    return Chart("Not proven yet", "step", "steps", (Series("step - proven", "#b279a2", _behind(facts.live, "proven")),))


def _behind(steps: Sequence[LoggedStep], mark: str) -> tuple[Point, ...]:
    """A line that is broken where there was no such step."""
    marks = ((s.row.step, getattr(s.row, mark)) for s in steps)
    return tuple((float(step), float(step - at) if at >= 0 else math.nan) for step, at in marks)
