"""A store: the object tier of one run and its options. `Store.open(uri)` reads no bytes; `attach` makes a checkpointer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from adacheck.backends.base import Backend
from adacheck.backends.registry import open_backend
from adacheck.backends.retry import Retry
from adacheck.backends.wrappers import Limited, Retrying
from adacheck.capture.inventory import Models, Optimizers, take_inventory
from adacheck.capture.unheld import unheld
from adacheck.checkpointer import Checkpointer
from adacheck.config import StoreConfig, parse
from adacheck.errors import ConfigError
from adacheck.install import Stateful
from adacheck.reading import open_sources, options_blamed
from adacheck.restore_points import RestorePoint as RestorePoint
from adacheck.restore_points import restore_points

if TYPE_CHECKING:
    from adacheck.reader import CutReader

_log = logging.getLogger("adacheck")


class Store:
    """Where one run keeps its checkpoints."""

    def __init__(self, config: StoreConfig, objects: Backend) -> None:
        self.config, self.objects = config, objects

    @classmethod
    def open(cls, uri: str, **options: Any) -> Store:
        """Open the store at `uri`; options as query parameters or keywords, see the README's table.

        Raises:
            ConfigError: an unknown scheme or option (the nearest known one is offered), a bad value, or `nvme=` missing.
            BackendError: the object tier does not answer, or refuses. Whether it can be written only `attach` asks.
        """
        if not isinstance(uri, str):
            raise ConfigError(f"a store URI is a string such as 'file:///data/run-42', not a {type(uri).__name__}: {uri!r}")
        config = parse(uri, options)
        scheme, _, address = config.address.partition("://")
        retry = Retry()
        with options_blamed():
            backend = retry(lambda: open_backend(scheme, address, config.storage))
        if config.bandwidth_bytes_per_s is not None:
            backend = Limited(backend, config.bandwidth_bytes_per_s)
        backend = Retrying(backend, retry)  # outside: what goes slow comes from a generator, which could not be tried again
        if not backend.traits.exclusive_put:
            backend.close()
            raise ConfigError(f"{config.address} has no exclusive puts, so two processes would not see each other; use file:// or s3://")
        return cls(config, backend)

    def attach(self, model: Models, optimizer: Optimizers, extra: Mapping[str, Stateful] | None = None) -> Checkpointer:
        """Hook a model and its optimizers (one, a list or a dict of each); `extra` takes anything with `state_dict()`.

        Raises:
            ConfigError: something that is no module, optimizer, or stateful object.
            Denied: the object tier can only be read by this user.
        """
        if extra is not None and not isinstance(extra, Mapping):
            raise ConfigError(f"extra is a dict of names and objects, as in extra={{'scheduler': scheduler}}, not a {type(extra).__name__}")
        for name, item in (extra or {}).items():
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
                raise ConfigError(f"extra[{name!r}] is a {type(item).__name__} without state_dict() and load_state_dict()")
        if self.config.aside:
            raise ConfigError(f"aside={self.config.aside} is a log that was set aside: it can be looked at and exported, not trained on")
        self.objects.check_writable()
        inventory = take_inventory(model, optimizer)
        ckpt = Checkpointer(self, inventory, extra or {})
        if (line := unheld(inventory)) is not None:
            _log.warning("%s", line)
        return ckpt

    def steps(self) -> list[RestorePoint]:
        """Every cut that can be restored now, oldest first; looks at records only, and works beside a running trainer.

        What cannot be read is left out and logged.

        Raises:
            ForeignRun: the NVMe directory belongs to another run.
            DamagedCut: the run's identity or its fork table cannot be read.
        """
        with open_sources(self.config, self.objects) as sources:
            for line in sources.rejected if sources else ():
                _log.warning("not listed: %s", line)
            return restore_points(sources) if sources else []

    def reader(self, step: int | Literal["latest"] | None = None) -> CutReader:
        """A `torch.distributed.checkpoint.StorageReader` of the cut at `step`, or of the newest: `dcp.load(state, storage_reader=...)`.

        Raises:
            NoCut: there is no such cut; names the nearest.
        """
        from adacheck.reader import CutReader  # torch.distributed.checkpoint takes a while to import, and few need it

        return CutReader(self.config, self.objects, None if step == "latest" else step)

    def close(self) -> None:
        """Close the object tier. Checkpointers are closed first, by their own `close()`."""
        self.objects.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
