"""Stores to damage: a small one with an object of every kind in both tiers, and each way in which an object can go wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adacheck.backends.base import Backend
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.object_store import ObjectStore
from adacheck.manifests import keys
from tests.golden.make_golden import train

NVME_KINDS = list(keys.Kind)[:9]
STEPS = 11
"""The newest cut of `build`, on NVMe; the object tier has 4 and 8."""


@dataclass(frozen=True)
class Copy:
    """A store under `root`, with its NVMe copy in `root/nvme`."""

    root: Path

    @property
    def uri(self) -> str:
        """What the tools are given."""
        return f"file://{self.root}/objects?nvme={self.root}/nvme"

    @property
    def nvme(self) -> Path:
        """The directory of the chain."""
        (folder,) = (path.parent for path in (self.root / "nvme").rglob("data.mdb"))
        return folder

    def open(self, kind: keys.Kind) -> Backend:
        """The tier that has objects of this kind, for writing."""
        return LmdbBackend(self.nvme, create=False) if kind in NVME_KINDS else ObjectStore(f"file://{self.root}/objects")

    def names(self, kind: keys.Kind) -> list[str]:
        """All objects of a kind, in order."""
        with self.open(kind) as tier:
            return [key for key in tier.list("") if (name := keys.parse(key)) is not None and name.kind is kind]

    def read(self, kind: keys.Kind, name: str) -> bytes:
        """The bytes of an object."""
        with self.open(kind) as tier:
            return tier.get(name)

    def write(self, kind: keys.Kind, name: str, content: bytes | None) -> None:
        """Replace an object, or delete it."""
        with self.open(kind) as tier:
            if content is None:
                tier.delete(name)
            else:
                tier.put(name, content)

    def copied(self, to: Path) -> Copy:
        """A copy of it all."""
        shutil.copytree(self.root, to)
        return Copy(to)


def build(root: Path, seed: int, expected: dict[str, dict[str, str]]) -> Copy:
    """Two starts of the golden job, 9 steps and 2, and a state staged for an upload that never came."""
    train(root, 9, expected, seed)
    train(root, 2, expected, seed)
    store = Copy(root)
    with LmdbBackend(store.nvme, create=False) as nvme:
        for key in list(nvme.list("")):
            name = keys.parse(key)
            if name is not None and name.kind in (keys.Kind.BASE, keys.Kind.BASE_SLOT):
                staged = keys.staged(name.generation, name.step, name.state)
                nvme.put(staged if name.kind is keys.Kind.BASE else f"{staged}/{name.slot:06d}", nvme.get(key))
    return store


def victim(store: Copy, kind: keys.Kind) -> tuple[str, str]:
    """An object of a kind, and the sibling it may be swapped with: of the same kind where there are two, else another record.

    Increments and versions are taken from the middle, where something links to them; slots are of different content.
    """
    names = store.names(kind)
    if kind in (keys.Kind.CHAIN, keys.Kind.FENCE):
        return names[0], keys.FENCE if kind is keys.Kind.CHAIN else keys.CHAIN
    if kind is keys.Kind.RUN:
        return names[0], keys.incarnation(1)
    at = 1 if kind in (keys.Kind.INCREMENT, keys.Kind.VERSION) else 0
    content = store.read(kind, names[at])
    other = next(name for name in reversed(names) if store.read(kind, name) != content)
    return names[at], other


def flip(content: bytes) -> bytes:
    """One bit of the middle is another."""
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def cut_short(content: bytes) -> bytes:
    """The last third is gone."""
    return content[: max(1, len(content) * 2 // 3)]


CHANGES: dict[str, Callable[[bytes], bytes | None]] = {
    "flip": flip,
    "empty": lambda _: b"",
    "truncate": cut_short,
    "delete": lambda _: None,
}


def damage(store: Copy, other_run: Copy, kind: keys.Kind, way: str) -> str:
    """Damage one object in one way (`swap` and `splice` besides `CHANGES`); gives its name."""
    name, sibling = victim(store, kind)
    content = store.read(kind, name)
    if way == "swap":
        store.write(kind, name, _read_any(store, kind, sibling))
        store.write(kind, sibling, content)
    elif way == "splice":
        store.write(kind, name, _of_other_run(other_run, kind, name))
    else:
        store.write(kind, name, CHANGES[way](content))
    return name


def _read_any(store: Copy, kind: keys.Kind, name: str) -> bytes:
    with store.open(kind) as tier:
        return tier.get(name)


def _of_other_run(other: Copy, kind: keys.Kind, name: str) -> bytes:
    """The object in the same place of another run; a full checkpoint's folder has another id there."""
    same = [key for key in other.names(kind) if _placed(key) == _placed(name)]
    return other.read(kind, same[0])


def _placed(key: str) -> tuple[int, ...]:
    name = keys.parse(key)
    assert name is not None
    return (name.incarnation, name.step, name.state, name.slot, name.number, name.shard)
