"""What every backend must do, as a class to inherit: give it a fixture `backend` and it runs all of this.

```python
class TestMine(BackendTests):
    @pytest.fixture
    def backend(self):
        with MyBackend(...) as backend:
            yield backend
```

What depends on a trait is asked of it only if it claims that trait.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from adacheck.backends.base import Backend, Buffer, Created, Exists, Expect, Item
from adacheck.backends.errors import BackendClosed, InvalidKey, NotFound
from tests.backend_machine import machine_for

MIB = 1 << 20
BAD_KEYS = ("", "/a", "a/", "a//b", ".", "..", "a/../b", "a b", "a\n", "ä", "a~b", "x" * 481)


class _BrokenError(Exception):
    """What a generator of the tests raises."""


def _content(size: int, seed: int = 1) -> bytes:
    return bytes((i * 31 + seed) % 251 for i in range(min(size, 4096))) * (size // 4096 + 1)


class BackendTests:
    """Inherit it, and define the fixture `backend`: a fresh, empty backend that is closed afterwards."""

    machine_examples: ClassVar[int] = 40
    """How many random histories to compare with a dict; fewer where every call is slow."""

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        raise NotImplementedError("define a fixture `backend`")

    def test_what_was_put_comes_back(self, backend: Backend) -> None:
        for size in (0, 1, 4095, 4096, 70_001, MIB, 4 * MIB):
            content = _content(size)[:size]
            assert backend.put("folder/object.bin", content) == Created()
            assert backend.get("folder/object.bin") == content
            found = backend.stat("folder/object.bin")
            assert found is not None and found.size_bytes == size

    def test_every_kind_of_buffer_is_taken(self, backend: Backend) -> None:
        for kind in (bytes, bytearray, memoryview):
            backend.put("a", kind(b"abc"))
            backend.put("b", [kind(b"abc"), kind(b""), kind(b"def")])
            assert (backend.get("a"), backend.get("b")) == (b"abc", b"abcdef")
            backend.delete("a")
            backend.delete("b")

    def test_no_parts_make_an_empty_object(self, backend: Backend) -> None:
        backend.put("a", [])
        backend.put("b", iter(()), exclusive=True)
        assert (backend.get("a"), backend.get("b")) == (b"", b"")

    def test_a_generator_may_reuse_its_buffer(self, backend: Backend) -> None:
        scratch = bytearray(64 * 1024)

        def parts() -> Iterator[Buffer]:
            for number in range(20):
                scratch[:] = bytes([number]) * len(scratch)
                yield memoryview(scratch)

        backend.put("a", parts())
        assert backend.get("a") == b"".join(bytes([number]) * len(scratch) for number in range(20))

    def test_a_batch_may_reuse_its_buffer(self, backend: Backend) -> None:
        scratch = bytearray(64 * 1024)

        def items() -> Iterator[Item]:
            for number in range(20):
                scratch[:] = bytes([number]) * len(scratch)
                yield f"s/{number:03d}", memoryview(scratch)

        assert backend.put_many(items()) == Created()
        for number in range(20):
            assert backend.get(f"s/{number:03d}") == bytes([number]) * len(scratch)

    def test_a_put_replaces(self, backend: Backend) -> None:
        backend.put("a", b"long before")
        backend.put("a", b"after")
        assert backend.get("a") == b"after"

    def test_an_exclusive_put_never_replaces(self, backend: Backend) -> None:
        for first in (b"", b"first"):
            assert backend.put("a", first, exclusive=True) == Created()
            assert backend.put("a", b"second", exclusive=True) == Exists("a")
            assert backend.put("a", iter([b"third"]), exclusive=True) == Exists("a")
            assert backend.put("a", b"", exclusive=True) == Exists("a")
            assert backend.get("a") == first
            backend.delete("a")

    def test_one_of_many_exclusive_puts_wins(self, backend: Backend) -> None:
        if not backend.traits.exclusive_put:
            pytest.skip("has no exclusive puts")
        outcomes: dict[int, Created | Exists] = {}
        start = threading.Barrier(8)

        def race(number: int) -> None:
            start.wait()
            outcomes[number] = backend.put("a", b"%d" % number, exclusive=True)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [number for number, outcome in outcomes.items() if outcome == Created()]
        assert len(outcomes) == 8 and len(winners) == 1
        assert backend.get("a") == b"%d" % winners[0]

    def test_a_range_is_cut_at_the_end(self, backend: Backend) -> None:
        backend.put("a", b"0123456789")
        for start, stop in ((0, 0), (0, 1), (3, 7), (9, 10), (5, 99), (10, 11), (50, 60), (7, 3)):
            assert backend.get("a", (start, stop)) == b"0123456789"[start:stop]

    def test_what_is_absent_is_said_so(self, backend: Backend) -> None:
        backend.put("folder/a", b"")
        for key in ("a", "folder", "folder/b", "other/a"):
            assert backend.stat(key) is None
            backend.delete(key)
            with pytest.raises(NotFound, match=key):
                backend.get(key)
            with pytest.raises(NotFound, match=key):
                backend.get(key, (0, 0))

    def test_a_listing_is_by_prefix_and_sorted(self, backend: Backend) -> None:
        keys = ["a-b/x", "a.b", "a/b/c", "a/b/d", "a/bb", "a0", "ab", "b/z~".rstrip("~"), "version/v00000010", "version/v00000009"]
        for key in keys:
            backend.put(key, b"x")
        for prefix in ("", "a", "a/", "a/b", "a/b/", "a/b/c", "a/b/cc", "version/v0000001", "z", "/", "..", "../"):
            assert list(backend.list(prefix)) == sorted(key for key in keys if key.startswith(prefix))

    def test_a_listing_is_fresh(self, backend: Backend) -> None:
        assert list(backend.list("a")) == []
        for number in range(3):
            backend.put(f"a/{number}", b"")
            assert len(list(backend.list("a"))) == number + 1
        backend.delete("a/1")
        assert list(backend.list("a/")) == ["a/0", "a/2"]

    def test_a_long_listing_is_whole(self, backend: Backend) -> None:
        keys = [f"many/{number:05d}" for number in range(2100 if backend.traits.atomic_batch else 120)]
        backend.put_many((key, b"x") for key in keys)
        assert list(backend.list("many/")) == keys

    def test_deleting(self, backend: Backend) -> None:
        backend.put("folder/a", b"1")
        backend.delete("folder/a")
        backend.delete("folder/a")
        assert backend.stat("folder/a") is None
        backend.put("folder/a", b"2")
        assert backend.get("folder/a") == b"2"

    def test_a_batch_is_carried_out_in_order(self, backend: Backend) -> None:
        backend.put("gone", b"1")
        outcome = backend.put_many(
            [("a", b"1"), ("gone", None), ("a", [b"2", b"3"]), ("b", b""), ("never", None), ("c", b"1"), ("c", None)]
        )
        assert outcome == Created()
        assert list(backend.list("")) == ["a", "b"]
        assert backend.get("a") == b"23"

    def test_a_batch_is_carried_out_only_as_expected(self, backend: Backend) -> None:
        backend.put("head", b"1")
        assert backend.put_many([("a", b"x")], expect=Expect("head", b"2")) == Exists("head")
        assert backend.put_many([("a", b"x")], expect=Expect("head", None)) == Exists("head")
        assert backend.put_many([("a", b"x")], expect=Expect("none", b"")) == Exists("none")
        assert backend.stat("a") is None
        assert backend.put_many([("a", b"x"), ("head", b"2")], expect=Expect("head", b"1")) == Created()
        assert backend.put_many([("none", b"")], expect=Expect("none", None)) == Created()
        assert (backend.get("a"), backend.get("head"), backend.get("none")) == (b"x", b"2", b"")

    def test_a_batch_may_read_what_was_there_before(self, backend: Backend) -> None:
        backend.put("old/1", b"one")
        backend.put("old/2", b"two")

        def moved() -> Iterator[Item]:
            for key in list(backend.list("old/")):
                yield key.replace("old", "new"), backend.get(key)
                yield key, None

        assert backend.put_many(moved()) == Created()
        assert list(backend.list("")) == ["new/1", "new/2"]
        assert backend.get("new/2") == b"two"

    def test_a_broken_generator_leaves_the_object_as_it_was(self, backend: Backend) -> None:
        if not backend.traits.atomic_put:
            pytest.skip("puts are not atomic")

        def parts() -> Iterator[Buffer]:
            yield b"x" * MIB
            raise _BrokenError

        backend.put("a", b"before")
        for key, exclusive in (("a", False), ("b", False), ("c", True)):
            with pytest.raises(_BrokenError):
                backend.put(key, parts(), exclusive=exclusive)
        assert list(backend.list("")) == ["a"]
        assert backend.get("a") == b"before"

    @pytest.mark.parametrize("error", [_BrokenError, KeyboardInterrupt, GeneratorExit])
    def test_a_broken_batch_leaves_nothing(self, backend: Backend, error: type[BaseException]) -> None:
        def items() -> Iterator[Item]:
            yield "a", b"after"
            yield "b", b"x" * MIB
            yield "c", None
            raise error

        backend.put_many([("a", b"before"), ("c", b"before")])
        with pytest.raises(error):
            backend.put_many(items())
        if backend.traits.atomic_batch:
            assert {key: backend.get(key) for key in backend.list("")} == {"a": b"before", "c": b"before"}
        backend.put("d", b"usable")
        assert backend.get("d") == b"usable"

    def test_a_bad_key_is_refused_everywhere(self, backend: Backend) -> None:
        calls: list[Callable[[str], object]] = [
            lambda key: backend.put(key, b""),
            lambda key: backend.put(key, b"", exclusive=True),
            lambda key: backend.put_many([(key, b"")]),
            lambda key: backend.put_many([(key, None)]),
            lambda key: backend.put_many([], expect=Expect(key, None)),
            lambda key: backend.get(key),
            lambda key: backend.stat(key),
            lambda key: backend.delete(key),
        ]
        for key in BAD_KEYS:
            for call in calls:
                with pytest.raises(InvalidKey):
                    call(key)
        assert list(backend.list("")) == []

    def test_a_key_may_have_480_bytes(self, backend: Backend) -> None:
        key = "/".join(["k" * 239, "l" * 240])
        backend.put(key, b"x")
        assert list(backend.list("kk")) == [key]
        assert backend.get(key) == b"x"

    def test_nothing_works_after_close(self, backend: Backend) -> None:
        backend.put("a", b"1")
        backend.close()
        backend.close()
        for call in (
            lambda: backend.put("a", b""),
            lambda: backend.put_many([]),
            lambda: backend.get("a"),
            lambda: backend.stat("a"),
            lambda: list(backend.list("")),
            lambda: backend.delete("a"),
        ):
            with pytest.raises(BackendClosed):
                call()

    def test_threads_do_not_disturb_each_other(self, backend: Backend) -> None:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(6):
                    content = _content(10_000 * (turn + 1), number + turn)
                    backend.put(f"t{number}/{turn}", content)
                    assert backend.get(f"t{number}/{turn}") == content
                    if turn % 2:
                        backend.delete(f"t{number}/{turn}")
                    assert len(list(backend.list(f"t{number}/"))) == turn // 2 + 1
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    def test_closing_under_way_is_safe(self, backend: Backend) -> None:
        backend.put("a", b"x" * MIB)
        outcomes: list[str] = []
        reading = threading.Barrier(5)

        def read() -> None:
            reading.wait()
            try:
                while True:
                    assert backend.get("a") == b"x" * MIB
            except BackendClosed:
                outcomes.append("closed")

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        reading.wait()
        backend.close()
        for thread in threads:
            thread.join()
        assert outcomes == ["closed"] * 4

    def test_it_behaves_like_a_dict(self, backend: Backend) -> None:
        numbers = itertools.count()
        run_state_machine_as_test(
            lambda: machine_for(backend, f"history-{next(numbers)}/"),  # type: ignore[arg-type]
            settings=settings(max_examples=self.machine_examples, stateful_step_count=20, deadline=None),
        )
