"""Records whose digests are right and whose content nobody can have meant: a check and a restore take them the same way.

Hypothesis changes one field of one record of a real store and writes it back as its writer would have: encoded, linked, listed. Then
neither a check nor a restore may raise what it does not promise, and what the check calls clean is restored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adacheck.capture.inventory import take_inventory
from adacheck.check import Check
from adacheck.check_records import Sample
from adacheck.digest import digest
from adacheck.finding import Kind, Severity, Tier
from adacheck.incarnations import read_run
from adacheck.manifests import keys
from adacheck.manifests.chain import append, seal_version
from adacheck.manifests.encoding import decode, encode
from adacheck.manifests.record import (
    STATE_KINDS,
    Base,
    Chain,
    Derived,
    Fork,
    Full,
    HistoryChunk,
    Incarnation,
    Increment,
    Linked,
    Run,
    StateSpec,
    TensorSpec,
    Version,
)
from adacheck.recovery import read_newest
from adacheck.sense import senseless
from adacheck.sense_bytes import ITEM_BYTES, bad_spec
from adacheck.sources import gather
from tests.flipped_store import Content, Small, loaded

K = keys.Kind
CLASSES: dict[keys.Kind, type[Any]] = {
    K.RUN: Run,
    K.INCARNATION: Incarnation,
    K.FORK: Fork,
    K.VERSION: Version,
    K.MANIFEST: Full,
    K.CHAIN: Chain,
    K.FENCE: Incarnation,
    K.BASE: Base,
    K.STAGED: Base,
    K.INCREMENT: Increment,
    K.HISTORY: HistoryChunk,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("small"))


def records(content: Content) -> list[tuple[Tier, str]]:
    """Every record of the store."""
    return [(tier, key) for tier, key, _ in content.every() if (name := keys.parse(key)) is not None and name.kind in CLASSES]


def record_at(content: Content, tier: Tier, key: str) -> Any:
    """The record at a key; of a link, the increment in it."""
    name = keys.parse(key)
    assert name is not None
    held = content.of(tier)[key]
    return decode(decode(held, Linked).entry, Increment) if name.kind is K.INCREMENT else decode(held, CLASSES[name.kind])


def written(content: Content, tier: Tier, key: str, record: Any) -> Content:
    """The store with a record as its writer would have put it: what links to it, or lists it, is right."""
    if isinstance(record, Increment):
        return _relinked(content, key, record)
    if isinstance(record, Version):
        return _resealed(content, key, lambda _: record)
    content = content.with_object(tier, key, encode(record))
    if isinstance(record, Full):
        folder, right = key.rpartition("/")[0], digest(encode(record))

        def listing(version: Version) -> Version:
            fulls = [replace(full, manifest_digest=right) if full.folder == folder else full for full in version.fulls]
            return replace(version, fulls=tuple(fulls))

        for name in [name for name in content.objects if name.startswith(keys.VERSIONS_PREFIX)]:
            content = _resealed(content, name, listing)
    return content


def _relinked(content: Content, key: str, increment: Increment) -> Content:
    names = sorted(name for name in content.nvme if (parsed := keys.parse(name)) is not None and parsed.kind is K.INCREMENT)
    link = decode(content.nvme[key], Linked).previous
    for name in names[names.index(key) :]:
        linked = append(increment if name == key else record_at(content, Tier.NVME, name), link)
        content, link = content.with_object(Tier.NVME, name, encode(linked)), linked.link
    return content


def _resealed(content: Content, key: str, change: Callable[[Version], Version]) -> Content:
    names = sorted(name for name in content.objects if name.startswith(keys.VERSIONS_PREFIX))
    link: bytes | None = None
    for name in names[names.index(key) :]:
        version = record_at(content, Tier.OBJECT, name)
        version = change(version) if name == key else replace(version, previous=link)
        if len(version.previous) == 32:
            version = seal_version(version)
        content, link = content.with_object(Tier.OBJECT, name, encode(version)), version.link
    return content


# One change somewhere in a value

INTS = st.sampled_from([-1, 0, 1, 2, 77, 10**6, 10**8, 10**12, 2**31, 2**62 - 1, 2**63 - 1, -(2**63)])
TEXTS = st.sampled_from(["", "param", "exp_avg", "nonsense", "../../x", "a b", "float32", "float99", "bf16", "raw", "full/x", "ü"])
BLOBS = st.sampled_from([b"", b"\x80", b"\x81", b"x", bytes(31), bytes(32), bytes(33), b"\x93\x01\x02\x03"])
FLOATS = st.sampled_from([0.0, -1.0, math.inf, math.nan, 1e300])


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """The value, one thing in it another."""
    if is_dataclass(value):
        name = draw(st.sampled_from([field.name for field in fields(value)]))
        return replace(value, **{name: draw(changed(getattr(value, name)))})  # type: ignore[type-var]
    if isinstance(value, tuple):
        if not value:
            return ()
        at, how = draw(st.integers(0, len(value) - 1)), draw(st.sampled_from(["change", "drop", "repeat", "swap"]))
        if how == "change":
            return (*value[:at], draw(changed(value[at])), *value[at + 1 :])
        if how == "drop":
            return (*value[:at], *value[at + 1 :])
        return (*value[:at], value[at], *value[at:]) if how == "repeat" else tuple(reversed(value))
    if isinstance(value, bool):
        return not value
    near = {int: INTS | st.sampled_from([-1, 1]).map(lambda by: value + by), str: TEXTS, bytes: BLOBS, float: FLOATS}
    return draw(near[type(value)])


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_a_check_calls_clean_is_restored(small: Small, data: st.DataObject) -> None:
    tier, key = data.draw(st.sampled_from(records(small.content)))
    record = data.draw(changed(record_at(small.content, tier, key)))
    agree(small, written(small.content, tier, key, record))


def agree(small: Small, content: Content) -> set[tuple[str, Kind]]:
    """A check and a restore of the same store agree; gives the damage that the check found."""
    objects, nvme = loaded(content.objects), loaded(content.nvme)
    check = Check(small.config, objects, Sample(1.0), nvme=nvme)
    damage = {(finding.name, finding.kind) for finding in check.findings() if finding.severity is Severity.DAMAGE}
    cut = small.restored(content)
    if check.newest is not None:
        assert cut is not None, f"the check promised step {check.newest.step}"
    if not damage:
        assert cut is not None and check.newest is not None, "the check called it clean"
        assert cut.step == check.newest.step or refused(objects, nvme), f"promised was step {check.newest.step}"
    return damage


def refused(objects: Any, nvme: Any) -> bool:
    """Whether a restore fell past a source because this machine cannot replay the recorded kernel, which no check can know."""
    run = read_run(objects)
    assert run is not None
    sources = gather(run.run, objects, nvme)
    read_newest(sources)
    return any("replay" in line for line in sources.rejected)


def test_every_dtype_of_torch_has_its_size() -> None:
    """But those of quantized tensors, which capture refuses."""
    known = {str(value).removeprefix("torch."): value.itemsize for value in vars(torch).values() if isinstance(value, torch.dtype)}
    stored = {name: size for name, size in known.items() if not name.startswith("q")}
    assert stored == {name: size for name, size in ITEM_BYTES.items() if name in known}


def segment(record: Any, at: int = 0, **fields_: Any) -> Any:
    """The record (an increment: its first gradient) with another segment."""
    if isinstance(record, Increment):
        return replace(record, gradients=(segment(record.gradients[0], at, **fields_), *record.gradients[1:]))
    segments = list(record.segments)
    segments[at] = replace(segments[at], **fields_)
    return replace(record, segments=tuple(segments))


def spec(record: Base, **fields_: Any) -> Base:
    """The base with another tensor spec of its parameter."""
    first = replace(record.spec.tensors[0], **fields_)
    return replace(record, spec=replace(record.spec, tensors=(first, *record.spec.tensors[1:])))


CRAFTED: dict[str, tuple[keys.Kind, Callable[[Any], Any], str]] = {
    "a dtype that does not exist": (K.BASE, lambda base: spec(base, dtype="float99"), "float99"),
    "a negative size": (K.BASE, lambda base: spec(base, shape=(-6, 4), global_shape=(-6, 4)), "not inside"),
    "a tensor of an exabyte": (K.BASE, lambda base: spec(base, shape=(1 << 58,), global_shape=(1 << 58,), offsets=(0,)), "elements"),
    "a codec that does not exist": (K.INCREMENT, lambda one: segment(one, codec="lzma"), "no codec 'lzma'"),
    "a width that no element has": (K.INCREMENT, lambda one: segment(one, codec="raw+zstd3", stored_bytes=1), "raw+zstd3"),
    "a segment past the tensor's end": (K.BASE, lambda base: segment(base, stop=10**9), "elements 0:1000000000"),
    "overlapping segments": (K.INCREMENT, lambda one: segment(one, start=3), "elements 3:"),
    "two segments in one slot": (K.BASE, lambda base: segment(base, 1, slot=base.segments[0].slot), "two segments in slot"),
    "a slot that no name has room for": (K.BASE, lambda base: segment(base, slot=10**6), "slot 1000000"),
    "an event that did not happen": (
        K.INCREMENT,
        lambda one: replace(one, gradients=(replace(one.gradients[0], event=5), *one.gradients[1:])),
        "of event 5 of 1",
    ),
    "a state twice": (K.INCREMENT, lambda one: replace(one, removed=(3, 3)), "names a state twice"),
    "a billion threads": (
        K.INCREMENT,
        lambda one: replace(one, events=(replace(one.events[0], kernel=replace(one.events[0].kernel, threads=10**9)),)),
        "1000000000 threads",
    ),
    "a base below what was pruned": (K.CHAIN, lambda chain: replace(chain, base_steps=(0, *chain.base_steps[1:])), "a base of step 0"),
    "bases without steps": (K.CHAIN, lambda chain: replace(chain, base_steps=()), "0 steps of them"),
    "an incarnation that no name has room for": (K.CHAIN, lambda chain: replace(chain, fence=10**9), "a fence at 1000000000"),
    "a generation that no name has room for": (K.CHAIN, lambda chain: replace(chain, generation=-1), "generation -1"),
    "a folder outside of the store": (
        K.VERSION,
        lambda version: replace(version, fulls=(replace(version.fulls[0], folder="../../etc"), *version.fulls[1:])),
        "the folder '../../etc'",
    ),
    "a status that nobody gives": (
        K.VERSION,
        lambda version: replace(version, fulls=(replace(version.fulls[0], status="fine"), *version.fulls[1:])),
        "'fine'",
    ),
    "fewer digests than states": (K.MANIFEST, lambda full: replace(full, digests=full.digests[1:]), "digests for"),
    "a shard outside of its folder": (
        K.MANIFEST,
        lambda full: replace(full, shards=(replace(full.shards[0], name="../x"), *full.shards[1:])),
        "shards called ['../x']",
    ),
    "a cut before all others": (K.FORK, lambda fork: replace(fork, cut=-2), "a cut at step -2"),
    "a run that leaves its directory": (K.RUN, lambda run: replace(run, run="../../x"), "'../../x'"),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_a_crafted_record_is_malformed_for_a_check_and_not_used_by_a_restore(small: Small, what: str) -> None:
    kind, change, words = CRAFTED[what]
    of_kind = [(tier, key) for tier, key in records(small.content) if (name := keys.parse(key)) is not None and name.kind is kind]
    tier, key = of_kind[0 if kind is K.BASE else -1]
    before = record_at(small.content, tier, key)
    assert senseless(before) is None
    crafted = change(before)
    reason = senseless(crafted)
    assert reason is not None and words in reason
    damage = agree(small, written(small.content, tier, key, crafted))
    assert (key, Kind.MALFORMED) in damage


def test_what_is_said_of_states_that_do_not_exist_is_found(small: Small) -> None:
    """Each increment makes sense by itself; of state 77 there is neither a base nor a value."""
    key = max(key for key in small.content.nvme if (name := keys.parse(key)) is not None and name.kind is K.INCREMENT)
    one: Increment = record_at(small.content, Tier.NVME, key)
    strange = replace(one.gradients[0], state=77)
    events = (replace(one.events[0], groups=(replace(one.events[0].groups[0], states=(77, *one.events[0].groups[0].states)),)),)
    crafted = {
        "a gradient of state 77": replace(one, events=events, gradients=(strange, *one.gradients[1:])),
        "a refresh of state 77": replace(one, refreshes=(replace(one.refreshes[0], state=77),)),
        "derived from state 77": replace(one, derived=(Derived(0, "param", 77, "param"),)),
    }
    for words, increment in crafted.items():
        assert senseless(increment) is None, words
        content = written(small.content, Tier.NVME, key, increment)
        assert (key, Kind.MALFORMED) in agree(small, content), words
        done, after = small.repaired(content)
        assert words in "".join(finding.found for finding in done.found) and not done.damage_left
        small.check_live(small.restored(after))


def test_every_kind_of_state_that_is_captured_makes_sense() -> None:
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    states = take_inventory(model, torch.optim.SGD(model.parameters(), lr=0.1)).states
    assert {live.kind for live in states.values()} == set(STATE_KINDS)
    spec = StateSpec(0, "w", (), "parameter", "optim", True, (TensorSpec("param", "float32", (3,), (3,), (0,)),), b"")
    assert [kind for kind in (*STATE_KINDS, "", "other") if list(bad_spec(replace(spec, kind=kind)))] == ["", "other"]
