"""Checks a full checkpoint of the object tier: manifest, shards, opaque items; by size, or byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import blake3
import msgpack

from adacheck.check_history import check_copy
from adacheck.check_records import Consequence, Look
from adacheck.digest import digest
from adacheck.errors import DamagedCut
from adacheck.finding import Kind
from adacheck.manifests import keys
from adacheck.manifests.chain import Kind as Fault
from adacheck.manifests.chain import Problem
from adacheck.manifests.record import SEGMENT_BYTES_MAX, Full, FullEntry, Shard
from adacheck.safetensors_shard import LENGTH_BYTES, Place, header_bytes, places
from adacheck.tiling import unlike_its_tensors, unlisted, untiled

_WINDOW_BYTES = 8 << 20


Manifests = Mapping[str, Full]
"""The intact manifests of all listed full checkpoints, by folder: what may have been swapped with what."""


def _consequence(entry: FullEntry) -> Consequence:
    return Consequence(
        f"the full checkpoint of step {entry.step}; other cuts are not touched",
        "put the object back from a copy of the object tier; otherwise the next full checkpoint replaces it",
    )


def check_contents(look: Look, entry: FullEntry, manifests: Manifests) -> None:
    """Check the shards, the opaque items and the history of a full checkpoint whose manifest is intact."""
    manifest, consequence = manifests[entry.folder], _consequence(entry)
    for shard in manifest.shards:
        _check_shard(look, f"{entry.folder}/{shard.name}", shard, manifests, consequence)
    _check_opaque(look, keys.opaque(entry.folder), entry.folder, manifests, consequence)
    check_copy(look, entry.folder, manifests)


def check_manifest(look: Look, entry: FullEntry, run: str | None, others: Mapping[bytes, str]) -> Full | None:
    """Check the manifest of a full checkpoint that a version lists, and give it if it is intact.

    Args:
        others: digests of all listed manifests -> where they belong, to tell a swap from damage.
    """
    key = keys.manifest(entry.folder)
    content = look.get(key)

    def misplaced(manifest: Full) -> Problem | None:
        if run is not None and manifest.run != run:
            return Problem(Fault.SPLICED, entry.step, f"a manifest of run {run}", f"one of run {manifest.run}")
        found = digest(content or b"")
        if found != entry.manifest_digest:
            where = others.get(found, f"one of step {manifest.step}, incarnation {manifest.incarnation}, with digest {found.hex()[:16]}")
            return Problem(Fault.SWAPPED, entry.step, f"the manifest with digest {entry.manifest_digest.hex()[:16]}", where)
        if (manifest.incarnation, manifest.step) != (entry.incarnation, entry.step):
            what = f"one of step {manifest.step}, incarnation {manifest.incarnation}"
            return Problem(Fault.SWAPPED, entry.step, f"the manifest of step {entry.step}, incarnation {entry.incarnation}", what)
        untrue = next(unlisted(manifest), None) or next(untiled(manifest.states), None) or unlike_its_tensors(manifest)
        return Problem(Fault.MALFORMED, entry.step, "shards that hold every tensor exactly once", untrue) if untrue else None

    return look.record(key, content, Full, misplaced, _consequence(entry))


def _check_shard(look: Look, key: str, shard: Shard, manifests: Manifests, consequence: Consequence) -> None:
    look.objects += 1
    size = look.size(key)
    expected = f"the {shard.size_bytes} bytes of {shard.name} with digest {shard.digest.hex()[:16]}"
    if size is None:
        look.add(Kind.MISSING, key, expected, "no object", consequence)
    elif size == 0:
        look.add(Kind.ZERO_LENGTH, key, expected, "an empty object", consequence)
    elif size != shard.size_bytes or look.sample.has(key):
        found, bad = _read_shard(look, key, shard, size)
        siblings = (
            f"{folder}/{other.name}" for folder, manifest in manifests.items() for other in manifest.shards if other.digest == found
        )
        sibling = next((name for name in siblings if name != key), None)
        if found != shard.digest and sibling is not None:
            look.add(Kind.SWAPPED, key, expected, f"the bytes of {sibling}", consequence)
        elif size < shard.size_bytes:
            look.add(Kind.TRUNCATED, key, expected, f"{size} bytes", consequence)
        elif found != shard.digest:
            what = f"{size} bytes with digest {found.hex()[:16]}; bad: {', '.join(bad[:5]) or 'the header'}" + (", …" if bad[5:] else "")
            look.add(Kind.WRONG_BYTES, key, expected, what, consequence)
        elif bad:
            look.add(Kind.MALFORMED, key, "the tensor digests of the manifest", f"others for {', '.join(bad[:5])}", consequence)


def _read_shard(look: Look, key: str, shard: Shard, size: int) -> tuple[bytes, list[str]]:
    """Digest of the whole file as it is, and the tensors whose own digest does not match. Reads each byte once."""
    stream = _Stream(look, key, size)
    wanted = {held.key: held.digests for held in shard.tensors}
    bad = set(wanted)
    try:
        beginning = stream.take(LENGTH_BYTES)
        table = places(beginning + stream.take(header_bytes(beginning) - LENGTH_BYTES))
        for name, place in sorted(table.items(), key=lambda item: item[1].start):
            if name in wanted and tuple(_segments(stream, place)) == wanted[name]:
                bad.discard(name)
    except DamagedCut:
        pass  # no header, no places: all its tensors count as bad, and the digest below says the rest
    return stream.finish(), sorted(bad)


def _segments(stream: _Stream, place: Place) -> Iterator[bytes]:
    """Digests of the canonical segments of the tensor at `place`; what lies before it in the file is passed over."""
    while stream.at < place.start:
        stream.take(min(place.start - stream.at, SEGMENT_BYTES_MAX))
    for start in range(place.start, place.stop, SEGMENT_BYTES_MAX):
        yield digest(stream.take(min(SEGMENT_BYTES_MAX, place.stop - start)))


class _Stream:
    """The bytes of one object from front to back, digested on the way."""

    def __init__(self, look: Look, key: str, size: int) -> None:
        self._look, self._key, self._size = look, key, size
        self._buffer, self._fetched = b"", 0
        self._hasher = blake3.blake3()
        self.at = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes.

        Raises:
            DamagedCut: there are not so many.
        """
        if self.at + count > self._size:
            raise DamagedCut(f"{self._key} ends at byte {self._size}")
        while len(self._buffer) < count and self._fetch():
            pass
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        self.at += len(taken)
        if len(taken) < count:
            raise DamagedCut(f"{self._key} ends at byte {self.at}")
        return taken

    def finish(self) -> bytes:
        """Digest of all bytes."""
        self._buffer = b""
        while self._fetch():
            self._buffer = b""
        return self._hasher.digest()

    def _fetch(self) -> bool:
        part = self._look.get(self._key, (self._fetched, min(self._fetched + _WINDOW_BYTES, self._size))) or b""
        self._fetched += len(part)
        self._hasher.update(part)
        self._buffer += part
        return bool(part) and self._fetched <= self._size


def _check_opaque(look: Look, key: str, folder: str, manifests: Manifests, consequence: Consequence) -> None:
    manifest = manifests[folder]
    look.objects += 1
    wanted = max((item.stop for item in manifest.opaque), default=1)
    size = look.size(key)
    expected = f"the {wanted} bytes of {len(manifest.opaque)} opaque items"
    if size is None:
        look.add(Kind.MISSING, key, expected, "no object", consequence)
    elif size == 0:
        look.add(Kind.ZERO_LENGTH, key, expected, "an empty object", consequence)
    elif size != wanted or look.sample.has(key):
        content = look.get(key) or b""
        if holds_items(content, manifest):
            return
        sibling = next((other for other, held in manifests.items() if other != folder and holds_items(content, held)), None)
        if sibling is not None:
            look.add(Kind.SWAPPED, key, expected, f"the bytes of {keys.opaque(sibling)}", consequence)
        elif size < wanted:
            look.add(Kind.TRUNCATED, key, expected, f"{size} bytes", consequence)
        else:
            bad = [item.tensor for item in manifest.opaque if digest(content[item.start : item.stop]) != item.digest]
            what = f"{size} bytes; bad: {', '.join(bad) or 'what lies between the items'}"
            look.add(Kind.WRONG_BYTES, key, f"{expected} with their digests", what, consequence)


def holds_items(content: bytes, manifest: Full) -> bool:
    """Whether these are the bytes of `opaque.msgpack`: every item of the manifest, and nothing else."""
    try:
        found = msgpack.unpackb(content)
    except (ValueError, msgpack.exceptions.ExtraData, msgpack.exceptions.FormatError, msgpack.exceptions.StackError):
        return False
    return bool(
        found == {item.tensor: content[item.start : item.stop] for item in manifest.opaque}
        and all(digest(content[item.start : item.stop]) == item.digest for item in manifest.opaque)
    )
