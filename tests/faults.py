"""Faults on purpose, behind the interfaces that the real things have: errors at chosen calls, and crashes of the process.

`Faulty` raises errors, `Crashing` kills the process between two calls of a backend, and `CrashingFiles` cuts the power between
two calls of the disk. All are driven by a call number, so that a test can go through every one.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from adacheck.backends.base import Backend, Buffer, Created, Exists, Expect, Item, Parts, Stat
from adacheck.backends.errors import BackendError
from adacheck.backends.local_files import LocalFiles
from adacheck.backends.wrappers import Wrapper

_Result = TypeVar("_Result")


class SimulatedCrash(BaseException):
    """The process died here. No `Exception`, so that nothing handles it by the way."""


@dataclass(frozen=True)
class Fault:
    """An error to raise instead of carrying out a call, or `after` it was carried out (a lost reply)."""

    error: BackendError
    after: bool = False


Schedule = Callable[[int, str, str], Fault | None]
"""(number of the call, from 1; method; key or prefix) -> the fault of that call."""


def at_calls(faults: Mapping[int, Fault]) -> Schedule:
    """Faults at these call numbers."""
    return lambda number, method, key: faults.get(number)


def seeded(seed: int, rate: float, make: Callable[[], BackendError], methods: Iterable[str] = ()) -> Schedule:
    """Faults at random calls (of these methods; of all, if none are given), half of them after the call; equal for equal seeds."""
    chosen = frozenset(methods)

    def schedule(number: int, method: str, key: str) -> Fault | None:
        chance = random.Random(f"{seed}/{number}")
        if chance.random() >= rate or (chosen and method not in chosen):
            return None
        return Fault(make(), after=chance.random() < 0.5)

    return schedule


class _Counted(Wrapper):
    """Numbers the calls of a backend; what becomes of each is decided by `_run`."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.calls = 0
        self._lock = threading.Lock()

    def _run(self, method: str, key: str, call: Callable[[], _Result]) -> _Result:
        raise NotImplementedError

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        return self._run("put", key, lambda: self._backend.put(key, parts, exclusive=exclusive))

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        return self._run("put_many", "", lambda: self._backend.put_many(items, expect=expect))

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        return self._run("get", key, lambda: self._backend.get(key, byte_range))

    def stat(self, key: str) -> Stat | None:
        return self._run("stat", key, lambda: self._backend.stat(key))

    def list(self, prefix: str) -> Iterator[str]:
        return self._run("list", prefix, lambda: self._backend.list(prefix))

    def delete(self, key: str) -> None:
        self._run("delete", key, lambda: self._backend.delete(key))


class Faulty(_Counted):
    """Raises the faults of a schedule; everything else goes through. `calls` counts them all."""

    def __init__(self, backend: Backend, schedule: Schedule) -> None:
        super().__init__(backend)
        self._schedule = schedule

    def _run(self, method: str, key: str, call: Callable[[], _Result]) -> _Result:
        with self._lock:
            self.calls += 1
            fault = self._schedule(self.calls, method, key)
        if fault is not None and not fault.after:
            raise fault.error
        result = call()
        if fault is not None:
            raise fault.error
        return result


class Crashing(_Counted):
    """Dies at the `crash_at`-th mutating call (from 1; `None`: never), before it is carried out, or `after`.

    From then on every call raises `SimulatedCrash`, `close` too: whoever goes on is a process that exists no more. What the
    backend beneath holds is what the crash left; go on with that one. `calls` counts mutating calls; a batch counts as one where
    batches are atomic, otherwise each of its items does.
    """

    def __init__(self, backend: Backend, crash_at: int | None = None, *, after: bool = False) -> None:
        super().__init__(backend)
        self.dead = False
        self._crash_at, self._after = crash_at, after

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        if self.traits.atomic_batch:
            return super().put_many(items, expect=expect)
        self._live()
        if expect is not None and isinstance(outcome := self._backend.put_many((), expect=expect), Exists):
            return outcome
        for key, parts in items:
            if parts is None:
                self.delete(key)
            else:
                self.put(key, parts)
        return Created()

    def close(self) -> None:
        self._live()
        super().close()

    def _run(self, method: str, key: str, call: Callable[[], _Result]) -> _Result:
        self._live()
        if method not in ("put", "put_many", "delete"):
            return call()
        with self._lock:
            self.calls += 1
            crashes = self.calls == self._crash_at
            self.dead = self.dead or (crashes and not self._after)
        self._live()
        result = call()
        if crashes:
            self.dead = True
        self._live()
        return result

    def _live(self) -> None:
        if self.dead:
            raise SimulatedCrash(f"{self.name}: crashed at mutating call {self._crash_at}")


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)


class CrashingFiles(LocalFiles):
    """The real calls below `root`, and beside them a model of what is synced.

    At the `crash_at`-th call (from 1; `None`: never) `SimulatedCrash` is raised instead, and at every later one; a write is half
    carried out. `power_cut()` then makes the directory what a disk would hold: all files and names as last synced. With `kept`,
    each unsynced change survives or not by chance, as it does on real disks, where names often outlive content.
    """

    def __init__(self, root: Path, crash_at: int | None = None, *, kept: random.Random | None = None) -> None:
        self.calls = 0
        self._root, self._crash_at, self._kept = root, crash_at, kept
        self._tree = _load(root)
        self._open: dict[int, _File] = {}

    def power_cut(self) -> None:
        """Leave below `root` only what survives; no call is possible afterwards."""
        self._crash_at = self.calls = self.calls or 1
        for path in self._root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._write_out(self._tree, self._root)

    def make_dir(self, path: Path) -> None:
        self._step()
        super().make_dir(path)
        self._folder(path.parent).names[path.name] = _Folder()

    def create(self, path: Path) -> int:
        self._step()
        descriptor = super().create(path)
        self._open[descriptor] = self._folder(path.parent).names[path.name] = _File()
        return descriptor

    def write(self, descriptor: int, content: Buffer) -> None:
        try:
            self._step()
        except SimulatedCrash:
            self._open[descriptor].content += bytes(content)[: len(content) // 2]
            raise
        super().write(descriptor, content)
        self._open[descriptor].content += content

    def fsync(self, descriptor: int) -> None:
        self._step()
        super().fsync(descriptor)
        self._open[descriptor].synced = bytes(self._open[descriptor].content)

    def close(self, descriptor: int) -> None:
        """Not a call that a crash could be told from its neighbours by; descriptors of the dead are closed, too."""
        os.close(descriptor)
        del self._open[descriptor]

    def link(self, source: Path, target: Path) -> None:
        self._step()
        super().link(source, target)
        self._folder(target.parent).names[target.name] = self._folder(source.parent).names[source.name]

    def replace(self, source: Path, target: Path) -> None:
        self._step()
        super().replace(source, target)
        self._folder(target.parent).names[target.name] = self._folder(source.parent).names.pop(source.name)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)
        del self._folder(path.parent).names[path.name]

    def remove_dir(self, path: Path) -> None:
        self._step()
        super().remove_dir(path)
        del self._folder(path.parent).names[path.name]

    def fsync_dir(self, path: Path) -> None:
        self._step()
        super().fsync_dir(path)
        if path != self._root.parent:
            folder = self._folder(path)
            folder.synced = dict(folder.names)

    def _step(self) -> None:
        if self._crash_at is not None and self.calls >= self._crash_at - 1:
            self.calls = self._crash_at
            raise SimulatedCrash(f"power cut at call {self._crash_at} of the disk")
        self.calls += 1

    def _folder(self, path: Path) -> _Folder:
        found = self._tree
        for name in path.relative_to(self._root).parts:
            below = found.names[name]
            assert isinstance(below, _Folder)
            found = below
        return found

    def _write_out(self, folder: _Folder, path: Path) -> None:
        for name in sorted({*folder.names, *folder.synced}):
            now, before = folder.names.get(name), folder.synced.get(name)
            node = now if now is not before and self._survives() else before
            if isinstance(node, _Folder):
                (path / name).mkdir()
                self._write_out(node, path / name)
            elif node is not None:
                content = bytes(node.content)  # a copy: another thread may be adding to it
                (path / name).write_bytes(content if self._survives() else node.synced)

    def _survives(self) -> bool:
        return self._kept is not None and self._kept.random() < 0.5


def _load(path: Path) -> _Folder:
    """What is on the disk already, all of it synced."""
    names: dict[str, _File | _Folder] = {}
    for below in path.iterdir():
        content = b"" if below.is_dir() else below.read_bytes()
        names[below.name] = _load(below) if below.is_dir() else _File(bytearray(content), content)
    return _Folder(names, dict(names))
