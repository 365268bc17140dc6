"""A store: the object tier of one run and its options. `Store.open(uri)` reads no bytes; `attach` makes a checkpointer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from adacheck import incarnations, recovery
from adacheck.backends.base import Backend
from adacheck.backends.lmdb_directory import DATA_FILE
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.registry import open_backend
from adacheck.backends.wrappers import Limited, Retrying
from adacheck.capture.inventory import Models, Optimizers, take_inventory
from adacheck.checkpointer import Checkpointer
from adacheck.config import StoreConfig, parse
from adacheck.errors import ConfigError
from adacheck.install import Stateful
from adacheck.keeper.protocol import Kind
from adacheck.nvme_directory import check_nvme_run, nvme_path
from adacheck.start import opened_here


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A cut that can be restored.

    Attributes:
        step: which.
        tiers: where it is (`nvme`, `object`).
        intact: its records link up; the bytes are checked when they are read (or by `adacheck-fsck --read-data`).
        proven: known to be exact; `exact` is False if it was found not to be.
    """

    step: int
    tiers: tuple[str, ...]
    intact: bool
    proven: bool
    exact: bool


class Store:
    """Where one run keeps its checkpoints."""

    def __init__(self, config: StoreConfig, objects: Backend) -> None:
        self.config, self.objects = config, objects

    @classmethod
    def open(cls, uri: str, **options: Any) -> Store:
        """Open the store at `uri`; options as query parameters or keywords, see the README's table.

        Raises:
            ConfigError: an unknown scheme or option (the nearest known one is offered), a bad value, or `nvme=` missing.
            BackendError: the object tier does not answer, or refuses.
        """
        if not isinstance(uri, str):
            raise ConfigError(f"a store URI is a string such as 'file:///data/run-42', not a {type(uri).__name__}: {uri!r}")
        config = parse(uri, options)
        scheme, _, address = config.address.partition("://")
        backend = open_backend(scheme, address, config.storage)
        if config.bandwidth_bytes_per_s is not None:
            backend = Limited(backend, config.bandwidth_bytes_per_s)
        backend = Retrying(backend)  # outside: what goes slow comes from a generator, which could not be tried again
        if not backend.traits.exclusive_put:
            backend.close()
            raise ConfigError(f"{config.address} has no exclusive puts, so two processes would not see each other; use file:// or s3://")
        return cls(config, backend)

    def attach(self, model: Models, optimizer: Optimizers, extra: Mapping[str, Stateful] | None = None) -> Checkpointer:
        """Hook a model and its optimizers (one, a list or a dict of each); `extra` takes anything with `state_dict()`.

        Raises:
            ConfigError: something that is no module, optimizer, or stateful object.
        """
        if extra is not None and not isinstance(extra, Mapping):
            raise ConfigError(f"extra is a dict of names and objects, as in extra={{'scheduler': scheduler}}, not a {type(extra).__name__}")
        for name, item in (extra or {}).items():
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
                raise ConfigError(f"extra[{name!r}] is a {type(item).__name__} without state_dict() and load_state_dict()")
        return Checkpointer(self, take_inventory(model, optimizer), extra or {})

    def steps(self) -> list[RestorePoint]:
        """Every cut that can be restored now, oldest first; looks at records only, and works beside a running trainer."""
        run = incarnations.read_run(self.objects)
        check_nvme_run(self.config, run.run if run else None)
        if run is None:
            return []
        with _reading(self.config, run.run) as nvme:
            sources = recovery.gather(run.run, self.objects, nvme)
            return restore_points(sources)

    def close(self) -> None:
        """Close the object tier. Checkpointers are closed first, by their own `close()`."""
        self.objects.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def restore_points(sources: recovery.Sources) -> list[RestorePoint]:
    """What the sources offer, as a list of cuts."""
    tiers: dict[int, set[str]] = {}
    for offer in sources.offers():
        for step in offer.steps:
            tiers.setdefault(step, set()).add(str(Kind(offer.kind)))
    status = {full.step: full.status for full in sources.fulls}
    return [
        RestorePoint(step, tuple(sorted(tiers[step])), True, status.get(step) == "proven", status.get(step) != "inexact")
        for step in sorted(tiers)
    ]


@contextmanager
def _reading(config: StoreConfig, run: str) -> Iterator[Backend | None]:
    """The NVMe copy opened for reading, `None` where there is none. LMDB is open once in a process: a trainer's of this one is shared."""
    path = nvme_path(config, run)
    if path is None or not (path / DATA_FILE).exists():
        yield None
    elif (shared := opened_here(path)) is not None:
        yield shared
    else:
        with LmdbBackend(path, create=False, read_only=True) as backend:
            yield backend
