"""Which full checkpoints are kept, and the deletion of the others: never before a version without them is published.

Only the newest incarnation deletes, and it lists the incarnations again before each deletion: a later one may be reading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import groupby

from adacheck.backends.base import Backend
from adacheck.catalogue import Fulls, Rejected, head, in_order, publish, versions
from adacheck.errors import ConfigError
from adacheck.incarnations import check_newest, read_forks
from adacheck.manifests import keys
from adacheck.unlisted import overlooked

VERSIONS_KEPT = 8
"""Version records that stay behind the head, for `fsck` and for a damaged head."""


def retained(fulls: Fulls, keep: int) -> Fulls:
    """Those to keep: the newest `keep`, the newest proven one, and the newest whose parameters are all finite.

    Raises:
        ConfigError: `keep` is less than 1.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep}: at least the newest full checkpoint must stay; use keep=1 or more")
    ordered = in_order(fulls)
    kept = set(ordered[-keep:])
    kept.update([full for full in ordered if full.status == "proven"][-1:])
    kept.update([full for full in ordered if full.finite][-1:])
    return in_order(kept)


def prune(backend: Backend, run: str, incarnation: int, keep: int, *, busy: Collection[str] = ()) -> tuple[str, ...]:
    """Publish a version without what `retained` drops, then delete what no version of the live lineage lists.

    That is what was dropped, now or by a pruning that was killed; all unlisted folders of earlier incarnations; and this
    incarnation's failed attempts: unlisted, and below the newest listed step. Uploads that were left unfinished go with them.
    While a version record is damaged no checkpoint is deleted: it may be the one that lists it. Nor is one of an earlier incarnation
    that a lost version may have listed (`overlooked`).

    Args:
        busy: folders that are being written or read, which stay.

    Returns:
        the folders whose objects were deleted.

    Raises:
        Superseded: a later incarnation has started; what was to be deleted stays.
        BackendError: of the backend; everything left is deleted by the next call.
    """
    publish(backend, run, incarnation, lambda fulls: retained(fulls, keep))
    records = list(versions(backend, run))
    swept = []
    if not any(isinstance(record, Rejected) for record in records):
        for folder, found in list(_unlisted(backend, run, incarnation, busy)):
            for key in found:
                check_newest(backend, incarnation)
                backend.delete(key)
            swept.append(folder)
    _prune_uploads(backend, run, incarnation, busy)
    _prune_versions(backend, incarnation)
    return tuple(swept)


def _unlisted(backend: Backend, run: str, incarnation: int, busy: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Folders to delete with their objects, the manifest first: without it the rest is nobody's checkpoint."""
    found = list(backend.list(keys.FULL_PREFIX))  # before the head: what is published in between is then unlisted for neither
    fulls = head(backend, run).fulls
    listed, forks = {full.folder for full in fulls}, read_forks(backend, run)
    newest_step = max((full.step for full in fulls), default=0)
    for folder, group in groupby(found, key=lambda key: key.rpartition("/")[0]):
        objects = [key for key in group if keys.parse(key) is not None]
        name = keys.parse(objects[0]) if objects else None
        if name is None or folder in listed or folder in busy:
            continue
        earlier = name.incarnation < incarnation and not overlooked(backend, run, folder, fulls, forks)
        if earlier or (name.incarnation == incarnation and name.step < newest_step):
            yield folder, sorted(objects, key=lambda key: key != keys.manifest(folder))


def _prune_uploads(backend: Backend, run: str, incarnation: int, busy: Collection[str]) -> None:
    """End uploads of earlier incarnations, and of this one's checkpoints up to the newest listed: nobody is at work on them."""
    newest_step = max((full.step for full in head(backend, run).fulls), default=0)
    for upload in list(backend.uploads()):
        name = keys.parse(keys.manifest(upload.folder))
        if name is None or upload.folder in busy:
            continue
        if name.incarnation < incarnation or (name.incarnation == incarnation and name.step <= newest_step):
            check_newest(backend, incarnation)
            backend.discard_upload(upload.name)


def _prune_versions(backend: Backend, incarnation: int) -> None:
    old = sorted(key for key in backend.list(keys.VERSIONS_PREFIX) if keys.parse(key) is not None)[: -VERSIONS_KEPT - 1]
    for key in old:
        check_newest(backend, incarnation)
        backend.delete(key)
