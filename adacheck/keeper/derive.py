"""Which tensors need not be sent because they are another tensor in a narrower dtype: bookkeeping of what was seen equal. Pure.

A rule is found from bytes alone: a tensor changed in two steps in a row, and after both it equalled the cast of the same other one.
A rule is a hint where to look, no promise: the trainer compares at every step, and sends the tensor when it is something else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from adacheck.digest import tensor_digest
from adacheck.manifests.record import Derived, Increment, StateSpec, TensorSpec

Tensor = tuple[int, str]
"""A state's number and the name of one of its tensors."""

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of the dtypes that are cast into each other as they are; narrower ones are scaled by whoever uses them."""

MISSES_MAX = 3
"""Whole shipments in a row of a tensor that has a rule, after which another source is looked for."""

PAUSE_STEPS_MAX = 1024
"""Longest pause between two looks for the source of a tensor that has none; doubled after each that found nothing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor without a rule, as last shipped: when, its digest, what it was the cast of, and when to compare it again."""

    step: int
    digest: bytes
    equal: frozenset[Tensor] = frozenset()
    pause_steps: int = 0
    again: int = 0


@dataclass(frozen=True, slots=True)
class Derivations:
    """What is known of one chain's tensors. A value: every change gives a new one.

    Attributes:
        rules: tensor -> its source; no source has a rule itself.
        misses: how often in a row the tensor of a rule was shipped after all.
        seen: tensors on the way to a rule.
    """

    rules: Mapping[Tensor, Tensor] = field(default_factory=dict)
    misses: Mapping[Tensor, int] = field(default_factory=dict)
    seen: Mapping[Tensor, Seen] = field(default_factory=dict)


def castable(specs: Mapping[int, StateSpec]) -> frozenset[Tensor]:
    """The tensors that may be casts: there is a wider one of the same shape where `may_derive` lets it be looked for."""
    anywhere = _widest(tensor for spec in specs.values() for tensor in spec.tensors)
    found: set[Tensor] = set()
    for number, spec in specs.items():
        widest = anywhere if len(spec.tensors) == 1 else _widest(spec.tensors)
        found.update((number, t.name) for t in spec.tensors if 0 < WIDTHS.get(t.dtype, 0) < widest[t.shape])
    return frozenset(found)


def _widest(tensors: Iterable[TensorSpec]) -> dict[tuple[int, ...], int]:
    """Bytes of the widest dtype that tensors of each shape have."""
    found: dict[tuple[int, ...], int] = {}
    for tensor in tensors:
        found[tensor.shape] = max(WIDTHS.get(tensor.dtype, 0), found.get(tensor.shape, 0))
    return found


def shipped(increment: Increment, wanted: Collection[Tensor]) -> dict[Tensor, bytes]:
    """Those of the tensors that an increment ships whole, with their digests."""
    found: dict[Tensor, list[bytes]] = {}
    for value in increment.values if wanted else ():
        for segment in value.segments:
            if (tensor := (value.spec.state, segment.tensor)) in wanted:
                found.setdefault(tensor, []).append(segment.digest)
    return {tensor: tensor_digest(digests) for tensor, digests in found.items()}


def to_compare(
    known: Derivations, step: int, whole: Mapping[Tensor, bytes], specs: Mapping[int, StateSpec]
) -> dict[Tensor, tuple[Tensor, ...]]:
    """Tensors that changed with this step and may get a rule, each with the tensors it may be the cast of.

    Args:
        whole: what `shipped` gave for the increment of this step.
        specs: every state there is after it.
    """
    changed = [t for t, digest in whole.items() if t not in known.rules and _changed(known.seen.get(t), step, digest)]
    if not changed:
        return {}
    wide: dict[tuple[int, ...], list[tuple[Tensor, int]]] = {}
    for number, spec in sorted(specs.items()):
        for tensor in spec.tensors:
            if WIDTHS.get(tensor.dtype, 0) > 2 and (number, tensor.name) not in known.rules:
                wide.setdefault(tensor.shape, []).append(((number, tensor.name), WIDTHS[tensor.dtype]))
    found: dict[Tensor, tuple[Tensor, ...]] = {}
    for number, name in changed:
        spec = specs[number]
        tensor = next(tensor for tensor in spec.tensors if tensor.name == name)
        sources = tuple(s for s, width in wide.get(tensor.shape, ()) if width > WIDTHS[tensor.dtype] and may_derive(spec, tensor, s[0]))
        if sources:
            found[number, name] = sources
    return found


def may_derive(spec: StateSpec, tensor: TensorSpec, from_state: int) -> bool:
    """Whether a tensor may have its source in that state: in its own, or in any other if it is all that its state consists of."""
    return spec.state == from_state or spec.tensors == (tensor,)


def observe(
    known: Derivations,
    step: int,
    whole: Mapping[Tensor, bytes],
    equal: Mapping[Tensor, Collection[Tensor]],
    derived: Iterable[Derived] = (),
) -> Derivations:
    """Take in one step, in order.

    Args:
        whole: what `shipped` gave.
        equal: for each tensor that `to_compare` named, those sources whose cast it equals now.
        derived: what the increment derives.
    """
    rules, misses, seen = dict(known.rules), dict(known.misses), dict(known.seen)
    for one in derived:
        misses.pop((one.state, one.tensor), None)
    for tensor, digest in whole.items():
        if tensor in rules:
            misses[tensor] = misses.get(tensor, 0) + 1
            if misses[tensor] < MISSES_MAX:
                continue
            del rules[tensor], misses[tensor]
        before, now = seen.get(tensor), frozenset(equal.get(tensor, ()))
        both = now & before.equal if before is not None and before.step == step - 1 else frozenset()
        sources = sorted(both - rules.keys(), key=lambda source: (source[0] != tensor[0], source))
        if sources and tensor not in rules.values():
            rules[tensor] = sources[0]
            seen.pop(tensor, None)
        else:
            seen[tensor] = _pausing(before, Seen(step, digest, now), compared=tensor in equal)
    return Derivations(rules, misses, seen)


def forget(known: Derivations, states: Collection[int]) -> Derivations:
    """Drop all that is known of the tensors of these states, and every rule whose source is in them."""
    kept = {tensor: source for tensor, source in known.rules.items() if tensor[0] not in states and source[0] not in states}
    misses = {tensor: count for tensor, count in known.misses.items() if tensor in kept}
    return Derivations(kept, misses, {tensor: seen for tensor, seen in known.seen.items() if tensor[0] not in states})


def _changed(before: Seen | None, step: int, digest: bytes) -> bool:
    """Whether it is known that the tensor changed with this step, and time to compare it."""
    return before is not None and before.step == step - 1 and before.digest != digest and step >= before.again


def _pausing(before: Seen | None, now: Seen, *, compared: bool) -> Seen:
    if before is None or now.equal:
        return now
    if not compared:
        return replace(now, pause_steps=before.pause_steps, again=before.again)
    pause = min(max(2 * before.pause_steps, 1), PAUSE_STEPS_MAX)
    return replace(now, pause_steps=pause, again=now.step + pause)
