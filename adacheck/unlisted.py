"""Which full checkpoint that no version lists may be the only thing a lost version leaves: repair lists it again, nobody deletes it.

An object that is gone leaves no trace, so the question is put the other way round: a version would list this one, were there one.
"""

from __future__ import annotations

from collections.abc import Iterable

from adacheck.backends.base import Backend
from adacheck.backends.errors import NotFound
from adacheck.catalogue import Fulls
from adacheck.keeper.cut import ForkEntry, is_live
from adacheck.manifests import keys
from adacheck.manifests.errors import FormatError, NewerFormat
from adacheck.manifests.record import Fork, Full
from adacheck.sense import read


def overlooked(backend: Backend, run: str, folder: str, fulls: Fulls, forks: Iterable[Fork]) -> bool:
    """Whether an unlisted folder has its manifest, is on the live lineage, and is newer than every live checkpoint that is listed.

    An older one was dropped, or a newer one replaces it. Its shards are not looked at.

    Args:
        fulls: the live checkpoints of the head.

    Raises:
        BackendError: of the backend, but for a manifest that is not there.
    """
    name = keys.parse(keys.manifest(folder))
    table = [ForkEntry(fork.incarnation, fork.cut, fork.proven) for fork in forks]
    if name is None or any(full.step >= name.step for full in fulls) or not is_live(table, name.incarnation, name.step):
        return False
    try:
        manifest = read(backend.get(keys.manifest(folder)), Full)
    except NotFound:
        return False
    except NewerFormat:
        return True  # only a later release can tell
    except FormatError:
        return False
    return (manifest.run, manifest.incarnation, manifest.step) == (run, name.incarnation, name.step)


def unlisted_fulls(backend: Backend, run: str, fulls: Fulls, forks: Iterable[Fork]) -> list[str]:
    """All folders that are `overlooked`, in order."""
    table = tuple(forks)
    folders = dict.fromkeys(key.rpartition("/")[0] for key in backend.list(keys.FULL_PREFIX))
    return [folder for folder in folders if overlooked(backend, run, folder, fulls, table)]
