"""How long what a repair set aside explains that something is missing: while a record is left that refers to it.

A check excuses a gap for which it finds a name in quarantine (`check_records.Look.excuse`, and for versions `check_object_tier`). So
a collection takes the bytes, and leaves the name empty while it is needed.
"""

from __future__ import annotations

from adacheck.backends.base import Backend
from adacheck.history import CHUNKS_KEPT
from adacheck.manifests import keys
from adacheck.retention import VERSIONS_KEPT

K = keys.Kind


def still_explains(backend: Backend, key: str) -> bool:
    """Whether a check of this tier would miss the object that was called `key` if nothing said that it was set aside."""
    name = keys.parse(key)
    if name is None or backend.stat(key) is not None:
        return False
    if name.kind is K.HISTORY_COPY:
        return backend.stat(keys.manifest(key.rpartition("/")[0])) is not None
    if name.kind is K.INCREMENT_SLOT:
        return backend.stat(keys.increment(name.generation, name.step)) is not None
    if name.kind is K.HISTORY:
        newest = max((chunk.number for chunk in _names(backend, keys.HISTORY_PREFIX)), default=0)
        return newest - name.number < CHUNKS_KEPT
    # the first version that is left links to the one before it, which is no news once enough follow
    return name.kind is K.VERSION and 0 < len(_names(backend, keys.VERSIONS_PREFIX)) <= VERSIONS_KEPT


def _names(backend: Backend, prefix: str) -> list[keys.Name]:
    return [name for key in backend.list(prefix) if (name := keys.parse(key)) is not None]
