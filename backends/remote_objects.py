"""Objects behind fsspec: S3 through s3fs, and fsspec's memory for tests.

Large objects are uploaded in parts as they come, so that memory holds one part; a name appears when the upload is completed,
never before. s3fs's own file objects complete it on an exception too, and put an empty exclusive object unconditionally;
hence the calls here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import fsspec

from adacheck.backends.base import Parts, Stat, Traits, each_part, is_key
from adacheck.backends.errors import BackendError, Denied, Full, NotFound, Unavailable
from adacheck.backends.remote_errors import foreign_errors, is_expired, is_taken, translate_remote_error

PART_BYTES = 32 << 20
PART_BYTES_MIN = 5 << 20
_PARTS_MAX = 10_000
_exclusive_memory = threading.Lock()


class RemoteObjects:
    """What `ObjectStore` needs of a place, on an fsspec filesystem of its own that caches no listing.

    Args:
        scheme: `s3` or `memory`.
        root: bucket and prefix, or a folder.
        part_bytes: size of the parts of a large object; an object has at most 10,000.
        options: of the fsspec filesystem.
    """

    def __init__(self, scheme: str, root: str, *, part_bytes: int = PART_BYTES, **options: Any) -> None:
        if part_bytes < PART_BYTES_MIN:
            raise Denied(f"part_bytes={part_bytes} is less than the {PART_BYTES_MIN} that S3 takes; choose more")
        self.name = f"{scheme}://{root}"
        self._remote = scheme == "s3"
        self._part_bytes = part_bytes
        self.traits = Traits(
            atomic_put=True,
            atomic_batch=False,
            exclusive_put=True,
            durable=self._remote,
            survives_process=self._remote,
            survives_host=self._remote,
        )
        self._fs = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **options)
        self._root = root.strip("/") if self._remote else "/" + root.strip("/")
        if self._remote:
            bucket = self._root.partition("/")[0]
            try:
                self._call("find the bucket", self._fs.call_s3, "head_bucket", Bucket=bucket)
            except NotFound as error:
                raise Denied(f"there is no bucket {bucket!r} for {self.name}; make it first, or check the address") from error

    def write(self, key: str, parts: Parts, *, exclusive: bool) -> bool:
        """Store an object; `False` if `exclusive` and the key is taken."""
        pieces = self._pieces(parts)
        first = next(pieces)
        if len(first) < self._part_bytes:
            return self._put(key, first, exclusive=exclusive)
        if exclusive and self.stat(key) is not None:
            return False
        return self._upload(key, first, pieces, exclusive=exclusive)

    def read(self, key: str, byte_range: tuple[int, int] | None) -> bytes:
        """The object's bytes, or some of them."""
        if byte_range is None:
            return bytes(self._call(f"read {key!r}", self._fs.cat_file, self._path(key)))
        found = self.stat(key)
        if found is None:
            raise NotFound(f"{self.name} has no object {key!r}")
        start, stop = byte_range[0], min(byte_range[1], found.size_bytes)
        if start >= stop:
            return b""
        return bytes(self._call(f"read {key!r}", self._fs.cat_file, self._path(key), start=start, end=stop))

    def stat(self, key: str) -> Stat | None:
        """Size and time of an object."""
        try:
            found = self._call(f"look at {key!r}", self._fs.info, self._path(key))
        except NotFound:
            return None
        if found["type"] != "file":
            return None
        modified = found.get("LastModified") or found.get("created")
        return Stat(int(found["size"]), modified.timestamp() if modified else 0.0)

    def names(self, prefix: str) -> list[str]:
        """All keys with the prefix, sorted; asked of the server each time."""
        directory, _, begin = prefix.rpartition("/")
        if directory and not is_key(directory):
            return []
        options = {"prefix": begin} if self._remote and begin else {}
        try:
            paths = self._call(f"list {prefix!r}", self._fs.find, self._path(directory), **options)
        except NotFound:
            return []
        keys = (path[len(self._root) :].lstrip("/") for path in paths)
        return sorted(key for key in keys if key.startswith(prefix) and is_key(key))

    def remove(self, key: str) -> None:
        """Remove an object."""
        with suppress(NotFound):
            self._call(f"remove {key!r}", self._fs.rm_file, self._path(key))

    def stale(self, older_than_s: float) -> Iterator[str]:
        """Multipart uploads begun so long ago and neither completed nor aborted, as `<key>#<upload id>`."""
        if not self._remote:
            return
        bucket, prefix, _ = self._fs.split_path(self._path("x"))
        marks: dict[str, str] = {}
        while True:
            page = self._call("list uploads", self._fs.call_s3, "list_multipart_uploads", Bucket=bucket, Prefix=prefix[:-1], **marks)
            for upload in page.get("Uploads", ()):
                if time.time() - upload["Initiated"].timestamp() >= older_than_s:
                    yield f"{upload['Key'][len(prefix) - 1 :]}#{upload['UploadId']}"
            if not page.get("IsTruncated"):
                return
            marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def discard(self, upload: str) -> None:
        """Abort one of `stale`."""
        key, separator, number = upload.partition("#")
        if not separator or not self._remote:
            raise Denied(f"{upload!r} is not an upload of {self.name}")
        bucket, path, _ = self._fs.split_path(self._path(key))
        with suppress(NotFound):
            self._call(f"abort the upload of {key!r}", self._fs.abort_mpu, bucket, path, number)

    def close(self) -> None:
        """Close the connections."""
        if self._remote and self._fs._s3 is not None:
            self._fs.close_session(self._fs.loop, self._fs._s3)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/")

    def _pieces(self, parts: Parts) -> Iterator[bytes]:
        """The content in pieces of at least `part_bytes`, but for the last, which may be empty; all in one where there are no uploads."""
        piece = bytearray()
        for part in each_part(parts):
            piece += part
            while self._remote and len(piece) >= self._part_bytes:
                yield bytes(memoryview(piece)[: self._part_bytes])
                piece = piece[self._part_bytes :]
        yield bytes(piece)

    def _put(self, key: str, content: bytes, *, exclusive: bool) -> bool:
        """One put of the whole object. fsspec's memory looks and then writes, so exclusive ones take turns."""
        mode = "create" if exclusive else "overwrite"
        try:
            with nullcontext() if self._remote else _exclusive_memory:
                self._call(f"write {key!r}", self._fs.pipe_file, self._path(key), content, mode=mode)
        except _Taken:
            return False
        return True

    def _upload(self, key: str, first: bytes, rest: Iterator[bytes], *, exclusive: bool) -> bool:
        bucket, path, _ = self._fs.split_path(self._path(key))
        what = f"upload {key!r}"
        place = {"Bucket": bucket, "Key": path}
        place["UploadId"] = self._call(what, self._fs.call_s3, "create_multipart_upload", **place)["UploadId"]
        try:
            done: list[dict[str, Any]] = []
            for body in _each_piece(first, rest):
                if len(done) == _PARTS_MAX:
                    raise Full(f"{self.name}: {key!r} has more than {_PARTS_MAX} parts of {self._part_bytes} bytes; raise part_bytes")
                number = len(done) + 1
                tag = self._call(what, self._fs.call_s3, "upload_part", Body=body, PartNumber=number, **place)["ETag"]
                done.append({"PartNumber": number, "ETag": tag})
            condition = {"IfNoneMatch": "*"} if exclusive else {}
            self._call(what, self._fs.call_s3, "complete_multipart_upload", MultipartUpload={"Parts": done}, **place, **condition)
        except BaseException as error:
            with suppress(BackendError):
                self._call(what, self._fs.abort_mpu, bucket, path, place["UploadId"])
            if isinstance(error, _Taken):
                return False
            if isinstance(error, NotFound):
                raise Unavailable(f"{self.name}: the upload of {key!r} was aborted by somebody else; put it again") from error
            raise
        return True

    def _call(self, what: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call fsspec and raise this project's errors. Expired credentials are looked up again, for the caller's next attempt."""
        try:
            return function(*args, **options)
        except foreign_errors() as error:
            if is_taken(error):
                raise _Taken(what) from error
            if self._remote and is_expired(error):
                with suppress(*foreign_errors()):
                    self._fs.connect(refresh=True)
            raise translate_remote_error(error, f"{self.name}: {what}") from error


class _Taken(BackendError):
    """An exclusive put found its key taken; never leaves this module."""


def _each_piece(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    for piece in rest:
        if piece:
            yield piece
