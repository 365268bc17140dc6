"""Reads a full checkpoint of the object tier: manifest, tensors, opaque items. No byte is handed out before its digest matched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch

from adacheck.backends.base import Backend
from adacheck.backends.errors import NotFound
from adacheck.capture.opaque import decode
from adacheck.digest import digest, tensor_digest_of_bytes
from adacheck.errors import DamagedCut, StateMismatch
from adacheck.manifests import encoding, keys
from adacheck.manifests.errors import FormatError, NewerFormat
from adacheck.manifests.record import Full, FullEntry, Segment, Shard, ShardTensor
from adacheck.safetensors_shard import LENGTH_BYTES, Place, header_bytes, places
from adacheck.states import State, dtype_of, spec_bytes, tensor_bytes
from adacheck.tiling import unlike_its_tensors, unlisted, untiled

WINDOW_BYTES = 8 << 20
"""Length of one ranged get; the small tensors beside the one asked for come with it."""

_WINDOWS = 3


def read_full(backend: Backend, entry: FullEntry) -> FullReader:
    """Open the full checkpoint that a version lists. Reads its manifest only.

    Raises:
        DamagedCut: the manifest is missing, is not the one listed, or its shards do not hold every global tensor exactly once.
        NewerFormat: a later release wrote it.
    """
    return FullReader(backend, entry, _read_manifest(backend, entry))


def _read_manifest(backend: Backend, entry: FullEntry) -> Full:
    key = keys.manifest(entry.folder)
    content = _get(backend, key, None)
    if digest(content) != entry.manifest_digest:
        raise DamagedCut(f"{key} is not the manifest that the version lists: {len(content)} bytes with another digest")
    try:
        manifest = encoding.decode(content, Full)
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


class FullReader:
    """The contents of one full checkpoint. Use it from one thread; memory: one tensor and 24 MiB.

    Attributes:
        entry, manifest: what it reads; states are numbered by their position in `manifest.states`.
    """

    def __init__(self, backend: Backend, entry: FullEntry, manifest: Full) -> None:
        self.entry = entry
        self.manifest = manifest
        self._backend = backend
        self._held = {(held.state, held.tensor): (shard, held) for shard in manifest.shards for held in shard.tensors}
        self._places: dict[str, dict[str, Place]] = {}
        self._windows: OrderedDict[tuple[str, int], bytes] = OrderedDict()

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
        spec = next(tensor for tensor in self.manifest.states[at].tensors if tensor.name == name)
        tensor = torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
        if tensor.numel():
            shard, held = self._held[at, name]
            self._fill(tensor_bytes(tensor), shard, held, spec_bytes(spec))
        return tensor

    def read_into(self, at: int, name: str, destination: torch.Tensor) -> None:
        """Read one tensor into `destination` (any device and strides), which is touched only by verified bytes.

        Raises:
            StateMismatch: it has another shape or dtype.
            DamagedCut: as `tensor`.
        """
        tensor = self.tensor(at, name)
        if tensor.shape != destination.shape or tensor.dtype != destination.dtype:
            raise StateMismatch(
                f"{name} of {self.manifest.states[at].fqn} is {tensor.dtype} {tuple(tensor.shape)} in the cut, "
                f"{destination.dtype} {tuple(destination.shape)} here"
            )
        destination.detach().copy_(tensor)

    def opaque(self) -> dict[str, bytes]:
        """All opaque items, encoded, by name.

        Raises:
            DamagedCut: the object is missing, short or damaged; names the item.
        """
        return {segment.tensor: self._opaque_item(segment) for segment in self.manifest.opaque}

    def _opaque_item(self, segment: Segment) -> bytes:
        key = keys.opaque(self.entry.folder)
        content = _get(self._backend, key, (segment.start, segment.stop)) if segment.stop > segment.start else b""
        if digest(content) != segment.digest:
            raise DamagedCut(f"{key}: item {segment.tensor} does not match its digest ({len(content)} of {segment.stored_bytes} bytes)")
        return content

    def _fill(self, target: memoryview, shard: Shard, held: ShardTensor, size_bytes: int) -> None:
        place = self._place(shard, held.key)
        if place.stop - place.start != size_bytes:
            raise DamagedCut(f"{self._key(shard)}: {held.key} has {place.stop - place.start} bytes there, {size_bytes} in the manifest")
        at = 0
        for part in self._parts(shard, place.start, place.stop):
            target[at : at + len(part)] = part
            at += len(part)
        if tensor_digest_of_bytes(target) != held.digest:
            raise DamagedCut(f"{self._key(shard)}: the bytes of {held.key} do not match their digest")

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
            if len(self._windows) >= _WINDOWS:
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
