"""What a training script holds: the calls of a checkpointer in every order, what they say, and what they refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import adacheck
from adacheck import deadline, generations
from adacheck.checkpointer import Checkpointer
from adacheck.errors import AdacheckError, Closed, ConfigError, Detached, NoCut, NotDurable, NotRestored, StateMismatch, UnsupportedTensor
from adacheck.keeper.driver import Keeper
from adacheck.keeper.shared import Shared
from tests.survival import adamw, backward, job_of, mlp, plain
from tests.training import Job, kill, opened, restored_bits

make = job_of(plain)


def trained(root: Path, steps: int, job: Job | None = None, **options: Any) -> dict[str, str]:
    """Train a new run to `steps`, close it, and give the job's bits."""
    job = job or make(1)
    with opened(f"file://{root}", job, **options) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, steps, settle=True)
        live = job.bits()
        ckpt.close()
    return live


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def threads_of_other_tests() -> None:
    """What tests before this one left running is not this one's."""
    _before.clear()
    _before.update(threading.enumerate())


def keeper_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("adacheck-") and thread not in _before]


# status, drain, close


def test_status_from_first_to_last(tmp_path: Path) -> None:
    job = make(1)
    with opened(f"file://{tmp_path}", job, refresh=4) as ckpt:
        before = ckpt.status()
        assert (before.step, before.acked, before.committed, before.published, before.proven) == (0, 0, 0, None, None)
        assert dict(before.payload_bytes) == {} and before.failure is None
        assert ckpt.restore() == 0
        job.train(ckpt, 0, 9, settle=True)
        job.train(ckpt, 9, 10)
        ckpt.drain()
        ckpt.publish_full()
        status = ckpt.status()
        assert (status.step, status.acked, status.committed, status.durable, status.published) == (10, 10, 10, 10, 10)
        assert status.proven is not None and 6 <= status.proven <= 10
        assert set(status.payload_bytes) == {"gradient", "value", "refresh", "opaque"}
        assert status.payload_bytes["gradient"] == 4 * sum(p.numel() for p in job.model.parameters())
        assert status.payload_bytes["value"] == 0 and status.payload_bytes["opaque"] > 0
        assert status.blocked_ms > 0 and status.waited_ms >= 0 and status.lost_copies == () and status.failure is None
        assert set(status.cpu_s) == {"log", "apply", "full"}
        with pytest.raises(AttributeError):
            status.step = 1  # type: ignore[misc]


def test_drain_and_close_before_anything_was_done(tmp_path: Path) -> None:
    with opened(f"file://{tmp_path}", make(1)) as ckpt:
        ckpt.drain()
        ckpt.close()
        ckpt.close()
    with opened(f"file://{tmp_path}", make(1)) as ckpt:
        assert ckpt.restore() == 0
        ckpt.drain()
        ckpt.close()
    with opened(f"file://{tmp_path}", make(1)) as ckpt:
        assert ckpt.restore() == 0


def test_close_makes_the_last_step_durable_and_ends_everything(tmp_path: Path) -> None:
    job = make(1)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 7)
        assert len(keeper_threads()) == 4, "copy, log, apply, full"
        ckpt.close()
        assert ckpt.status().durable == 7 and keeper_threads() == []
        hooks: Any = job.optimizer
        assert not hooks._optimizer_step_pre_hooks and not hooks._optimizer_step_post_hooks
        live = job.bits()
        plain(job, 8)  # the script may go on without a checkpointer
    assert restored_bits(f"file://{tmp_path}", make, 7) == live


def test_close_without_nvme_publishes_the_last_step(tmp_path: Path) -> None:
    live = trained(tmp_path, 7, nvme=None)
    assert restored_bits(f"file://{tmp_path}", make, 7, nvme=None) == live


def test_everything_is_refused_after_close(tmp_path: Path) -> None:
    job = make(1)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 2)
        ckpt.close()
        with pytest.raises(Closed, match=r"step\(\) was called after close\(\), which came at step 2"):
            ckpt.step()
        for call in (ckpt.restore, ckpt.drain, ckpt.publish_full):
            with pytest.raises(Closed, match=rf"{call.__name__}\(\)"):
                call()
        ckpt.close()
        assert ckpt.status().step == 2


def test_context_manager_closes(tmp_path: Path) -> None:
    job = make(1)
    with adacheck.Store.open(f"file://{tmp_path}") as store, job.attach(store) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 3)
    assert keeper_threads() == [] and ckpt.status().durable == 3


def test_close_says_what_stopped_the_keeper(tmp_path: Path) -> None:
    job = make(1)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 3, settle=True)
        assert ckpt._keeper is not None
        ckpt._keeper.shared.fail(Detached("the disk has caught fire"))
        job.train(ckpt, 3, 4)
        with pytest.raises(NotDurable, match=r"step 4 .*the disk has caught fire"):
            ckpt.close()
        assert keeper_threads() == []


def test_one_deadline_bounds_all_of_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait takes half of what it is given, on a clock that nothing else moves."""
    now, given = [0.0], dict[str, float]()

    def slow(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def call(self: Any, *args: Any) -> Any:
            given[name] = args[-1]
            now[0] += args[-1] / 2
            return real(self, *args[:-1], 20.0)

        monkeypatch.setattr(kind, name, call)

    job = make(1)
    with opened(f"file://{tmp_path}", job, deadline_s=1000) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 3)
        monkeypatch.setattr(deadline, "clock", lambda: now[0])
        for kind, name in ((Shared, "wait"), (Keeper, "keep_identity"), (Keeper, "stop")):
            slow(kind, name)
        ckpt.close()
    assert given.keys() == {"wait", "keep_identity", "stop"} and given["stop"] > generations.END_S
    assert now[0] + given["stop"] / 2 <= 1000


# threads


class Waiting:
    """Part of `extra` that is saved when it may be."""

    def __init__(self) -> None:
        self.reached, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def state_dict(self) -> dict[str, int]:
        self.reached.set()
        assert self.may_go_on.wait(20)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def started(call: Callable[[], object], name: str) -> threading.Thread:
    thread = threading.Thread(target=call, name=name)
    thread.start()
    return thread


def test_a_second_thread_in_step_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    job, item = make(1), Waiting()
    job.extra = {"item": item}
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 2)
        plain(job, 3)
        item.may_go_on.clear()
        item.reached.clear()
        other = started(ckpt.step, "the-other")
        assert item.reached.wait(20)
        with pytest.raises(AdacheckError, match=r"step\(\) was called by thread MainThread while thread the-other was in step\(\)"):
            ckpt.step()
        item.may_go_on.set()
        other.join(20)
        job.train(ckpt, 3, 4)
        ckpt.close()
        live = job.bits()
        assert ckpt.status().committed == 4 and ckpt.status().failure is None

    def fresh(seed: int) -> Job:
        job = make(seed)
        job.extra = {"item": Waiting()}
        return job

    assert restored_bits(f"file://{tmp_path}", fresh, 4) == live


def test_an_optimizer_that_steps_while_another_thread_is_in_step(tmp_path: Path) -> None:
    """The training goes on; the cut in the making may be of no moment at all, and is none."""
    job, item = make(1), Waiting()
    job.extra = {"item": item}
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 2, settle=True)
        item.may_go_on.clear()
        item.reached.clear()
        other = started(ckpt.step, "the-other")
        assert item.reached.wait(20)
        plain(job, 3)
        item.may_go_on.set()
        other.join(20)
        with pytest.raises(NotDurable, match=r"optimizer.step\(\) was called by thread MainThread while thread the-other was in step\(\)"):
            ckpt.close()
        assert ckpt.status().committed == 2


def test_step_while_another_thread_is_in_the_optimizer(tmp_path: Path) -> None:
    job, item = make(1), Waiting()

    def wait() -> None:
        item.state_dict()

    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 2)
        item.may_go_on.clear()
        job.optimizer.register_step_post_hook(lambda *_: wait())
        hooks: Any = job.optimizer
        hooks._optimizer_step_post_hooks.move_to_end(next(reversed(hooks._optimizer_step_post_hooks)), last=False)
        other = started(lambda: plain(job, 3), "the-other")
        assert item.reached.wait(20)
        with pytest.raises(
            AdacheckError, match=r"step\(\) was called by thread MainThread while thread the-other was in optimizer.step\(\)"
        ):
            ckpt.step()
        item.may_go_on.set()
        other.join(20)


# restore


def test_step_without_restore_on_a_run_with_cuts_names_the_newest(tmp_path: Path) -> None:
    live = trained(tmp_path, 6)
    job = make(2)
    before = job.bits()
    with opened(f"file://{tmp_path}", job) as ckpt:
        with pytest.raises(NotRestored, match="the newest is step 6"):
            ckpt.step()
        assert job.bits() == before
        assert ckpt.restore() == 6  # it is not too late
        assert job.bits() == live


def test_step_without_restore_begins_a_new_run(tmp_path: Path) -> None:
    job = make(1)
    with opened(f"file://{tmp_path}", job) as ckpt:
        job.train(ckpt, 0, 3)
        ckpt.close()
        live = job.bits()
    assert restored_bits(f"file://{tmp_path}", make, 3) == live


def test_restore_comes_once_and_first(tmp_path: Path) -> None:
    job = make(1)
    with opened(f"file://{tmp_path}", job) as ckpt:
        assert ckpt.restore() == 0
        with pytest.raises(AdacheckError, match=r"restore\(\) was called at step 0, after training had begun"):
            ckpt.restore()
        job.train(ckpt, 0, 2)
        with pytest.raises(AdacheckError, match="at step 2"):
            ckpt.restore()
        job.train(ckpt, 2, 3, settle=True)
        assert ckpt.status().committed == 3


def test_restore_of_a_step_and_on_from_there(tmp_path: Path) -> None:
    """An earlier cut begins another lineage: what came after it is gone for good."""
    job, bits = make(1), dict[int, dict[str, str]]()
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        for n in range(1, 13):
            job.train(ckpt, n - 1, n, settle=True)
            bits[n] = job.bits()
    with adacheck.Store.open(f"file://{tmp_path}") as store:
        earlier, newest = [point.step for point in store.steps()][-2:]
    assert newest == 12
    job = make(2)
    with opened(f"file://{tmp_path}", job) as ckpt:
        with pytest.raises(NoCut, match=r"step 13 .*nowhere: offered are steps 1, .*12"):
            ckpt.restore(step=13)
        assert ckpt.restore(step=earlier) == earlier and job.bits() == bits[earlier]
        job.train(ckpt, earlier, earlier + 1, settle=True)
        assert job.bits() == bits[earlier + 1]
    assert restored_bits(f"file://{tmp_path}", make, earlier + 1) == bits[earlier + 1]
    with opened(f"file://{tmp_path}", make(2)) as ckpt, pytest.raises(NoCut, match=r"step 13"):
        ckpt.restore(step=13)


def test_restore_of_the_newest_proven_cut(tmp_path: Path) -> None:
    job = make(1)
    with opened(f"file://{tmp_path}", job, full_every=5, refresh=3) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 5, settle=True)
        live = job.bits()
        ckpt.publish_full()
        job.train(ckpt, 5, 9, settle=True)
        ckpt.close()
    job = make(2)
    with opened(f"file://{tmp_path}", job) as ckpt:
        assert ckpt.restore(proven=True) == 5 and job.bits() == live
        assert ckpt.restored is not None and ckpt.restored.step == 5


def test_restore_of_a_proven_cut_where_none_is(tmp_path: Path) -> None:
    job = make(1)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 1, settle=True)
    job = make(2)
    before = job.bits()
    with opened(f"file://{tmp_path}", job) as ckpt:
        with pytest.raises(NoCut, match="a proven cut"):
            ckpt.restore(proven=True)
        assert job.bits() == before and ckpt.restore() == 1


def test_restored_tells_where_from_and_how_much_was_replayed(tmp_path: Path) -> None:
    trained(tmp_path, 9)
    with opened(f"file://{tmp_path}", make(2)) as ckpt:
        ckpt.restore()
        assert ckpt.restored is not None and ckpt.restored.source.startswith("lmdb:")
        assert 0 < max(ckpt.restored.replayed.values()) <= 9


# mismatch: everything that differs is named, nothing is written


def bigger(seed: int) -> Job:
    model = mlp(seed)
    model[2] = torch.nn.Linear(17, 4)
    return Job(model, {"optim": adamw(model.parameters())}, plain)


def fewer_and_more(seed: int) -> Job:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(12, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3, bias=False), torch.nn.LayerNorm(3))
    return Job(model, {"optim": adamw(model.parameters())}, plain)


def halved(seed: int) -> Job:
    model = mlp(seed).bfloat16()
    return Job(model, {"optim": adamw(model.parameters())}, plain)


def grouped(seed: int) -> Job:
    model = mlp(seed)
    return Job(model, {"optim": adamw([{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}])}, plain)


def reordered(seed: int) -> Job:
    model = mlp(seed)
    return Job(model, {"optim": adamw(reversed(list(model.parameters())))}, plain)


def partly_trained(seed: int) -> Job:
    model = mlp(seed)
    return Job(model, {"optim": adamw(model[0].parameters())}, plain)


def other_optimizers(seed: int) -> Job:
    model = mlp(seed)
    return Job(model, {"a": adamw(model[0].parameters()), "b": adamw(model[2].parameters())}, plain)


class Counter:
    """Something stateful."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def with_extra(seed: int) -> Job:
    job = make(seed)
    job.extra["loader"] = Counter()
    return job


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (bigger, ["2.weight: shape [4, 17] in the script, [3, 17] in the cut", "2.bias: shape [4] in the script, [3] in the cut"]),
        (fewer_and_more, ["missing in the script: 2.bias", "not in the cut: 3.weight", "not in the cut: 3.bias"]),
        (halved, ["0.weight: dtype bfloat16 in the script, float32 in the cut", "2.bias: dtype"]),
        (grouped, ["optimizer 'optim': 2 parameter groups in the script, 1 in the cut"]),
        (reordered, ["optimizer 'optim': group 0 begins to differ at"]),
        (partly_trained, ["2.weight: in optimizer none in the script, optim in the cut"]),
        (other_optimizers, ["missing in the script: optimizer 'optim'", "not in the cut: optimizer 'a'", "not in the cut: optimizer 'b'"]),
        (with_extra, ["not in the cut: extra['loader']"]),
    ],
)
def test_mismatch_names_everything_and_writes_nothing(tmp_path: Path, other: Callable[[int], Job], named: list[str]) -> None:
    live = trained(tmp_path, 5)
    torch.manual_seed(3)
    job = other(3)
    before = job.bits()
    with opened(f"file://{tmp_path}", job) as ckpt:
        with pytest.raises(StateMismatch) as caught:
            ckpt.restore()
        for difference in named:
            assert difference in str(caught.value)
        assert "step 5" in str(caught.value) and job.bits() == before
        assert str(caught.value).endswith(
            "\nnothing was written; change the script back, give a new run another URI, or load what fits with store.reader() "
            "or adacheck-restore --to DIR (--map-fqn renames)"
        )
    assert restored_bits(f"file://{tmp_path}", make, 5) == live  # the store is none the worse for it


def test_extra_that_the_script_lacks_is_named(tmp_path: Path) -> None:
    trained(tmp_path, 3, with_extra(1))
    with opened(f"file://{tmp_path}", make(2)) as ckpt, pytest.raises(StateMismatch, match=r"missing in the script: extra\['loader'\]"):
        ckpt.restore()


def test_extra_comes_back(tmp_path: Path) -> None:
    def counting(job: Job, n: int) -> None:
        plain(job, n)
        job.extra["loader"].value = 10 * n

    job = with_extra(1)
    job.iterate = counting
    trained(tmp_path, 4, job)
    job = with_extra(2)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        assert job.extra["loader"].value == 40


# what cannot be attached or stored


def test_extra_without_state_is_refused_at_attach(tmp_path: Path) -> None:
    job = make(1)
    job.extra["loader"] = object()
    with pytest.raises(ConfigError, match=r"extra\['loader'\] is a object without state_dict\(\)"), opened(f"file://{tmp_path}", job):
        pass


def test_item_of_extra_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    job = with_extra(1)
    job.extra["loader"].value = object()
    with pytest.raises(UnsupportedTensor, match=r"extra/loader\.value"), opened(f"file://{tmp_path}", job):
        pass
    assert not list(tmp_path.iterdir()), "said before anything was written"


# consistency of what was captured


def test_writes_after_step_returns_never_reach_the_store(tmp_path: Path) -> None:
    """Everything is overwritten the moment `step()` returns, and put back once the keeper is done with it."""

    def tensors(job: Job) -> list[torch.Tensor]:
        entries = [entry for state in job.optimizer.state.values() for entry in state.values()]
        gradients = [parameter.grad for parameter in job.model.parameters() if parameter.grad is not None]
        return [tensor.data for tensor in [*job.model.parameters(), *gradients, *entries]]

    job = make(1)
    with opened(f"file://{tmp_path}", job, refresh=3) as ckpt:
        ckpt.restore()
        for n in range(1, 15):
            job.train(ckpt, n - 1, n)
            kept = [tensor.clone() for tensor in tensors(job)]
            for tensor in tensors(job):
                tensor.fill_(float("nan"))
            ckpt.drain()
            for tensor, before in zip(tensors(job), kept, strict=True):
                tensor.copy_(before)
        assert all(ckpt.inexact(step) == () for step in range(15))
        live = job.bits()
    assert restored_bits(f"file://{tmp_path}", make, 14) == live


def test_many_steps_in_flight_are_stored_as_they_were(tmp_path: Path) -> None:
    """No waiting between steps; killed without waiting either: what comes back is a cut that was live."""
    bits: dict[int, dict[str, str]] = {}
    job = make(1)
    with opened(f"file://{tmp_path}", job, log_steps=8) as ckpt:
        ckpt.restore()
        for n in range(1, 41):
            job.train(ckpt, n - 1, n)
            bits[n] = job.bits()
        durable = ckpt.status().durable
    job = make(2)
    with opened(f"file://{tmp_path}", job) as ckpt:
        step = ckpt.restore()
        assert durable <= step <= 40 and step > 0
        assert job.bits() == bits[step]


# on_error


def report(ckpt: Checkpointer, text: str) -> None:
    assert ckpt._keeper is not None
    ckpt._keeper.shared.report(text)


def test_on_error_warn_logs_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = make(1)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 2)
        report(ckpt, "a disk creaks")
        job.train(ckpt, 2, 4, settle=True)
        assert [record.message for record in caplog.records if record.levelname == "WARNING"] == ["a disk creaks"]
        assert ckpt.status().committed == 4


def test_on_error_raise_raises_at_the_next_step(tmp_path: Path) -> None:
    job = make(1)
    with opened(f"file://{tmp_path}", job, on_error="raise") as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 2)
        report(ckpt, "a disk creaks")
        with pytest.raises(AdacheckError, match="a disk creaks"):
            job.train(ckpt, 2, 3)
        job.train(ckpt, 3, 4, settle=True)
        assert ckpt.status().committed == 4
        assert ckpt._keeper is not None
        ckpt._keeper.shared.fail(Detached("the disk is gone"))
        with pytest.raises(Detached, match="the disk is gone"):
            job.train(ckpt, 4, 5)


def test_two_checkpointers_of_one_run_in_one_process(tmp_path: Path) -> None:
    """The second is refused, and the first goes on unharmed."""
    job = make(1)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 2, settle=True)
        with opened(f"file://{tmp_path}", make(2)) as second, pytest.raises(AdacheckError, match="being trained on this host already"):
            second.restore()
        job.train(ckpt, 2, 4)
        ckpt.close()
        assert ckpt.status().durable == 4


def test_hooks_cost_nothing_after_a_kill(tmp_path: Path) -> None:
    """`kill`, which the tests build on, leaves neither threads nor hooks nor locks."""
    job = make(1)
    with adacheck.Store.open(f"file://{tmp_path}") as store:
        ckpt = job.attach(store)
        ckpt.restore()
        backward(job.model)
        job.train(ckpt, 0, 1)
        kill(ckpt)
        hooks: Any = job.optimizer
        assert keeper_threads() == [] and not hooks._optimizer_step_pre_hooks
    with opened(f"file://{tmp_path}", make(2)) as again:
        again.restore()
