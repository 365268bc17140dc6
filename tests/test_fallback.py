"""Optimizers that are not replayed: whatever they keep, where and in what form, comes back byte for byte."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck.capture.inventory import take_inventory
from adacheck.capture.watch import Watch
from adacheck.errors import UnsupportedTensor
from tests.training import Job, kill, logged, opened, payloads

LAST = 7


class Hoarder(torch.optim.Optimizer):
    """Keeps tensors of all shapes in lists, dicts and tuples, counters beside them, and some things under no parameter at all."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step that all of the state goes into."""
        states: Any = self.state
        shared = states["shared"]
        shared.setdefault("norms", []).append(torch.tensor(float(len(shared.get("norms", ())))))
        for group in self.param_groups:
            for parameter in group["params"]:
                entries = self.state[parameter]
                history = entries.setdefault("history", [])
                history.append(parameter.grad.clone())
                del history[:-3]
                entries["pair"] = (parameter.grad.sum(), {"n": len(history), "last": parameter.grad.flatten()[:2].clone()})
                entries.setdefault("nothing", None)
                entries["count"] = entries.get("count", 0) + 1
                entries.setdefault("wide", torch.zeros(3, 5, dtype=torch.float64)).add_(float(parameter.grad.sum()))
                with torch.no_grad():
                    update = torch.stack(history).mean(0) * (1 + entries["wide"].sum().tanh()) + len(shared["norms"])
                    parameter.sub_(update.to(parameter.dtype), alpha=group["lr"])


def simple(job: Job, n: int) -> None:
    job.optimizer.zero_grad()
    torch.autograd.backward(job.model(torch.randn(4, 6)).square().mean())
    job.optimizer.step()


def closure(job: Job, n: int) -> None:
    data = torch.randn(4, 6)

    def loss() -> Any:
        job.optimizer.zero_grad()
        value = job.model(data).square().mean()
        torch.autograd.backward(value)
        return value

    job.optimizer.step(loss)


def tokens(job: Job, n: int) -> None:
    job.optimizer.zero_grad()
    torch.autograd.backward(job.model(torch.randint(0, 11, (5,))).square().mean())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse invariant checks")  # torch's own, about its own call
        job.optimizer.step()


def dense() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


Made = tuple[Callable[[], torch.nn.Module], Callable[..., Any], Callable[[Job, int], None]]
JOBS: dict[str, Made] = {
    "LBFGS": (dense, lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3, max_iter=4), closure),
    "LBFGS, line search": (dense, lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"), closure),
    "SparseAdam": (lambda: torch.nn.Embedding(11, 4, sparse=True), torch.optim.SparseAdam, tokens),
    "Adagrad, sparse": (lambda: torch.nn.Embedding(11, 4, sparse=True), torch.optim.Adagrad, tokens),
    "AdamW(closure)": (dense, torch.optim.AdamW, closure),
    "Hoarder": (dense, Hoarder, simple),
}


def make(name: str, seed: int) -> Job:
    torch.manual_seed(seed)
    of_model, of_optimizer, iterate = JOBS[name]
    model = of_model()
    return Job(model, {"optim": of_optimizer(model.parameters())}, iterate)


@pytest.mark.parametrize("name", JOBS)
def test_all_of_it_comes_back_and_trains_on(tmp_path: Path, name: str) -> None:
    job, uri = make(name, 1), f"file://{tmp_path}"
    with opened(uri, job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, LAST)
        ckpt.drain()
    live = job.bits()
    assert set(payloads(logged(tmp_path).increments[LAST]).values()) <= {"value: optimizer", "value: quiet"}
    for stepped in (False, True):  # a fresh optimizer, and one that has state of its own
        torch.manual_seed(4711)
        restored = make(name, 99)
        if stepped:
            restored.train(None, 0, 3)
        with opened(uri, restored) as ckpt:
            assert ckpt.restore() == LAST
            assert restored.bits() == live
            if stepped:
                break
    for one in (job, restored):
        torch.manual_seed(2)
        one.train(None, LAST, LAST + 3)
    assert restored.bits() == job.bits()


def test_what_is_restored_is_the_trainers_own_and_the_next_restore_finds_it_changed(tmp_path: Path) -> None:
    """Nested tensors that the trainer writes in place after a restore are not those of the keeper's shadow."""
    uri = f"file://{tmp_path}"
    job = make("Hoarder", 1)
    with opened(uri, job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 3)
        ckpt.drain()
    for cut in (5, 6):
        job = make("Hoarder", 1 + cut)
        with opened(uri, job) as ckpt:
            ckpt.restore()
            keeper = ckpt._keeper
            assert keeper is not None
            held = [entry for state in keeper.shared.chain.shadow.values() for entry in state.scalars.get("history", ())]
            mine = [entry for parameter in job.model.parameters() for entry in job.optimizer.state[parameter]["history"]]
            assert held and len(held) == len(mine)
            assert not {tensor.data_ptr() for tensor in held} & {tensor.data_ptr() for tensor in mine}
            job.train(ckpt, cut - 2 if cut == 5 else cut - 1, cut)
            ckpt.drain()
            live = job.bits()
    restored = make("Hoarder", 77)
    with opened(uri, restored) as ckpt:
        assert ckpt.restore() == 6
        assert restored.bits() == live
        kill(ckpt)


def test_state_that_is_replaced_by_tuples_arrays_or_nan_is_watched() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter])
    inventory = take_inventory(torch.nn.ParameterList([parameter]), optimizer)
    watch = Watch()
    for entry in ((torch.ones(2), torch.zeros(2)), [torch.ones(2)], float("nan"), torch.ones(2).numpy(), "text", 3, None):
        optimizer.state[parameter]["odd"] = entry
        watch.accept(inventory.states.values())
        watch.check(inventory.states.values())
        assert watch.collect() == frozenset(), entry
        optimizer.state[parameter]["odd"] = object()
        watch.check(inventory.states.values())
        assert watch.collect() == frozenset({0}), entry


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    job = make("Hoarder", 1)
    shared: Any = job.optimizer.state
    shared["function"] = {"f": simple}
    with pytest.raises(UnsupportedTensor, match=r"own/optim\.state\.function\.f is a .*function"), opened(f"file://{tmp_path}", job):
        pass
