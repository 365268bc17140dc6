"""The NVMe log: one LMDB environment per directory, a batch per transaction, each synced before it returns.

Why things are as they are:

- No `writemap`: a full disk is then an error of a write, never a SIGBUS in the trainer.
- The map is as large as the filesystem. Address space is not memory, and the file grows only as pages are used, so the disk (or
  `size_limit_bytes`) is full before the map is. A batch comes from a generator and cannot be taken twice, so growing the map in
  the middle of one and trying again is no option.
- A value is stored whole. LMDB looks for contiguous free pages for each, and 6 GB of mixed sizes up to 4 MiB through 100 MB
  of live values kept the file at live + 5 batches (a transaction's pages are free two transactions later); cutting values
  into 256 KiB made it live + 4 batches, not worth more keys.
- Until it commits, a batch is in memory (LMDB's dirty pages): keep batches to an increment, or to one state of a base.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from adacheck.backends.base import Backend, Buffer, Created, Exists, Expect, Item, Parts, Stat, Traits, check_key
from adacheck.backends.errors import BackendError, Busy, Damaged, Denied, Full, NotFound, Unavailable
from adacheck.backends.gate import Gate
from adacheck.backends.lmdb_directory import DATA_FILE, MAP_BYTES_MIN, free_bytes, lock_directory, map_bytes
from adacheck.backends.lmdb_pages import check_file, check_header
from adacheck.backends.lmdb_snapshot import LmdbSnapshot, text_of
from adacheck.backends.mounts import FilesystemType, filesystem_type, is_network
from adacheck.backends.os_errors import FULL, translate_os_error

READERS_MAX = 510
_PAGE_OF_KEYS = 1000
_READER_CHECK_EVERY = 64
_DAMAGED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.PanicError)


class LmdbBackend(Backend):
    """A directory with one LMDB environment; one writer at a time on the host, any number of readers beside it.

    Args:
        path: the directory; made (with its parents) if `create`.
        size_limit_bytes: most bytes the file may have; `Full` beyond. Without it the filesystem is the limit.
        read_only: for tools that look at a store while its trainer runs; needs no lock, sees each batch as it is committed.
        filesystem: how to find the type of a path's filesystem.

    Raises:
        Busy: another process, or this one, has the directory open for writing.
        Denied: it is on a network filesystem, not writable, or absent and not to be made.
        Damaged: the data file has no bytes, is cut short, or a tree page in it is not well-formed.
        Full: no space to make it.
    """

    traits = Traits(atomic_put=True, atomic_batch=True, exclusive_put=True, durable=True, survives_process=True, survives_host=False)

    def __init__(
        self,
        path: Path | str,
        *,
        size_limit_bytes: int | None = None,
        create: bool = True,
        read_only: bool = False,
        filesystem: FilesystemType = filesystem_type,
    ) -> None:
        self.path = Path(path)
        self.name = f"lmdb:{self.path}"
        self._read_only = read_only
        self._file = self.path / DATA_FILE
        self._writer, self._next_writer = threading.Lock(), threading.Lock()
        self._writing_thread = 0
        self._batches = 0
        kind = filesystem(self.path)
        if is_network(kind):
            raise Denied(f"{self.path} is on {kind}, a network filesystem, where LMDB loses data; choose a directory on a local disk")
        self._lock = None if read_only else lock_directory(self.path, create=create)
        try:
            self._env = self._open(map_bytes(self.path, size_limit_bytes), bounded=size_limit_bytes is not None)
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise
        opened = self._file.stat()
        self._identity = (opened.st_dev, opened.st_ino)
        self._gate = Gate(self.name)

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        """As `Backend.put`, synced to the disk. Several objects are much cheaper in one `put_many`."""
        expect = Expect(check_key(key), None) if exclusive else None
        return self.put_many([(key, parts)], expect=expect)

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        """As `Backend.put_many`: one transaction and one sync for the whole batch, which is in memory until then.

        Items are taken inside the transaction. Their generator may call `get`, which sees what was there before the batch.
        """
        with self._gate.call(), self._transaction() as transaction:
            if expect is not None and self._read(transaction, check_key(expect.key)) != expect.content:
                return Exists(expect.key)
            self._check_present()
            need_bytes = 0
            for key, parts in items:
                need_bytes += self._apply(transaction, check_key(key), parts, need_bytes)
            with self._translated("commit", need_bytes):
                transaction.commit()
            return Created()

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        """As `Backend.get`."""
        name = check_key(key).encode()
        with self._gate.call(), self._translated(f"read {key!r}"), self._env.begin(buffers=True) as transaction:
            value = transaction.get(name)
            if value is None:
                raise NotFound(f"{self.name} has no object {key!r}")
            return bytes(value) if byte_range is None else bytes(value[byte_range[0] : byte_range[1]])

    def stat(self, key: str) -> Stat | None:
        """As `Backend.stat`; LMDB knows no times."""
        name = check_key(key).encode()
        with self._gate.call(), self._translated(f"read {key!r}"), self._env.begin(buffers=True) as transaction:
            value = transaction.get(name)
            return None if value is None else Stat(len(value), 0.0)

    def list(self, prefix: str) -> Iterator[str]:
        """As `Backend.list`. Each thousand keys are of one moment, so that a slow caller keeps no old pages from being reused."""
        keys = self._keys_from(prefix, prefix.encode())
        return self._list(prefix, keys)

    def _list(self, prefix: str, keys: tuple[str, ...]) -> Iterator[str]:
        while keys:
            yield from keys
            keys = self._keys_from(prefix, keys[-1].encode() + b"\0") if len(keys) == _PAGE_OF_KEYS else ()

    def delete(self, key: str) -> None:
        """As `Backend.delete`, synced to the disk."""
        self.put_many([(key, None)])

    @contextmanager
    def snapshot(self) -> Iterator[Backend]:
        """The store as it is now, whatever is written meanwhile. Pages are not reused until it ends: keep it short.

        It does not keep the backend open: after `close()` it raises as the backend does.
        """
        with self._reading("begin to read"):
            transaction = self._env.begin(buffers=True)
        try:
            yield LmdbSnapshot(self.name, self.traits, transaction, self._reading)
        finally:
            transaction.abort()  # nothing, where closing the environment has ended it

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Around one read: `close()` waits for it, errors are this project's."""
        with self._gate.call(), self._translated(what):
            yield

    def close(self) -> None:
        """As `Backend.close`; waits for calls of other threads, those that write included."""
        if self._gate.close():
            self._env.close()
            if self._lock is not None:
                self._lock.release()

    def _open(self, map_bytes: int, *, bounded: bool) -> Any:
        """Check the file and map it: with the map asked for, or the largest that the address space has room for."""
        if not self._file.is_file():
            raise Denied(f"{self.path} holds no LMDB store; check the path")
        with self._translated("open"):
            if self._read_only:
                check_header(self._file)
            else:
                check_file(self._file)
            while True:
                try:
                    env = lmdb.open(str(self.path), map_size=map_bytes, readonly=self._read_only, create=False, max_readers=READERS_MAX)
                    break
                except lmdb.MemoryError:
                    if bounded or map_bytes <= MAP_BYTES_MIN:
                        raise
                    map_bytes //= 2
            try:
                env.reader_check()
                if self._read_only:
                    _check_snapshot(env, self._file)
            except BaseException:
                env.close()
                raise
            return env

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """The one write transaction; aborted at the end if it was not committed."""
        if self._read_only:
            raise Denied(f"{self.name} was opened read-only; open it without read_only to write")
        if self._writing_thread == threading.get_ident():
            raise Busy(f"{self.name} cannot write from inside a batch of its own; yield those items from the batch's generator")
        with self._next_writer:  # a thread that writes batch after batch must not overtake one that waits
            self._writer.acquire()
        try:
            self._writing_thread = threading.get_ident()
            self._batches += 1
            with self._translated("begin a transaction"):
                if self._batches % _READER_CHECK_EVERY == 0:
                    self._env.reader_check()
                transaction = self._env.begin(write=True, buffers=True)
            try:
                yield transaction
            finally:
                transaction.abort()
        finally:
            self._writing_thread = 0
            self._writer.release()

    def _apply(self, transaction: Any, key: str, parts: Parts | None, before_bytes: int) -> int:
        """Carry out one item and return its size; `before_bytes` is what the batch wrote so far."""
        name = key.encode()
        if parts is None:
            with self._translated(f"delete {key!r}", before_bytes):
                transaction.delete(name)
            return 0
        content = joined(parts)
        size_bytes = memoryview(content).nbytes
        with self._translated(f"write {key!r}", before_bytes + size_bytes):
            transaction.put(name, content)
        return size_bytes

    def _check_present(self) -> None:
        """Writing to a file that was deleted or replaced would succeed, and be lost with this process."""
        try:
            present = self._file.stat()
        except OSError as error:
            raise Damaged(f"{self._file} was deleted while it was open: {error}; what is written now would be lost") from error
        if (present.st_dev, present.st_ino) != self._identity:
            raise Damaged(f"{self._file} was replaced by another file while it was open; what is written now would be lost")

    def _read(self, transaction: Any, key: str) -> bytes | None:
        with self._translated(f"read {key!r}"):
            value = transaction.get(key.encode())
            return None if value is None else bytes(value)

    def _keys_from(self, prefix: str, start: bytes) -> tuple[str, ...]:
        """Up to a thousand keys with `prefix`, from `start` on."""
        found: list[str] = []
        with self._gate.call(), self._translated(f"list {prefix!r}"), self._env.begin() as transaction:
            cursor = transaction.cursor()
            if cursor.set_range(start) if start else cursor.first():
                for name in cursor.iternext(values=False):
                    if len(found) == _PAGE_OF_KEYS or not name.startswith(prefix.encode()):
                        break
                    found.append(text_of(name, self.name))
        return tuple(found)

    @contextmanager
    def _translated(self, what: str, need_bytes: int = 0) -> Iterator[None]:
        """Raise this project's errors for those of LMDB and of the operating system."""
        try:
            yield
        except lmdb.Error as error:
            raise self._translate(error, f"{self.name}: {what}: {error}", need_bytes) from error
        except OSError as error:
            raise translate_os_error(error, f"{self.name}: {what}", need_bytes) from error

    def _translate(self, error: lmdb.Error, text: str, need_bytes: int) -> BackendError:
        code = getattr(error, "code", None) or 0
        if isinstance(error, lmdb.MapFullError):
            limit = self._env.info()["map_size"]
            return Full(f"{text}; the batch needs {need_bytes} bytes beside what is stored, the limit is {limit} bytes")
        free = free_bytes(self.path)
        # LMDB calls a write that was cut short, as it is where space ends within it, an input/output error.
        if code in FULL or (code == errno.EIO and free < max(need_bytes, 1 << 20)):
            return Full(f"{text}; the batch needs {need_bytes} bytes, {self.path} has room for {free}: make some there")
        if isinstance(error, _DAMAGED):
            return Damaged(f"{text}; restore from another tier and move the directory away")
        if isinstance(error, lmdb.ReadonlyError) or code in (errno.EACCES, errno.EPERM, errno.EROFS):
            need = "; whoever reads must be able to write its lock.mdb" if self._read_only else ""
            return Denied(f"{text}; check the permissions of {self.path}{need}")
        if "already open in this process" in str(error):
            return Busy(f"{self.path} is open already in this process or its parent; share that backend, or start a new process")
        return Unavailable(text)


def joined(parts: Parts) -> Buffer:
    """The content as one buffer: the one given where it is a buffer, else a copy (a generator may reuse each part for the next)."""
    if isinstance(parts, (bytes, bytearray, memoryview)):
        return parts
    content = bytearray()
    for part in parts:
        content += part
    return content


def _check_snapshot(env: Any, file: Path) -> None:
    """Check the pages of one moment while another process writes: an open reader keeps them from being used again."""
    for _ in range(100):
        with env.begin() as transaction:
            if check_file(file, transaction.id()):
                return
    raise Unavailable(f"{file} changed faster than it could be checked; try again")
