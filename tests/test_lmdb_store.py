"""The LMDB log: one writer, whole batches, a bounded file, and no disk, limit, damage or fork that kills the process."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adacheck.backends.base import Backend, Created, Expect, Item
from adacheck.backends.errors import BackendClosed, Busy, Damaged, Denied, Full, NotFound
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.mounts import filesystem_type, is_network, type_in_mountinfo
from tests.backend_suite import BackendTests

MIB = 1 << 20
PRELUDE = """
import os, resource, signal, sys
from adacheck.backends.base import *
from adacheck.backends.errors import *
from adacheck.backends.lmdb_store import LmdbBackend
path = sys.argv[1]
"""


class TestLmdb(BackendTests):
    machine_examples = 15

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        with LmdbBackend(tmp_path / "run" / "chain") as backend:
            yield backend


def file_bytes(store: LmdbBackend) -> int:
    """Size of the data file; it never shrinks, but free pages in it are used again."""
    return (store.path / "data.mdb").stat().st_size


def _run(script: str, path: Path, *more: object) -> str:
    """Run a script in a process of its own, which must end well; what it printed."""
    done = subprocess.run([sys.executable, "-c", PRELUDE + script, str(path), *map(str, more)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.strip()


# --- transactions


def test_every_commit_is_synced_and_nothing_is_written_through_the_map(tmp_path: Path) -> None:
    with LmdbBackend(tmp_path) as store:
        flags = store._env.flags()
    assert (flags["sync"], flags["metasync"], flags["map_async"], flags["writemap"]) == (True, True, False, False)


def test_values_over_four_mebibytes(tmp_path: Path) -> None:
    content = os.urandom(9 * MIB + 5)
    with LmdbBackend(tmp_path) as store:
        store.put("a", content)
    with LmdbBackend(tmp_path) as store:
        assert store.get("a") == content
        assert 9 * MIB < file_bytes(store) < 10 * MIB


def test_writing_or_closing_inside_a_batch_is_refused(tmp_path: Path) -> None:
    with LmdbBackend(tmp_path) as store:

        def items(call: str) -> Iterator[Item]:
            yield "a", b"1"
            with pytest.raises(Busy, match="inside"):
                getattr(store, call)(*(("b", b"2") if call == "put" else ()))
            yield "c", b"3"

        store.put_many(items("put"))
        store.put_many(items("close"))
        assert list(store.list("")) == ["a", "c"]


def test_readers_see_only_whole_batches(tmp_path: Path) -> None:
    wrong: list[object] = []
    done = threading.Event()
    with LmdbBackend(tmp_path) as store:
        store.put_many([("a", b"0")])

        def read() -> None:
            while not done.is_set():
                one, two = store.get("a"), store.get("a")
                if int(two) < int(one):
                    wrong.append((one, two))

        thread = threading.Thread(target=read)
        thread.start()
        for number in range(1, 60):
            assert store.put_many([("a", b"-1"), ("a", b"%d" % number)], expect=Expect("a", b"%d" % (number - 1))) == Created()
        done.set()
        thread.join()
    assert wrong == []


def test_a_killed_writer_leaves_whole_batches(tmp_path: Path) -> None:
    script = """
store = LmdbBackend(path)
number = int(store.get("head")) if store.stat("head") else 0
while True:
    number += 1
    store.put_many([*((f"part/{part}", b"%d" % number * 100_000) for part in range(8)), ("head", b"%d" % number)])
    print(number, flush=True)
"""
    for kill in range(4):
        writer = subprocess.Popen([sys.executable, "-c", PRELUDE + script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(3 + kill):
            acked = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.stdout.close()
        writer.wait()
        acked = int(rest[-1]) if rest else acked
        with LmdbBackend(tmp_path) as store:
            head = int(store.get("head"))
            assert acked <= head <= acked + 1
            assert {store.get(f"part/{part}") for part in range(8)} == {b"%d" % head * 100_000}


# --- size


def test_the_file_stays_bounded_under_churn(tmp_path: Path) -> None:
    """120 MB of mixed sizes through 16 MB of live values: live + what three batches hold + 20% for holes."""
    chance, scratch = random.Random(5), os.urandom(4 * MIB)
    sizes: dict[str, int] = {}
    written = number = batch_max = 0
    with LmdbBackend(tmp_path) as store:
        while written < 120 * MIB:
            batch: list[Item] = []
            new = chance.choice([1, 3])
            for _ in range(new):
                number += 1
                size = 4 * MIB if chance.random() < 0.4 else int(2 ** chance.uniform(4, 21))
                batch.append((f"k/{number:06d}", memoryview(scratch)[:size]))
                sizes[f"k/{number:06d}"] = size
                written += size
            while sum(sizes.values()) > 16 * MIB:
                key = next(iter(sizes)) if chance.random() < 0.8 else chance.choice(list(sizes))
                del sizes[key]
                batch.append((key, None))
            store.put_many(batch)
            batch_max = max(batch_max, sum(len(parts) for _, parts in batch if isinstance(parts, memoryview)))
        assert list(store.list("k/")) == sorted(sizes)
        assert file_bytes(store) <= 1.2 * (16 * MIB + 3 * batch_max)


def test_a_full_map_is_full_and_loses_nothing(tmp_path: Path) -> None:
    with LmdbBackend(tmp_path, size_limit_bytes=8 * MIB) as store:
        store.put("a", b"a" * MIB)
        store.put("gone", b"b" * 2 * MIB)
        with pytest.raises(Full, match=rf"{8 * MIB}"):
            store.put_many((f"big/{number}", b"x" * MIB) for number in range(20))
        assert list(store.list("")) == ["a", "gone"]
        assert store.get("a") == b"a" * MIB
        store.delete("gone")
        store.put_many([("small", b"s")])
        store.put_many([("next", b"c" * 2 * MIB)])
        assert file_bytes(store) <= 8 * MIB
    with LmdbBackend(tmp_path, size_limit_bytes=32 * MIB) as store:
        store.put_many((f"big/{number}", b"x" * MIB) for number in range(20))
        assert len(list(store.list(""))) == 23


def test_a_small_address_space_makes_a_small_map(tmp_path: Path) -> None:
    script = """
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
store = LmdbBackend(path)
store.put("a", bytes(4 << 20))
print(store._env.info()["map_size"] < 6 << 30, len(store.get("a")))
"""
    assert _run(script, tmp_path) == f"True {4 * MIB}"


FILL = """
kept = 0
try:
    for number in range(100):
        store.put_many([(f"fill/{number}/{part}", bytes([number]) * (700 << 10)) for part in range(3)])
        kept += 1
except Full as error:
    print("full" if path in str(error) and str(3 * (700 << 10)) in str(error) else error)
assert [store.get(f"fill/{n}/{p}") == bytes([n]) * (700 << 10) for n in range(kept) for p in range(3)] == [True] * 3 * kept
assert len(list(store.list("fill/"))) == 3 * kept and kept > 1
"""


def test_a_limit_of_the_file_size_is_full_not_a_signal(tmp_path: Path) -> None:
    script = f"""
store = LmdbBackend(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
{FILL}
store.put_many([(f"fill/0/{{part}}", None) for part in range(3)])
store.put("small", b"works")
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
store.put_many([("large", bytes(4 << 20))])
store.close()
print(LmdbBackend(path).get("small"))
"""
    assert _run(script, tmp_path).split("\n") == ["full", "b'works'"]


def test_a_full_disk_is_full_not_a_signal(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None or os.getuid() != 0:
        pytest.skip("needs root to mount a small disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk here")
    try:
        script = f"""
other = open(sys.argv[2], "wb")
other.write(bytes(4 << 20))
other.flush()
store = LmdbBackend(path)
{FILL}
os.ftruncate(other.fileno(), 0)
store.put_many([("large", bytes(2 << 20))])
store.close()
store = LmdbBackend(path)
print(store.get("large") == bytes(2 << 20))
"""
        assert _run(script, disk / "store", disk / "other").split("\n") == ["full", "True"]
    finally:
        subprocess.run(["umount", disk], check=True)


# --- one writer


def test_a_second_opening_in_one_process_is_busy(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "store")
    with LmdbBackend(tmp_path / "store") as store:
        for _ in range(2):
            with pytest.raises(Busy, match=f"this process.*{os.getpid()}"):
                LmdbBackend(tmp_path / "link")
        with pytest.raises(Busy, match="this process"):
            LmdbBackend(tmp_path / "store", read_only=True)
        assert "Busy" in _run("try: LmdbBackend(path)\nexcept Busy as error: print(repr(error))", tmp_path / "store")
        store.put("a", b"1")
    with LmdbBackend(tmp_path / "link") as store:
        assert store.get("a") == b"1"


def test_a_second_process_is_told_who_holds_it(tmp_path: Path) -> None:
    with LmdbBackend(tmp_path) as store:
        store.put("a", b"1")
        said = _run("try: LmdbBackend(path)\nexcept Busy as error: print(error)", tmp_path)
        assert f"process {os.getpid()}" in said and str(tmp_path) in said
        store.put("a", b"2")
    assert _run("print(LmdbBackend(path).get('a'))", tmp_path) == "b'2'"


def test_a_forked_child_neither_uses_it_nor_keeps_others_out(tmp_path: Path) -> None:
    script = """
store = LmdbBackend(path)
store.put("a", b"1")
child = os.fork()
if child == 0:
    said = []
    use = (lambda: store.get("a"), lambda: store.put("a", b"2"))
    for call in (*use, lambda: LmdbBackend(path), lambda: LmdbBackend(path, read_only=True)):
        try:
            call()
        except Busy:
            said.append("busy")
    store.close()
    os.write(1, f"{said}\\n".encode())  # in one piece: both write to one pipe
    signal.pause()
os.write(1, f"{store.get('a')} {store.put('b', b'')} {child}\\n".encode())
os.kill(os.getpid(), signal.SIGKILL)
"""
    dead = subprocess.Popen([sys.executable, "-c", PRELUDE + script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert dead.stdout is not None
    lines = sorted(dead.stdout.readline().strip() for _ in range(2))
    dead.stdout.close()
    assert dead.wait() == -signal.SIGKILL
    orphan = int(lines[1].split()[-1])
    try:
        assert lines == ["['busy', 'busy', 'busy', 'busy']", f"b'1' Created() {orphan}"]
        with LmdbBackend(tmp_path) as store:
            assert list(store.list("")) == ["a", "b"]
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_others_may_read_beside_the_writer(tmp_path: Path) -> None:
    script = """
for _ in range(15):
    with LmdbBackend(path, read_only=True) as store:
        head = int(store.get("head"))
        assert head <= int(store.get("head"))
        keys = list(store.list("part/"))
        assert len(keys) == 3 and {len(store.get(key)) for key in keys} == {300_000}, keys
        for call in (lambda: store.put("a", b""), lambda: store.put_many([]), lambda: store.delete("a")):
            try:
                call()
                raise SystemExit("wrote")
            except Denied as error:
                assert "read-only" in str(error)
print("read", store.name)
"""
    with LmdbBackend(tmp_path) as store:
        store.put_many([*((f"part/{part}", bytes(300_000)) for part in range(3)), ("head", b"0")])
        reader = subprocess.Popen([sys.executable, "-c", PRELUDE + script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        number = 0
        while reader.poll() is None:
            number += 1
            store.put_many([*((f"part/{part}", bytes([number % 256]) * 300_000) for part in range(3)), ("head", b"%d" % number)])
        assert reader.stdout is not None
        assert (reader.stdout.read(), reader.returncode) == (f"read lmdb:{tmp_path}\n", 0)
        reader.stdout.close()
        assert number > 0


def test_readers_that_died_do_not_hold_pages(tmp_path: Path) -> None:
    """A reader is killed inside a read; the slot it leaves would keep every page written from then on."""
    script = """
store = LmdbBackend(path, read_only=True)
transaction = store._env.begin()
transaction.get(b"a")
os.kill(os.getpid(), signal.SIGKILL)
"""
    LmdbBackend(tmp_path).close()
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", PRELUDE + script, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    with LmdbBackend(tmp_path) as store:
        assert str(store._env.readers()).count("\n") <= 1
        assert subprocess.run([sys.executable, "-c", PRELUDE + script, str(tmp_path)], check=False).returncode == -signal.SIGKILL
        for _ in range(100):
            store.put("a", bytes(MIB))
        assert file_bytes(store) < 80 * MIB
        before = file_bytes(store)
        for _ in range(100):
            store.put("a", bytes(MIB))
        assert file_bytes(store) == before


def test_close_waits_for_a_batch_of_another_thread(tmp_path: Path) -> None:
    store = LmdbBackend(tmp_path)
    inside, closing = threading.Event(), threading.Event()

    def items() -> Iterator[Item]:
        yield "a", b"1"
        inside.set()
        closing.wait()
        yield "b", b"2"

    writer = threading.Thread(target=store.put_many, args=(items(),))
    writer.start()
    inside.wait()
    closer = threading.Thread(target=store.close)
    closer.start()
    closing.set()
    writer.join()
    closer.join()
    with LmdbBackend(tmp_path) as store:
        assert list(store.list("")) == ["a", "b"]


# --- places it refuses


def test_a_network_filesystem_is_refused(tmp_path: Path) -> None:
    for kind in ("nfs4", "cifs", "lustre", "fuse.sshfs", "ceph", "9p"):
        with pytest.raises(Denied, match=f"{tmp_path} is on {kind}, a network filesystem"):
            LmdbBackend(tmp_path, filesystem=lambda path, kind=kind: kind)  # type: ignore[misc]
    assert list(tmp_path.iterdir()) == []
    for kind in ("ext4", "xfs", "tmpfs", "overlay", "btrfs", "zfs", "fuse.fuse-overlayfs", ""):
        assert not is_network(kind)
        LmdbBackend(tmp_path, filesystem=lambda path, kind=kind: kind).close()  # type: ignore[misc]


def test_the_deepest_mount_decides() -> None:
    table = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:40 / /mnt/with\\040space rw - nfs4 host:/x rw\n"
        "31 30 8:2 / /mnt/with\\040space/local rw - xfs /dev/sdb rw\n"
        "32 22 0:41 / /data rw - nfs host:/y rw\n"
        "33 22 8:3 / /data rw - ext4 /dev/sdc rw\n"
    )
    places = {"/": "ext4", "/mnt/with": "ext4", "/mnt/with space/a/b": "nfs4", "/mnt/with space/local": "xfs", "/data/x": "ext4"}
    assert {place: type_in_mountinfo(table, Path(place)) for place in places} == places
    assert filesystem_type(Path("/proc/self")) == "proc"


def test_a_directory_that_is_absent_or_none_is_denied(tmp_path: Path) -> None:
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(Denied, match="absent"):
            LmdbBackend(tmp_path / "absent", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "absent").exists()
    (tmp_path / "empty").mkdir()
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(Denied, match="no LMDB store"):
            LmdbBackend(tmp_path / "empty", **options)  # type: ignore[arg-type]
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(Denied):
            LmdbBackend(path)


# --- damage

LAST_PAGE_AT = 136
"""In a meta page: behind its header of 16 bytes, magic, version, address, size of the map, and two trees of 48 bytes."""


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A store with a tree of several levels, values inside and outside of it, and free pages."""
    path = tmp_path / "whole"
    with LmdbBackend(path) as store:
        store.put_many((f"small/{number:05d}", b"%d" % number * 30) for number in range(600))
        store.put_many((f"large/{number:02d}", bytes([number]) * 50_000) for number in range(20))
        store.put_many((f"small/{number:05d}", None) for number in range(0, 600, 7))
    return path


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 4100, 8192, 50_000, -4096, -1])
def test_a_file_cut_short_is_damaged(whole: Path, size: int) -> None:
    file = whole / "data.mdb"
    used = (file.stat().st_size) if size >= 0 else _last_used(file)
    os.truncate(file, size if size >= 0 else used + size)
    for read_only in (False, True):
        for _ in range(2):
            with pytest.raises(Damaged, match=str(file)):
                LmdbBackend(whole, read_only=read_only)


def _last_used(file: Path) -> int:
    """Where the last page that is referred to ends: the shortest file that is not damaged."""
    size = file.stat().st_size
    copy = file.parent.parent / "copy"
    while True:
        size -= 4096
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        shutil.copy(file, copy / "data.mdb")
        os.truncate(copy / "data.mdb", size)
        try:
            LmdbBackend(copy).close()
        except Damaged:
            return size + 4096


def test_no_flipped_bit_in_a_tree_kills_the_process(whole: Path) -> None:
    """Each byte of the header and of the first nodes' offsets of every tree page, and both meta pages: damaged, or harmless."""
    script = """
import random, shutil
file = path + "/data.mdb"
content = open(file, "rb").read()
chance, found, harmless = random.Random(3), 0, 0
pages = [at for at in range(0, len(content), 4096) if content[at + 10] in (1, 2, 8)]
places = [at + chance.randrange(150) for at in pages for _ in range(4)]
for place in places:
    with open(file, "r+b") as out:
        out.seek(place)
        out.write(bytes([content[place] ^ (1 << chance.randrange(8))]))
    try:
        with LmdbBackend(path) as store:
            sum(len(store.get(key)) for key in store.list(""))
            harmless += 1
    except (Damaged, NotFound, InvalidKey, UnicodeDecodeError):
        found += 1
    with open(file, "r+b") as out:
        out.write(content)
with LmdbBackend(path) as store:
    assert len(list(store.list(""))) == 534
print(len(places) > 50, found > 0, found + harmless == len(places))
"""
    assert _run(script, whole) == "True True True"


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("bit", range(33, 64, 5))
def test_a_last_page_that_no_disk_has_is_damaged(whole: Path, bit: int, read_only: bool) -> None:
    """LMDB would map as much as that, or fail for want of memory, or take it for a file that another process has made larger."""
    file = whole / "data.mdb"
    with file.open("rb+") as opened:
        for meta in (0, 4096):
            opened.seek(meta + LAST_PAGE_AT)
            (before,) = struct.unpack("<Q", opened.read(8))
            opened.seek(meta + LAST_PAGE_AT)
            opened.write(struct.pack("<Q", before ^ 1 << bit))
    with pytest.raises(Damaged, match=str(whole)):
        LmdbBackend(whole, read_only=read_only)


def test_another_file_in_its_place_is_damaged(tmp_path: Path) -> None:
    LmdbBackend(tmp_path).close()
    for content in (b"not a store" * 10_000, bytes(100_000)):
        (tmp_path / "data.mdb").write_bytes(content)
        for read_only in (False, True):
            with pytest.raises(Damaged, match="no LMDB file"):
                LmdbBackend(tmp_path, read_only=read_only)


def test_a_page_that_was_freed_before_it_was_written_is_no_damage(tmp_path: Path) -> None:
    """A batch that writes and deletes leaves a file shorter than LMDB's last page number says."""
    with LmdbBackend(tmp_path) as store:
        for number in range(40):
            store.put("a", bytes(5000 * (number % 3 + 1)))
            store.put_many([("b", b"2" * MIB), ("b", None)])
            if file_bytes(store) <= store._env.info()["last_pgno"] * 4096:
                break
        else:
            pytest.fail("LMDB filled the file each time; this test no longer tests anything")
    for read_only in (False, True):
        with LmdbBackend(tmp_path, read_only=read_only) as store:
            assert list(store.list("")) == ["a"]


def test_a_crash_while_it_is_made_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "data.mdb").write_bytes(b"")
    with LmdbBackend(tmp_path) as store:
        store.put("a", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.mdb", "lock.mdb", "writer.lock"]


def test_a_disk_without_room_for_a_new_store_is_full(tmp_path: Path) -> None:
    script = """
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try: LmdbBackend(path)
except Full as error: print("full", path in str(error))
"""
    assert _run(script, tmp_path / "store") == "full True"


def test_a_snapshot_does_not_see_what_is_written_after_it(tmp_path: Path) -> None:
    with LmdbBackend(tmp_path / "x") as writer:
        writer.put_many([("a/1", b"one"), ("a/2", b"two"), ("b", b"bee")])
        with writer.snapshot() as moment:
            writer.put_many([("a/1", None), ("a/2", b"changed"), ("a/3", b"new")])
            assert list(moment.list("a/")) == ["a/1", "a/2"] and list(moment.list("")) == ["a/1", "a/2", "b"]
            assert moment.get("a/1") == b"one" and moment.get("a/2", (1, 2)) == b"w"
            found = moment.stat("b")
            assert found is not None and found.size_bytes == 3 and moment.stat("a/3") is None
            with pytest.raises(NotFound):
                moment.get("a/3")
            for write in (lambda: moment.put("c", b""), lambda: moment.put_many([]), lambda: moment.delete("b")):
                with pytest.raises(Denied, match="only reads"):
                    write()
        assert list(writer.list("a/")) == ["a/2", "a/3"]


def test_a_snapshot_does_not_keep_the_store_open(tmp_path: Path) -> None:
    with LmdbBackend(tmp_path / "x") as writer:
        writer.put("a", b"1")
        with writer.snapshot() as moment:
            assert moment.get("a") == b"1"
            writer.close()
            for read in (lambda: moment.get("a"), lambda: moment.stat("a"), lambda: list(moment.list(""))):
                with pytest.raises(BackendClosed):
                    read()
    with LmdbBackend(tmp_path / "x") as again:
        assert again.get("a") == b"1"
