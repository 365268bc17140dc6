"""What a start says where it restores less than there was: how many steps are lost, and what can still be done about it."""

from __future__ import annotations

import platform

from adacheck.config import StoreConfig
from adacheck.errors import DamagedCut
from adacheck.incarnations import is_made_anew, read_incarnation
from adacheck.keeper.cut import NO_LIMIT, fork_limit
from adacheck.lineage import who
from adacheck.manifests import keys
from adacheck.manifests.record import Fork, Incarnation
from adacheck.nvme_directory import nvme_path, set_aside
from adacheck.recovery import Cut
from adacheck.sources import Sources
from adacheck.unlisted import unlisted_fulls


def fallen_back(config: StoreConfig, sources: Sources, cut: Cut | None, before: Incarnation | None) -> str | None:
    """A line on the steps after the cut, where there were some, or may be elsewhere; `None` if it is the newest there was.

    Call it before the copies are brought in, which removes what it looks at. `before`: who took the copy on NVMe last.
    """
    step = 0 if cut is None else cut.step
    restored = "no step, for the object tier has none" if cut is None else f"step {step} from {cut.source}"
    newest = max((s for offer in sources.offers() for s in offer.steps), default=0)
    newest = max([newest, *_overlooked(sources), *(unread(sources, cut) if sources.scan is not None else ())])
    mend = f"adacheck-fsck '{config.uri}' --repair, run before a start, mends what can be mended"
    if step < newest:
        lost = f"{newest - step} steps are" if newest - step > 1 else "1 step is"
        return f"restored {restored}, not step {newest}, the newest there was: {lost} lost, and this start goes on without; {mend}"
    started = [fork for fork in sources.forks if fork.cut != NO_LIMIT]
    if not started:
        return None
    if sources.scan is None and _logged(sources):
        return f"restored {restored}: the log on NVMe cannot be read, so steps after it are lost, and this start goes on without; {mend}"
    last = max(started, key=lambda fork: fork.incarnation)
    here = max(0 if before is None else before.incarnation, 0 if sources.scan is None else sources.scan.chain.incarnation)
    return _elsewhere(config, sources, last, restored, empty=here == 0) if last.incarnation > here else None


def _elsewhere(config: StoreConfig, sources: Sources, last: Fork, restored: str, *, empty: bool) -> str | None:
    """The run trained last with another log than this one, or with what lay here; `None` if it had none. `empty`: nothing is here."""
    trained, path = _known(sources, last.incarnation), nvme_path(config, sources.run)
    if trained is not None and not trained.nvme:
        return None
    nothing = f"nothing on NVMe at {config.nvme}"
    if empty and path is not None and set_aside(path):
        return f"{nothing} (what was there was moved aside): restored {restored}; steps after it are lost"
    if trained is not None and (trained.host, trained.nvme) == (platform.node(), config.nvme):
        return f"{nothing} (it was deleted, or the disk is another one): restored {restored}; steps after it are lost"
    whose = f"incarnation {last.incarnation}, of which no more is known," if trained is None else who(trained)
    where = "" if trained is None else f" in {trained.nvme} there"
    what = f"{nothing}: restored {restored}" if empty and path is not None else f"restored {restored}"
    newer = f"{whose} trained on after step {max(last.cut, 0)} with its log{where}, which may have newer steps"
    return f"{what}. {newer}: this start goes on without, and from then on they are no part of the run; next time, start first where it is"


def _known(sources: Sources, number: int) -> Incarnation | None:
    try:
        found = read_incarnation(sources.objects, sources.run, number)
    except DamagedCut:
        return None
    return None if found is None or is_made_anew(found) else found


def _overlooked(sources: Sources) -> list[int]:
    """Steps of full checkpoints that a lost version may have listed."""
    folders = unlisted_fulls(sources.objects, sources.run, sources.fulls, sources.forks)
    return [name.step for folder in folders if (name := keys.parse(keys.manifest(folder))) is not None]


def unread(sources: Sources, cut: Cut | None) -> list[int]:
    """Steps on NVMe after the cut, in order, damaged or not: what this start could not read, and a repair may be able to."""
    step, limit = 0 if cut is None else cut.step, None
    if sources.scan is not None:
        limit = fork_limit(sources.fork_table, sources.scan.chain.incarnation)
    return [logged for logged in _logged(sources) if step < logged and (limit is None or logged <= limit)]


def _logged(sources: Sources) -> list[int]:
    """Steps of the increments on NVMe, damaged or not, in order; of every generation where the head record does not say which counts."""
    names = [name for key in sources.nvme.list("g") if (name := keys.parse(key)) is not None] if sources.nvme is not None else []
    generation = None if sources.scan is None else sources.scan.chain.generation
    found = {name.step for name in names if name.kind is keys.Kind.INCREMENT and generation in (None, name.generation)}
    return sorted(found)
