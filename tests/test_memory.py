"""The in-memory backend, which is also the model that other tests stand on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from adacheck.backends.base import Backend, Item
from adacheck.backends.errors import Busy
from adacheck.backends.memory import MemoryBackend
from tests.backend_suite import BackendTests


class TestMemory(BackendTests):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        with MemoryBackend() as backend:
            yield backend

    def test_closing_inside_a_batch_is_refused(self, backend: Backend) -> None:
        def items() -> Iterator[Item]:
            yield "a", b"1"
            backend.close()

        with pytest.raises(Busy, match="inside one of its own calls"):
            backend.put_many(items())
        assert list(backend.list("")) == []
