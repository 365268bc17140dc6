"""After a keeper had to give up, training goes on and a new generation begins; the old cut stays restorable until then."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck import generations, reattach
from adacheck.backends.base import Created, Exists, Expect, Item, Parts
from adacheck.backends.errors import Full, Unavailable
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.object_store import ObjectStore
from adacheck.background import Background
from adacheck.errors import AdacheckError, Detached
from adacheck.incarnations import newest_incarnation
from adacheck.manifests import keys
from adacheck.manifests.errors import NewerFormat
from adacheck.store import Store
from adacheck.tools import fsck
from tests.faults import Fault, Faulty
from tests.test_interrupted import STEPS_MAX, begin_again, restores_what_is_live
from tests.tiny_run import Process, differing, plain_objects
from tests.tool_run import run_tool

DEADLINE_S = 20


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 8)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("nvme", ["", "none"])
def test_a_keeper_that_gave_up_is_begun_again_with_a_new_base(
    tmp_path: Path, nvme: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generations, "RETRY_STEPS", 3)
    uri = f"file://{tmp_path}/run" + (f"?nvme={nvme}" if nvme else "")
    store = Store.open(uri, full_every=100)
    model, optimizer = make()
    ckpt = store.attach(model, optimizer)
    ckpt.restore()
    for _ in range(10):
        train(model, optimizer)
        ckpt.step()
    ckpt.drain()
    assert ckpt._keeper is not None
    old = weakref.ref(ckpt._keeper.shared.chain)
    ckpt._keeper.shared.fail(Detached("simulated: the keeper lost its window"))
    steps = 10
    while steps < 13 or ckpt.status().failure is not None:  # until its threads have ended and it was begun again
        train(model, optimizer)
        ckpt.step()
        steps += 1
    assert sum("checkpoints have stopped" in record.message for record in caplog.records) == 1, "said once"
    gc.collect()
    assert old() is None, "its shadow is as large as the training state"
    for _ in range(12):
        train(model, optimizer)
        ckpt.step()
    ckpt.drain()
    status = ckpt.status()
    assert status.failure is None
    assert status.committed == status.step == steps + 12
    live = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ckpt.close()

    fresh, fresh_optimizer = make()
    again = Store.open(uri).attach(fresh, fresh_optimizer)
    assert again.restore() == steps + 12
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, live[name])
    again.close()
    checked = run_tool(fsck.main, uri, "--read-data", "--json")
    assert checked.code == 0 and json.loads(checked.out)["findings"] == [], "a generation is left behind without a trace"


def test_after_a_step_that_raised_in_a_thread_that_lives_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the thread is still in the step cannot be known, so the call is refused: once, and then checkpoints begin again."""
    monkeypatch.setattr(generations, "RETRY_STEPS", 1)
    model, optimizer = make()
    ckpt = Store.open(f"file://{tmp_path}/run").attach(model, optimizer)
    ckpt.restore()
    with ThreadPoolExecutor(1) as worker:

        def step() -> None:
            worker.submit(train, model, optimizer).result(DEADLINE_S)
            ckpt.step()

        step()
        optimizer.param_groups[0]["betas"] = ()
        with pytest.raises(ValueError, match="not enough values"):
            step()
        with pytest.raises(AdacheckError, match=r"was in optimizer\.step\(\)"):
            ckpt.step()
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        while ckpt.status().failure is not None:
            step()
        for _ in range(3):
            step()
    ckpt.drain()
    assert ckpt.status().committed == ckpt.status().step
    ckpt.close()


def test_the_old_cut_stays_until_the_new_generation_has_its_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "RETRY_STEPS", 1)
    store = Store.open(f"file://{tmp_path}/run")
    model, optimizer = make()
    ckpt = store.attach(model, optimizer)
    ckpt.restore()
    for _ in range(6):
        train(model, optimizer)
        ckpt.step()
    ckpt.drain()
    at_six = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert ckpt._keeper is not None
    ckpt._keeper.shared.fail(Detached("simulated"))
    while ckpt.status().failure is not None:  # begins again at the end of a step, and has no increment yet
        train(model, optimizer)
        ckpt.step()
    assert ckpt.status().committed == 6
    assert ckpt._keeper is not None and ckpt._start is not None
    ckpt._keeper.stop(10.0)
    ckpt._start.release()

    fresh, fresh_optimizer = make()
    again = Store.open(f"file://{tmp_path}/run").attach(fresh, fresh_optimizer)
    assert again.restore() == 6
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, at_six[name])
    again.close()


def test_an_object_tier_that_fails_while_checkpoints_begin_again_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It took the new incarnation and its fork, and then does not say which full checkpoints there are."""
    monkeypatch.setattr(generations, "RETRY_STEPS", 1)
    puts: list[str] = []

    def fails(call: int, method: str, key: str) -> Fault | None:
        if method == "put":
            puts.append(key)
        begins = keys.fork(2) in puts and "said once" not in puts and method == "list" and key == keys.VERSIONS_PREFIX
        if begins:
            puts.append("said once")
        return Fault(Unavailable("as if the network were gone")) if begins else None

    store = Store.open(f"file://{tmp_path}/run?full_every=1000")
    store.objects = Faulty(store.objects, fails)
    model, optimizer = make()
    ckpt = store.attach(model, optimizer)
    ckpt.restore()
    for _ in range(3):
        train(model, optimizer)
        ckpt.step()
    ckpt.drain()
    assert ckpt._keeper is not None
    ckpt._keeper.shared.fail(Detached("simulated"))
    while ckpt.status().failure is not None:
        train(model, optimizer)
        ckpt.step()
    assert "said once" in puts and "cannot begin again yet: as if the network were gone" in caplog.text
    train(model, optimizer)
    ckpt.step()
    steps = ckpt.status().step
    ckpt.close()
    with Store.open(f"file://{tmp_path}/run").attach(*make()) as again:
        assert again.restore() == steps


class FailsOnce:
    """Part of `extra`."""

    def __init__(self) -> None:
        self.calls, self.fails_at = 0, -1

    def state_dict(self) -> dict[str, int]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyError("not now")
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_a_step_that_raised_half_way_is_no_part_of_any_later_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "RETRY_STEPS", 2)
    item = FailsOnce()
    model, optimizer = make()
    ckpt = Store.open(f"file://{tmp_path}/run").attach(model, optimizer, extra={"item": item})
    ckpt.restore()
    item.fails_at = item.calls + 9
    failed = 0
    steps = 0
    while steps < 30 or ckpt.status().failure is not None:
        train(model, optimizer)
        steps += 1
        try:
            ckpt.step()
        except KeyError:
            failed += 1
    assert failed == 1
    for _ in range(2):
        train(model, optimizer)
        ckpt.step()
        steps += 1
    live = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ckpt.close()
    fresh, fresh_optimizer = make()
    with Store.open(f"file://{tmp_path}/run").attach(fresh, fresh_optimizer, extra={"item": FailsOnce()}) as again:
        assert again.restore() == steps
        assert all(torch.equal(tensor, live[name]) for name, tensor in fresh.state_dict().items())


class Stalling(ObjectStore):
    """An object tier that does not answer while it is `stalled`, and remembers which threads waited for it."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.answers, self.waited = threading.Event(), set[str]()
        self.answers.set()

    def list(self, prefix: str) -> Iterator[str]:
        if not self.answers.is_set():
            self.waited.add(threading.current_thread().name)
            if not self.answers.wait(DEADLINE_S):
                raise Unavailable(f"{prefix} was not listed in time")
        return super().list(prefix)


def test_the_trainer_does_not_wait_for_a_bucket_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "RETRY_STEPS", 2)
    objects = Stalling(f"file://{tmp_path}/objects")
    process = Process(tmp_path, objects=objects, options={"full_every": 10_000})
    process.ckpt.restore()
    for _ in range(4):
        process.step()
    objects.answers.clear()
    assert process.ckpt._keeper is not None
    process.ckpt._keeper.shared.fail(Detached("simulated"))
    while not objects.waited:
        process.step(drain=False)
    for _ in range(5):
        process.step(drain=False)
    assert process.ckpt.status().failure is not None and objects.waited == {"adacheck-again"}
    objects.answers.set()
    while process.ckpt.status().failure is not None:
        process.step(drain=False)
    process.step()
    last = process.ckpt.status().step
    assert process.durable == last
    process.abandon()
    again = Process(tmp_path)
    assert again.ckpt.restore() == last and not differing(again.run.snapshot(), process.run.snapshot())
    again.abandon()


def started(root: Path, objects: ObjectStore | Faulty | None = None, nvme: str = "") -> Process:
    """A process that has trained beyond its first full checkpoint."""
    process = Process(root, objects=objects, nvme=nvme)
    process.ckpt.restore()
    for _ in range(5):
        process.step()
    return process


def number_of(process: Process) -> int:
    assert process.ckpt._start is not None
    return process.ckpt._start.incarnation.incarnation


def test_in_a_tier_that_was_emptied_it_counts_on_from_its_own_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generations, "RETRY_STEPS", 1)
    started(tmp_path).abandon()
    process = started(tmp_path)
    shutil.rmtree(tmp_path / "objects")
    begin_again(process)
    assert number_of(process) == 3 and "its records are back, older checkpoints are not" in caplog.text
    for _ in range(5):
        process.step()
    last = process.ckpt.status().step
    published = process.ckpt.status().published
    assert published is not None and published > last - 5
    process.abandon()
    again = Process(tmp_path)
    assert again.ckpt.restore() == last and not differing(again.run.snapshot(), process.run.snapshot())
    again.abandon()


@pytest.mark.parametrize("seen", ["not the number", "not the fence", "no room for the fence"])
def test_what_a_try_has_taken_unseen_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seen: str
) -> None:
    monkeypatch.setattr(generations, "RETRY_STEPS", 1)
    caplog.set_level(logging.WARNING, "adacheck")
    failed: list[str] = []

    def once(_call: int, method: str, key: str) -> Fault | None:
        if seen == "not the number" and (method, key) == ("put", keys.incarnation(2)) and not failed:
            failed.append(key)
            return Fault(Unavailable("the reply was lost"), after=True)
        return None

    put_many = LmdbBackend.put_many

    def fence_once(self: LmdbBackend, items: Iterable[Item], *, expect: Expect | None = None) -> Created | Exists:
        if seen == "not the number" or failed or not isinstance(items, list) or [key for key, _ in items] != [keys.FENCE]:
            return put_many(self, items, expect=expect)
        failed.append(keys.FENCE)
        if seen == "not the fence":
            put_many(self, items, expect=expect)
        raise Full("as if the disk were full")

    process = started(tmp_path, Faulty(ObjectStore(f"file://{tmp_path}/objects"), once))
    monkeypatch.setattr(LmdbBackend, "put_many", fence_once)
    begin_again(process)
    assert failed and caplog.text.count("cannot begin again yet") == 1
    assert number_of(process) == 2
    restores_what_is_live(process)


@pytest.mark.parametrize("fails", ["take_next", "start"])
def test_whatever_keeps_checkpoints_from_beginning_again_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    """A record of a later release, and a process that may not start another thread."""
    monkeypatch.setattr(generations, "RETRY_STEPS", 1)
    process = started(tmp_path)
    errors: list[Exception] = [NewerFormat(9, 1) if fails == "take_next" else RuntimeError("can't start new thread")]
    where = reattach if fails == "take_next" else Background
    whole = getattr(where, fails)

    def once(*args: Any) -> Any:
        if errors and (fails == "take_next" or args[0]._name == "adacheck-again"):  # not the thread that copies
            raise errors.pop()
        return whole(*args)

    monkeypatch.setattr(where, fails, once)
    begin_again(process)
    assert not errors and caplog.text.count("cannot begin again yet") == 1
    restores_what_is_live(process)


class Hanging(ObjectStore):
    """One call of the thread that begins again hangs until `goes_on`: the put of its number, or the listing before its fork."""

    def __init__(self, address: str, hanging: str) -> None:
        super().__init__(address)
        self._hanging, self._listings = hanging, 0
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def put(self, key: str, parts: Parts, *, exclusive: bool = False) -> Created | Exists:
        self._hang(self._hanging == "put", key)
        return super().put(key, parts, exclusive=exclusive)

    def list(self, prefix: str) -> Iterator[str]:
        self._listings += threading.current_thread().name == "adacheck-again" and prefix == keys.INCARNATIONS_PREFIX
        self._hang(self._hanging == "list" and self._listings == 2, prefix)
        return super().list(prefix)

    def _hang(self, here: bool, key: str) -> None:
        if here and threading.current_thread().name == "adacheck-again" and key.startswith(keys.INCARNATIONS_PREFIX):
            self.hangs.set()
            if not self.goes_on.wait(DEADLINE_S):
                raise Unavailable(f"{key} did not go on in time")


def hanging(process: Process, objects: Hanging) -> threading.Event:
    """Trains until checkpoints are about to begin again, and gives what is set when that has come to its end."""
    assert process.ckpt._keeper is not None
    process.ckpt._keeper.shared.fail(Detached("simulated"))
    for _ in range(STEPS_MAX):
        process.step(drain=False)
        if objects.hangs.wait(0.05):
            break
    given_up = process.ckpt._generations._given_up
    assert objects.hangs.is_set() and given_up is not None and given_up.taking is not None
    return given_up.taking.done


@pytest.mark.parametrize("nvme", ["", "none"])
@pytest.mark.parametrize("call", ["put", "list"])
def test_a_thread_that_outlives_its_checkpointer_supersedes_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nvme: str
) -> None:
    monkeypatch.setattr(generations, "RETRY_STEPS", 1)
    objects = Hanging(f"file://{tmp_path}/objects", call)
    closed = started(tmp_path, objects, nvme)
    done = hanging(closed, objects)
    closed.abandon()
    later = Process(tmp_path, objects=objects, nvme=nvme)
    later.ckpt.restore()
    later.step()
    objects.goes_on.set()
    assert done.wait(DEADLINE_S)
    later.ckpt.publish_full()
    later.ckpt.close()
    with plain_objects(tmp_path) as plain:
        assert newest_incarnation(plain) == number_of(later)
    again = Process(tmp_path, nvme=nvme)
    assert again.ckpt.restore() == later.ckpt.status().step and not differing(again.run.snapshot(), later.run.snapshot())
    again.ckpt.close()


def test_a_thread_that_outlives_its_checkpointer_writes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "RETRY_STEPS", 1)
    objects = Hanging(f"file://{tmp_path}/objects", "list")
    process = started(tmp_path, objects, "none")
    done = hanging(process, objects)
    process.abandon()
    objects.goes_on.set()
    assert done.wait(DEADLINE_S)
    assert objects.stat(keys.incarnation(2)) is not None and objects.stat(keys.fork(2)) is None
