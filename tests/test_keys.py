"""Object names: exactly the documented forms, in numeric order, and back to what they mean."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck.backends.base import check_key
from adacheck.keeper.stored import slot_key
from adacheck.manifests import keys
from adacheck.manifests.errors import OutOfRange
from adacheck.manifests.keys import Kind, Name

LONG, SHORT, SHARDS = st.integers(0, 10**8 - 1), st.integers(0, 10**6 - 1), st.integers(1, 99_999)
STEPS = st.integers(0, 10**12 - 1)
IDS = st.text("0123456789abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=32)
FULL = {"incarnation": LONG, "step": STEPS, "id": IDS}

FIELDS: dict[Kind, dict[str, st.SearchStrategy[Any]]] = {
    Kind.CHAIN: {},
    Kind.FENCE: {},
    Kind.INCREMENT: {"generation": LONG, "step": STEPS},
    Kind.INCREMENT_SLOT: {"generation": LONG, "step": STEPS, "slot": SHORT},
    Kind.BASE: {"generation": LONG, "state": SHORT, "step": STEPS},
    Kind.BASE_SLOT: {"generation": LONG, "state": SHORT, "step": STEPS, "slot": SHORT},
    Kind.STAGED: {"generation": LONG, "state": SHORT, "step": STEPS},
    Kind.STAGED_SLOT: {"generation": LONG, "state": SHORT, "step": STEPS, "slot": SHORT},
    Kind.HISTORY: {"number": LONG},
    Kind.RUN: {},
    Kind.INCARNATION: {"incarnation": LONG},
    Kind.FORK: {"incarnation": LONG},
    Kind.VERSION: {"incarnation": LONG, "number": LONG},
    Kind.SHARD: FULL | {"shards": st.just(99_999), "shard": SHARDS},
    Kind.OPAQUE: FULL,
    Kind.HISTORY_COPY: FULL,
    Kind.MANIFEST: FULL,
}
FOLDER = keys.full_folder(3, 1000, "4f0c")
EXAMPLES = {
    keys.CHAIN: ("chain", Name(Kind.CHAIN)),
    keys.FENCE: ("fence", Name(Kind.FENCE)),
    keys.increment(2, 17): ("g00000002/inc/s000000000017", Name(Kind.INCREMENT, generation=2, step=17)),
    keys.increment_slot(2, 17, 5): ("g00000002/inc/s000000000017/000005", Name(Kind.INCREMENT_SLOT, generation=2, step=17, slot=5)),
    keys.base(2, 8, 17): ("g00000002/base/000008/s000000000017", Name(Kind.BASE, generation=2, state=8, step=17)),
    slot_key(keys.base(2, 8, 17), 5): (
        "g00000002/base/000008/s000000000017/000005",
        Name(Kind.BASE_SLOT, generation=2, state=8, step=17, slot=5),
    ),
    keys.staged(2, 17, 8): ("g00000002/full/s000000000017/000008", Name(Kind.STAGED, generation=2, step=17, state=8)),
    slot_key(keys.staged(2, 17, 8), 5): (
        "g00000002/full/s000000000017/000008/000005",
        Name(Kind.STAGED_SLOT, generation=2, step=17, state=8, slot=5),
    ),
    keys.history(12): ("history/c00000012", Name(Kind.HISTORY, number=12)),
    keys.RUN: ("run.msgpack", Name(Kind.RUN)),
    keys.incarnation(3): ("incarnations/i00000003.msgpack", Name(Kind.INCARNATION, incarnation=3)),
    keys.fork(3): ("forks/i00000003.msgpack", Name(Kind.FORK, incarnation=3)),
    keys.version(3, 12): ("versions/i00000003/v00000012.msgpack", Name(Kind.VERSION, incarnation=3, number=12)),
    f"{FOLDER}/{keys.shard_name(3, 8)}": (
        "full/i00000003/step-000000001000-4f0c/shard-00003-of-00008.safetensors",
        Name(Kind.SHARD, incarnation=3, step=1000, id="4f0c", shard=3, shards=8),
    ),
    keys.opaque(FOLDER): (
        "full/i00000003/step-000000001000-4f0c/opaque.msgpack",
        Name(Kind.OPAQUE, incarnation=3, step=1000, id="4f0c"),
    ),
    keys.history_copy(FOLDER): (
        "full/i00000003/step-000000001000-4f0c/history.msgpack",
        Name(Kind.HISTORY_COPY, incarnation=3, step=1000, id="4f0c"),
    ),
    keys.manifest(FOLDER): (
        "full/i00000003/step-000000001000-4f0c/manifest.msgpack",
        Name(Kind.MANIFEST, incarnation=3, step=1000, id="4f0c"),
    ),
}


@st.composite
def names(draw: st.DrawFn, kind: Kind | None = None) -> Name:
    chosen = draw(st.sampled_from(Kind)) if kind is None else kind
    return Name(chosen, **{field: draw(strategy) for field, strategy in FIELDS[chosen].items()})


@pytest.mark.parametrize("made", EXAMPLES)
def test_names_have_the_documented_forms(made: str) -> None:
    expected, meaning = EXAMPLES[made]
    assert made == expected
    assert keys.parse(made) == meaning
    assert keys.key_of(meaning) == made


def test_every_kind_has_an_example() -> None:
    assert {meaning.kind for _, meaning in EXAMPLES.values()} == set(Kind) == set(FIELDS)


@given(names())
def test_round_trip_of_any_name(name: Name) -> None:
    key = keys.key_of(name)
    assert keys.parse(key) == name
    assert check_key(key) == key


@given(st.data())
def test_order_of_names_is_the_order_of_numbers(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([kind for kind in Kind if kind not in (Kind.OPAQUE, Kind.HISTORY_COPY, Kind.MANIFEST, Kind.SHARD)]))
    order = list(FIELDS[kind])
    if kind in (Kind.STAGED, Kind.STAGED_SLOT):
        order = ["generation", "step", "state", "slot"][: len(order)]
    one, other = data.draw(names(kind)), data.draw(names(kind))
    if data.draw(st.booleans()) and order:  # differ only in the last number, where chance would hardly ever look
        other = Name(kind, **{field: getattr(one, field) for field in order[:-1]}, **{order[-1]: getattr(other, order[-1])})
    numbers = [tuple(getattr(name, field) for field in order) for name in (one, other)]
    assert (keys.key_of(one) < keys.key_of(other)) == (numbers[0] < numbers[1])


@given(STEPS.filter(lambda step: step > 0), SHORT)
def test_slots_of_a_step_lie_between_its_record_and_the_next(step: int, slot: int) -> None:
    assert keys.increment(1, step - 1) < keys.increment(1, step) < keys.increment_slot(1, step, slot)
    if step + 1 < 10**12:
        assert keys.increment_slot(1, step, slot) < keys.increment(1, step + 1)


def test_prefixes_begin_what_they_should_and_nothing_else() -> None:
    every = [*sorted(expected for expected, _ in EXAMPLES.values()), keys.increment(3, 17), keys.base(2, 9, 17), keys.staged(2, 18, 8)]

    def under(prefix: str) -> set[Kind]:
        return {name.kind for key in every if key.startswith(prefix) and (name := keys.parse(key))}

    on_nvme = {Kind.INCREMENT, Kind.INCREMENT_SLOT, Kind.BASE, Kind.BASE_SLOT, Kind.STAGED, Kind.STAGED_SLOT}
    assert under(keys.generation_prefix(2)) == on_nvme
    assert under(keys.generation_prefix(3)) == {Kind.INCREMENT}
    assert under(keys.increments_prefix(2)) == {Kind.INCREMENT, Kind.INCREMENT_SLOT}
    assert under(keys.all_staged_prefix(2)) == {Kind.STAGED, Kind.STAGED_SLOT}
    assert under(keys.staged_prefix(2, 18)) == {Kind.STAGED}
    assert under(keys.INCARNATIONS_PREFIX) == {Kind.INCARNATION}
    assert under(keys.FORKS_PREFIX) == {Kind.FORK}
    assert under(keys.VERSIONS_PREFIX) == under(keys.versions_prefix(3)) == {Kind.VERSION}
    assert under(keys.versions_prefix(4)) == set()
    assert under(keys.FULL_PREFIX) == {Kind.SHARD, Kind.OPAQUE, Kind.HISTORY_COPY, Kind.MANIFEST}


@pytest.mark.parametrize(
    "key",
    [
        "",
        "chain/",
        "chain\n",
        "Chain",
        "g2/inc/s000000000017",
        "g00000002/inc/s000000000017/",
        "g00000002/inc/s0000000000017",
        "g0000000٢/inc/s000000000017",
        "g00000002/inc/s-00000000017",
        "g00000002/inc/s000000000017/000005/1",
        "g00000002/base/s000000000017",
        "x/run.msgpack",
        "run_msgpack",
        "versions/i00000003/v00000012.msgpack.tmp",
        "full/i00000003/step-000000001000-4F0C/manifest.msgpack",
        "full/i00000003/step-000000001000-/manifest.msgpack",
        "full/i00000003/step-000000001000-4f0c/shard-00009-of-00008.safetensors",
        "full/i00000003/step-000000001000-4f0c/shard-00000-of-00008.safetensors",
        "full/i00000003/step-000000001000-4f0c/notes.txt",
    ],
)
def test_other_names_mean_nothing(key: str) -> None:
    assert keys.parse(key) is None


@given(st.text(max_size=60))
def test_parse_takes_any_text(key: str) -> None:
    name = keys.parse(key)
    assert name is None or keys.key_of(name) == key


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keys.increment(1, 10**12), "step 1000000000000 does not fit the 12 digits"),
        (lambda: keys.increment(-1, 1), "generation -1"),
        (lambda: keys.increment_slot(1, 1, 10**6), "slot 1000000"),
        (lambda: keys.staged(1, 1, 10**6), "state 1000000"),
        (lambda: keys.version(1, 10**8), "number 100000000"),
        (lambda: keys.shard_name(0, 8), "shard 0 of 8"),
        (lambda: keys.shard_name(9, 8), "shard 9 of 8"),
        (lambda: keys.shard_name(1, 100_000), "shards 100000"),
        (lambda: keys.full_folder(1, 1, ""), "id ''"),
        (lambda: keys.full_folder(1, 1, "a/b"), "id 'a/b'"),
        (lambda: keys.full_folder(1, 1, "a\n"), "id"),
        (lambda: keys.key_of(Name(Kind.SHARD, id="a", shard=3, shards=2)), "shard 3 of 2"),
    ],
)
def test_numbers_that_would_break_the_order_are_refused(make: Any, message: str) -> None:
    with pytest.raises(OutOfRange, match=message):
        make()
