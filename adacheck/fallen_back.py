"""What a start says where it restores less than there was: how many steps are lost, and what can still be done about it."""

from __future__ import annotations

from adacheck.config import StoreConfig
from adacheck.keeper.cut import NO_LIMIT, fork_limit
from adacheck.manifests import keys
from adacheck.nvme_directory import GENERATION, nvme_path, set_aside
from adacheck.recovery import Cut
from adacheck.sources import Sources
from adacheck.unlisted import overlooked


def fallen_back(config: StoreConfig, sources: Sources, cut: Cut | None) -> str | None:
    """A line on the steps after the cut, where there were some, or may be elsewhere; `None` if it is the newest there was.

    Call it before the copies are brought in, which removes what it looks at.
    """
    step = 0 if cut is None else cut.step
    restored = "no step, for the object tier has none" if cut is None else f"step {step} from {cut.source}"
    logged = _logged(sources)
    newest = max((s for offer in sources.offers() for s in offer.steps), default=0)
    if logged and sources.scan is not None:
        limit = fork_limit(sources.fork_table, sources.scan.chain.incarnation)
        newest = max(newest, logged[-1] if limit is None else min(logged[-1], limit))
    newest = max([newest, *_overlooked(sources)])
    mend = f"adacheck-fsck '{config.uri}' --repair, run before a start, mends what can be mended"
    if step < newest:
        lost = f"{newest - step} steps are" if newest - step > 1 else "1 step is"
        return f"restored {restored}, not step {newest}, the newest there was: {lost} lost, and this start goes on without; {mend}"
    if sources.nvme is None or sources.scan is not None or all(fork.cut == NO_LIMIT for fork in sources.forks):
        return None
    if logged:
        return f"restored {restored}: the log on NVMe cannot be read, so steps after it are lost, and this start goes on without; {mend}"
    path = nvme_path(config, sources.run)
    why = "what was there was moved aside" if path is not None and set_aside(path) else "a new host, or it was deleted"
    elsewhere = "steps after it are lost; if another host has them, start there"
    return f"nothing on NVMe at {config.nvme} ({why}): restored {restored}; {elsewhere}"


def _overlooked(sources: Sources) -> list[int]:
    """Steps of full checkpoints that a lost version may have listed."""
    names = {key.rpartition("/")[0]: keys.parse(key) for key in sources.objects.list(keys.FULL_PREFIX)}
    found = {folder for folder in names if overlooked(sources.objects, sources.run, folder, sources.fulls, sources.forks)}
    return [name.step for folder, name in names.items() if name is not None and folder in found]


def _logged(sources: Sources) -> list[int]:
    """Steps of the increments on NVMe, damaged or not, in order."""
    names = [keys.parse(key) for key in sources.nvme.list(keys.increments_prefix(GENERATION))] if sources.nvme is not None else []
    return sorted(name.step for name in names if name is not None and name.kind is keys.Kind.INCREMENT)
