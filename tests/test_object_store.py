"""The object tier on local files, on a real S3 server and on fsspec's memory."""

from __future__ import annotations

import errno
import itertools
import os
import random
import secrets
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from traceback import format_exception
from typing import Any

import pytest
from s3fs.errors import translate_boto_error

from adacheck.backends.base import Backend, Buffer, Created, Exists, Upload
from adacheck.backends.errors import BackendError, BadOption, Denied, Full, NotFound, Unavailable, UnknownScheme
from adacheck.backends.local_files import LocalFiles
from adacheck.backends.local_objects import LocalObjects
from adacheck.backends.object_store import ObjectStore
from adacheck.backends.registry import open_backend
from adacheck.backends.s3_objects import S3Objects
from tests.backend_suite import BackendTests
from tests.faults import CrashingFiles, SimulatedCrash
from tests.seaweed import BUCKET, s3_server

MIB = 1 << 20


class TestFile(BackendTests):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        with ObjectStore(f"file://{tmp_path}/deep/store") as backend:
            yield backend


class TestMemoryUrl(BackendTests):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        with ObjectStore(f"memory://{secrets.token_hex(8)}/store") as backend:
            yield backend


class TestS3(BackendTests):
    machine_examples = 6

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        with _s3() as backend:
            yield backend


def _s3(prefix: str | None = None, **options: Any) -> ObjectStore:
    prefix = prefix or f"run-{secrets.token_hex(8)}"
    return ObjectStore(f"s3://{BUCKET}/{prefix}", **s3_server().options, session=_session(), **options)


@cache
def _session() -> Any:
    """One for all, since each parses the descriptions of the service anew."""
    return import_module("aiobotocore.session").AioSession()


def _fs(store: ObjectStore) -> Any:
    place = store._place
    assert isinstance(place, S3Objects)
    return place._fs


def _parts(count: int, size: int = MIB) -> Iterator[Buffer]:
    scratch = bytearray(size)
    for number in range(count):
        scratch[:] = bytes([number + 1]) * size
        yield scratch


def _expected(count: int, size: int = MIB) -> bytes:
    return b"".join(bytes([number + 1]) * size for number in range(count))


# --- S3


@pytest.mark.parametrize("count", [4, 5, 6, 10, 12])
def test_a_large_object_goes_up_in_parts(count: int) -> None:
    with _s3(part_bytes=5 * MIB) as store:
        assert store.put("shard", _parts(count)) == Created()
        assert store.get("shard") == _expected(count)
        assert store.put("shard", _parts(1), exclusive=True) == Exists("shard")
        assert store.put("shard", _parts(count), exclusive=True) == Exists("shard")
        assert store.put("other", _parts(count), exclusive=True) == Created()
        assert store.get("other") == _expected(count)
        assert list(store.uploads()) == []


def test_a_race_for_a_large_object_has_one_winner() -> None:
    """The look before the upload cannot see a rival that comes later; the condition at its end does."""
    with _s3(part_bytes=5 * MIB) as store:

        def slow() -> Iterator[Buffer]:
            yield from _parts(6)
            store.put("version", b"the rival", exclusive=True)

        assert store.put("version", slow(), exclusive=True) == Exists("version")
        assert store.get("version") == b"the rival"
        assert list(store.uploads()) == []


def test_an_exception_in_mid_upload_leaves_no_object_and_no_upload() -> None:
    with _s3(part_bytes=5 * MIB) as store:

        def broken() -> Iterator[Buffer]:
            yield from _parts(11)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.put("shard", broken())
        assert list(store.list("")) == []
        assert list(store.uploads()) == []


def test_uploads_of_killed_processes_are_found_and_removed() -> None:
    with _s3("killed", part_bytes=5 * MIB) as store:
        fs = _fs(store)
        fs.call_s3("create_multipart_upload", Bucket=BUCKET, Key="killed/full/shard-1")
        fs.call_s3("create_multipart_upload", Bucket=BUCKET, Key="killed-not/full/shard-1")
        (found,) = store.uploads()
        assert found.folder == "full" and found.name.startswith("full/shard-1#")
        assert found.touched_unix_s > 1_700_000_000
        store.discard_upload(found.name)
        store.discard_upload(found.name)
        assert list(store.uploads()) == []


def test_an_upload_that_was_aborted_under_way_may_be_tried_again() -> None:
    with _s3(part_bytes=5 * MIB) as store:

        def parts() -> Iterator[Buffer]:
            yield from _parts(11)
            for upload in store.uploads():
                store.discard_upload(upload.name)

        with pytest.raises(Unavailable):
            store.put("shard", parts())
        assert list(store.list("")) == []


def test_another_process_sees_every_write() -> None:
    with _s3("shared") as one, _s3("shared") as two:
        assert list(two.list("versions/")) == []
        one.put("versions/v1", b"1")
        assert list(two.list("versions/")) == ["versions/v1"]
        assert two.stat("versions/v1") is not None
        one.delete("versions/v1")
        assert list(two.list("versions/")) == []


def test_a_missing_bucket_is_denied() -> None:
    with pytest.raises(Denied, match=r"s3://nowhere/run: .*make the bucket first") as caught:
        ObjectStore("s3://nowhere/run", **s3_server().options)
    assert one_traceback(caught.value)
    with pytest.raises(Denied, match="names no bucket"):
        ObjectStore("s3://", **s3_server().options)


def one_traceback(error: BaseException) -> bool:
    """Whether an error is shown alone, without what it was translated from."""
    return "".join(format_exception(error)).count("Traceback (most recent call last)") == 1


def test_wrong_credentials_are_denied() -> None:
    with pytest.raises(Denied, match="credentials") as caught:
        ObjectStore(f"s3://{BUCKET}/run", **{**s3_server().options, "secret": "wrong"})
    assert one_traceback(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"client_kwargs": {"region_name": "bad region!"}}, "'bad region!' doesn't match"),
        ({"client_kwargs": {"region_name": 5}}, "expected string"),
        ({"client_kwargs": {"nonsense": 1}}, "unexpected keyword argument 'nonsense'"),
        ({"client_kwargs": "x"}, "'str' object"),
        ({"config_kwargs": 3}, "'int' object is not a mapping"),
        ({"config_kwargs": {"proxies": "http://proxy"}}, "'str' object"),
        ({"config_kwargs": {"s3": {"addressing_style": "foo"}}}, "addressing style foo is invalid"),
        ({"profile": "nosuch"}, "profile (nosuch) could not be found"),
        ({"token": 1}, "'int' object"),
        ({"endpoint_url": "localhost:8333"}, "Invalid endpoint: localhost:8333"),
    ],
)
def test_an_option_that_s3fs_or_botocore_chokes_on_is_named_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadOption, match=r"given: .*; correct") as caught:
        open_backend("s3", f"{BUCKET}/run", {**s3_server().options, **options})
    assert says in str(caught.value) and next(iter(options)) in str(caught.value)
    assert s3_server().options["secret"] not in str(caught.value)


def test_a_silent_server_is_unavailable() -> None:
    options = {**s3_server().options, "endpoint_url": "http://127.0.0.1:1", "config_kwargs": {"retries": {"max_attempts": 0}}}
    with pytest.raises(Unavailable):
        ObjectStore(f"s3://{BUCKET}/run", **options)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("ExpiredToken", 400, Unavailable),
        ("SlowDown", 503, Unavailable),
        ("InternalError", 500, Unavailable),
        ("ConditionalRequestConflict", 409, Unavailable),
        ("AccessDenied", 403, Denied),
        ("InvalidAccessKeyId", 403, Denied),
        ("NoSuchBucket", 404, Denied),
        ("QuotaExceeded", 403, Full),
        ("XMinioStorageFull", 507, Full),
        ("NoSuchKey", 404, NotFound),
    ],
)
def test_replies_of_a_server_become_our_errors(monkeypatch: pytest.MonkeyPatch, code: str, status: int, kind: type[BackendError]) -> None:
    client_error = import_module("botocore.exceptions").ClientError

    async def fail(*_: Any, **__: Any) -> None:
        reply = {"Error": {"Code": code, "Message": "as it says"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise translate_boto_error(client_error(reply, "GetObject"))

    monkeypatch.setattr("s3fs.S3FileSystem._cat_file", fail)  # before it is opened: an instance binds its methods
    with _s3() as store:
        opened = _fs(store)
        with pytest.raises(kind, match="as it says") as caught:
            store.get("a")
        assert type(caught.value) is kind
        assert one_traceback(caught.value) == (code in ("ExpiredToken", "AccessDenied", "InvalidAccessKeyId", "NoSuchBucket"))
        assert (_fs(store) is not opened) == (code in ("ExpiredToken", "InvalidAccessKeyId")), "credentials are looked up again"


# --- local files


def test_names_are_synced_and_no_temporary_is_left(tmp_path: Path) -> None:
    with ObjectStore(f"file://{tmp_path}") as store:
        store.put("a/b/c", b"1")
        store.put("a/b/c", b"2")
        store.put("a/b/c", b"3", exclusive=True)
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "c"]
        store.delete("a/b/c")
        assert list(tmp_path.iterdir()) == []


def test_a_key_below_an_object_is_denied(tmp_path: Path) -> None:
    with ObjectStore(f"file://{tmp_path}") as store:
        store.put("a", b"1")
        with pytest.raises(Denied, match="/a/b: Not a directory"):
            store.put("a/b", b"1")
        with pytest.raises(NotFound):
            store.get("a/b")
        assert store.stat("a/b") is None


def test_temporaries_of_killed_processes_are_found_and_removed(tmp_path: Path) -> None:
    with ObjectStore(f"file://{tmp_path}") as store:
        store.put("full/shard", b"1")
        left = tmp_path / "full" / "~0123456789abcdef.tmp"
        left.write_bytes(b"half")
        assert list(store.list("")) == ["full/shard"]
        os.utime(left, (1, 1))
        assert list(store.uploads()) == [Upload("full/~0123456789abcdef.tmp", "full", 1.0)]
        with pytest.raises(Denied):
            store.discard_upload("full/shard")
        store.discard_upload("full/~0123456789abcdef.tmp")
        store.discard_upload("full/~0123456789abcdef.tmp")
        assert list(store.uploads()) == []


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, Full), (errno.EDQUOT, Full), (errno.EFBIG, Full), (errno.EROFS, Denied), (errno.EIO, Unavailable)]
)
@pytest.mark.parametrize("call", ["create", "write", "fsync", "link", "replace", "fsync_dir"])
def test_faults_of_the_disk_become_our_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[BackendError]
) -> None:
    files = LocalFiles()
    with ObjectStore(f"file://{tmp_path}", files=files) as store:

        def fail(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(files, call, fail)
        with pytest.raises(kind, match=str(tmp_path)):
            store.put("a", b"1", exclusive=call == "link")
        monkeypatch.undo()
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("~")] == []
        store.put("a", b"2")
        assert store.get("a") == b"2"


def test_a_full_disk_is_full_and_names_the_path_and_the_need(tmp_path: Path) -> None:
    script = f"""
import resource
from adacheck.backends.object_store import ObjectStore
from adacheck.backends.errors import Full
store = ObjectStore("file://{tmp_path}")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    store.put("a", [bytes(1 << 20)] * 2)
except Full as error:
    assert "{tmp_path}" in str(error) and "2097152" in str(error), error
    store.put("b", bytes(1 << 20))
    print("full", list(store.list("")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("full ['b']\n", 0), done.stderr


def test_a_file_in_place_of_the_directory_is_denied(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Denied):
        ObjectStore(f"file://{tmp_path}/file")
    with pytest.raises(Denied):
        ObjectStore(f"file://{tmp_path}/file/below")


def test_a_shared_directory_survives_its_host(tmp_path: Path) -> None:
    assert LocalObjects(tmp_path, filesystem=lambda path: "nfs4").traits.survives_host
    assert not LocalObjects(tmp_path, filesystem=lambda path: "xfs").traits.survives_host


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_crash_at_any_call_keeps_what_was_reported(tmp_path: Path, seed: int | None) -> None:
    """At every call of the disk, with what was not synced dropped, or kept by chance: old or new content, whole, nothing between."""
    reached_end = False
    for crash_at in itertools.count(1):
        root = tmp_path / f"crash-{crash_at}"
        root.mkdir()
        kept = None if seed is None else random.Random(1000 * seed + crash_at)
        files = CrashingFiles(root, crash_at, kept=kept)
        promised: dict[str, set[bytes | None]] = {}
        try:
            _history(ObjectStore(f"file://{root}/store", files=files), promised)
            reached_end = True
        except SimulatedCrash:
            pass
        files.power_cut()
        with ObjectStore(f"file://{root}/store") as store:
            for key, allowed in promised.items():
                assert (store.get(key) if store.stat(key) else None) in allowed, (crash_at, key)
            assert set(store.list("")) <= set(promised)
            assert {u.name for u in store.uploads()} == {p.relative_to(root / "store").as_posix() for p in root.rglob("~*")}
        if reached_end:
            break
    assert reached_end and crash_at > 40


def _history(store: ObjectStore, promised: dict[str, set[bytes | None]]) -> None:
    """Some puts and deletes; `promised` holds, for every key, what a crash right now may leave."""

    def put(key: str, content: bytes, *, exclusive: bool = False) -> None:
        promised.setdefault(key, {None}).add(content)
        assert store.put(key, [content[:2], content[2:]], exclusive=exclusive) == Created()
        promised[key] = {content}

    put("run", b"the run", exclusive=True)
    put("full/step-1/shard", b"shard one")
    put("full/step-1/manifest", b"manifest")
    put("versions/v1", b"version one", exclusive=True)
    put("full/step-1/shard", b"shard one, again")
    promised["full/step-1/manifest"].add(None)
    store.delete("full/step-1/manifest")
    promised["full/step-1/manifest"] = {None}
    put("versions/v2", b"version two", exclusive=True)


# --- all


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    for url in ("gopher://x", "/tmp/x", "s3:bucket"):
        with pytest.raises(UnknownScheme):
            ObjectStore(url)
    with pytest.raises(Denied, match="absolute"):
        ObjectStore("file://relative/path")


def test_memory_is_shared_within_the_process() -> None:
    name = secrets.token_hex(8)
    with ObjectStore(f"memory://{name}") as one, ObjectStore(f"memory://{name}") as two:
        one.put("a", b"1")
        assert two.get("a") == b"1"
        assert not two.traits.durable


@pytest.mark.parametrize("scheme", ["file", "s3"])
def test_a_forked_child_is_told_to_open_its_own(tmp_path: Path, scheme: str) -> None:
    """S3's connections live in a thread, which a fork leaves behind: the child makes a thread and connections of its own."""
    url, options = (f"file://{tmp_path}", {}) if scheme == "file" else (f"s3://{BUCKET}/fork-{secrets.token_hex(8)}", s3_server().options)
    script = f"""
import os
from adacheck.backends.object_store import ObjectStore
from adacheck.backends.errors import Busy
store = ObjectStore("{url}", **{options})
child = os.fork()
if child == 0:
    try:
        store.put("a", b"")
    except Busy as error:
        store.close()
        ObjectStore("{url}", **{options}).put("b", b"")
        os._exit(7 if "forked child" in str(error) else 1)
    os._exit(1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
store.put("a", b"")
print(code, list(store.list("")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("7 ['a', 'b']\n", 0), done.stderr


def test_read_only_makes_no_directory_and_needs_no_right_to_write(tmp_path: Path) -> None:
    with pytest.raises(Denied, match="does not exist"):
        ObjectStore(f"file://{tmp_path}/absent", read_only=True)
    assert not (tmp_path / "absent").exists()
    with ObjectStore(f"file://{tmp_path}/there") as store:
        store.put("a/b", b"x")
    with ObjectStore(f"file://{tmp_path}/there", read_only=True) as store:
        assert store.get("a/b") == b"x" and list(store.list("")) == ["a/b"]
