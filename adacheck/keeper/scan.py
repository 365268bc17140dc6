"""Reads a chain's copy on NVMe back: its head record, the increments that link up, the bases, and what had to be rejected.

Everything that opens a store uses this: a restore, `steps()`, the tools. It only reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from adacheck.backends.base import Backend
from adacheck.backends.errors import NotFound
from adacheck.keeper.protocol import Copy, Held, recovered
from adacheck.keeper.stored import Stored, slot_count
from adacheck.manifests import chain as links
from adacheck.manifests import keys
from adacheck.manifests.encoding import decode
from adacheck.manifests.errors import FormatError, WrongRecord
from adacheck.manifests.record import Base, Chain, Increment, Linked
from adacheck.sense import read, senseless
from adacheck.sense_chain import unfounded


@dataclass
class Scan:
    """What a copy holds.

    Attributes:
        chain: head record.
        copy: the protocol's view of it.
        increments: intact, linked increments by step, with their links.
        bases: the base of each state.
        rejected: one line for each object that could not be used, with the reason.
    """

    chain: Chain
    copy: Copy
    increments: dict[int, Increment] = field(default_factory=dict)
    links: dict[int, bytes] = field(default_factory=dict)
    bases: dict[int, Base] = field(default_factory=dict)
    rejected: list[str] = field(default_factory=list)

    def stored_increments(self) -> dict[int, Stored]:
        """Where each increment lies, for its owner."""
        return {step: Stored(step, slot_count(increment), self.links[step]) for step, increment in self.increments.items()}

    def stored_bases(self) -> dict[int, Stored]:
        """Where each base lies, for its owner."""
        return {state: Stored(base.step, len(base.segments)) for state, base in self.bases.items()}


def scan(backend: Backend, run: str) -> Scan | None:
    """Read a copy's records; `None` if there is no chain at all.

    Raises:
        FormatError: the head record itself is damaged, of another kind, or makes no sense; there is nothing to go by then.
    """
    try:
        chain = read(backend.get(keys.CHAIN), Chain)
    except NotFound:
        return None
    if chain.run != run:
        raise WrongRecord(f"the head record of a chain of run {chain.run} where one of run {run} belongs")
    rejected: list[str] = []
    bases = _bases(backend, chain, run, rejected)
    increments, found_links = _increments(backend, chain, run, bases, rejected)
    held = {step: held_of(increment) for step, increment in increments.items()}
    steps = {state: base.step for state, base in bases.items()}
    copy = recovered(chain.incarnation, chain.fence, steps, held, floor=chain.anchor_step)
    missing = [pair for pair in zip(chain.base_states, chain.base_steps, strict=True) if steps.get(pair[0]) != pair[1]]
    if missing:
        rejected.extend(f"base of state {state} at step {step}: missing or damaged, so no cut can be read here" for state, step in missing)
        copy = replace(copy, floor=copy.top + 1)
    return Scan(chain, copy, increments, found_links, bases, rejected)


def held_of(increment: Increment) -> Held:
    """What the protocol must know of an increment."""
    whole = frozenset(value.spec.state for value in increment.values if not value.unchanged)
    derived: dict[int, frozenset[int]] = {}
    for one in increment.derived:
        if one.state != one.from_state:
            derived[one.from_state] = derived.get(one.from_state, frozenset()) | {one.state}
    return Held(whole, frozenset(increment.removed), derived)


def _bases(backend: Backend, chain: Chain, run: str, rejected: list[str]) -> dict[int, Base]:
    found: dict[int, Base] = {}
    for state, step in zip(chain.base_states, chain.base_steps, strict=True):
        key = keys.base(chain.generation, state, step)
        try:
            base = read(backend.get(key), Base)
        except NotFound:
            continue  # the caller says so
        except FormatError as error:
            rejected.append(f"base {key}: {error}")
            continue
        whose = (base.run, base.generation, base.chain, base.spec.state, base.step)
        if whose != (run, chain.generation, chain.chain, state, step):
            rejected.append("base {}: is of run {}, generation {}, chain {}, state {}, step {}".format(key, *whose))
        else:
            found[state] = base
    return found


def _increments(
    backend: Backend, chain: Chain, run: str, bases: Mapping[int, Base], rejected: list[str]
) -> tuple[dict[int, Increment], dict[int, bytes]]:
    """The longest run of increments from the anchor on that are whole, link up, and make sense."""
    contents: Mapping[int, bytes] = {}
    names = [keys.parse(key) for key in backend.list(keys.increments_prefix(chain.generation))]
    contents = {
        name.step: backend.get(keys.increment(chain.generation, name.step))
        for name in names
        if name is not None and name.kind is keys.Kind.INCREMENT
    }
    expect = links.Expect(run, chain.generation, chain.chain)
    problems = list(links.verify(sorted(contents.items()), chain.anchor_step, chain.anchor_link, expect, senseless))
    first_bad = min((problem.step for problem in problems), default=None)
    rejected.extend(f"increment {p.step}: {p.kind}: expected {p.expected}, found {p.found}" for p in problems)
    increments: dict[int, Increment] = {}
    found_links: dict[int, bytes] = {}
    for step in sorted(contents):
        if first_bad is not None and step >= first_bad:
            break
        linked = decode(contents[step], Linked)
        increments[step], found_links[step] = decode(linked.entry, Increment), linked.link
    for step, reason in unfounded(bases, increments):
        rejected.append(f"increment {step}: {reason}")
        sound = [at for at in increments if at < step]
        return {at: increments[at] for at in sound}, {at: found_links[at] for at in sound}
    return increments, found_links
