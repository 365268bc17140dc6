"""Removes what nobody refers to and nobody is writing: what processes that were killed left behind, and what was set aside long ago.

Only names of this project, only what is older than a given age, and never what the newest incarnation may be writing however old it
is: its full checkpoints in a step that is not listed yet. Before each deletion the incarnations and the head are read again.
Without torch; needs no lock, but for what is set aside within LMDB.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from adacheck.backends.base import Backend
from adacheck.backends.errors import Busy
from adacheck.backends.lmdb_directory import DATA_FILE
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.catalogue import Fulls, Rejected, live, versions
from adacheck.config import StoreConfig
from adacheck.errors import NoCut
from adacheck.finding import Tier
from adacheck.incarnations import newest_incarnation, read_forks, read_run
from adacheck.manifests import keys
from adacheck.manifests.record import Fork
from adacheck.nvme_directory import nvme_path, set_aside
from adacheck.settled import still_explains
from adacheck.unlisted import overlooked

K = keys.Kind


@dataclass(frozen=True, slots=True)
class Removed:
    """One object, upload or directory that was removed; of an upload nobody knows the size."""

    tier: Tier
    name: str
    size_bytes: int
    what: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Something without a reference that stays, and why."""

    tier: Tier
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class _Listed:
    """What is so at this moment: the newest incarnation, the folders that the head lists, those of them that are live, and the forks."""

    newest: int
    folders: frozenset[str]
    fulls: Fulls
    forks: tuple[Fork, ...]

    def may_be_written(self, name: keys.Name) -> bool:
        """Whether a full checkpoint may be in flight: the newest incarnation writes one after the other, each of a later step."""
        return name.incarnation > self.newest or (
            name.incarnation == self.newest and name.step >= max((full.step for full in self.fulls), default=0)
        )


class Garbage:
    """One collection.

    Args:
        objects: the object tier, for writing.
        older_than_s: least age of what is removed.
        now_unix_s: what ages are measured from.
    """

    def __init__(
        self,
        config: StoreConfig,
        objects: Backend,
        *,
        older_than_s: float,
        now_unix_s: float | None = None,
    ) -> None:
        self._config, self._objects = config, objects
        self._before_unix_s = (time.time() if now_unix_s is None else now_unix_s) - older_than_s

    def collect(self) -> Iterator[Removed | Kept]:
        """Remove what may go, and say of the rest why it stays.

        Raises:
            NoCut: there is no store at the address.
            DamagedCut: the run's identity or its forks cannot be read.
            BackendError: a tier does not answer, or refuses; what was removed until then is gone.
        """
        run = read_run(self._objects)
        if run is None:
            raise NoCut(f"there is no run at {self._config.address}; check the address")
        yield from self._folders(run.run)
        yield from self._stale_uploads(run.run)
        yield from self._quarantine(Tier.OBJECT, self._objects)
        yield from self._nvme(run.run)

    def _listed(self, run: str) -> _Listed | Kept:
        found = list(versions(self._objects, run))
        for version in found:
            if isinstance(version, Rejected):
                return Kept(Tier.OBJECT, version.key, f"{version.reason}; it may list what nothing else does: repair it first")
        fulls = [full for version in found[:1] if not isinstance(version, Rejected) for full in version.fulls]
        forks = read_forks(self._objects, run)
        return _Listed(newest_incarnation(self._objects), frozenset(full.folder for full in fulls), live(fulls, forks), forks)

    def _folders(self, run: str) -> Iterator[Removed | Kept]:
        names = list(self._objects.list(keys.FULL_PREFIX))
        for folder, group in groupby(names, key=lambda key: key.rpartition("/")[0]):
            objects = [key for key in group if keys.parse(key) is not None]
            yield from self._folder(run, folder, sorted(objects, key=lambda key: key != keys.manifest(folder)))
        for key in self._objects.list(""):
            if keys.parse(key) is None and keys.parse_quarantined(key) is None and not self._is_nvme(key):
                yield Kept(Tier.OBJECT, key, "it has no name of this project")

    def _folder(self, run: str, folder: str, objects: list[str]) -> Iterator[Removed | Kept]:
        """Remove a folder that no version lists, its manifest first: without it the rest is nobody's checkpoint."""
        stats = [stat for key in objects if (stat := self._objects.stat(key)) is not None]
        for key in objects:
            why = self._why_kept(run, folder, max((stat.modified_unix_s for stat in stats), default=0.0))
            if isinstance(why, Kept):
                yield from (why,) if why.why else ()
                return
            stat = self._objects.stat(key)
            if stat is not None:
                self._objects.delete(key)
                yield Removed(Tier.OBJECT, key, stat.size_bytes, "of a full checkpoint that no version lists")

    def _why_kept(self, run: str, folder: str, touched_unix_s: float) -> Kept | None:
        """From a fresh listing: `None` if the folder may go; a reason of no words for what is listed."""
        listed = self._listed(run)
        name = keys.parse(keys.manifest(folder))
        if isinstance(listed, Kept):
            return listed
        if name is None or folder in listed.folders:
            return Kept(Tier.OBJECT, folder, "")
        if listed.may_be_written(name):
            return Kept(Tier.OBJECT, folder, f"incarnation {name.incarnation}, the newest, may be writing it")
        if touched_unix_s > self._before_unix_s:
            return Kept(Tier.OBJECT, folder, "it is not old enough")
        if overlooked(self._objects, run, folder, listed.fulls, listed.forks):
            return Kept(
                Tier.OBJECT, folder, "no version lists it, and all that are listed are older: run --repair first, which lists it again"
            )
        return None

    def _stale_uploads(self, run: str) -> Iterator[Removed | Kept]:
        for upload in list(self._objects.uploads()):
            if upload.touched_unix_s > self._before_unix_s:
                continue
            name, listed = keys.parse(keys.manifest(upload.folder)), self._listed(run)
            if not _is_ours(upload.folder):
                yield Kept(Tier.OBJECT, upload.name, "it is in no folder of this project")
            elif name is not None and isinstance(listed, Kept):
                yield listed
            elif name is not None and isinstance(listed, _Listed) and listed.may_be_written(name):
                yield Kept(Tier.OBJECT, upload.name, f"incarnation {name.incarnation}, the newest, may be writing it")
            else:
                self._objects.discard_upload(upload.name)
                yield Removed(Tier.OBJECT, upload.name, 0, "an upload whose process was killed")

    def _quarantine(self, tier: Tier, backend: Backend) -> Iterator[Removed]:
        for name in list(backend.list(keys.QUARANTINE_PREFIX)):
            parsed = keys.parse_quarantined(name)
            stat = backend.stat(name)
            if parsed is None or stat is None or parsed[0] > self._before_unix_s:
                continue
            if not still_explains(backend, parsed[1]):
                backend.delete(name)
                yield Removed(tier, name, stat.size_bytes, "set aside by a repair")
            elif stat.size_bytes:
                backend.put(name, b"")
                yield Removed(tier, name, stat.size_bytes, "set aside by a repair; its empty name stays, and says why something is missing")

    def _nvme(self, run: str) -> Iterator[Removed | Kept]:
        """What was set aside on this host: whole copies beside the one in use, and objects within it while nobody writes there."""
        path = nvme_path(self._config, run)
        if path is None:
            return
        for moved in set_aside(path):
            files = [(file.stat().st_mtime, file.stat().st_size) for file in moved.rglob("*") if file.is_file()]
            if max([moved.stat().st_mtime, *(touched for touched, _ in files)]) <= self._before_unix_s:
                shutil.rmtree(moved)
                yield Removed(Tier.NVME, str(moved), sum(size for _, size in files), "a copy that could not be read")
        if not (path / DATA_FILE).is_file():
            return
        try:
            with LmdbBackend(path, create=False) as nvme:
                yield from self._quarantine(Tier.NVME, nvme)
        except Busy as error:
            yield Kept(Tier.NVME, str(path), f"in use by {error.holder}; run it again when that has ended")

    def _is_nvme(self, key: str) -> bool:
        """Whether it is a file of an NVMe directory inside the object tier's."""
        if self._config.nvme is None or self._config.scheme != "file":
            return False
        return (Path(self._config.address.removeprefix("file://")) / key).is_relative_to(self._config.nvme)


def _is_ours(folder: str) -> bool:
    """Whether this project writes objects there."""
    if folder in ("", "incarnations", "forks") or folder.startswith(keys.QUARANTINE_PREFIX):
        return True
    return any(keys.parse(f"{folder}/{name}") is not None for name in ("v00000001.msgpack", "manifest.msgpack"))
