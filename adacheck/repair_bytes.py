"""Repairs an object with bytes that are proven to be right: its own with one bit turned back, those of the object it was swapped
with, or the same content from elsewhere in the store, which its digest proves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from adacheck.backends.errors import BackendError
from adacheck.check_full import holds_items
from adacheck.digest import digest
from adacheck.errors import DamagedCut
from adacheck.finding import Tier
from adacheck.history import even
from adacheck.keeper.stored import slot_key
from adacheck.manifests import keys
from adacheck.manifests.chain import seal_version
from adacheck.manifests.encoding import split
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Base, Chain, Fork, Full, HistoryChunk, Incarnation, Increment, Linked, Run, Segment, Version
from adacheck.mend import has_digest, is_sealed, mended
from adacheck.opaque_object import made_again
from adacheck.repair_case import Case
from adacheck.repair_tensors import shard_from_tensors, tensor_range
from adacheck.sense import read

K = keys.Kind
Candidate = tuple[bytes, str]
"""Content that may be right, and where it is from."""

_RECORDS = (K.RUN, K.INCARNATION, K.FORK, K.VERSION, K.MANIFEST, K.CHAIN, K.FENCE, K.INCREMENT, K.BASE, K.STAGED, K.HISTORY)
_SLOTS = (K.INCREMENT_SLOT, K.BASE_SLOT, K.STAGED_SLOT)


def put_good_bytes(case: Case) -> None:
    """Give every damaged object for which there are any the bytes that belong there."""
    slots = case.slots()
    for tier in Tier:
        damaged = list(case.damaged(tier))
        others = {name: content for name, _ in damaged if (content := case.content(tier, name)) is not None}
        for key, name in damaged:
            for content, source in _candidates(case, tier, key, name, others, slots):
                if _fits(case, key, name, content, slots):
                    case.put(tier, key, content, source)
                    break


def _candidates(
    case: Case, tier: Tier, key: str, name: keys.Name, others: dict[str, bytes], slots: dict[str, Segment]
) -> Iterator[Candidate]:
    own = others.get(key)
    if own is not None and (content := _mended(case, key, name, own, slots)) is not None:
        yield content, "one bit was another; it is turned back"
    yield from ((content, f"its content was at {other}") for other, content in others.items() if other != key)
    if name.kind is K.INCARNATION and case.check.copy.fence is not None and (content := case.content(Tier.NVME, keys.FENCE)):
        yield content, "copied from the fence on NVMe"
    if key in slots:
        for other, segment in slots.items():
            if segment.digest == slots[key].digest and other not in others and (content := case.content(Tier.NVME, other)):
                yield content, f"copied from {other}, which is the same"
    if name.kind in (K.BASE_SLOT, K.STAGED_SLOT) and key in slots:
        yield from _from_full(case, key, slots[key])
    if name.kind is K.SHARD:
        yield from _from_nvme(case, key)
    if name.kind is K.OPAQUE:
        yield from _from_increments(case, key)
    if name.kind is K.INCREMENT_SLOT and key in slots:
        yield from _from_items(case, name.step, slots[key])
    if name.kind is K.HISTORY:
        yield from _from_copies(case)


def _mended(case: Case, key: str, name: keys.Name, content: bytes, slots: dict[str, Segment]) -> bytes | None:
    """`content` with one bit turned back, where that makes it fit."""
    if name.kind in _RECORDS:
        return None if is_sealed(memoryview(content)) else mended(content, is_sealed)
    if key in slots and len(content) == slots[key].stored_bytes:
        return mended(content, has_digest(slots[key].digest))
    manifest = case.check.manifests.get(key.rpartition("/")[0])
    if manifest is None:
        return None
    if name.kind is K.OPAQUE:
        return _mended_items(content, manifest)
    sizes = {(shard.name, shard.size_bytes): shard.digest for shard in manifest.shards}
    sizes |= {(keys.history_copy(key.rpartition("/")[0]).rpartition("/")[2], held.stored_bytes): held.digest for held in manifest.history}
    wanted = sizes.get((key.rpartition("/")[2], len(content)))
    return None if wanted is None else mended(content, has_digest(wanted))


def _mended_items(content: bytes, manifest: Full) -> bytes | None:
    """Only where the digests say that the bit is: in the one bad item, or between the items."""
    if len(content) != max((item.stop for item in manifest.opaque), default=len(content)):
        return None
    bad = [item for item in manifest.opaque if digest(content[item.start : item.stop]) != item.digest]
    if len(bad) > 1:
        return None
    if bad:
        is_right = has_digest(bad[0].digest)
        item = mended(content[bad[0].start : bad[0].stop], is_right)
        return None if item is None else content[: bad[0].start] + item + content[bad[0].stop :]
    inside = {at for item in manifest.opaque for at in range(item.start, item.stop)}
    return mended(content, lambda view: holds_items(bytes(view), manifest), [at for at in range(len(content)) if at not in inside])


def _from_full(case: Case, key: str, segment: Segment) -> Iterator[Candidate]:
    """The bytes of a base's segment from a full checkpoint of the same bytes."""
    copy = case.check.copy
    owner = key.rpartition("/")[0]
    base = copy.bases.get(owner) or copy.staged.get(owner)
    for entry, manifest in case.manifests() if base is not None else ():
        for at, spec in enumerate(manifest.states):
            if base is not None and spec.fqn == base.spec.fqn and manifest.digests[at] == base.digest:
                content = tensor_range(case.objects, entry.folder, manifest, at, segment)
                if content is not None:
                    yield content, f"copied from {entry.folder}"


def _from_nvme(case: Case, key: str) -> Iterator[Candidate]:
    """A shard put together from what is left of it, and from bases and staged states of the same bytes."""
    folder, _, shard_name = key.rpartition("/")
    manifest = case.check.manifests.get(folder)
    shard = next((shard for shard in manifest.shards if shard.name == shard_name), None) if manifest is not None else None
    if manifest is None or shard is None:
        return
    bases = {**case.check.copy.bases, **case.check.copy.staged}
    try:
        content = shard_from_tensors(case.objects, case.nvme, folder, manifest, shard, bases)
    except (DamagedCut, BackendError):
        return
    yield content, "put together from the states on NVMe"


def _from_increments(case: Case, key: str) -> Iterator[Candidate]:
    """The opaque items of a full checkpoint from what is left of them, and from the increment of its step."""
    manifest = case.check.manifests.get(key.rpartition("/")[0])
    for record, increment in case.check.copy.increments.items() if manifest is not None else ():
        if manifest is not None and increment.step == manifest.step:
            items: dict[str, bytes] = {}
            for segment in increment.opaque:
                part = case.content(Tier.NVME, slot_key(record, segment.slot)) or b""
                items[segment.tensor] = items.get(segment.tensor, b"") + part
            if (content := made_again(case.content(Tier.OBJECT, key) or b"", manifest.opaque, items)) is not None:
                yield content, f"put together from {record} on NVMe"


def _from_items(case: Case, step: int, segment: Segment) -> Iterator[Candidate]:
    """The bytes of an opaque item's segment from the full checkpoint of the same step."""
    for entry, manifest in case.manifests():
        for item in manifest.opaque if manifest.step == step else ():
            if item.tensor == segment.tensor and (content := case.content(Tier.OBJECT, keys.opaque(entry.folder))):
                yield content[item.start + segment.start : item.start + segment.stop], f"copied from {entry.folder}"


def _from_copies(case: Case) -> Iterator[Candidate]:
    """Chunks of history from the copies beside the full checkpoints, which may lack the newest rows."""
    for entry, _ in case.manifests():
        content = case.content(Tier.OBJECT, keys.history_copy(entry.folder)) or b""
        yield from ((bytes(chunk), f"copied from {entry.folder}, as it was then") for chunk in split(content))


def _fits(case: Case, key: str, name: keys.Name, content: bytes, slots: dict[str, Segment]) -> bool:
    """Whether this content belongs under this name."""
    if name.kind in _SLOTS:
        return key in slots and len(content) == slots[key].stored_bytes and digest(content) == slots[key].digest
    folder, _, last = key.rpartition("/")
    manifest = case.check.manifests.get(folder)
    if name.kind is K.OPAQUE:
        return manifest is not None and holds_items(content, manifest)
    if name.kind is K.SHARD:
        return manifest is not None and any(shard.name == last and shard.digest == digest(content) for shard in manifest.shards)
    if name.kind is K.HISTORY_COPY:
        return manifest is not None and digest(content) in [held.digest for held in manifest.history]
    if name.kind is K.MANIFEST:
        listed = [full.manifest_digest for version in case.check.top.versions[-1:] for full in version.fulls if full.folder == folder]
        return digest(content) in listed
    try:
        return _IS_RECORD_OF[name.kind](case, name, content)
    except FormatError:
        return False


def _is_version(case: Case, name: keys.Name, content: bytes) -> bool:
    found = read(content, Version)
    named = (found.run, found.incarnation, found.number) == (case.run, name.incarnation, name.number)
    return named and seal_version(found).link == found.link


def _is_base(case: Case, name: keys.Name, content: bytes) -> bool:
    found = read(content, Base)
    return (found.run, found.generation, found.spec.state, found.step) == (case.run, name.generation, name.state, name.step)


def _is_increment(case: Case, name: keys.Name, content: bytes) -> bool:
    found = read(read(content, Linked).entry, Increment)
    return (found.run, found.generation, found.step) == (case.run, name.generation, name.step)


def _is_fence(case: Case, name: keys.Name, content: bytes) -> bool:
    found = read(content, Incarnation)
    return found.run == case.run and case.check.top.incarnations.get(found.incarnation, found) == found


def _is_incarnation(case: Case, name: keys.Name, content: bytes) -> bool:
    found = read(content, Incarnation)
    return (found.run, found.incarnation) == (case.run, name.incarnation)


def _is_fork(case: Case, name: keys.Name, content: bytes) -> bool:
    found = read(content, Fork)
    return (found.run, found.incarnation) == (case.run, name.incarnation)


def _is_chunk(case: Case, name: keys.Name, content: bytes) -> bool:
    found = read(content, HistoryChunk)
    return (found.run, found.number) == (case.run, name.number) and even(found)


_IS_RECORD_OF: dict[keys.Kind, Callable[[Case, keys.Name, bytes], bool]] = {
    K.RUN: lambda case, _, content: read(content, Run).run == case.run,
    K.INCARNATION: _is_incarnation,
    K.FORK: _is_fork,
    K.VERSION: _is_version,
    K.CHAIN: lambda case, _, content: read(content, Chain).run == case.run,
    K.FENCE: _is_fence,
    K.BASE: _is_base,
    K.STAGED: _is_base,
    K.INCREMENT: _is_increment,
    K.HISTORY: _is_chunk,
}
