"""The order and the grouping of writes that FORMAT.md section 8 promises, watched from below while a job trains and restarts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adacheck import start, store
from adacheck.backends import registry
from adacheck.backends.base import Backend, Created, Exists, Expect, Item, Parts
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.wrappers import Wrapper
from adacheck.manifests import keys
from adacheck.manifests.encoding import decode
from adacheck.manifests.record import Chain
from tests.golden.make_golden import train

K = keys.Kind


@dataclass(frozen=True)
class Transaction:
    """One `put_many` on NVMe: what was put and deleted, in order; its condition and the fence before it; and what is there after it."""

    put: tuple[str, ...]
    deleted: tuple[str, ...]
    expect: Expect | None
    fence: bytes | None
    chain: Chain | None
    bases: frozenset[tuple[int, int]]


def kinds(names: Iterable[str]) -> list[keys.Kind]:
    return [name.kind for key in names if (name := keys.parse(key)) is not None]


def parsed(names: Iterable[str], kind: keys.Kind) -> list[keys.Name]:
    return [name for key in names if (name := keys.parse(key)) is not None and name.kind is kind]


class Watched(LmdbBackend):
    """LMDB that tells what it was asked to write."""

    events: list[Transaction | str]

    def put_many(self, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        put, deleted, fence = list[str](), list[str](), self._now(keys.FENCE)

        def noted() -> Iterator[Item]:
            for key, parts in items:
                (deleted if parts is None else put).append(key)
                yield key, parts

        outcome = super().put_many(noted(), expect=expect)
        content = self._now(keys.CHAIN)
        bases = frozenset((name.state, name.step) for name in parsed(self.list("g"), K.BASE))
        chain = decode(content, Chain) if content is not None else None
        self.events.append(Transaction(tuple(put), tuple(deleted), expect, fence, chain, bases))
        return outcome

    def _now(self, key: str) -> bytes | None:
        return self.get(key) if self.stat(key) is not None else None


class WatchedObjects(Wrapper):
    """An object tier that tells the names it was given, `!` before those that were exclusive."""

    def __init__(self, backend: Backend, events: list[Transaction | str]) -> None:
        super().__init__(backend)
        self._events = events

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        outcome = super().put(key, parts, exclusive=exclusive)
        self._events.append(f"!{key}" if exclusive else key)
        return outcome


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[Transaction | str]]]:
    """What two starts of the golden job wrote to either tier, in order: 9 steps from nothing, then 2 after a restore."""
    root, written = tmp_path_factory.mktemp("watched"), list[list[Transaction | str]]()
    open_backend = registry.open_backend
    with pytest.MonkeyPatch.context() as patch:
        for steps in (9, 2):
            events: list[Transaction | str] = []

            def opened(*args: Any, events: list[Transaction | str] = events) -> Backend:
                return WatchedObjects(open_backend(*args), events)

            patch.setattr(Watched, "events", events, raising=False)
            patch.setattr(start, "LmdbBackend", Watched)
            patch.setattr(store, "open_backend", opened)
            train(root, steps, {})
            written.append(events)
    yield written


def transactions(events: list[Transaction | str]) -> list[Transaction]:
    return [event for event in events if isinstance(event, Transaction)]


def test_every_transaction_expects_the_fence_of_its_writer(starts: list[list[Transaction | str]]) -> None:
    for events in starts:
        first, *rest = transactions(events)
        assert first.put == (keys.FENCE,) and len(rest) > 5
        assert all(each.expect == Expect(keys.FENCE, each.fence) and each.fence is not None for each in rest)
        assert all(keys.FENCE not in (*each.put, *each.deleted) for each in rest)


def test_an_increment_is_there_when_its_record_is_which_comes_last(starts: list[list[Transaction | str]]) -> None:
    done = list[int]()
    for each in (each for events in starts for each in transactions(events)):
        of_steps = [name for key in each.put if (name := keys.parse(key)) is not None and name.kind in (K.INCREMENT, K.INCREMENT_SLOT)]
        for name in of_steps:
            assert name.step == len(done) + 1, "nothing is written for a step after its record, nor before that of the step before"
            if name.kind is K.INCREMENT:
                done.append(name.step)
        if K.INCREMENT in kinds(each.put):
            assert [name.kind for name in of_steps][-2:] == [K.INCREMENT_SLOT, K.INCREMENT], "with its last segments"
    assert done == list(range(1, 12))


def test_the_head_record_lists_the_bases_there_are(starts: list[list[Transaction | str]]) -> None:
    replaced = 0
    for each in (each for events in starts for each in transactions(events)):
        if K.BASE in kinds((*each.put, *each.deleted)):
            assert each.put[-1] == keys.CHAIN
            replaced += K.BASE in kinds(each.put) and K.BASE in kinds(each.deleted)
        if each.chain is not None:
            assert frozenset(zip(each.chain.base_states, each.chain.base_steps, strict=True)) == each.bases
    assert replaced > 3


def test_increments_go_together_with_the_anchor_that_follows_them(starts: list[list[Transaction | str]]) -> None:
    gone = []
    for each in transactions(starts[0]):
        dropped = [name.step for name in parsed(each.deleted, K.INCREMENT)]
        if dropped:
            assert each.put == (keys.CHAIN,) and each.chain is not None and each.chain.anchor_step == max(dropped)
            gone += dropped
    assert gone == list(range(1, len(gone) + 1)) and gone


def test_a_full_checkpoint_is_data_then_manifest_then_an_exclusive_version(starts: list[list[Transaction | str]]) -> None:
    names = [event for events in starts for event in events if isinstance(event, str)]
    manifests = [at for at, name in enumerate(names) if name.endswith("/manifest.msgpack")]
    assert len(manifests) == 3
    for at in manifests:
        folder = names[at].rpartition("/")[0]
        assert [name.startswith(folder) for name in names[: at + 1]].count(True) == 4, "shard, opaque items, history and manifest"
        assert not any(name.startswith(folder) for name in names[at + 1 :])
        assert names[at + 1].startswith("!versions/")
    assert all(name.startswith("!") for name in names if not name.startswith("full/"))


def test_the_fork_is_written_before_any_copy_is_touched(starts: list[list[Transaction | str]]) -> None:
    for number, events in enumerate(starts, start=1):
        taken, fork = events.index(f"!{keys.incarnation(number)}"), events.index(f"!{keys.fork(number)}")
        on_nvme = [at for at, event in enumerate(events) if isinstance(event, Transaction)]
        assert taken < on_nvme[0] < fork < on_nvme[1], "the incarnation, the fence, the fork, and only then the copy"


def test_watching_is_what_was_watched(tmp_path: Path) -> None:
    """The recorder notes both sides of a transaction, so that the tests above have something to look at."""
    events: list[Transaction | str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watched, "events", events, raising=False)
        with Watched(tmp_path / "x") as nvme:
            nvme.put_many([(keys.FENCE, b"1"), (keys.base(1, 0, 3), b"2")])
            nvme.put_many([(keys.base(1, 0, 3), None)], expect=Expect(keys.FENCE, b"1"))
    first, second = transactions(events)
    assert (first.put, first.fence, first.bases) == ((keys.FENCE, keys.base(1, 0, 3)), None, frozenset([(0, 3)]))
    assert (second.deleted, second.fence, second.bases) == ((keys.base(1, 0, 3),), b"1", frozenset())
