"""Rebuilds states of a cut from an NVMe copy: bases, then increments, through the same code that moves a shadow.

Which states a cut has is known from records alone, so whoever needs few of them reads and replays only those.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from adacheck.backends.base import Backend
from adacheck.errors import DamagedCut
from adacheck.full_reader import Rows, rows_of
from adacheck.keeper.apply import Applied, Applier, ReadSegment, load_state
from adacheck.keeper.protocol import applicable, underivable
from adacheck.keeper.replay import batches
from adacheck.keeper.scan import Scan
from adacheck.keeper.stored import read_verified, slot_key
from adacheck.kernel import environment, refusal
from adacheck.manifests import keys
from adacheck.manifests.record import Kernel, Segment, StateSpec
from adacheck.states import State, spec_bytes

_log = logging.getLogger("adacheck")

BATCH_BYTES = 64 << 20
"""States that are rebuilt together when they are handed on one by one: at most so many bytes, or one state."""


class NvmeReader:
    """The cut at `step` of an NVMe copy that reaches it. Use it from one thread.

    Attributes:
        specs: every state of the cut, by number; `scalars` are those before what is replayed.
        replayed: increments replayed per state so far.
        inexact: a comparison on the way to the cut found other bytes in the trainer.

    Raises:
        DamagedCut: the records say already that a state of it cannot be rebuilt.
    """

    def __init__(self, nvme: Backend, found: Scan, step: int) -> None:
        self._nvme, self._found, self.step = nvme, found, step
        for state, at in underivable(found.copy, step).items():
            raise DamagedCut(f"step {at}: state {state} was derived from one whose oldest base here is later; run adacheck-fsck", at)
        self._todo = applicable(found.copy, step)
        self.specs = self._specs()
        self._sources = self._derived_from()
        self.replayed: dict[int, int] = {}
        self.inexact = False

    @property
    def name(self) -> str:
        """Where it reads, for people."""
        return self._nvme.name

    def refused(self) -> str | None:
        """Why the gradients of this cut cannot be replayed here, `None` if they can."""
        reasons = (refusal(kernel, environment()) for kernel in self._kernels())
        return next((reason for reason in reasons if reason is not None), None)

    def states(self, wanted: Collection[int]) -> dict[int, State]:
        """These states at the cut, in fresh CPU tensors.

        Raises:
            DamagedCut: bytes are missing or wrong (`step` of the error: which increment's).
            ReplayRefused: gradients were recorded with a kernel that cannot be had here.
        """
        needed = self._with_sources(wanted)
        applier = Applier({number: self._base(number) for number in self._found.bases if number in needed})
        for at, states in self._todo:
            increment = self._found.increments[at]
            applied = applier.apply(increment, self._read(at), states & needed)
            self._learn(applied)
            for gradient in increment.gradients:
                if gradient.state in states & needed:
                    self.replayed[gradient.state] = self.replayed.get(gradient.state, 0) + 1
        return {number: state for number, state in applier.shadow.items() if number in wanted}

    def read(self, wanted: Mapping[int, Sequence[Rows]]) -> Iterator[tuple[int, list[torch.Tensor], Mapping[str, object]]]:
        """Parts of states, by number: the rows asked for, and the optimizer's entries that are no tensors.

        Memory: one batch of whole states with those they are derived from, also where few rows are asked for. Raises as `states`.
        """
        for batch in batches(sorted(wanted), self._size_bytes, BATCH_BYTES):
            states = self.states(batch)
            for number in batch:
                state = states[number]
                yield number, [rows_of(state.tensors[rows.tensor], rows) for rows in wanted[number]], state.scalars

    def opaque(self, prefix: str = "") -> dict[str, bytes]:
        """The opaque items of the cut whose names begin so, encoded, by name.

        Raises:
            DamagedCut: bytes are missing or wrong.
        """
        read = self._read(self.step)
        items: dict[str, bytes] = {}
        for segment in self._found.increments[self.step].opaque:
            if segment.tensor.startswith(prefix):
                items[segment.tensor] = items.get(segment.tensor, b"") + read(segment)
        return items

    def _learn(self, applied: Applied) -> None:
        if not self.inexact and not all(compared.equal for compared in applied.compared):
            self.inexact = True
            _log.warning("the cut at step %d is inexact: a comparison on the way to it found other bytes in the trainer", self.step)

    def _specs(self) -> dict[int, StateSpec]:
        specs = {number: base.spec for number, base in self._found.bases.items()}
        for at, states in self._todo:
            increment = self._found.increments[at]
            specs.update({value.spec.state: value.spec for value in increment.values if value.spec.state in states and not value.unchanged})
            for number in states.intersection(increment.removed):
                specs.pop(number, None)
        return specs

    def _derived_from(self) -> dict[int, set[int]]:
        """For each state the other ones that it is derived from on the way to the cut."""
        found: defaultdict[int, set[int]] = defaultdict(set)
        for at, states in self._todo:
            for derived in self._found.increments[at].derived:
                if derived.state in states and derived.state != derived.from_state:
                    found[derived.state].add(derived.from_state)
        return found

    def _with_sources(self, wanted: Iterable[int]) -> frozenset[int]:
        """These states, and all that they cannot be rebuilt without."""
        found, todo = set[int](), list(wanted)
        while todo:
            if (number := todo.pop()) not in found:
                found.add(number)
                todo.extend(self._sources.get(number, ()))
        return frozenset(found)

    def _size_bytes(self, number: int) -> int:
        specs = [self.specs[needed] for needed in self._with_sources([number]) if needed in self.specs]
        return sum(spec_bytes(tensor) for spec in specs for tensor in spec.tensors)

    def _kernels(self) -> set[Kernel]:
        """Every kernel that must be replayed on the way to the cut."""
        found: set[Kernel] = set()
        for at, states in self._todo:
            increment = self._found.increments[at]
            replayed = states - {value.spec.state for value in increment.values}
            found |= {increment.events[gradient.event].kernel for gradient in increment.gradients if gradient.state in replayed}
        return found

    def _base(self, number: int) -> State:
        base = self._found.bases[number]
        key = keys.base(self._found.chain.generation, number, base.step)

        def read(segment: Segment) -> bytes:
            return read_verified(self._nvme, slot_key(key, segment.slot), segment)

        try:
            return load_state(f"base at step {base.step}", base.spec, base.segments, base.digest, read)
        except DamagedCut as error:
            raise DamagedCut(str(error), base.step) from error  # no cut of this copy can be read without it

    def _read(self, step: int) -> ReadSegment:
        key = keys.increment(self._found.chain.generation, step)

        def read(segment: Segment) -> bytes:
            try:
                return read_verified(self._nvme, slot_key(key, segment.slot), segment)
            except DamagedCut as error:
                raise DamagedCut(str(error), step) from error

        return read
