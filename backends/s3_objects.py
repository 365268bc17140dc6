"""Objects on S3, through s3fs's connection and S3's own calls.

Large objects are uploaded in parts as they come, so that memory holds one part; a name appears when the upload is completed,
never before. s3fs's file objects would complete it on an exception too, and put an empty exclusive object unconditionally; its
`find` and `info` answer from what a reply without a body lets them guess. Hence S3's own calls here.

Whatever happens on the network, each call ends: `request_timeout_s` and the least rate bound it. s3fs and botocore try nothing again
beneath, or their attempts would multiply with those of `Retrying`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

import fsspec

from adacheck.backends.base import Parts, Stat, Traits, Upload, each_part, is_key
from adacheck.backends.errors import BackendError, BadOption, Denied, Full, NotFound, Unavailable
from adacheck.backends.remote_errors import (
    Taken,
    cause_of,
    foreign_errors,
    is_beyond_end,
    is_misuse,
    may_be_expired,
    translate_remote_error,
)
from adacheck.backends.retry import Retry

PART_BYTES = 32 << 20
PART_BYTES_MIN = 5 << 20
_PARTS_MAX = 10_000

REQUEST_TIMEOUT_S = 30.0
"""Longest silence of the server, and time a request has besides that of its bytes."""

LEAST_BYTES_PER_S = 512 << 10
"""A request whose bytes move slower than this is given up: a connection that trickles is as bad as one that stalls."""

PART_RETRY = Retry(attempts=3)
"""For one part of a large object, so that one fault does not send all of the object again."""

_MARK = "adacheck-put"
_CONNECT_TIMEOUT_S = 10.0
_SETUP_S = 60.0
"""For reading the service's description and finding credentials, which may be a request to the host's metadata service."""

_Result = TypeVar("_Result")


class S3Objects:
    """What `ObjectStore` needs of a place, on an fsspec filesystem of its own that caches no listing.

    Args:
        root: bucket and prefix.
        part_bytes: size of the parts of a large object; an object has at most 10,000.
        request_timeout_s: see `REQUEST_TIMEOUT_S`.
        part_retry: see `PART_RETRY`.
        options: of the fsspec filesystem.
    """

    def __init__(
        self,
        root: str,
        *,
        part_bytes: int = PART_BYTES,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        part_retry: Retry = PART_RETRY,
        **options: Any,
    ) -> None:
        if part_bytes < PART_BYTES_MIN:
            raise Denied(f"part_bytes={part_bytes} is less than the {PART_BYTES_MIN} that S3 takes; choose more")
        self.name = f"s3://{root}"
        self.traits = Traits(
            atomic_put=True, atomic_batch=False, exclusive_put=True, durable=True, survives_process=True, survives_host=True
        )
        self._part_bytes, self._timeout_s, self._part_retry = part_bytes, request_timeout_s, part_retry
        self._options = {"max_concurrency": 1, **options}
        self._options["config_kwargs"] = {**_client_config(request_timeout_s), **options.get("config_kwargs", {})}
        self._renewing = threading.Lock()
        self._expired: list[Any] = []
        self._fs = self._connection()
        self._bucket, folder, _ = self._fs.split_path(root.strip("/"))
        self._prefix = f"{folder.strip('/')}/" if folder else ""
        try:
            self._call("find the bucket", "list_objects_v2", Prefix=self._prefix, MaxKeys=1)  # a HEAD could not say what is wrong
        except BackendError as error:
            self.close()
            if isinstance(error, NotFound):
                raise self._no_bucket() from None
            if is_misuse(error.__cause__):
                raise BadOption(str(error)) from error.__cause__
            raise

    def write(self, key: str, parts: Parts, *, exclusive: bool) -> bool:
        """Store an object; `False` if `exclusive` and the key is taken."""
        pieces = self._pieces(parts)
        first = next(pieces)
        if len(first) < self._part_bytes:
            return self._put(key, first, exclusive=exclusive)
        if exclusive and self.stat(key) is not None:
            return False
        try:
            self._upload(key, first, pieces, exclusive=exclusive)
        except Taken:
            return False
        return True

    def read(self, key: str, byte_range: tuple[int, int] | None) -> bytes:
        """The object's bytes, or some of them."""
        start, stop = byte_range or (None, None)
        if byte_range is not None and byte_range[0] >= byte_range[1]:
            if self.stat(key) is None:
                raise NotFound(f"{self.name} has no object {key!r}")
            return b""
        path, size_bytes = f"{self._bucket}/{self._prefix}{key}", byte_range[1] - byte_range[0] if byte_range else self._part_bytes

        def ask(fs: Any, limit_s: float) -> Any:
            try:
                return fs.cat_file(path, start=start, end=stop, timeout=limit_s)
            except OSError as error:
                if is_beyond_end(error):
                    return b""
                raise

        return bytes(self._ask(f"read {key!r}", ask, size_bytes))

    def stat(self, key: str) -> Stat | None:
        """Size and time of an object."""
        try:
            found = self._call(f"look at {key!r}", "head_object", Key=self._prefix + key)
        except NotFound:
            return None
        return Stat(int(found["ContentLength"]), found["LastModified"].timestamp())

    def names(self, prefix: str) -> list[str]:
        """All keys with the prefix, sorted; asked of the server each time."""
        if "/" in prefix and not is_key(prefix.rpartition("/")[0]):
            return []  # no key begins so, but a server that takes keys for paths may go somewhere else
        found: list[str] = []
        marks: dict[str, str] = {}
        while True:
            try:
                page = self._call(f"list {prefix!r}", "list_objects_v2", Prefix=self._prefix + prefix, **marks)
            except NotFound:
                raise self._no_bucket() from None  # never an empty listing, which would look like a new store
            keys = [entry["Key"] for entry in page.get("Contents", ())]
            found += [key[len(self._prefix) :] for key in keys if key.startswith(self._prefix + prefix)]
            if not page.get("IsTruncated"):
                return sorted(key for key in found if is_key(key))
            marks = {"ContinuationToken": page["NextContinuationToken"]}

    def remove(self, key: str) -> None:
        """Remove an object."""
        with suppress(NotFound):
            self._call(f"remove {key!r}", "delete_object", Key=self._prefix + key)

    def uploads(self) -> Iterator[Upload]:
        """Multipart uploads that are neither completed nor aborted, called `<key>#<upload id>`."""
        marks: dict[str, str] = {}
        while True:
            page = self._call("list uploads", "list_multipart_uploads", Prefix=self._prefix, **marks)
            for upload in page.get("Uploads", ()):
                key = upload["Key"][len(self._prefix) :]
                yield Upload(f"{key}#{upload['UploadId']}", key.rpartition("/")[0], upload["Initiated"].timestamp())
            if not page.get("IsTruncated"):
                return
            marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def discard(self, upload: str) -> None:
        """Abort one of `uploads`."""
        key, separator, number = upload.partition("#")
        if not separator:
            raise Denied(f"{upload!r} is not an upload of {self.name}")
        with suppress(NotFound):
            self._call(f"abort the upload of {key!r}", "abort_multipart_upload", Key=self._prefix + key, UploadId=number)

    def close(self) -> None:
        """Close the connections."""
        with self._renewing:
            for fs in (*self._expired, self._fs):
                _close(fs)

    def _pieces(self, parts: Parts) -> Iterator[bytes]:
        """The content in pieces of `part_bytes`, but for the last, which may be empty if it is the only one."""
        piece = bytearray()
        empty = True
        for part in each_part(parts):
            piece += part
            while len(piece) >= self._part_bytes:
                empty = False
                yield bytes(memoryview(piece)[: self._part_bytes])
                piece = piece[self._part_bytes :]
        if piece or empty:
            yield bytes(piece)

    def _put(self, key: str, content: bytes, *, exclusive: bool) -> bool:
        """One put of the whole object. aiohttp sends a PUT again by itself when a connection breaks: it may then find its own object."""
        what, place = f"write {key!r}", {"Key": self._prefix + key}
        if not exclusive:
            self._call(what, "put_object", Body=content, **place)
            return True
        mark = {_MARK: secrets.token_hex(16)}
        try:
            self._call(what, "put_object", Body=content, IfNoneMatch="*", Metadata=mark, **place)
        except Taken:
            return bool(self._call(what, "head_object", **place).get("Metadata") == mark)
        return True

    def _upload(self, key: str, first: bytes, rest: Iterator[bytes], *, exclusive: bool) -> None:
        what, place = f"upload {key!r}", {"Key": self._prefix + key}
        place["UploadId"] = self._call(what, "create_multipart_upload", **place)["UploadId"]
        try:
            done: list[dict[str, Any]] = []
            for number, body in enumerate(_chained(first, rest), start=1):
                if number > _PARTS_MAX:
                    raise Full(f"{self.name}: {key!r} has more than {_PARTS_MAX} parts of {self._part_bytes} bytes; raise part_bytes")
                done.append({"PartNumber": number, "ETag": self._part(what, place, number, body)})
            condition = {"IfNoneMatch": "*"} if exclusive else {}
            self._call(what, "complete_multipart_upload", MultipartUpload={"Parts": done}, **place, **condition)
        except BaseException as error:
            with suppress(BackendError):
                self._part_retry(lambda: self.discard(f"{key}#{place['UploadId']}"))
            if isinstance(error, NotFound):
                raise Unavailable(f"{self.name}: the upload of {key!r} was aborted by somebody else; put it again") from error
            raise

    def _part(self, what: str, place: dict[str, str], number: int, body: bytes) -> str:
        return str(self._part_retry(lambda: self._call(what, "upload_part", Body=body, PartNumber=number, **place))["ETag"])

    def _no_bucket(self) -> Denied:
        return Denied(f"there is no bucket {self._bucket!r} for {self.name}; make it first, or check the address")

    def _call(self, what: str, method: str, **arguments: Any) -> Any:
        """One of S3's own calls; raises this project's errors."""
        arguments["Bucket"] = self._bucket
        return self._ask(what, lambda fs, limit_s: fs.call_s3(method, timeout=limit_s, **arguments), len(arguments.get("Body", b"")))

    def _ask(self, what: str, ask: Callable[[Any, float], _Result], size_bytes: int) -> _Result:
        """Ask the server, within a time for so many bytes; once more with credentials looked up anew if they seem to have expired."""
        limit_s = self._timeout_s + size_bytes / LEAST_BYTES_PER_S
        fs = self._fs
        try:
            try:
                return ask(fs, limit_s)
            except foreign_errors() as error:
                if not may_be_expired(error):
                    raise
            return ask(self._renewed(fs), limit_s)
        except foreign_errors() as error:
            raise translate_remote_error(error, f"{self.name}: {what}", limit_s) from cause_of(error)

    def _renewed(self, expired: Any) -> Any:
        """A connection that looked its credentials up after `expired` did. Those that expired before are closed: nobody uses them."""
        with self._renewing:
            if self._fs is expired:
                for fs in self._expired:
                    _close(fs)
                self._expired, self._fs = [expired], self._connection()
            return self._fs

    def _connection(self) -> Any:
        fs = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, **self._options)
        fs.retries = 1  # s3fs's own
        try:
            fs.connect(timeout=_SETUP_S)  # now, so that no request's time goes by it
        except foreign_errors() as error:
            raise translate_remote_error(error, f"{self.name}: find the credentials", _SETUP_S) from cause_of(error)
        return fs


def _client_config(timeout_s: float) -> dict[str, Any]:
    """Botocore's options, but for those that the user gives."""
    config: dict[str, Any] = {"connect_timeout": min(_CONNECT_TIMEOUT_S, timeout_s), "read_timeout": timeout_s}
    config["retries"] = {"total_max_attempts": 1}
    if "response_checksum_validation" in import_module("botocore.config").Config.OPTION_DEFAULTS:
        config["response_checksum_validation"] = "when_required"  # all bytes have digests here, which tell damage from a fault
    return config


def _close(fs: Any) -> None:
    if fs._s3 is not None:
        fs.close_session(fs.loop, fs._s3)


def _chained(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
