"""Which full checkpoints there are: immutable versions, of which the highest is the head. Publishing is one exclusive put.

There is no mutable pointer. A version is made from the head by a pure function, and put under the next number; whoever loses the
race for a number reads again and decides again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from adacheck.backends.base import Backend, Created
from adacheck.backends.errors import NotFound, Unavailable
from adacheck.errors import DamagedCut
from adacheck.incarnations import check_newest, read_forks
from adacheck.keeper.cut import ForkEntry, is_live
from adacheck.manifests import keys
from adacheck.manifests.chain import NO_LINK, seal_version
from adacheck.manifests.encoding import encode
from adacheck.manifests.errors import FormatError, NewerFormat
from adacheck.manifests.record import Fork, FullEntry, Version
from adacheck.sense import read

RACES_MAX = 100
"""Lost races for a number after which publishing gives up: other writers of this incarnation do nothing but publish."""

Fulls = tuple[FullEntry, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A version record that could not be used, and why; a restore prints a line for each."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Head:
    """The newest version that can be read.

    Attributes:
        version: as stored, `None` if there is none.
        fulls: its checkpoints that the fork table has not cut off, oldest step first.
        rejected: newer records that could not be used.
    """

    version: Version | None
    fulls: Fulls
    rejected: tuple[Rejected, ...]


def head(backend: Backend, run: str) -> Head:
    """The head: the highest usable version of the highest incarnation that has one.

    Raises:
        DamagedCut: the fork table cannot be read.
        NewerFormat: a later release wrote a newer version.
    """
    forks = read_forks(backend, run)
    rejected: list[Rejected] = []
    for found in versions(backend, run):
        if isinstance(found, Version):
            return Head(found, live(found.fulls, forks), tuple(rejected))
        rejected.append(found)
    return Head(None, (), tuple(rejected))


def versions(backend: Backend, run: str) -> Iterator[Version | Rejected]:
    """All version records, newest first, each read when asked for.

    Raises:
        NewerFormat: a later release wrote the record.
    """
    for key in sorted(backend.list(keys.VERSIONS_PREFIX), reverse=True):
        if keys.parse(key) is not None:
            found = _read_version(backend, key, run)
            # bytes may be wrong on the way only, and an older head would hide the newest checkpoint
            yield found if isinstance(found, Version) else _read_version(backend, key, run)


def _read_version(backend: Backend, key: str, run: str) -> Version | Rejected:
    name = keys.parse(key)
    assert name is not None
    try:
        version = read(backend.get(key), Version)
    except NotFound:
        return Rejected(key, "it is listed and cannot be found")
    except NewerFormat:
        raise
    except FormatError as error:
        return Rejected(key, str(error))
    if version.run != run:
        return Rejected(key, f"it is of run {version.run}, not of {run}")
    if (version.incarnation, version.number) != (name.incarnation, name.number):
        return Rejected(key, f"it holds version {version.number} of incarnation {version.incarnation}")
    if len(version.previous) != len(NO_LINK) or seal_version(version).link != version.link:
        return Rejected(key, "its link does not match its content")
    return version


def live(fulls: Iterable[FullEntry], forks: Iterable[Fork]) -> Fulls:
    """Those on the live lineage, oldest step first: an incarnation counts up to the least cut any later one started from."""
    table = [ForkEntry(fork.incarnation, fork.cut, fork.proven) for fork in forks]
    return in_order(full for full in fulls if is_live(table, full.incarnation, full.step))


def in_order(fulls: Iterable[FullEntry]) -> Fulls:
    """Oldest step first."""
    return tuple(sorted(fulls, key=lambda full: (full.step, full.incarnation, full.folder)))


def listing(entry: FullEntry) -> Callable[[Fulls], Fulls]:
    """The change that adds a full checkpoint, once."""
    return lambda fulls: (*(full for full in fulls if full.folder != entry.folder), entry)


def with_status(status: str, folders: Iterable[str]) -> Callable[[Fulls], Fulls]:
    """The change that sets the status (`proven`, `inexact`) of the checkpoints in `folders`, where they are still listed."""
    chosen = frozenset(folders)
    return lambda fulls: tuple(replace(full, status=status) if full.folder in chosen else full for full in fulls)


def publish(backend: Backend, run: str, incarnation: int, change: Callable[[Fulls], Fulls], *, anew: bool = False) -> Version:
    """Put the next version: what `change` makes of the live checkpoints of the head.

    `change` is pure and idempotent: it is applied again to the new head after a lost race, also to one that this very put has won
    though its answer was lost. If it changes nothing in a head of this incarnation, that head is returned and nothing is written,
    unless it is to be `anew`.
    All objects of a checkpoint it adds must be in the store.

    Raises:
        Superseded: a later incarnation has started; nothing was written.
        DamagedCut: a checkpoint to be listed has no manifest, or the fork table cannot be read.
        Unavailable: too many races were lost.
    """
    for _ in range(RACES_MAX):
        check_newest(backend, incarnation)
        current = head(backend, run)
        fulls = in_order(change(current.fulls))
        _check_manifests(backend, set(fulls) - set(current.fulls))
        last = current.version
        if last is not None and (last.incarnation, last.fulls) == (incarnation, fulls) and not current.rejected and not anew:
            return last
        previous = NO_LINK if last is None else last.link
        version = seal_version(Version(run, incarnation, _next_number(backend, incarnation, last), fulls, previous, b""))
        key = keys.version(incarnation, version.number)
        if isinstance(backend.put(key, encode(version), exclusive=True), Created):
            return version
    raise Unavailable(f"{RACES_MAX} races for the next version of incarnation {incarnation} on {backend.name} were lost; try again")


def _check_manifests(backend: Backend, fulls: Iterable[FullEntry]) -> None:
    for full in fulls:
        if backend.stat(keys.manifest(full.folder)) is None:
            raise DamagedCut(f"{full.folder} has no manifest on {backend.name}, so it cannot be published; write it again under a new id")


def _next_number(backend: Backend, incarnation: int, last: Version | None) -> int:
    """Higher than the head's, and than any number taken, be it by a record that cannot be read."""
    names = (keys.parse(key) for key in backend.list(keys.versions_prefix(incarnation)))
    taken = [name.number for name in names if name is not None]
    return max([*taken, 0 if last is None else last.number]) + 1
