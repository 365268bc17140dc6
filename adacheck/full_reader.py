"""Reads a full checkpoint of the object tier: manifest, tensors, opaque items. No byte is handed out before its digest matched.

Bytes that do not match are read a second time before they count as damaged: they may have changed on the way.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from adacheck import sense
from adacheck.backends.base import Backend
from adacheck.backends.errors import NotFound
from adacheck.capture.opaque import decode
from adacheck.digest import digest
from adacheck.errors import DamagedCut
from adacheck.manifests import keys
from adacheck.manifests.errors import FormatError, NewerFormat
from adacheck.manifests.record import SEGMENT_BYTES_MAX, Full, FullEntry, Segment, Shard, ShardTensor, StateSpec, TensorSpec
from adacheck.safetensors_shard import LENGTH_BYTES, Place, header_bytes, places
from adacheck.states import State, dtype_of, empty, spec_bytes, tensor_bytes
from adacheck.tiling import unlike_its_tensors, unlisted, untiled

WINDOW_BYTES = 8 << 20
"""Length of one ranged get; the small tensors beside the one asked for come with it."""

WINDOWS_MAX = 3
"""Windows that are kept at a time."""

_log = logging.getLogger("adacheck")


@dataclass(frozen=True, slots=True)
class Rows:
    """The part `start:stop` of a tensor's first dimension; a tensor without dimensions is one row, 0:1."""

    tensor: str
    start: int
    stop: int


def rows_of(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """These rows of a tensor at hand, without a copy."""
    return tensor[rows.start : rows.stop] if tensor.dim() else tensor


def read_full(backend: Backend, entry: FullEntry) -> FullReader:
    """Open the full checkpoint that a version lists. Reads its manifest only.

    Raises:
        DamagedCut: the manifest is missing, is not the one listed, or its shards do not hold every global tensor exactly once.
        NewerFormat: a later release wrote it.
    """
    return FullReader(backend, entry, _read_manifest(backend, entry))


def _read_manifest(backend: Backend, entry: FullEntry) -> Full:
    key = keys.manifest(entry.folder)
    content = _get_checked(backend, key, None, entry.manifest_digest)
    if digest(content) != entry.manifest_digest:
        raise DamagedCut(f"{key} is not the manifest that the version lists: {len(content)} bytes with another digest")
    try:
        manifest = sense.read(content, Full)
    except NewerFormat:
        raise
    except FormatError as error:
        raise DamagedCut(f"{key} cannot be read: {error}") from error
    if (manifest.incarnation, manifest.step) != (entry.incarnation, entry.step):
        raise DamagedCut(
            f"{key} is of step {manifest.step}, incarnation {manifest.incarnation}; listed is {entry.step}, {entry.incarnation}"
        )
    problem = next(unlisted(manifest), None) or next(untiled(manifest.states), None) or unlike_its_tensors(manifest)
    if problem:
        raise DamagedCut(f"the full checkpoint {entry.folder} is not whole: {problem}")
    return manifest


def _get(backend: Backend, key: str, byte_range: tuple[int, int] | None) -> bytes:
    try:
        return backend.get(key, byte_range)
    except NotFound as error:
        raise DamagedCut(f"{key} is missing from {backend.name}; the full checkpoint it belongs to is lost") from error


def _get_checked(backend: Backend, key: str, byte_range: tuple[int, int] | None, wanted: bytes) -> bytes:
    """The bytes, got a second time if they do not have the digest; the caller looks at it again."""
    content = _get(backend, key, byte_range)
    return content if digest(content) == wanted else _get(backend, key, byte_range)


class FullReader:
    """The contents of one full checkpoint. Use it from one thread; memory: one tensor, `WINDOWS_MAX` windows, and a segment.

    Attributes:
        entry, manifest: what it reads.
        specs: every state, by its position in `manifest.states`.
    """

    def __init__(self, backend: Backend, entry: FullEntry, manifest: Full) -> None:
        self.entry = entry
        self.manifest = manifest
        self.specs: dict[int, StateSpec] = dict(enumerate(manifest.states))
        self._backend = backend
        self._held = {(held.state, held.tensor): (shard, held) for shard in manifest.shards for held in shard.tensors}
        self._places: dict[str, dict[str, Place]] = {}
        self._windows: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    @property
    def step(self) -> int:
        """Of the cut."""
        return self.manifest.step

    @property
    def name(self) -> str:
        """Where it reads, for people."""
        return self.entry.folder

    def state(self, at: int) -> State:
        """State number `at`, in fresh CPU tensors; `scalars` decoded.

        Raises:
            DamagedCut: names the tensor and its shard.
        """
        spec = self.manifest.states[at]
        tensors = {tensor.name: self.tensor(at, tensor.name) for tensor in spec.tensors}
        return State(spec, tensors, decode(spec.scalars) if spec.scalars else {})

    def tensor(self, at: int, name: str) -> torch.Tensor:
        """One tensor (this state's chunk) in fresh CPU memory.

        Raises:
            DamagedCut: missing, short, or other bytes than the manifest says.
        """
        spec = self._spec(at, name)
        return self.rows(at, Rows(name, 0, spec.shape[0] if spec.shape else 1))

    def rows(self, at: int, rows: Rows) -> torch.Tensor:
        """Some rows of a tensor in fresh CPU memory; what is read is the 4 MiB segments they lie in, in windows of 8 MiB.

        Raises:
            DamagedCut: as `tensor`.
        """
        spec = self._spec(at, rows.tensor)
        tensor = empty((rows.stop - rows.start, *spec.shape[1:]) if spec.shape else (), dtype_of(spec.dtype))
        if tensor.numel():
            shard, held = self._held[at, rows.tensor]
            first = rows.start * prod(spec.shape[1:]) * tensor.element_size()
            try:
                self._fill(tensor_bytes(tensor), first, shard, held, spec_bytes(spec))
            except DamagedCut as error:
                _log.warning("read again: %s", error)
                self._windows.clear()
                self._places.pop(shard.name, None)
                self._fill(tensor_bytes(tensor), first, shard, held, spec_bytes(spec))
        return tensor

    def read(self, wanted: Mapping[int, Sequence[Rows]]) -> Iterator[tuple[int, list[torch.Tensor], Mapping[str, object]]]:
        """Parts of states, by position: the rows asked for, and the optimizer's entries that are no tensors.

        Memory: the rows of one state, and the windows. Raises as `tensor`.
        """
        for at in sorted(wanted):
            scalars = self.specs[at].scalars
            yield at, [self.rows(at, rows) for rows in wanted[at]], decode(scalars) if scalars else {}

    def _spec(self, at: int, name: str) -> TensorSpec:
        return next(tensor for tensor in self.manifest.states[at].tensors if tensor.name == name)

    def opaque(self, prefix: str = "") -> dict[str, bytes]:
        """The opaque items whose names begin so, encoded, by name.

        Raises:
            DamagedCut: the object is missing, short or damaged; names the item.
        """
        return {segment.tensor: self._opaque_item(segment) for segment in self.manifest.opaque if segment.tensor.startswith(prefix)}

    def _opaque_item(self, segment: Segment) -> bytes:
        key = keys.opaque(self.entry.folder)
        place = (segment.start, segment.stop)
        content = _get_checked(self._backend, key, place, segment.digest) if segment.stop > segment.start else b""
        if digest(content) != segment.digest:
            raise DamagedCut(f"{key}: item {segment.tensor} does not match its digest ({len(content)} of {segment.stored_bytes} bytes)")
        return content

    def _fill(self, target: memoryview, first: int, shard: Shard, held: ShardTensor, size_bytes: int) -> None:
        """Fill `target` with the tensor's bytes from `first` on, each segment of them checked whole."""
        place = self._place(shard, held.key)
        if place.stop - place.start != size_bytes:
            raise DamagedCut(f"{self._key(shard)}: {held.key} has {place.stop - place.start} bytes there, {size_bytes} in the manifest")
        if len(held.digests) != -(-size_bytes // SEGMENT_BYTES_MAX):
            raise DamagedCut(f"{self._key(shard)}: the manifest has {len(held.digests)} digests for {held.key} of {size_bytes} bytes")
        stop = first + len(target)
        for number in range(first // SEGMENT_BYTES_MAX, -(-stop // SEGMENT_BYTES_MAX)):
            start, end = number * SEGMENT_BYTES_MAX, min((number + 1) * SEGMENT_BYTES_MAX, size_bytes)
            content = self._read(shard, place.start + start, place.start + end)
            if digest(content) != held.digests[number]:
                raise DamagedCut(f"{self._key(shard)}: the bytes {start}:{end} of {held.key} do not match their digest")
            low, high = max(start, first), min(end, stop)
            target[low - first : high - first] = memoryview(content)[low - start : high - start]

    def _place(self, shard: Shard, key: str) -> Place:
        if shard.name not in self._places:
            try:
                length = header_bytes(self._read(shard, 0, LENGTH_BYTES))
                self._places[shard.name] = places(self._read(shard, 0, length))
            except DamagedCut as error:
                raise DamagedCut(f"{self._key(shard)}: {error}") from error
        if key not in self._places[shard.name]:
            raise DamagedCut(f"{self._key(shard)}: its header does not have {key}")
        return self._places[shard.name][key]

    def _read(self, shard: Shard, start: int, stop: int) -> bytes:
        return b"".join(self._parts(shard, start, stop))

    def _parts(self, shard: Shard, start: int, stop: int) -> Iterator[memoryview]:
        while start < stop:
            part = self._from_window(shard, start, stop)
            yield part
            start += len(part)

    def _from_window(self, shard: Shard, start: int, stop: int) -> memoryview:
        """Some bytes of a shard from `start`, at least one and none at or after `stop`."""
        number = start // WINDOW_BYTES
        window = self._windows.pop((shard.name, number), None)
        if window is None:
            if len(self._windows) >= WINDOWS_MAX:
                self._windows.popitem(last=False)
            window = _get(self._backend, self._key(shard), (number * WINDOW_BYTES, (number + 1) * WINDOW_BYTES))
        self._windows[shard.name, number] = window
        part = memoryview(window)[start - number * WINDOW_BYTES : stop - number * WINDOW_BYTES]
        if not part:
            end = number * WINDOW_BYTES + len(window)
            raise DamagedCut(f"{self._key(shard)} ends at byte {end}, the manifest says {shard.size_bytes}")
        return part

    def _key(self, shard: Shard) -> str:
        return f"{self.entry.folder}/{shard.name}"
