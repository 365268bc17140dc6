"""Where a run's history can be read: the NVMe copy on this host, else the copy beside the newest full checkpoint. Without torch.

Nothing that is wrong with it ever stops a restore or a report: what cannot be read is left out, and `adacheck-fsck` names it.
"""

from __future__ import annotations

import logging

from adacheck import history
from adacheck.backends.errors import BackendError, NotFound
from adacheck.history import History, Intact, Row
from adacheck.manifests import keys
from adacheck.sources import Sources

_log = logging.getLogger("adacheck")


def resume(sources: Sources, incarnation: int) -> History:
    """The history that an incarnation goes on with."""
    on_nvme = _on_nvme(sources)
    return history.begin(sources.run, incarnation, on_nvme or _in_objects(sources), stored=bool(on_nvme))


def read_rows(sources: Sources) -> list[tuple[int, Row]]:
    """Every row that can be read, with its incarnation, in the order in which the steps were logged."""
    return [(chunk.incarnation, row) for chunk, _ in _on_nvme(sources) or _in_objects(sources) for row in history.rows(chunk)]


def _on_nvme(sources: Sources) -> list[Intact]:
    contents: list[bytes] = []
    if sources.nvme is not None:
        for key in sources.nvme.list(keys.HISTORY_PREFIX):
            try:
                contents.append(sources.nvme.get(key))
            except NotFound:
                continue  # the trainer beside us has dropped it meanwhile
    return history.intact(contents, sources.run)


def _in_objects(sources: Sources) -> list[Intact]:
    for full in reversed(sources.fulls):
        key = keys.history_copy(full.folder)
        try:
            found = history.intact(history.parts(sources.objects.get(key)), sources.run)
        except BackendError as error:
            _log.debug("the history in %s cannot be read: %s", key, error)
            continue
        if found:
            return found
    return []
