"""Makes records anew from what the rest of the store says: whose store it is, who took which number, where an incarnation started,
who may write to NVMe, and what its chain consists of.

A fork is made anew with the *lowest* cut that the rest of the store proves: what it then cuts off may be too much, and is never too
little. So no step of an abandoned history comes back to life.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from adacheck.backends.base import Backend, Item
from adacheck.check_nvme import CopyRecords
from adacheck.digest import digest
from adacheck.finding import Tier
from adacheck.incarnations import made_anew
from adacheck.keeper.cut import NO_CUT, void_fork
from adacheck.keeper.stored import slot_key
from adacheck.manifests import keys
from adacheck.manifests.encoding import decode, encode
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import SEGMENT_BYTES_MAX, Base, Chain, Fork, Full, Increment, Linked, Run, Segment
from adacheck.nvme_directory import CHAIN
from adacheck.repair_case import Action, Case
from adacheck.repair_tensors import tensor_range
from adacheck.sense import read, senseless
from adacheck.sense_bytes import ITEM_BYTES, tensor_bytes

K = keys.Kind


def rebuild_identity(case: Case) -> None:
    """`run.msgpack`, and the records that say that an incarnation's number is taken."""
    top = case.check.top
    for key, _ in case.damaged(Tier.OBJECT, K.RUN):
        begun_unix_s = min((taken.started_unix_s for taken in top.incarnations.values()), default=0.0)
        made = Run(case.run, begun_unix_s, "adacheck-fsck --repair")
        case.put(Tier.OBJECT, key, encode(made), f"made anew: run {case.run}, as all other records say", keep=True)
    for key, name in case.damaged(Tier.OBJECT, K.INCARNATION):
        unknown = made_anew(case.run, name.incarnation)
        case.put(Tier.OBJECT, key, encode(unknown), "made anew, so that its number stays taken; host and pid are lost", keep=True)


def rebuild_forks(case: Case) -> None:
    """The cut an incarnation started from: the highest step of an earlier one that its own records show to be on its lineage."""
    for key, name in case.damaged(Tier.OBJECT, K.FORK):
        number = name.incarnation
        shown = list(_shown_live(case, number))
        if shown:
            fork, why = Fork(case.run, number, max(shown), False), f"its records rely on step {max(shown)}"
        elif number == 1 or _wrote(case, number):
            fork, why = Fork(case.run, number, NO_CUT, True), "nothing of earlier incarnations is relied on"
        else:
            void = void_fork(number)
            fork, why = Fork(case.run, number, void.cut, void.proven), "it never wrote anything, so it limits nothing"
        case.put(Tier.OBJECT, key, encode(fork), f"made anew: cut {fork.cut}, since {why}", keep=True)


def _shown_live(case: Case, number: int) -> Iterator[int]:
    """Steps of earlier incarnations that incarnation `number`, or a later one, took for live."""
    for version in case.check.top.versions:
        if version.incarnation >= number:
            yield from (full.step for full in version.fulls if full.incarnation < number)
    copy = case.check.copy
    if copy.chain is not None and copy.chain.incarnation >= number:
        yield from (increment.step for increment in copy.increments.values() if increment.incarnation < number)


def _wrote(case: Case, number: int) -> bool:
    names = [name for key in case.check.top.names if (name := keys.parse(key)) is not None]
    wrote = {name.incarnation for name in names if name.kind in (K.VERSION, K.SHARD, K.OPAQUE, K.MANIFEST)}
    return number in wrote | case.check.copy.incarnations()


def rebuild_fence(case: Case) -> None:
    """The newest incarnation is the one that may write; whoever starts next takes it over."""
    top = case.check.top
    for key, _ in case.damaged(Tier.NVME, K.FENCE):
        if top.incarnations:
            newest = top.incarnations[max(top.incarnations)]
            case.put(Tier.NVME, key, encode(newest), f"made anew: incarnation {newest.incarnation}", keep=True)


def rebuild_bases(case: Case) -> None:
    """Bases, with their slots, from a full checkpoint of the same step; or of an earlier one from which on the increments are there.

    A state may have its base at another step than the others: it is replayed from there.
    """
    chain = case.check.copy.chain
    for key in dict.fromkeys(_owner(key, name) for key, name in case.damaged(Tier.NVME, K.BASE, K.BASE_SLOT)):
        name = keys.parse(key)
        if chain is None or name is None or case.nvme is None:
            return
        for entry, manifest in case.manifests():
            at = _state_at(manifest, name.state)
            if at is None or not chain.anchor_step <= entry.step <= name.step or manifest.generation != chain.generation:
                continue
            if _derived_between(case, name.state, entry.step, name.step):
                continue
            made_of = _base(case, entry.folder, manifest, at, chain, entry.step)
            if made_of is not None:
                chain = _replace_base(case, case.nvme, chain, key, *made_of)
                what = f"made anew from {entry.folder}, of step {entry.step}"
                case.actions.append(Action(Tier.NVME, keys.base(chain.generation, name.state, entry.step), what))
                break


def _derived_between(case: Case, state: int, after: int, to: int) -> bool:
    """Whether the state is made from another one in these steps, whose base may be of a later one."""
    increments = [increment for increment in case.check.copy.increments.values() if after < increment.step <= to]
    return any(one.state == state != one.from_state for increment in increments for one in increment.derived)


def _owner(key: str, name: keys.Name) -> str:
    return key if name.kind is K.BASE else key.rpartition("/")[0]


def _replace_base(case: Case, nvme: Backend, chain: Chain, old: str, base: Base, slots: list[bytes]) -> Chain:
    """Put a base in the place of a damaged one, which is set aside, in one transaction; gives the head record that lists it."""
    new = keys.base(chain.generation, base.spec.state, base.step)
    steps = [base.step if state == base.spec.state else step for state, step in zip(chain.base_states, chain.base_steps, strict=True)]
    chain = replace(chain, base_steps=tuple(steps))
    there = [name for name in nvme.list(old) if name == old or name.startswith(f"{old}/")]
    aside: list[Item] = [(keys.quarantined(case.now_unix_s, name), nvme.get(name)) for name in there]
    made: list[Item] = [(slot_key(new, number), content) for number, content in enumerate(slots)]
    gone: list[Item] = [(name, None) for name in there]
    nvme.put_many([*aside, *gone, *made, (new, encode(base)), (keys.CHAIN, encode(chain))])
    return chain


def _state_at(manifest: Full, state: int) -> int | None:
    return next((at for at, spec in enumerate(manifest.states) if spec.state == state), None)


def _base(case: Case, folder: str, manifest: Full, at: int, chain: Chain, step: int) -> tuple[Base, list[bytes]] | None:
    """A base of state number `at` of a full checkpoint, and the bytes of its slots; `None` if they are not all right."""
    spec = manifest.states[at]
    segments: list[Segment] = []
    slots: list[bytes] = []
    for tensor in spec.tensors:
        size = ITEM_BYTES[tensor.dtype]
        elements, every = tensor_bytes(tensor) // size, SEGMENT_BYTES_MAX // size
        for start in range(0, elements, every):
            wanted = Segment(tensor.name, start, min(start + every, elements), "raw", 1.0, len(segments), 0, b"")
            content = tensor_range(case.objects, folder, manifest, at, wanted) or b""
            segments.append(replace(wanted, stored_bytes=len(content), digest=digest(content)))
            slots.append(content)
    base = Base(chain.run, chain.generation, chain.chain, step, spec, manifest.digests[at], tuple(segments))
    return (base, slots) if senseless(base) is None else None


def rebuild_chain(case: Case) -> None:
    """The head record of the chain, from the bases and the linked increments that are there, if they are complete."""
    copy = case.check.copy
    if copy.chain is not None or case.nvme is None or not any(True for _ in case.damaged(Tier.NVME, K.CHAIN)):
        return
    chain = _chain_of(case.nvme, copy, case.run)
    if chain is not None and _complete(case, chain):
        what = f"made anew from {len(chain.base_states)} bases and the increments from step {chain.anchor_step + 1} on"
        case.put(Tier.NVME, keys.CHAIN, encode(chain), what, keep=True)


def _chain_of(nvme: Backend, copy: CopyRecords, run: str) -> Chain | None:
    parsed = [(key, name) for key in copy.names if (name := keys.parse(key)) is not None]
    generations = {name.generation for _, name in parsed if name.kind is K.INCREMENT}
    if len(generations) != 1:
        return None
    (generation,) = generations
    steps = sorted(name.step for _, name in parsed if name.kind is K.INCREMENT)
    bases = sorted((name.state, name.step) for _, name in parsed if name.kind is K.BASE and name.generation == generation)
    try:
        linked = [decode(nvme.get(keys.increment(generation, step)), Linked) for step in steps]
        wrote = max(decode(entry.entry, Increment).incarnation for entry in linked)
    except FormatError:
        return None
    fence = wrote if copy.fence is None else max(wrote, copy.fence.incarnation)
    states, base_steps = tuple(state for state, _ in bases), tuple(step for _, step in bases)
    return Chain(run, generation, CHAIN, wrote, fence, steps[0] - 1, linked[0].previous, states, base_steps, ())


def _complete(case: Case, chain: Chain) -> bool:
    """Whether no base is missing: a slot without its record, or a state of a full checkpoint that is nowhere, would say so."""
    copy, bases = case.check.copy, list[Base]()
    for state, step in zip(chain.base_states, chain.base_steps, strict=True):
        content = case.content(Tier.NVME, keys.base(chain.generation, state, step))
        try:
            bases.append(read(content or b"", Base))
        except FormatError:
            return False
    names = [(key, name) for key in copy.names if (name := keys.parse(key)) is not None and name.generation == chain.generation]
    lost = {key.rpartition("/")[0] for key, name in names if name.kind is K.BASE_SLOT} - {key for key, name in names if name.kind is K.BASE}
    known = {base.spec.state for base in bases}
    listed = {spec.state for _, manifest in case.manifests() for spec in manifest.states if manifest.generation == chain.generation}
    return not lost and senseless(chain) is None and listed <= known
