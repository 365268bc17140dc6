"""Whether the records of a chain make sense together: nothing is said of a state of which nothing is known. See `sense.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from adacheck.manifests.record import Base, Increment, Segment, StateSpec
from adacheck.planes import unpacked
from adacheck.sense_bytes import ITEM_BYTES, bad_segment


def unfounded(bases: Mapping[int, Base], increments: Mapping[int, Increment]) -> Iterator[tuple[int, str]]:
    """Every increment that says something of a state of which nothing, or something else, is known: its step, and what it says.

    Only of increments that some cut is replayed through: after the least base, or after the birth of a state without one.

    Args:
        bases: of the chain, by state. increments: those that make sense by themselves, by step.
    """
    known: dict[int, StateSpec] = {}
    least = min((base.step for base in bases.values()), default=-1)
    for step in sorted(increments):
        known.update({state: base.spec for state, base in bases.items() if base.step < step})
        ahead = {state for state, base in bases.items() if base.step >= step}
        increment = increments[step]
        if step > least:
            reason = next(_unfounded(increment, known, ahead), None)
            if reason is not None:
                yield step, reason
        known.update({value.spec.state: value.spec for value in increment.values if value.spec.state not in ahead})
        for state in increment.removed:
            known.pop(state, None)


def _unfounded(increment: Increment, known: Mapping[int, StateSpec], ahead: set[int]) -> Iterator[str]:
    whole = {value.spec.state: value.spec for value in increment.values}
    for value in increment.values:
        if value.unchanged and value.spec.state not in known and value.spec.state not in ahead:
            yield f"{value.spec.fqn} is unchanged, and no earlier value of it is there"
    for gradient in increment.gradients:
        state = gradient.state
        if state in ahead or state in whole:
            continue
        elements = gradient.segments[-1].stop if gradient.segments else 0
        if state not in known:
            yield f"a gradient of state {state}, which does not exist"
        elif elements != prod(known[state].tensors[0].shape):
            yield f"a gradient of {elements} elements for {known[state].fqn}, which has {prod(known[state].tensors[0].shape)}"
    yield from _underived(increment, {**known, **whole}, ahead)
    for refresh in increment.refreshes:
        spec = whole.get(refresh.state) or known.get(refresh.state)
        if refresh.state in ahead:
            continue
        if spec is None:
            yield f"a refresh of state {refresh.state}, which does not exist"
            continue
        yield from _refresh(spec, refresh.segments)


def _underived(increment: Increment, specs: Mapping[int, StateSpec], ahead: set[int]) -> Iterator[str]:
    """Casts of what is not there; a tensor that the first replay of a step makes is not known yet."""
    for one in increment.derived:
        if one.state in ahead:
            continue
        if one.state not in specs or (one.from_state not in specs and one.from_state not in ahead):
            yield f"state {one.state} is derived from state {one.from_state}, and one of them does not exist"
            continue
        into, source = _shape(specs, one.state, one.tensor), _shape(specs, one.from_state, one.from_tensor)
        if into is not None and source is not None and into != source:
            yield f"{one.tensor} of state {one.state} is derived from a tensor of another shape"


def _shape(specs: Mapping[int, StateSpec], state: int, name: str) -> tuple[int, ...] | None:
    return next((tensor.shape for tensor in specs[state].tensors if tensor.name == name), None) if state in specs else None


def _refresh(spec: StateSpec, segments: Iterable[Segment]) -> Iterator[str]:
    """Ranges inside their tensors; one that the first replay of a step makes is not known yet."""
    tensors = {tensor.name: tensor for tensor in spec.tensors}
    for segment in segments:
        what = f"a refresh of {spec.fqn}.{segment.tensor}"
        tensor = tensors.get(segment.tensor)
        if unpacked(segment.codec) != "raw" or not 0 <= segment.start < segment.stop:
            yield f"{what}: {segment.codec!r} bytes of elements {segment.start}:{segment.stop}"
        elif tensor is not None and segment.stop > prod(tensor.shape):
            yield f"{what} to element {segment.stop} of {prod(tensor.shape)}"
        elif tensor is not None:
            yield from bad_segment(segment, ITEM_BYTES[tensor.dtype], what)
