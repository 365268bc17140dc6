"""Writes a full checkpoint to the object tier: sharded safetensors as streams, then the opaque items, then the manifest.

Nothing here lists the checkpoint: the caller publishes the `FullEntry` that comes back (`catalogue.publish`). A write that failed
leaves objects in a folder of its own that nobody names; it is tried again under a new id.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import blake3
import numpy

from adacheck.backends.base import Backend, Buffer, Parts
from adacheck.digest import digest, state_digest, tensor_digest
from adacheck.errors import DamagedCut
from adacheck.manifests import encoding, keys
from adacheck.manifests.record import Certificate, Full, FullEntry, Segment, Shard, ShardTensor, StateSpec, TensorSpec
from adacheck.opaque_object import opaque_object
from adacheck.safetensors_shard import Entry, header
from adacheck.states import dtype_of, segment_ranges
from adacheck.tiling import several_optimizers, tensor_key, untiled

SHARD_BYTES = 256 << 20
"""A shard is closed before it grows over this, unless one tensor is larger."""

_EXPONENTS = {
    "float64": ("<u8", 0x7FF0000000000000),
    "float32": ("<u4", 0x7F800000),
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
}
"""Dtype -> its bit patterns' type, and the exponent that only NaN and infinities have in full."""


@dataclass(frozen=True)
class StateSource:
    """One state to write, and where its bytes come from.

    Attributes:
        spec: what it is.
        read: name of a tensor -> its canonical segments (`states.segment_ranges`), verified, in order; called again on a retry.
            Each buffer is taken before the next is asked for, so one scratch buffer serves.
        digest: `state_digest` the bytes must have, `None` to take them as they come.
    """

    spec: StateSpec
    read: Callable[[str], Iterable[Buffer]]
    digest: bytes | None = None


@dataclass(frozen=True)
class CutId:
    """Whose cut is written."""

    run: str
    generation: int
    incarnation: int
    step: int


@dataclass
class _Tensor:
    """One tensor on its way into a shard; `digests` of its segments and `finite` are of the last time it was streamed."""

    state: int
    source: StateSource
    spec: TensorSpec
    entry: Entry
    digests: tuple[bytes, ...] = ()
    finite: bool = True


def new_id() -> str:
    """A fresh id for one attempt at a full checkpoint."""
    return secrets.token_hex(8)


def write_full(
    backend: Backend,
    cut: CutId,
    sources: Sequence[StateSource],
    opaque: Sequence[tuple[str, bytes]],
    *,
    certificates: tuple[Certificate, ...] = (),
    history: bytes = b"",
    identity: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> FullEntry:
    """Write all objects of a full checkpoint, the manifest last, and return the `pending` entry that a version would list.

    Memory: one segment, and the opaque items. Nothing is restorable before `catalogue.publish` lists the entry.

    Args:
        sources: every state of the cut; several with one name are chunks of one global tensor.
        opaque: names and contents of the opaque items.
        history: the run's so far, for reports; no object if empty.
        identity: id of this attempt, `new_id()` by default.
        shard_bytes: target size of a shard.

    Raises:
        DamagedCut: the states do not tile their global tensors, a source's bytes differ from its digest or spec, or the backend
            holds fewer bytes than were written.
        BackendError: of the backend.
    """
    specs = tuple(source.spec for source in sources)
    problem = next(untiled(specs), None)
    if problem:
        raise DamagedCut(f"the cut at step {cut.step} cannot be written as a full checkpoint: {problem}")
    folder = keys.full_folder(cut.incarnation, cut.step, identity or new_id())
    tensors = list(_tensors(sources))
    plan = _shards(tensors, shard_bytes)
    shards = tuple(_write_shard(backend, folder, keys.shard_name(at, len(plan)), held) for at, held in enumerate(plan, start=1))
    content, segments = opaque_object(opaque)
    _put(backend, keys.opaque(folder), content, len(content))
    copied = _put_history(backend, folder, history)
    digests = _state_digests(cut, sources, tensors)
    full = Full(cut.run, cut.generation, cut.incarnation, cut.step, specs, digests, shards, segments, copied, certificates)
    manifest = encoding.encode(full)
    _put(backend, keys.manifest(folder), manifest, len(manifest))
    size_bytes = sum(shard.size_bytes for shard in shards) + len(content) + len(history) + len(manifest)
    finite = all(tensor.finite for tensor in tensors)
    return FullEntry(cut.incarnation, cut.step, folder, digest(manifest), size_bytes, "pending", finite)


def _tensors(sources: Sequence[StateSource]) -> Iterator[_Tensor]:
    """All tensors in the order of the states."""
    several = several_optimizers([source.spec for source in sources])
    for at, source in enumerate(sources):
        for spec in source.spec.tensors:
            aliases = source.spec.aliases if spec.name == "param" else ()
            names = tuple(f"model.{alias}" for alias in aliases)
            entry = Entry(tensor_key(source.spec, spec.name, several), spec, dtype_of(spec.dtype).itemsize, names)
            yield _Tensor(at, source, spec, entry)


def _shards(tensors: Sequence[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    """Which tensors go into which shard. Of tensors without elements only whole ones are stored, and only once.

    An empty *chunk* would have the offset of a real one, which the stock reader then takes for it.
    """
    shards: list[list[_Tensor]] = []
    size, held, empty = 0, set[str](), set[str]()
    for tensor in tensors:
        key = tensor.entry.key
        if not tensor.entry.size_bytes:
            if prod(tensor.spec.global_shape) or key in empty:
                continue
            empty.add(key)
        if not shards or key in held or (size and size + tensor.entry.size_bytes > shard_bytes):
            shards.append([])
            size, held = 0, set()
        shards[-1].append(tensor)
        size += tensor.entry.size_bytes
        held.add(key)
    # The widest elements first: each tensor in the file is then aligned to its element.
    return [sorted(shard, key=lambda tensor: -tensor.entry.element_bytes) for shard in shards]


@dataclass
class _ShardStream:
    """The bytes of one shard, computed again each time they are iterated (a retry), digested on the way."""

    tensors: list[_Tensor]
    size_bytes: int = 0
    digest: bytes = b""
    _hasher: blake3.blake3 = field(default_factory=blake3.blake3)

    def __iter__(self) -> Iterator[Buffer]:
        self.size_bytes, self._hasher = 0, blake3.blake3()
        yield self._passed(header([tensor.entry for tensor in self.tensors]))
        for tensor in self.tensors:
            yield from self._segments(tensor)
        self.digest = self._hasher.digest()

    def _passed(self, part: Buffer) -> Buffer:
        self.size_bytes += len(part)
        self._hasher.update(part)
        return part

    def _segments(self, tensor: _Tensor) -> Iterator[Buffer]:
        digests, finite = [], True
        look = tensor.spec.name == "param" and tensor.source.spec.kind == "parameter"
        ranges = segment_ranges(tensor.spec)
        parts = iter(tensor.source.read(tensor.spec.name))
        for start, stop in ranges:
            part = memoryview(next(parts, b"")).cast("B")
            if len(part) != (stop - start) * tensor.entry.element_bytes:
                raise DamagedCut(f"{tensor.entry.key}: {len(part)} bytes for elements {start}:{stop} while writing its full checkpoint")
            digests.append(digest(part))
            finite = finite and not (look and _has_non_finite(tensor.spec.dtype, part))
            yield self._passed(part)
        if next(parts, None) is not None:
            raise DamagedCut(f"{tensor.entry.key}: more bytes than its spec has while writing its full checkpoint")
        tensor.digests, tensor.finite = tuple(digests), finite


def _has_non_finite(dtype: str, part: memoryview) -> bool:
    if dtype not in _EXPONENTS:
        return False
    kind, exponent = _EXPONENTS[dtype]
    bits = numpy.frombuffer(part, kind)
    return bool(((bits & exponent) == exponent).any())


def _write_shard(backend: Backend, folder: str, name: str, tensors: list[_Tensor]) -> Shard:
    stream = _ShardStream(tensors)
    size_bytes = len(header([tensor.entry for tensor in tensors])) + sum(tensor.entry.size_bytes for tensor in tensors)
    _put(backend, f"{folder}/{name}", stream, size_bytes)
    if stream.size_bytes != size_bytes or not stream.digest:
        raise DamagedCut(f"{folder}/{name}: {backend.name} took {stream.size_bytes} of its {size_bytes} bytes")
    held = tuple(ShardTensor(tensor.entry.key, tensor.state, tensor.spec.name, tensor.digests) for tensor in tensors)
    return Shard(name, size_bytes, stream.digest, held)


def _put(backend: Backend, key: str, parts: Parts, size_bytes: int) -> None:
    backend.put(key, parts)
    stat = backend.stat(key)
    if stat is None or stat.size_bytes != size_bytes:
        found = "no object" if stat is None else f"{stat.size_bytes} bytes"
        raise DamagedCut(f"{key}: {size_bytes} bytes were written, {backend.name} has {found}; the upload must be tried again")


def _put_history(backend: Backend, folder: str, history: bytes) -> tuple[Segment, ...]:
    if not history:
        return ()
    _put(backend, keys.history_copy(folder), history, len(history))
    return (Segment("history", 0, len(history), "raw", 1.0, 0, len(history), digest(history)),)


def _state_digests(cut: CutId, sources: Sequence[StateSource], tensors: Sequence[_Tensor]) -> tuple[bytes, ...]:
    """Digests of the states as they were written, checked against what their sources say."""
    by_state: list[list[bytes]] = [[] for _ in sources]
    for tensor in tensors:
        by_state[tensor.state].append(tensor_digest(tensor.digests))
    found = tuple(state_digest(source.spec, digests) for source, digests in zip(sources, by_state, strict=True))
    for source, written in zip(sources, found, strict=True):
        if source.digest is not None and source.digest != written:
            raise DamagedCut(
                f"state {source.spec.fqn} at step {cut.step} has digest {written.hex()[:16]}, its record says {source.digest.hex()[:16]}; "
                "its full checkpoint is not written, an older cut stays the newest on the object tier"
            )
    return found
