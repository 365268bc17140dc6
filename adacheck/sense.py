"""Whether a record makes sense. Its digest says that it is what was written; this says that somebody could have meant it.

Everyone who reads a store reads through `read` (and, for a whole chain, `sense_chain.unfounded`): a restore, `steps()`,
`adacheck-fsck`. So what a check calls clean a restore can use. Pure, and without torch. What needs a machine to answer (can this
kernel be replayed here?) is not asked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import chain as joined
from typing import TypeVar

from adacheck.keeper.cut import NO_CUT, NO_LIMIT
from adacheck.manifests import chain as links
from adacheck.manifests import keys
from adacheck.manifests.encoding import decode
from adacheck.manifests.errors import Malformed
from adacheck.manifests.record import (
    DIGEST_BYTES,
    SEGMENT_BYTES_MAX,
    Base,
    Certificate,
    Chain,
    Event,
    Fork,
    Full,
    FullEntry,
    Gradient,
    HistoryChunk,
    Incarnation,
    Increment,
    Record,
    Run,
    Value,
    Version,
)
from adacheck.sense_bytes import (
    ITEM_BYTES,
    bad_items,
    bad_row,
    bad_slots,
    bad_spec,
    bad_states,
    bad_whole,
    is_map,
    out_of_range,
    tensor_bytes,
)

STATUSES = ("pending", "proven", "inexact")
"""What a version says of a full checkpoint's proof."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_THREADS_MAX = 1 << 16
_UNIX_S_END = 1e11  # the year 5138
R = TypeVar("R", bound=Record)


def read(content: bytes, kind: type[R]) -> R:
    """The record of class `kind` in `content`, which makes sense.

    Raises:
        FormatError: as `encoding.decode`; `Malformed` also where it makes none, and the message says why.
    """
    record = decode(content, kind)
    reason = senseless(record)
    if reason is not None:
        raise Malformed(f"{kind.__name__}: {reason}")
    return record


def senseless(record: Record) -> str | None:
    """Why nobody can have meant this record, in words; `None` where it makes sense by itself."""
    return next(_reasons(record), None)


def _reasons(record: Record) -> Iterator[str]:
    match record:
        case Run():
            if not _NAME.fullmatch(record.run) or record.run in (".", ".."):
                yield f"the run {record.run!r}, which no directory can be called"
        case Incarnation():
            yield from out_of_range(incarnation=record.incarnation)
            if not 0 <= record.started_unix_s < _UNIX_S_END:
                yield f"a start {record.started_unix_s} s after 1970"
        case Fork():
            yield from out_of_range(incarnation=record.incarnation)
            if not (NO_CUT <= record.cut <= NO_LIMIT):
                yield f"a cut at step {record.cut}"
        case Chain():
            yield from _chain(record)
        case Version():
            yield from _version(record)
        case Full():
            yield from _full(record)
        case Base():
            yield from out_of_range(generation=record.generation, step=record.step)
            yield from bad_whole(record.spec, record.segments, record.digest)
            yield from bad_slots(record.segments)
        case Increment():
            yield from _increment(record)
        case HistoryChunk():
            yield from out_of_range(incarnation=record.incarnation, number=record.number)
        case _:
            return


def _chain(chain: Chain) -> Iterator[str]:
    yield from out_of_range(generation=chain.generation, incarnation=chain.incarnation, step=chain.anchor_step)
    if chain.fence < chain.incarnation or chain.incarnation < 1 or chain.fence >= keys.limit("incarnation"):
        yield f"written by incarnation {chain.incarnation}, with a fence at {chain.fence}"
    if len(chain.anchor_link) != DIGEST_BYTES:
        yield f"an anchor link of {len(chain.anchor_link)} bytes"
    if len(chain.base_states) != len(chain.base_steps):
        yield f"{len(chain.base_states)} states with a base, and {len(chain.base_steps)} steps of them"
    if list(chain.base_states) != sorted(chain.base_states):
        yield "the states with a base are not in order"
    yield from bad_states(chain.base_states, "the list of bases")
    for step in chain.base_steps:
        if not chain.anchor_step <= step < keys.limit("step"):
            yield f"a base of step {step}, and all increments up to step {chain.anchor_step} pruned"
    yield from _certificates(chain.certificates)


def _certificates(certificates: Iterable[Certificate]) -> Iterator[str]:
    for certificate in certificates:
        yield from bad_states((*certificate.states, *certificate.denied), "a certificate")


def _version(version: Version) -> Iterator[str]:
    yield from out_of_range(incarnation=version.incarnation, number=version.number)
    folders = [full.folder for full in version.fulls]
    if len(set(folders)) != len(folders):
        yield "it lists a full checkpoint twice"
    for full in version.fulls:
        yield from _entry(full)
        if full.incarnation > version.incarnation:
            yield f"it lists {full.folder} of the later incarnation {full.incarnation}"


def _entry(full: FullEntry) -> Iterator[str]:
    name = keys.parse(keys.manifest(full.folder))
    if name is None or (name.incarnation, name.step) != (full.incarnation, full.step):
        yield f"the folder {full.folder!r} for step {full.step} of incarnation {full.incarnation}"
    if len(full.manifest_digest) != DIGEST_BYTES or full.size_bytes < 0:
        yield f"{full.folder} has a digest of {len(full.manifest_digest)} bytes and {full.size_bytes} bytes"
    if full.status not in STATUSES:
        yield f"{full.folder} is {full.status!r}, which is none of {', '.join(STATUSES)}"


# Full checkpoints; how shards hold the tensors, and chunks the global ones, is `tiling.py`'s question.


def _full(full: Full) -> Iterator[str]:
    yield from out_of_range(generation=full.generation, incarnation=full.incarnation, step=full.step)
    yield from bad_states((spec.state for spec in full.states), "the list of states")
    for spec in full.states:
        yield from bad_spec(spec)
    if [len(digest) for digest in full.digests] != [DIGEST_BYTES] * len(full.states):
        yield f"{len(full.digests)} digests for {len(full.states)} states, or of another length than {DIGEST_BYTES}"
    yield from _shards(full)
    yield from bad_items(full.opaque, in_one_object=True)
    yield from bad_items(full.history, in_one_object=True)
    if len(full.history) > 1:
        yield f"{len(full.history)} copies of the history"
    yield from _certificates(full.certificates)


def _shards(full: Full) -> Iterator[str]:
    names = [shard.name for shard in full.shards]
    parsed = [keys.parse(f"{keys.full_folder(0, 0, '0')}/{name}") for name in names]
    if len(set(names)) != len(names) or not all(name is not None and name.kind is keys.Kind.SHARD for name in parsed):
        yield f"shards called {names[:3]}"
    for shard in full.shards:
        held = [_tensor_bytes_of(full, held.state, held.tensor) for held in shard.tensors]
        if sum(held) > shard.size_bytes or len(shard.digest) != DIGEST_BYTES:
            yield f"{shard.name} of {shard.size_bytes} bytes with {sum(held)} bytes of tensors, or a digest of another length"
        for tensor, size in zip(shard.tensors, held, strict=True):
            if [len(digest) for digest in tensor.digests] != [DIGEST_BYTES] * -(-size // SEGMENT_BYTES_MAX):
                yield f"{tensor.key} of {size} bytes has {len(tensor.digests)} digests, or of another length"


def _tensor_bytes_of(full: Full, state: int, tensor: str) -> int:
    """0 for what does not exist: `tiling.unlisted` names it."""
    if not 0 <= state < len(full.states):
        return 0
    return sum(tensor_bytes(spec) for spec in full.states[state].tensors if spec.name == tensor and spec.dtype in ITEM_BYTES)


# Increments


def _increment(increment: Increment) -> Iterator[str]:
    yield from out_of_range(generation=increment.generation, incarnation=increment.incarnation, step=increment.step)
    for event in increment.events:
        yield from _event(event)
    yield from _gradients(increment)
    yield from bad_states((value.spec.state for value in increment.values), "the list of values")
    yield from _derived(increment)
    for value in increment.values:
        yield from _value(value, [one.tensor for one in increment.derived if one.state == value.spec.state])
    yield from bad_states((refresh.state for refresh in increment.refreshes), "the list of refreshes")
    yield from bad_states(increment.removed, "the list of removed states")
    yield from bad_items(increment.opaque, in_one_object=False)
    yield from bad_slots(links.segments(increment))


def _event(event: Event) -> Iterator[str]:
    yield from bad_states(joined.from_iterable(group.states for group in event.groups), f"an event of {event.optimizer!r}")
    if not all(is_map(group.hyperparameters) for group in event.groups):
        yield f"hyperparameters of {event.optimizer!r} that are no map"
    if not 1 <= event.kernel.threads <= _THREADS_MAX:
        yield f"a kernel of {event.kernel.threads} threads"


def _gradients(increment: Increment) -> Iterator[str]:
    seen: set[tuple[int, int]] = set()
    for gradient in increment.gradients:
        what = f"the gradient of state {gradient.state}"
        if not 0 <= gradient.event < len(increment.events):
            yield f"{what} is of event {gradient.event} of {len(increment.events)}"
        elif not any(gradient.state in group.states for group in increment.events[gradient.event].groups):
            yield f"{what} is of event {gradient.event}, which did not step it"
        if (gradient.state, gradient.event) in seen:
            yield f"{what} is there twice"
        seen.add((gradient.state, gradient.event))
        yield from _gradient(gradient, what)


def _gradient(gradient: Gradient, what: str) -> Iterator[str]:
    if gradient.dtype not in ITEM_BYTES:
        yield f"{what} has dtype {gradient.dtype!r}, which does not exist"
        return
    elements = gradient.segments[-1].stop if gradient.segments else 0
    narrowed = any(segment.codec.startswith("bf16") for segment in gradient.segments)
    if any(segment.tensor != "grad" for segment in gradient.segments) or (narrowed and gradient.dtype != "float32"):
        yield f"{what} of {gradient.dtype} has segments of something else"
    yield from bad_row(gradient.segments, elements, ITEM_BYTES[gradient.dtype], what)


def _derived(increment: Increment) -> Iterator[str]:
    made = [(one.state, one.tensor) for one in increment.derived]
    if len(set(made)) != len(made):
        yield "a tensor is derived twice"
    for one in increment.derived:
        yield from out_of_range(state=one.state)
        if (one.from_state, one.from_tensor) in made:
            yield f"{one.tensor} of state {one.state} is derived from a tensor that is derived itself"


def _value(value: Value, omitted: Collection[str]) -> Iterator[str]:
    if not value.unchanged:
        yield from bad_whole(value.spec, value.segments, value.digest, may_pack=True, omitted=omitted)
        return
    yield from bad_spec(value.spec)
    if value.segments or len(value.digest) != DIGEST_BYTES:
        yield f"{value.spec.fqn} is unchanged, and has segments or a digest of {len(value.digest)} bytes"
