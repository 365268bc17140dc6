"""Checks what a run remembers of its steps: chunks on NVMe, and the copy beside each full checkpoint. No restore needs either."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from adacheck.check_records import Consequence, Look
from adacheck.finding import Kind
from adacheck.history import CHUNKS_KEPT, even
from adacheck.manifests import keys
from adacheck.manifests.chain import Kind as Fault
from adacheck.manifests.chain import Problem, check_segment
from adacheck.manifests.record import Full, HistoryChunk

_LOST = Consequence("some steps in the report of this run; no cut", "nothing; the steps to come are remembered, and old ones drop out")


def check_chunks(look: Look, run: str, names: Collection[str], *, logged: bool) -> None:
    """Check every chunk among the `names` of an NVMe copy, and that none is missing. `logged`: whether the copy has increments."""
    parsed = [(key, name) for key in names if (name := keys.parse(key)) is not None and name.kind is keys.Kind.HISTORY]
    for key, name in parsed:

        def misplaced(chunk: HistoryChunk, number: int = name.number) -> Problem | None:
            if chunk.run != run:
                return Problem(Fault.SPLICED, 0, f"history of run {run}", f"that of run {chunk.run}")
            if chunk.number != number:
                return Problem(Fault.SWAPPED, 0, f"chunk {number}", f"chunk {chunk.number}")
            return None if even(chunk) else Problem(Fault.MALFORMED, 0, "columns of one length", "columns of several")

        look.record(key, look.get(key), HistoryChunk, misplaced, _LOST)
    numbers = {name.number for _, name in parsed}
    newest = max(numbers, default=0 if logged else -1)
    for number in sorted(set(range(max(0, newest - CHUNKS_KEPT + 1), newest + 1)) - numbers):
        look.add(Kind.MISSING, keys.history(number), f"chunk {number} of the history, which ends with {newest}", "no object", _LOST)


def check_copy(look: Look, folder: str, manifests: Mapping[str, Full]) -> None:
    """Check the copy of the history beside a full checkpoint."""
    key, others = keys.history_copy(folder), _copies(manifests, but=folder)
    for segment in manifests[folder].history:
        look.objects += 1
        if look.size(key) == segment.stored_bytes and not look.sample.has(key):
            continue
        problem = check_segment(manifests[folder].step, segment, look.get(key), others)
        if problem is not None:
            look.damage(key, problem, _LOST)


def _copies(manifests: Mapping[str, Full], but: str) -> dict[bytes, str]:
    held = ((folder, segment) for folder, manifest in manifests.items() if folder != but for segment in manifest.history)
    return {segment.digest: keys.history_copy(folder) for folder, segment in held}
