"""Trying again and going slow: what is retried, what never is, and that a lost reply is not mistaken for a lost race."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck.backends.base import Backend, Buffer, Created, Exists, Expect, Item
from adacheck.backends.errors import BackendError, Denied, Full, Unavailable
from adacheck.backends.memory import MemoryBackend
from adacheck.backends.object_store import ObjectStore
from adacheck.backends.retry import Retry
from adacheck.backends.wrappers import Limited, Retrying
from tests.backend_suite import BackendTests
from tests.faults import Fault, Faulty, at_calls, seeded


class TestRetryingOverFaults(BackendTests):
    """The whole suite over a backend that fails every eighth call or so, half of the time after having carried it out."""

    @pytest.fixture
    def backend(self, request: pytest.FixtureRequest) -> Iterator[Backend]:
        faults = seeded(7, 0.12, lambda: Unavailable("passing"), ("get", "stat", "list", "delete", "put"))
        with Retrying(Faulty(MemoryBackend(), faults), Retry(9, sleep=lambda delay_s: None)) as backend:
            if request.node.name in _ONE_SHOT:
                pytest.skip("puts a generator, which is not tried again")
            yield backend


_ONE_SHOT = {
    "test_no_parts_make_an_empty_object",
    "test_a_generator_may_reuse_its_buffer",
    "test_an_exclusive_put_never_replaces",
    "test_a_broken_generator_leaves_the_object_as_it_was",
    "test_it_behaves_like_a_dict",
}


class Anew:
    """Parts made anew each time they are taken, as a shard's are."""

    def __init__(self, make: Callable[[], Iterator[Buffer]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Buffer]:
        return self._make()


class TestLimited(BackendTests):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        with Limited(MemoryBackend(), 1e6, clock=lambda: 0.0, sleep=lambda delay_s: None) as backend:
            yield backend


def _retrying(faults: dict[int, Fault], attempts: int = 4, inner: Backend | None = None) -> tuple[Retrying, Faulty, list[float]]:
    delays: list[float] = []
    faulty = Faulty(inner or MemoryBackend(), at_calls(faults))
    return Retrying(faulty, Retry(attempts, 0.5, 1.5, sleep=delays.append, random=lambda: 0.5)), faulty, delays


def _passing(after: bool = False) -> Fault:
    return Fault(Unavailable("passing"), after)


def test_delays_grow_up_to_a_bound() -> None:
    backend, faulty, delays = _retrying({number: _passing() for number in range(1, 6)}, attempts=6)
    assert backend.put("a", b"1") == Created()
    assert (faulty.calls, delays) == (6, [0.375, 0.75, 1.125, 1.125, 1.125])


@pytest.mark.parametrize("chance", [0.0, 0.999])
def test_delays_are_spread_over_half_of_the_interval(chance: float) -> None:
    delays: list[float] = []
    faulty = Faulty(MemoryBackend(), at_calls({1: _passing()}))
    assert Retrying(faulty, Retry(2, 1.0, sleep=delays.append, random=lambda: chance)).stat("a") is None
    assert delays == [0.5 + chance / 2]


def test_the_last_failure_passes() -> None:
    backend, faulty, delays = _retrying({number: _passing() for number in range(1, 9)}, attempts=3)
    with pytest.raises(Unavailable):
        backend.get("a")
    assert (faulty.calls, len(delays)) == (3, 2)


def test_the_training_scripts_random_numbers_are_left_alone() -> None:
    before = random.getstate()
    faulty = Faulty(MemoryBackend(), at_calls({1: _passing(), 2: _passing()}))
    Retrying(faulty, Retry(sleep=lambda delay_s: None)).put("a", b"1")
    assert faulty.calls == 3 and random.getstate() == before


def test_no_attempt_begins_after_the_time_for_all_of_them() -> None:
    """Each call takes a minute here: the third one would begin after two minutes, and is not made."""
    now_s, calls = 0.0, 0

    def call() -> None:
        nonlocal now_s, calls
        now_s, calls = now_s + 60, calls + 1
        raise Unavailable("silent")

    def sleep(delay_s: float) -> None:
        nonlocal now_s
        now_s += delay_s

    with pytest.raises(Unavailable, match=r"silent; given up after 2 attempts in 120 s"):
        Retry(6, 0.5, total_s=120, sleep=sleep, clock=lambda: now_s)(call)
    assert calls == 2


@pytest.mark.parametrize("error", [Full("full"), Denied("denied")])
def test_only_passing_faults_are_tried_again(error: BackendError) -> None:
    backend, faulty, delays = _retrying({1: Fault(error)})
    with pytest.raises(type(error)):
        backend.put("a", b"1")
    assert (faulty.calls, delays) == (1, [])


def test_a_lost_reply_to_an_exclusive_put_is_our_own() -> None:
    for parts in (b"mine", [b"mi", b"ne"], Anew(lambda: iter([b"m", b"", b"ine"]))):
        backend, _, _ = _retrying({1: _passing(after=True)})
        assert backend.put("version", parts, exclusive=True) == Created()
        assert backend.get("version") == b"mine"


@pytest.mark.parametrize("rival", [b"theirs", b"min", b"mine, and more", b""])
def test_a_race_lost_between_two_attempts_is_lost(rival: bytes) -> None:
    backend, faulty, _ = _retrying({1: _passing()})
    faulty._backend.put("version", rival)
    assert backend.put("version", b"mine", exclusive=True) == Exists("version")


def test_equal_content_without_a_failure_is_a_race_lost() -> None:
    backend, _, _ = _retrying({})
    backend.put("version", b"mine")
    assert backend.put("version", b"mine", exclusive=True) == Exists("version")


def test_a_generator_gets_one_attempt() -> None:
    taken: list[int] = []

    def parts() -> Iterator[Buffer]:
        taken.append(1)
        yield b"x"

    backend, faulty, _ = _retrying({1: _passing(after=True), 2: _passing(after=True)})
    with pytest.raises(Unavailable):
        backend.put("a", parts())
    assert (faulty.calls, len(taken)) == (1, 1)
    assert backend.put("a", Anew(parts)) == Created()
    assert (faulty.calls, len(taken)) == (3, 3)


def test_an_atomic_batch_is_tried_again_only_if_it_can_be() -> None:
    items: list[Item] = [("a", b"1"), ("b", [b"2"]), ("c", None)]
    backend, faulty, _ = _retrying({1: _passing(after=True)})
    assert backend.put_many(items) == Created()
    assert faulty.calls == 2
    once: list[tuple[Iterator[Item] | list[Item], Expect | None]] = [
        (iter(items), None),
        (items, Expect("a", None)),
        ([("a", iter([b"1"]))], None),
    ]
    for given_items, expect in once:
        backend, faulty, _ = _retrying({1: _passing(after=True)})
        with pytest.raises(Unavailable):
            backend.put_many(given_items, expect=expect)
        assert faulty.calls == 1


def test_items_are_tried_again_one_by_one_where_batches_are_not_atomic(tmp_path: Path) -> None:
    with ObjectStore(f"file://{tmp_path}") as store:
        backend, _, _ = _retrying({1: _passing(), 3: _passing(after=True), 6: _passing()}, inner=store)
        items: Iterator[Item] = iter([("a", b"1"), ("b", b"2"), ("a", None)])
        assert backend.put_many(items, expect=Expect("b", None)) == Created()
        assert [*store.list("")] == ["b"]
        assert backend.put_many([("c", b"3")], expect=Expect("b", None)) == Exists("b")
        assert store.stat("c") is None


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, delay_s: float) -> None:
        assert delay_s > 0
        self.now_s += delay_s


@given(sizes=st.lists(st.integers(0, 5 << 20), min_size=1, max_size=6), pause_s=st.floats(0, 3))
def test_a_limit_is_kept_and_idle_time_is_not_saved_up(sizes: list[int], pause_s: float) -> None:
    clock = _Clock()
    backend = Limited(MemoryBackend(), 1 << 20, clock=lambda: clock.now_s, sleep=clock.sleep)
    clock.now_s += pause_s
    start_s = clock.now_s
    for number, size in enumerate(sizes):
        backend.put(f"k/{number}", bytes(size))
    assert clock.now_s - start_s == pytest.approx(sum(sizes) / (1 << 20))
    backend.put_many([("twice", [bytes(1 << 20)] * 2), ("k/0", None)])
    assert len(backend.get("twice")) == 2 << 20
    assert clock.now_s - start_s == pytest.approx(sum(sizes) / (1 << 20) + 4)


def test_threads_share_one_limit() -> None:
    waits: list[float] = []
    lock = threading.Lock()

    def sleep(delay_s: float) -> None:
        with lock:
            waits.append(delay_s)

    backend = Limited(MemoryBackend(), 1000, clock=lambda: 0.0, sleep=sleep)
    threads = [threading.Thread(target=backend.put, args=(f"k/{number}", bytes(500))) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == [0.5, 1.0, 1.5, 2.0]
