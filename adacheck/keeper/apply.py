"""Applies increments to states: the keeper's shadow, a restore, and the tools all go through this one piece of code.

An increment moves a state by whole values or by replayed gradients; what was sent beside them to compare is compared here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from adacheck.capture import opaque
from adacheck.cast import cast_into
from adacheck.digest import digest as digest_of
from adacheck.errors import DamagedCut
from adacheck.keeper.assembly import left_out, value_digest
from adacheck.keeper.narrow import RAW, widen
from adacheck.keeper.proof import Compared
from adacheck.keeper.replay import GradientMemory, Replayed, Replayer, batches
from adacheck.kernel import certificate_key
from adacheck.manifests.record import Derived, Event, Gradient, Increment, Kernel, Segment, StateSpec, Value
from adacheck.planes import unpacked, unpacked_bytes
from adacheck.same import same_bytes
from adacheck.states import State, allocate, dtype_of, spec_bytes, tensor_bytes

ReadSegment = Callable[[Segment], bytes]
"""Gives the verified bytes of a segment of the increment (or base) at hand, unpacked."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One comparison of a replay with the value that was shipped: what certificates are made of."""

    state: int
    kernel: Kernel
    equal: bool
    gradient_nonzero: bool


@dataclass
class Applied:
    """What applying one increment showed."""

    compared: list[Compared] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


class Applier:
    """Brings `shadow` (state number -> state) forward, in place. Belongs to one thread.

    Attributes:
        lost: states that were derived at a step before the base of their source, with that step. They are not in the shadow until
            they go whole again; a cut that they belong to cannot be had from here.
    """

    def __init__(self, shadow: dict[int, State]) -> None:
        self.shadow = shadow
        self.lost: dict[int, int] = {}
        self._replayer, self._memory = Replayer(), GradientMemory()

    def apply(self, increment: Increment, read: ReadSegment, states: Collection[int], comparable: Collection[int] = ()) -> Applied:
        """Bring `states` from `increment.step - 1` to `increment.step`.

        Args:
            comparable: states shipped whole whose complete gradients are there too: both ways are taken, and compared.

        Raises:
            DamagedCut: bytes are missing or wrong, or do not fill their tensors.
            ReplayRefused: the recorded kernel cannot be had here.
        """
        applied = Applied()
        whole = {value.spec.state: value for value in increment.values}
        targets = {state: self.shadow[state] for state in states if state not in whole and state in self.shadow}
        scratch = {state: _clone(self.shadow[state]) for state in comparable if state in states and state in self.shadow}
        nonzero = self._replay(increment, read, {**targets, **scratch}, frozenset(scratch))
        omitted = left_out(increment.derived)
        for state, value in whole.items():
            if state in states:
                self._take_value(increment.step, value, omitted[state], read)
        for derived in increment.derived:
            if derived.state in states and derived.state in self.shadow:
                self._derive(increment.step, derived, states)
        for state, replayed in scratch.items():
            equal = _same(replayed, self.shadow[state])
            for kernel in _kernels(increment, state, replayed):
                applied.verdicts.append(Verdict(state, kernel, equal, state in nonzero))
        for state in increment.removed:
            if state in states:
                self.shadow.pop(state, None)
                self.lost.pop(state, None)
        for refresh in increment.refreshes:
            if refresh.state in states and refresh.state in self.shadow:
                applied.compared += [self._compare(refresh.state, segment, read) for segment in refresh.segments]
        return applied

    def check_complete(self) -> None:
        """Every state of the cut is in the shadow.

        Raises:
            DamagedCut: one is lost.
        """
        for state, step in self.lost.items():
            raise DamagedCut(f"step {step}: state {state} was derived from one whose oldest base here is later; run adacheck-fsck", step)

    def _replay(self, increment: Increment, read: ReadSegment, targets: Mapping[int, State], scratch: Collection[int]) -> set[int]:
        """Replay every event on `targets`; gives the `scratch` states that had a gradient other than zero."""
        nonzero: set[int] = set()
        for number, event in enumerate(increment.events):
            mine = [g for g in increment.gradients if g.event == number and g.state in targets]
            hyperparameters = _by_state(event) if mine else {}
            for batch in batches(mine, lambda g: targets[g.state].tensors["param"].numel() * dtype_of(g.dtype).itemsize):
                shapes = [(tuple(targets[g.state].tensors["param"].shape), dtype_of(g.dtype)) for g in batch]
                gradients = self._memory.take(shapes)
                for gradient, into in zip(batch, gradients, strict=True):
                    _fill(increment.step, gradient, read, into)
                    if gradient.state in scratch and _any_nonzero(into):
                        nonzero.add(gradient.state)
                self._replayer.apply(
                    event.kernel,
                    [Replayed(targets[g.state], hyperparameters[g.state], into) for g, into in zip(batch, gradients, strict=True)],
                )
        return nonzero

    def _take_value(self, step: int, value: Value, omitted: Collection[str], read: ReadSegment) -> None:
        state = value.spec.state
        if value.unchanged:
            if (known := self.shadow.get(state)) is None:
                raise DamagedCut(f"step {step}: {value.spec.fqn} is said to be unchanged, but no earlier value of it is there")
            self.shadow[state] = replace(known, spec=value.spec)  # its bytes are; names and `requires_grad` may not be
            return
        known = self.shadow.get(state)
        tensors = known.tensors if known is not None and known.spec.tensors == value.spec.tensors else None
        self.shadow[state] = load_state(f"step {step}", value.spec, value.segments, value.digest, read, tensors, omitted)
        self.lost.pop(state, None)

    def _derive(self, step: int, derived: Derived, states: Collection[int]) -> None:
        """Make a tensor the cast of its source, which is at this step too: unless its base is of a later one."""
        source = self.shadow.get(derived.from_state)
        if source is None or derived.from_state not in states:
            self.lost[derived.state] = step
            del self.shadow[derived.state]
            return
        into, wide = self.shadow[derived.state].tensors.get(derived.tensor), source.tensors.get(derived.from_tensor)
        if into is None or wide is None or into.shape != wide.shape:
            what = f"{self.shadow[derived.state].spec.fqn}.{derived.tensor}"
            raise DamagedCut(f"step {step}: {what} is said to be the cast of {source.spec.fqn}.{derived.from_tensor}, which does not fit")
        cast_into(into, wide)

    def _compare(self, state: int, segment: Segment, read: ReadSegment) -> Compared:
        tensor = self.shadow[state].tensors.get(segment.tensor)
        equal = False
        if tensor is not None and segment.stop <= tensor.numel():
            size = tensor.element_size()
            held = np.frombuffer(tensor_bytes(tensor)[segment.start * size : segment.stop * size], np.uint8)
            equal = np.array_equal(held, np.frombuffer(read(segment), np.uint8))
        return Compared(state, segment.tensor, segment.start, segment.stop, equal)


def load_state(
    where: str,
    spec: StateSpec,
    segments: Iterable[Segment],
    digest: bytes,
    read: ReadSegment,
    into: dict[str, torch.Tensor] | None = None,
    omitted: Collection[str] = (),
) -> State:
    """A state from the canonical segments it was stored in; into `into` if its tensors have the right specs.

    `omitted` tensors have no segments; the caller fills them.

    Raises:
        DamagedCut: the segments do not fill the tensors exactly, or do not have the digest. `where` says of what.
    """
    segments = tuple(segments)
    _check_fits(where, spec, segments, omitted)
    raw_digests = dict[int, bytes]()
    as_stored = all(segment.codec == RAW for segment in segments)
    if as_stored:
        _check_digest(where, spec, segments, raw_digests, omitted, digest)
    tensors = allocate(spec) if into is None else into
    filled = dict.fromkeys(tensors, 0)
    for segment in segments:
        view, size = tensor_bytes(tensors[segment.tensor]), tensors[segment.tensor].element_size()
        content = read(segment)
        if (
            unpacked(segment.codec) != RAW
            or segment.start != filled[segment.tensor]
            or len(content) != (segment.stop - segment.start) * size
        ):
            raise DamagedCut(f"{where}: segment {segment.slot} of {spec.fqn}.{segment.tensor} does not fit after the one before it")
        view[segment.start * size : segment.stop * size] = content
        filled[segment.tensor] = segment.stop
        if segment.codec != RAW:
            raw_digests[segment.slot] = digest_of(content)
    for name, tensor in tensors.items():
        if filled[name] != tensor.numel() and name not in omitted:
            raise DamagedCut(f"{where}: {spec.fqn}.{name} has {filled[name]} of its {tensor.numel()} elements")
    if not as_stored:
        _check_digest(where, spec, segments, raw_digests, omitted, digest)
    scalars = opaque.decode(spec.scalars) if spec.scalars else {}
    return State(spec, tensors, scalars)


def _check_digest(
    where: str,
    spec: StateSpec,
    segments: Sequence[Segment],
    raw_digests: Mapping[int, bytes],
    omitted: Collection[str],
    digest: bytes,
) -> None:
    if value_digest(spec, segments, raw_digests, omitted) != digest:
        raise DamagedCut(f"{where}: the segments of {spec.fqn} do not give the digest recorded for it; run adacheck-fsck")


def _check_fits(where: str, spec: StateSpec, segments: tuple[Segment, ...], omitted: Collection[str]) -> None:
    """Before any memory is taken: every segment belongs to a tensor of the spec, and they have its size in bytes."""
    stored = {tensor.name: 0 for tensor in spec.tensors}
    if len(stored) != len(spec.tensors) or "param" not in stored:
        raise DamagedCut(f"{where}: {spec.fqn} lists its tensors twice, or has no 'param'")
    for segment in segments:
        if segment.tensor not in stored or segment.tensor in omitted:
            raise DamagedCut(f"{where}: segment {segment.slot} of {spec.fqn} is of {segment.tensor!r}, which is not sent")
        stored[segment.tensor] += unpacked_bytes(segment)
    for tensor in spec.tensors:
        if min(tensor.shape, default=0) < 0 or (spec_bytes(tensor) != stored[tensor.name] and tensor.name not in omitted):
            what = f"{spec.fqn}.{tensor.name} of shape {list(tensor.shape)}"
            raise DamagedCut(f"{where}: {what} has {stored[tensor.name]} bytes of segments; run adacheck-fsck")


def _fill(step: int, gradient: Gradient, read: ReadSegment, into: torch.Tensor) -> None:
    flat, filled = into.view(-1), 0
    for segment in gradient.segments:
        if segment.start != filled or segment.stop > flat.numel():
            raise DamagedCut(f"step {step}: gradient segment {segment.slot} of state {gradient.state} does not follow element {filled}")
        widen(read(segment), unpacked(segment.codec), segment.coefficient, flat[segment.start : segment.stop])
        filled = segment.stop
    if filled != flat.numel():
        raise DamagedCut(f"step {step}: the gradient of state {gradient.state} has {filled} of {flat.numel()} elements")


def _by_state(event: Event) -> dict[int, dict[str, Any]]:
    """Hyperparameters of each state at an event; states of one group share one mapping."""
    found: dict[int, dict[str, Any]] = {}
    for group in event.groups:
        hyperparameters = opaque.decode(group.hyperparameters)
        found.update(dict.fromkeys(group.states, hyperparameters))
    return found


def _kernels(increment: Increment, state: int, shadow: State) -> set[Kernel]:
    """Under which kernels a state was stepped in an increment."""
    parameter = shadow.tensors["param"].dtype
    return {
        certificate_key(increment.events[g.event].kernel, parameter, dtype_of(g.dtype)) for g in increment.gradients if g.state == state
    }


def _clone(state: State) -> State:
    return State(state.spec, {name: tensor.clone() for name, tensor in state.tensors.items()}, copy.deepcopy(state.scalars))


def _same(a: State, b: State) -> bool:
    if a.spec.tensors != b.spec.tensors or a.spec.scalars != b.spec.scalars:
        return False
    return all(same_bytes(a.tensors[t.name], b.tensors[t.name]) for t in a.spec.tensors)


def _any_nonzero(tensor: torch.Tensor) -> bool:
    return bool(tensor.count_nonzero())
