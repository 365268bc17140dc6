"""Whether the chunks of a full checkpoint cover each global tensor exactly once, and what each tensor is called outside.

A reader that fills what it finds would return garbage where a chunk is missing; ours proves the cover before it reads a byte.
Pure, and without torch: fsck asks the same question.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

from adacheck.digest import state_digest, tensor_digest
from adacheck.manifests.record import Full, StateSpec, TensorSpec


def several_optimizers(states: Sequence[StateSpec]) -> bool:
    """Whether the optimizer's name is part of the keys."""
    return len({state.optimizer for state in states if state.optimizer}) > 1


def tensor_key(state: StateSpec, tensor: str, several: bool) -> str:
    """Key of one tensor as `get_state_dict(..., flatten_optimizer_state_dict=True)` names it under `model.` and `optim.`.

    Args:
        tensor: name within the state: `param`, or the optimizer's (`exp_avg`).
        several: `several_optimizers` of the whole cut.
    """
    if tensor == "param":
        return f"model.{state.fqn}"
    owner = f"{state.optimizer}." if several else ""
    return f"optim.{owner}state.{state.fqn}.{tensor}"


def untiled(states: Sequence[StateSpec]) -> Iterator[str]:
    """Every way in which the chunks do not cover their global tensors exactly once, in words that name the tensor's key."""
    several = several_optimizers(states)
    chunks: dict[str, list[TensorSpec]] = defaultdict(list)
    for state in states:
        for spec in state.tensors:
            chunks[tensor_key(state, spec.name, several)].append(spec)
    for key, specs in chunks.items():
        yield from _untiled_tensor(key, specs)


def _untiled_tensor(key: str, specs: list[TensorSpec]) -> Iterator[str]:
    kinds = {(spec.dtype, spec.global_shape) for spec in specs}
    if len(kinds) > 1:
        yield f"{key}: its chunks do not agree on dtype and global shape: {sorted(kinds)}"
        return
    shape = specs[0].global_shape
    for spec in specs:
        if len(spec.shape) != len(shape) or len(spec.offsets) != len(shape) or not _inside(spec):
            yield f"{key}: chunk {spec.shape} at {spec.offsets} is not inside {shape}"
            return
    filled = sorted((spec for spec in specs if prod(spec.shape)), key=lambda spec: spec.offsets)
    pair = _overlap(filled)
    if pair:
        yield f"{key}: chunks {pair[0].shape} at {pair[0].offsets} and {pair[1].shape} at {pair[1].offsets} overlap"
        return
    covered, total = sum(prod(spec.shape) for spec in filled), prod(shape)
    if covered != total:
        yield f"{key}: its chunks cover {covered} of {total} elements of {shape}"


def _inside(spec: TensorSpec) -> bool:
    bounds = zip(spec.offsets, spec.shape, spec.global_shape, strict=True)
    return all(offset >= 0 and size >= 0 and offset + size <= whole for offset, size, whole in bounds)


def _overlap(ordered: list[TensorSpec]) -> tuple[TensorSpec, TensorSpec] | None:
    """Two chunks with a common element; `ordered` by their offsets, so that only chunks of one stretch of rows are compared."""
    open_chunks: list[TensorSpec] = []
    for spec in ordered:
        if spec.offsets:
            open_chunks = [other for other in open_chunks if other.offsets[0] + other.shape[0] > spec.offsets[0]]
        for other in open_chunks:
            sides = zip(spec.offsets, spec.shape, other.offsets, other.shape, strict=True)
            if all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in sides):
                return other, spec
        open_chunks.append(spec)
    return None


def unlisted(manifest: Full) -> Iterator[str]:
    """Every way in which the shards do not hold each tensor of the manifest's states exactly once, tensors without bytes apart."""
    several = several_optimizers(manifest.states)
    wanted = {(at, spec.name): tensor_key(state, spec.name, several) for at, state in enumerate(manifest.states) for spec in state.tensors}
    empty = {(at, spec.name) for at, state in enumerate(manifest.states) for spec in state.tensors if not prod(spec.shape)}
    seen: set[tuple[int, str]] = set()
    for shard in manifest.shards:
        for held in shard.tensors:
            place = (held.state, held.tensor)
            if wanted.get(place) != held.key:
                yield f"{shard.name} lists {held.key}, which is not tensor {held.tensor} of state {held.state} of the manifest"
            elif place in seen:
                yield f"{held.key} is listed twice, again in {shard.name}"
            seen.add(place)
    for place in wanted.keys() - seen - empty:
        yield f"{wanted[place]} (state {place[0]}) is in no shard"


def unlike_its_tensors(manifest: Full) -> str | None:
    """A state whose digest is not that of the tensors listed for it."""
    held = {(held.state, held.tensor): tensor_digest(held.digests) for shard in manifest.shards for held in shard.tensors}
    for at, (spec, wanted) in enumerate(zip(manifest.states, manifest.digests, strict=True)):
        if state_digest(spec, [held.get((at, tensor.name), tensor_digest([])) for tensor in spec.tensors]) != wanted:
            return f"the digest of state {at} ({spec.fqn}) is not that of its tensors"
    return None
