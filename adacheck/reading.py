"""Opens the object tier of a store for tools that only read: nothing is made, locked or written. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from adacheck.backends.base import Backend
from adacheck.backends.registry import open_backend
from adacheck.backends.wrappers import Retrying
from adacheck.config import StoreConfig


@dataclass(frozen=True, slots=True)
class Reading:
    """An object tier that is only read; `stale_uploads` lists what killed uploads left, where the tier can tell."""

    objects: Backend
    stale_uploads: Callable[[float], Iterator[str]]


@contextmanager
def open_objects(config: StoreConfig) -> Iterator[Reading]:
    """The object tier at `config.address`, closed at the end.

    Raises:
        BackendError: it is not there, does not answer, or refuses.
    """
    options = {**config.storage, "read_only": True} if config.scheme == "file" else dict(config.storage)
    backend = open_backend(config.scheme, config.address.partition("://")[2], options)
    with Retrying(backend) as objects:
        yield Reading(objects, getattr(backend, "stale_uploads", lambda _: iter(())))
