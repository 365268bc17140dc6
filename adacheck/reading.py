"""Opens a store for tools and readers: nothing is made or locked, and only a repair may write. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from adacheck.backends.base import Backend
from adacheck.backends.errors import BadOption, Damaged, Denied
from adacheck.backends.lmdb_directory import DATA_FILE
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.os_errors import translated
from adacheck.backends.registry import open_backend
from adacheck.backends.retry import Retry
from adacheck.backends.wrappers import Retrying
from adacheck.config import NvmeMissing, StoreConfig, parse
from adacheck.errors import ConfigError
from adacheck.incarnations import read_run
from adacheck.lineage import check_lineage
from adacheck.nvme_directory import check_nvme_run, no_aside, nvme_path, trained_here
from adacheck.sources import Sources, gather

OBJECT_TIER_ONLY = (
    "no nvme= was given, so only the object tier is looked at; steps since its newest full checkpoint may be on the trainer's host"
)


def reading_config(uri: str) -> tuple[StoreConfig, str]:
    """The configuration for a tool that only reads, which needs no `nvme=`; with what to tell the user, `""` for nothing.

    Raises:
        ConfigError: as `config.parse`.
    """
    try:
        return parse(uri, {}), ""
    except NvmeMissing:
        return parse(uri, {"nvme": "none"}), OBJECT_TIER_ONLY


@contextmanager
def options_blamed() -> Iterator[None]:
    """What the object tier's library does not take is a mistake in the configuration."""
    try:
        yield
    except BadOption as error:
        raise ConfigError(str(error)) from error.__cause__


@contextmanager
def open_objects(config: StoreConfig, *, writing: bool = False) -> Iterator[Backend]:
    """The object tier at `config.address`, closed at the end; it must exist. `writing`: for a repair.

    Raises:
        ConfigError: an option is not what its library takes.
        BackendError: it is not there, does not answer, or refuses.
    """
    address = config.address.partition("://")[2]
    options = {**config.storage, "read_only": True} if config.scheme == "file" else dict(config.storage)
    retry = Retry()
    with options_blamed():
        if writing and config.scheme == "file":
            open_backend(config.scheme, address, options).close()  # it is there: only then is it opened to be written
            options = dict(config.storage)
        backend = retry(lambda: open_backend(config.scheme, address, options))
    with Retrying(backend, retry) as objects:
        if writing:
            objects.check_writable()
        yield objects


@contextmanager
def open_sources(config: StoreConfig, objects: Backend) -> Iterator[Sources | None]:
    """What the store offers, an NVMe copy as it is at this moment whatever its trainer does meanwhile; `None` without a run.

    A copy that cannot be read at all, or not by this user, is in `rejected`, and offers nothing.

    Raises:
        ForeignRun: the NVMe directory belongs to another run, or to another copy of its object tier.
        DamagedCut: the run's identity or its fork table cannot be read.
        NoCut, Damaged, Denied: the copy that was set aside, and is asked for, is not there or cannot be read.
    """
    found = read_run(objects)
    if found is None:
        check_nvme_run(config, None)
        yield None
        return
    with ExitStack() as stack:
        try:
            check_nvme_run(config, found.run)
            nvme = stack.enter_context(_nvme_moment(config, found.run))
            if nvme is not None:
                check_lineage(config, objects, nvme)
            sources = gather(found.run, objects, nvme, aside=bool(config.aside))
        except (Damaged, Denied) as error:
            if config.aside:
                raise  # the object tier has another lineage
            sources = gather(found.run, objects, None)
            sources.rejected.append(f"the NVMe copy of run {found.run}: {error}")
        yield sources


@contextmanager
def _nvme_moment(config: StoreConfig, run: str) -> Iterator[Backend | None]:
    """The NVMe copy as it is now, `None` where there is none."""
    path = nvme_path(config, run)
    with translated(f"look at {path}"):
        here = path is not None and (path / DATA_FILE).exists()
    if config.aside and not here:
        raise no_aside(config, run)
    if path is None or not here:
        yield None
        return
    shared = trained_here(path)
    with nullcontext(shared) if shared is not None else LmdbBackend(path, create=False, read_only=True) as nvme, nvme.snapshot() as moment:
        yield moment
