"""Whose turn it is: the run's identity, its incarnations and its fork table, each an object that is put once and never changed."""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from adacheck.backends.base import Backend, Exists
from adacheck.backends.errors import NotFound
from adacheck.errors import ConfigError, DamagedCut, ForeignRun, Superseded
from adacheck.keeper.cut import ForkEntry, unstarted, void_fork
from adacheck.manifests import keys
from adacheck.manifests.encoding import encode
from adacheck.manifests.errors import FormatError, NewerFormat
from adacheck.manifests.record import Fork, Incarnation, Record, Run
from adacheck.sense import read

R = TypeVar("R", bound=Record)


def new_run() -> Run:
    """A fresh identity."""
    try:
        software = f"adacheck {version('adacheck')}"
    except PackageNotFoundError:
        software = "adacheck"
    return Run(str(uuid.uuid4()), time.time(), software)


def read_run(backend: Backend) -> Run | None:
    """The run that lives in an object tier; `None` for an empty one.

    Raises:
        DamagedCut: there is one, and it cannot be read.
    """
    return _read(backend, keys.RUN, Run)


def open_run(backend: Backend, fresh: Run) -> Run:
    """The run of an object tier: `fresh` becomes it if there is none yet. Of several that try at once, all get the same.

    Raises:
        ConfigError: the backend has no exclusive puts, without which two processes would not see each other.
        DamagedCut: the identity cannot be read.
    """
    if not backend.traits.exclusive_put:
        raise ConfigError(f"{backend.name} cannot be the object tier: it has no exclusive puts; use file:// or an S3 with conditional puts")
    found = read_run(backend)
    if found is None and isinstance(backend.put(keys.RUN, encode(fresh), exclusive=True), Exists):
        found = read_run(backend)
        if found is None:
            raise DamagedCut(f"{keys.RUN} of {backend.name} was there and has vanished; another process deletes in this store")
    return found or fresh


def newest_incarnation(backend: Backend) -> int:
    """The number of the newest incarnation, 0 before the first."""
    names = (keys.parse(key) for key in backend.list(keys.INCARNATIONS_PREFIX))
    return max((name.incarnation for name in names if name is not None), default=0)


def take_incarnation(backend: Backend, run: str, nvme: str | None = None) -> Incarnation:
    """Begin a new incarnation of the run: the next number that nobody has, by an exclusive put. `nvme`: where its log will be."""
    while True:
        taken = begun_now(run, newest_incarnation(backend) + 1, nvme)
        if not isinstance(backend.put(keys.incarnation(taken.incarnation), encode(taken), exclusive=True), Exists):
            return taken


def begun_now(run: str, number: int, nvme: str | None) -> Incarnation:
    """The record by which this process takes a number now; nobody else makes the same one."""
    return Incarnation(run, number, time.time(), platform.node(), os.getpid(), nvme or "")


def take_claimed(backend: Backend, claim: Incarnation) -> None:
    """Begin this incarnation and no other; the same again is no error, since an earlier put of it may have landed unseen.

    Raises:
        Superseded: somebody else has taken the number, or a later one.
    """
    check_newest(backend, claim.incarnation)
    key = keys.incarnation(claim.incarnation)
    if isinstance(backend.put(key, encode(claim), exclusive=True), Exists) and _read(backend, key, Incarnation) != claim:
        raise Superseded(f"{key} of {backend.name} was taken by another start: this process may not write any more, stop it")


def read_incarnation(backend: Backend, run: str, number: int) -> Incarnation | None:
    """Who took a number; `None` if nobody did.

    Raises:
        DamagedCut: the record cannot be read, or is another's.
    """
    key = keys.incarnation(number)
    found = _read(backend, key, Incarnation)
    if found is not None and (found.run, found.incarnation) != (run, number):
        raise DamagedCut(f"{key} of {backend.name} holds incarnation {found.incarnation} of run {found.run}; restore this object")
    return found


def made_anew(run: str, number: int) -> Incarnation:
    """What a repair puts where nobody remembers who took a number, so that it stays taken."""
    return Incarnation(run, number, 0.0, "unknown", 0, "")


def is_made_anew(incarnation: Incarnation) -> bool:
    """Whether a repair made this record."""
    return incarnation == made_anew(incarnation.run, incarnation.incarnation)


def check_newest(backend: Backend, incarnation: int) -> None:
    """Check that no later incarnation has begun, from a fresh listing.

    Raises:
        Superseded: one has.
    """
    newest = newest_incarnation(backend)
    if newest > incarnation:
        raise Superseded(
            f"incarnation {newest} of the run has started on {backend.name}; incarnation {incarnation}, this process, "
            "may not write any more: stop it"
        )


def keep_identity(backend: Backend, incarnation: Incarnation, forks: Iterable[Fork]) -> str | None:
    """Put the records back that say whose store this is, if they vanished while the run goes on; a line that says so if they had.

    Without them nothing that is published here could be restored.

    Raises:
        ForeignRun: another run lives here now.
    """
    found = read_run(backend)
    if found is not None:
        if found.run != incarnation.run:
            raise ForeignRun(f"{backend.name} belongs to run {found.run} now, not to {incarnation.run}; give this run another URI")
        return None
    backend.put(keys.RUN, encode(replace(new_run(), run=incarnation.run)), exclusive=True)
    backend.put(keys.incarnation(incarnation.incarnation), encode(incarnation), exclusive=True)
    for fork in forks:
        backend.put(keys.fork(fork.incarnation), encode(fork), exclusive=True)
    return f"{backend.name} had lost run {incarnation.run}; its records are back, older checkpoints are not"


def read_forks(backend: Backend, run: str) -> tuple[Fork, ...]:
    """The fork table, by incarnation.

    Raises:
        DamagedCut: a record of it cannot be read: without it dead steps would count as live.
        ForeignRun: a record is of another run.
    """
    forks = []
    for key in backend.list(keys.FORKS_PREFIX):
        name = keys.parse(key)
        fork = _read(backend, key, Fork) if name is not None else None
        if name is None or fork is None:
            continue
        if fork.run != run:
            raise ForeignRun(f"{key} of {backend.name} is of run {fork.run}, the store of run {run}")
        if fork.incarnation != name.incarnation:
            raise DamagedCut(f"{key} of {backend.name} holds the fork of incarnation {fork.incarnation}; restore this object")
        forks.append(fork)
    return tuple(forks)


def write_fork(backend: Backend, fork: Fork) -> None:
    """Record the cut an incarnation starts from; the same again is no error.

    Raises:
        Superseded: a later incarnation has started, or has declared that this one never will.
    """
    check_newest(backend, fork.incarnation)
    key = keys.fork(fork.incarnation)
    if isinstance(backend.put(key, encode(fork), exclusive=True), Exists) and _read(backend, key, Fork) != fork:
        raise Superseded(f"{key} of {backend.name} says otherwise than cut {fork.cut}: this process was superseded, start a new one")


def void_unstarted(backend: Backend, run: str, incarnation: int) -> tuple[Fork, ...]:
    """Declare that earlier incarnations without a fork never started (`cut.void_fork`), and return the fork table after that.

    A restore does this before it chooses its cut, so that none of them can cut off checkpoints later.

    Raises:
        DamagedCut, ForeignRun: as `read_forks`.
    """
    table = [ForkEntry(fork.incarnation, fork.cut, fork.proven) for fork in read_forks(backend, run)]
    for number in unstarted(table, incarnation):
        void = void_fork(number)
        backend.put(keys.fork(number), encode(Fork(run, number, void.cut, void.proven)), exclusive=True)
    return read_forks(backend, run)


def _read(backend: Backend, key: str, kind: type[R]) -> R | None:
    try:
        return read(backend.get(key), kind)
    except NotFound:
        return None
    except NewerFormat:
        raise
    except FormatError as error:
        raise DamagedCut(f"{key} of {backend.name} cannot be read: {error}; restore this object from a copy") from error
