"""What both disks would hold if the host lost power now, taken before every operation that changes either of them.

One run gives all its crashes: instead of dying at operation k and starting over for k + 1, an image is kept of each. Unsynced
writes are not in it (or, with a generator, each by chance, as names often outlive content on real disks). LMDB's transactions
count as one operation; that they are atomic and durable is tested with LMDB itself.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import blake3

from adacheck.backends.base import Backend, Created, Exists, Expect, Item, Parts
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.wrappers import Wrapper
from tests.faults import CrashingFiles

_Result = TypeVar("_Result")
DATA = "data.mdb"


@dataclass
class Image:
    """One crash: the directory that holds what is left, the durable step promised by then, and before which operation it was."""

    path: Path
    durable: int
    before: str


class Recorder:
    """Takes the images of one run whose object tier is `root/objects` and whose NVMe directory is `root/nvme`.

    Attributes:
        durable: asked at every image for the step that is promised at that moment.
        images: those taken; of crashes that leave the same bytes only the one with the highest promise.
    """

    def __init__(self, root: Path, images: Path, *, kept: random.Random | None = None) -> None:
        self.root, self._into = root, images
        self.durable: Callable[[], int] = lambda: -1
        self.operations = 0
        (root / "objects").mkdir(parents=True, exist_ok=True)
        self.files = RecordingFiles(self, root / "objects", kept)
        self._found: dict[bytes, Image] = {}
        self._lock = threading.RLock()

    @property
    def images(self) -> list[Image]:
        return list(self._found.values())

    def open_nvme(self, path: Path) -> Backend:
        """Stands in for `LmdbBackend`."""
        self.take("open NVMe")
        return RecordingNvme(LmdbBackend(path), self)

    def take(self, before: str) -> None:
        """Keep what a crash would leave now."""
        with self._lock:
            self.operations += 1
            path = self._into / f"{self.operations:04d}"
            (path / "objects").mkdir(parents=True)
            self.files.write_image(path / "objects")
            for data in (self.root / "nvme").rglob(DATA):
                copy = path / data.relative_to(self.root)
                copy.parent.mkdir(parents=True)
                shutil.copyfile(data, copy)
            image = Image(path, self.durable(), before)
            same = self._found.setdefault(_content(path), image)
            if same is not image:
                same.durable = max(same.durable, image.durable)
                shutil.rmtree(path)

    def transaction(self, call: Callable[[], _Result]) -> _Result:
        """Carry out a transaction with an image before it, and none in the middle of it."""
        with self._lock:
            self.take("transaction")
            return call()


class RecordingFiles(CrashingFiles):
    """The object tier's disk, with an image before every call."""

    def __init__(self, recorder: Recorder, root: Path, kept: random.Random | None) -> None:
        super().__init__(root, kept=kept)
        self._recorder = recorder

    def write_image(self, path: Path) -> None:
        self._write_out(self._tree, path)

    def _step(self) -> None:
        self._recorder.take("call of the disk")


class RecordingNvme(Wrapper):
    """NVMe, with an image before every transaction."""

    def __init__(self, backend: Backend, recorder: Recorder) -> None:
        super().__init__(backend)
        self._recorder = recorder

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        return self._recorder.transaction(lambda: self._backend.put(key, parts, exclusive=exclusive))

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        return self._recorder.transaction(lambda: self._backend.put_many(items, expect=expect))

    def delete(self, key: str) -> None:
        self._recorder.transaction(lambda: self._backend.delete(key))


def _content(path: Path) -> bytes:
    """Digest of all names and bytes below a directory."""
    hasher = blake3.blake3()
    for file in sorted(path.rglob("*")):
        hasher.update(b"%s %d\n" % (file.relative_to(path).as_posix().encode(), file.is_file() and file.stat().st_size))
        if file.is_file():
            hasher.update(file.read_bytes())
    return hasher.digest()
