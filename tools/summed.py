"""Many lines on single objects in few for people: one for each run of objects to which the same was done. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from adacheck.finding import Tier
from adacheck.manifests import keys

Line = tuple[Tier, str, str]
"""The tier and the name of an object, and what was done."""


def summed(lines: Iterable[Line]) -> Iterator[str]:
    """One line for each run of the same words in one tier, and in one full checkpoint: by name, or by number and steps."""
    for (tier, folder, what), group in groupby(lines, key=_kin):
        names = [name for _, name, _ in group]
        if len(names) == 1:
            yield f"{tier} {names[0]}: {what}"
            continue
        steps = [parsed.step for name in names if (parsed := keys.parse(_before(name))) is not None and parsed.step]
        of = f" of steps {min(steps)} to {max(steps)}" if steps and not folder else ""
        yield f"{tier} {folder}{': ' if folder else ''}{len(names)} objects{of}: {what}"


def _kin(line: Line) -> tuple[Tier, str, str]:
    tier, name, what = line
    return tier, name.rpartition("/")[0] if name.startswith(keys.FULL_PREFIX) else "", what


def _before(name: str) -> str:
    """What an object was called before it was set aside."""
    parsed = keys.parse_quarantined(name)
    return name if parsed is None else parsed[1]
