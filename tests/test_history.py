"""The history of a run: every step once, bounded, continued by whoever comes next, and never in the way of a restore."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from adacheck import history
from adacheck.backends.errors import Full
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.history import CHUNK_ROWS, CHUNKS_KEPT, History, Row
from adacheck.history_sources import read_rows
from adacheck.incarnations import read_run
from adacheck.manifests import keys
from adacheck.sources import gather
from adacheck.tools import fsck
from tests.damaged_store import Copy
from tests.faults import Faulty
from tests.test_outage import Switch, steps
from tests.tiny_run import Process, plain_objects
from tests.tool_run import run_tool
from tests.training import nvme_folder

RUN = "6a7c1d5e-8f10-4c2b-9a3d-0123456789ab"


def row(step: int) -> Row:
    return Row(step, 1.5e9 + step, step * 7, 0, 0, step * 3, 5, step * 11, step, step - 1, step - 2, -1)


def filled(history_: History, first: int, last: int) -> History:
    for step in range(first, last + 1):
        history_ = history.add(history_, row(step))
    return history_


def rows_of(content: bytes) -> list[tuple[int, Row]]:
    return [(chunk.incarnation, row) for chunk, _ in history.intact(history.parts(content), RUN) for row in history.rows(chunk)]


def test_rows_come_back_in_order() -> None:
    past = filled(History(RUN, 3), 1, 3 * CHUNK_ROWS + 5)
    assert rows_of(history.whole(past)) == [(3, row(step)) for step in range(1, 3 * CHUNK_ROWS + 6)]
    assert history.whole(History(RUN, 3)) == b""


def test_only_what_is_new_is_stored_and_all_of_it() -> None:
    """A store that is given what each row asks for holds what the history holds."""
    past, stored = History(RUN, 1), dict[int, bytes]()
    for step in range(1, 100):
        past = history.add(past, row(step))
        items = list(history.unstored(past))
        assert len(items) <= 2 and all(content is not None for _, content in items)
        if step % 10 == 0:
            continue  # a store that fails now and then is given the rest later
        stored.update({number: content for number, content in items if content is not None})
        past = replace(past, stored=past.number)
        assert b"".join(content for _, content in sorted(stored.items())) == history.whole(past)


def test_the_oldest_chunks_are_dropped_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHUNK_ROWS * CHUNKS_KEPT == 102_400
    monkeypatch.setattr(history, "CHUNKS_KEPT", 9)
    past, stored = History(RUN, 1), dict[int, bytes]()
    for step in range(1, CHUNK_ROWS * 12):
        past = history.add(past, row(step))
        for number, content in history.unstored(past):
            if content is None:
                stored.pop(number, None)
            else:
                stored[number] = content
        past = replace(past, stored=past.number)
        assert len(stored) == len(history.parts(history.whole(past))) <= 9
    assert sorted(stored) == list(range(3, 12))
    assert b"".join(content for _, content in sorted(stored.items())) == history.whole(past)
    later = history.resumed(history.begin(RUN, 2, history.intact(history.parts(history.whole(past)), RUN), stored=True), 3)
    assert len(history.parts(history.whole(history.add(later, row(1))))) == 9 and later.number == 12


def test_a_chunk_fits_a_page_whatever_its_numbers() -> None:
    huge = Row((1 << 64) - 1, 1e300, *[(1 << 64) - 1] * 5, *[(1 << 64) - 1] * 5)
    past = History(RUN, (1 << 64) - 1, number=10**8 - 1)
    for _ in range(CHUNK_ROWS):
        past = history.add(past, huge)
    assert len(past.rows) == CHUNK_ROWS and len(history.current(past)) <= 4080
    assert history.BYTES_MAX >= CHUNKS_KEPT * 4096


def test_damage_costs_the_rows_it_hits() -> None:
    content = bytearray(history.whole(filled(History(RUN, 1), 1, 3 * CHUNK_ROWS)))
    second = len(history.parts(bytes(content))[0])
    content[second + 200] ^= 1
    assert [row.step for _, row in rows_of(bytes(content))] == [*range(1, CHUNK_ROWS + 1), *range(2 * CHUNK_ROWS + 1, 3 * CHUNK_ROWS + 1)]
    content[second + 200] ^= 1
    content[second + 12] ^= 1  # the length of a record: where the next begins is not known then
    assert [row.step for _, row in rows_of(bytes(content))] == list(range(1, CHUNK_ROWS + 1))
    assert history.intact([b"", b"x" * 100, history.current(filled(History("another", 1), 1, 2))], RUN) == []


def read(root: Path, *, nvme: bool = True) -> list[tuple[int, Row]]:
    """What a reader finds in the store of a `Process`."""
    with plain_objects(root) as objects:
        run = read_run(objects)
        assert run is not None
        if not nvme:
            return read_rows(gather(run.run, objects, None))
        with LmdbBackend(nvme_folder(root), create=False, read_only=True) as copy:
            return read_rows(gather(run.run, objects, copy))


def stored_rows(root: Path, *, nvme: bool = True) -> list[tuple[int, int]]:
    """Incarnation and step of each row that a reader finds."""
    return [(incarnation, row.step) for incarnation, row in read(root, nvme=nvme)]


def test_every_step_has_a_row_and_steps_done_again_have_two(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.ckpt.restore()
    steps(first, 6)
    first.abandon()
    second = Process(tmp_path)
    assert second.ckpt.restore(4) == 4
    steps(second, 3)
    second.abandon()
    third = Process(tmp_path)
    assert third.ckpt.restore() == 7, "from NVMe, which is swept then"
    steps(third, 1)
    third.abandon()
    assert stored_rows(tmp_path) == [*((1, step) for step in range(1, 7)), *((2, step) for step in range(5, 8)), (3, 8)]


def test_a_row_says_what_the_status_said(tmp_path: Path) -> None:
    process, said = Process(tmp_path), []
    process.ckpt.restore()
    for _ in range(12):
        process.step()
        said.append(process.ckpt.status())
    process.abandon()
    rows = [row for _, row in read(tmp_path)]
    for at, (row, status) in enumerate(zip(rows, said, strict=True)):
        stored = {name: getattr(row, f"{name}_bytes") for name in status.payload_bytes}
        assert row.step == status.step and stored == dict(status.payload_bytes)
        before = said[at - 1] if at else None
        assert row.blocked_us == (round(before.blocked_ms * 1e3) if before else 0)
        assert row.committed == (before.committed if before else 0)
        assert row.acked == row.step - 1 and row.committed <= row.acked and row.durable <= row.acked
    assert rows[-1].proven >= 1 and all(a.unix_s <= b.unix_s for a, b in pairwise(rows))


def test_another_host_goes_on_with_the_copy_beside_the_full_checkpoint(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.ckpt.restore()
    steps(first, 9)
    first.abandon()
    copied = stored_rows(tmp_path, nvme=False)
    assert [step for _, step in copied][:8] == list(range(1, 9)), "full checkpoints are at 4 and 8"
    shutil.rmtree(tmp_path / "nvme")
    second = Process(tmp_path)
    assert second.ckpt.restore() == 8
    steps(second, 2)
    second.abandon()
    assert stored_rows(tmp_path) == [*copied, (2, 9), (2, 10)]


def test_without_nvme_the_history_is_beside_the_full_checkpoints(tmp_path: Path) -> None:
    for start, count in ((0, 5), (4, 4)):
        process = Process(tmp_path, nvme="none")
        assert process.ckpt.restore() == start
        steps(process, count)
        process.abandon()
    assert stored_rows(tmp_path, nvme=False)[:7] == [*((1, step) for step in range(1, 5)), *((2, step) for step in range(5, 8))]


def test_rows_of_an_nvme_outage_are_stored_when_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Switch()
    monkeypatch.setattr("adacheck.start.LmdbBackend", lambda path: Faulty(LmdbBackend(path), switch))
    monkeypatch.setattr("adacheck.history.CHUNK_ROWS", 2)
    process = Process(tmp_path, options={"full_every": 1000})
    process.ckpt.restore()
    steps(process, 3)
    switch.error = Full("no room on the test's disk")
    steps(process, 5)
    switch.error = None
    steps(process, 30, until=lambda: not process.ckpt.status().lost_copies)
    steps(process, 1)
    last = process.ckpt.status().step
    process.abandon()
    assert stored_rows(tmp_path) == [(1, step) for step in range(1, last + 1)]
    assert run_tool(fsck.main, Copy(tmp_path).uri, "--read-data").code == 0


@pytest.mark.parametrize("way", ["flip", "empty", "delete"])
def test_damaged_history_costs_no_cut(tmp_path: Path, way: str) -> None:
    first = Process(tmp_path)
    first.ckpt.restore()
    steps(first, 9)
    expected = first.run.snapshot()
    first.abandon()
    store = Copy(tmp_path)
    for kind in (keys.Kind.HISTORY, keys.Kind.HISTORY_COPY):
        for name in store.names(kind):
            content = store.read(kind, name)
            store.write(kind, name, {"flip": content[:99] + bytes([content[99] ^ 1]) + content[100:], "empty": b"", "delete": None}[way])
    ended = run_tool(fsck.main, store.uri, "--read-data")
    assert ended.code == 4 and "newest cut: step 9 from lmdb" in ended.out and "no cut" in ended.out
    second = Process(tmp_path)
    assert second.ckpt.restore() == 9 and second.run.snapshot() == expected
    steps(second, 2)
    second.abandon()
    assert stored_rows(tmp_path) == [(2, 10), (2, 11)]
    shutil.rmtree(tmp_path / "nvme")
    assert "newest cut: step 8 from full/" in run_tool(fsck.main, store.uri).out
    third = Process(tmp_path)
    assert third.ckpt.restore() == 8
    third.abandon()
