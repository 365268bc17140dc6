"""Random histories of calls, each compared with what a dict would say: the heart of `BackendTests`."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adacheck.backends.base import Backend, Created, Exists, Expect, Item
from adacheck.backends.errors import NotFound

KEYS = st.sampled_from(["a", "ab", "a.b", "b/c", "b/cc", "b/d/e", "c-1/v00000001", "c-1/v00000002"])
CONTENTS = st.one_of(st.binary(max_size=20), st.sampled_from([4096, 5000, 70_000]).map(lambda size: b"xy" * (size // 2)))
ITEMS = st.lists(st.tuples(KEYS, st.one_of(st.none(), CONTENTS)), max_size=5)
PREFIXES = st.sampled_from(["", "a", "b", "b/", "b/c", "b/d/", "c-1/v", "d"])


class BackendMachine(RuleBasedStateMachine):
    """`folder` keeps the histories on one backend apart."""

    def __init__(self, backend: Backend, folder: str) -> None:
        super().__init__()
        self._backend, self._folder = backend, folder
        self._model: dict[str, bytes] = {}

    def teardown(self) -> None:
        for key in list(self._backend.list(self._folder)):
            self._backend.delete(key)

    @rule(key=KEYS, content=CONTENTS)
    def put(self, key: str, content: bytes) -> None:
        assert self._backend.put(self._folder + key, content) == Created()
        self._model[key] = content

    @rule(key=KEYS, content=CONTENTS, at=st.integers(0, 100))
    def put_exclusive(self, key: str, content: bytes, at: int) -> None:
        outcome = self._backend.put(self._folder + key, iter([content[:at], content[at:]]), exclusive=True)
        assert outcome == (Exists(self._folder + key) if key in self._model else Created())
        self._model.setdefault(key, content)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self._backend.delete(self._folder + key)
        self._model.pop(key, None)

    @rule(items=ITEMS)
    def put_many(self, items: list[tuple[str, bytes | None]]) -> None:
        assert self._backend.put_many(self._placed(items)) == Created()
        self._apply(items)

    @rule(items=ITEMS, key=KEYS, content=st.one_of(st.none(), CONTENTS), right=st.booleans())
    def put_many_expecting(self, items: list[tuple[str, bytes | None]], key: str, content: bytes | None, right: bool) -> None:
        content = self._model.get(key) if right else content
        outcome = self._backend.put_many(self._placed(items), expect=Expect(self._folder + key, content))
        if self._model.get(key) == content:
            assert outcome == Created()
            self._apply(items)
        else:
            assert outcome == Exists(self._folder + key)

    @rule(key=KEYS, start=st.integers(0, 80_000), size=st.integers(0, 80_000))
    def get(self, key: str, start: int, size: int) -> None:
        try:
            found = self._backend.get(self._folder + key, (start, start + size))
        except NotFound:
            assert key not in self._model
        else:
            assert found == self._model[key][start : start + size]

    @rule(key=KEYS)
    def stat(self, key: str) -> None:
        found = self._backend.stat(self._folder + key)
        assert (None if found is None else found.size_bytes) == (len(self._model[key]) if key in self._model else None)

    @rule(prefix=PREFIXES)
    def list_keys(self, prefix: str) -> None:
        expected = sorted(self._folder + key for key in self._model if key.startswith(prefix))
        assert [*self._backend.list(self._folder + prefix)] == expected

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert {key: self._backend.get(self._folder + key) for key in self._model} == self._model

    def _placed(self, items: list[tuple[str, bytes | None]]) -> list[Item]:
        return [(self._folder + key, content) for key, content in items]

    def _apply(self, items: list[tuple[str, bytes | None]]) -> None:
        for key, content in items:
            if content is None:
                self._model.pop(key, None)
            else:
                self._model[key] = content


def machine_for(backend: Backend, folder: str) -> BackendMachine:
    """A machine with no history, for `run_state_machine_as_test`."""
    return BackendMachine(backend, folder)
