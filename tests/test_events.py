"""What counts as an optimizer event, and what does not go as a gradient: closures, sparse gradients, scalers, other optimizers."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck.store import Store
from tests.survival import LAST, adamw, backward, job_of, mlp, plain, survives, travelled
from tests.training import Job


def test_accumulation_is_one_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def accumulating(job: Job, n: int) -> None:
        job.optimizer.zero_grad()
        for _ in range(3):
            backward(job.model)
        job.optimizer.step()

    found = survives(tmp_path, job_of(accumulating), caplog)
    assert all(len(increment.events) == 1 for increment in found.increments.values())
    assert set(travelled(found, "0.weight")) == {"gradient"}


def test_users_hooks_that_change_gradients_come_before_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One registered before `attach`, one in mid-run, after ours: what the optimizer was given counts."""
    hooked: set[int] = set()

    def clamp(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.clamp_(-1e-3, 1e-3)

    def double(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2.0)

    def make(seed: int) -> Job:
        model = mlp(seed)
        optimizer = adamw(model.parameters())
        optimizer.register_step_pre_hook(double)
        return Job(model, {"optim": optimizer}, hooking)

    def hooking(job: Job, n: int) -> None:
        if n >= 6 and id(job) not in hooked:
            hooked.add(id(job))
            job.optimizer.register_step_pre_hook(clamp)
        plain(job, n)

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.bias") + travelled(found, "0.weight")) == {"gradient"}


@pytest.mark.parametrize("again", [False, True])
def test_step_raises_in_the_middle(tmp_path: Path, caplog: pytest.LogCaptureFixture, again: bool) -> None:
    """The first group is stepped, the second one raises; the script goes on, or tries once more in the same iteration."""

    def make(seed: int) -> Job:
        model = mlp(seed)
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
        return Job(model, {"optim": adamw(groups)}, raising)

    def raising(job: Job, n: int) -> None:
        if n in (9, LAST):
            weight = job.model.get_parameter("2.weight")
            weight.grad = torch.zeros_like(weight).to_sparse()
            with pytest.raises(RuntimeError, match="sparse"):
                job.optimizer.step()
            if not again:
                return
        plain(job, n)

    found = survives(tmp_path, make, caplog)
    assert travelled(found, "0.weight")[-2] == "gradient"
    assert travelled(found, "0.weight")[-1].startswith("value")


class Nested(torch.optim.AdamW):
    """As optimizers in the field are: a step around the parent's step, whose hooks then fire twice."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.99
        return super().step(closure)


def test_nested_step_is_one_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        adamw(mlp(seed).parameters())  # a plain one patches the class that the nested step calls
        return Job(model, {"optim": Nested(model.parameters(), lr=1e-2)}, plain)

    found = survives(tmp_path, make, caplog)
    assert all(len(increment.events) == 1 for increment in found.increments.values())
    assert set(travelled(found, "0.weight")) == {"value: optimizer"}


@pytest.mark.parametrize("trained", [True, False])
def test_parameter_group_added_in_mid_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, trained: bool) -> None:
    def adding(job: Job, n: int) -> None:
        if n == 6:
            job.optimizer.add_param_group({"params": list(job.model.get_submodule("2").parameters()), "lr": 0.1})
        plain(job, n)

    def made(seed: int, layers: str) -> Job:
        model = mlp(seed)
        model[2].requires_grad_(trained)
        groups = [
            {"params": list(model.get_submodule(layer).parameters()), "lr": lr} for layer, lr in zip(layers, (1e-2, 0.1), strict=False)
        ]
        return Job(model, {"optim": adamw(groups)}, adding)

    found = survives(tmp_path, lambda seed: made(seed, "0"), caplog, again=lambda seed: made(seed, "02"))
    if trained:
        assert set(travelled(found, "2.weight")) == {"gradient"}


def test_given_to_an_optimizer_that_does_not_step_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of the parameter's bytes changes, and still the cut must say whose it is."""

    def adding(job: Job, n: int) -> None:
        if n == LAST:
            job.optimizer.add_param_group({"params": list(job.model.get_submodule("2").parameters())})
        else:
            plain(job, n)

    def made(seed: int, layers: str) -> Job:
        model = mlp(seed)
        return Job(model, {"optim": adamw([{"params": list(model.get_submodule(layer).parameters())} for layer in layers])}, adding)

    survives(tmp_path, lambda seed: made(seed, "0"), caplog, again=lambda seed: made(seed, "02"))


def test_parameters_come_and_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A layer that exists from step 4 to 8 only: its states are born, and removed while other states keep older bases."""

    def changing(job: Job, n: int) -> None:
        if n == 4:
            job.model.add_module("late", torch.nn.Linear(3, 4))
            job.optimizer.add_param_group({"params": list(job.model.get_submodule("late").parameters())})
        if n == 9:
            for parameter in job.model.get_submodule("late").parameters():
                del job.optimizer.state[parameter]
            del job.model.late
            job.optimizer.param_groups.pop()
        plain(job, n)

    survives(tmp_path, job_of(changing), caplog)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_closures_go_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        return Job(model, {"optim": kind(model.parameters(), lr=0.05)}, with_closure)

    def with_closure(job: Job, n: int) -> None:
        x = torch.randn(5, 12)

        def closure() -> float:
            job.optimizer.zero_grad()
            loss = job.model(x).square().mean()
            torch.autograd.backward(loss)
            return float(loss.detach())

        job.optimizer.step(closure)

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight")) == {"value: optimizer"}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_go_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any) -> None:
    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Embedding(11, 4, sparse=True), torch.nn.Linear(4, 3))
        return Job(model, {"table": kind(model[0].parameters(), lr=0.05), "rest": adamw(model[1].parameters())}, lookups)

    def lookups(job: Job, n: int) -> None:
        for optimizer in job.optimizers.values():
            optimizer.zero_grad()
        torch.autograd.backward(job.model(torch.randint(0, 11, (5,))).square().mean())
        for optimizer in job.optimizers.values():
            optimizer.step()

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight")) == {"value: optimizer"} and set(travelled(found, "1.weight")) == {"gradient"}


def test_frozen_while_nothing_else_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A value whose bytes equal those of the step before is left out, and still says whether the parameter is trained."""

    def make(seed: int) -> Job:
        model = mlp(seed)
        return Job(model, {"optim": torch.optim.LBFGS(model.parameters(), max_iter=1)}, freezing)

    def freezing(job: Job, n: int) -> None:
        if n >= LAST - 3:
            job.model.get_parameter("0.weight").requires_grad_(n >= LAST + 2)
        else:
            job.optimizer.step(partial(closure, job))

    def closure(job: Job) -> float:
        backward(job.model)
        return 1.0

    survives(tmp_path, make, caplog)


class Undeclared(torch.optim.RMSprop):
    """Somebody's own."""


def test_optimizers_that_nobody_declared_go_whole_and_say_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        return Job(model, {"optim": Undeclared(model.parameters(), lr=1e-2)}, plain)

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight")) == {"value: optimizer"}
    assert len([record for record in caplog.records if "Undeclared" in record.message]) == 2  # once for each of the two starts


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(1e-2)}, {"capturable": False}])
def test_switches_of_adamw(tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        own: dict[str, Any] = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        return Job(model, {"optim": torch.optim.AdamW(model.parameters(), fused=True, **own)}, changing)

    def changing(job: Job, n: int) -> None:
        plain(job, n)
        job.optimizer.param_groups[0]["lr"] *= 0.99

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight")) == {"gradient"}


def _nesterov(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(300, 300)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=seed < 100)


def _train_twelve(uri: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], int]:
    """Trains, and gives the weights at the end and how many bytes of the last step went whole."""
    ckpt = Store.open(uri).attach(model, optimizer)
    ckpt.restore()
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
        ckpt.step()
    ckpt.drain()
    whole_bytes = ckpt.status().payload_bytes["value"]
    ckpt.close()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, whole_bytes


def test_gradients_that_foreach_nesterov_writes_are_captured_before(tmp_path: Path) -> None:
    live, whole_bytes = _train_twelve(f"file://{tmp_path}/run", *_nesterov(1))
    assert whole_bytes == 0, "certified, so captured as the step was given them"
    model, optimizer = _nesterov(2)
    with Store.open(f"file://{tmp_path}/run").attach(model, optimizer) as ckpt:
        assert ckpt.restore() == 12
        assert all(torch.equal(tensor, live[name]) for name, tensor in model.state_dict().items())


def test_a_state_whose_gradient_is_written_during_the_step_goes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["torch.optim.sgd"]
    original = module.sgd

    def step_and_write(parameters: list[torch.Tensor], gradients: list[torch.Tensor], *args: object, **kwargs: object) -> None:
        original(parameters, gradients, *args, **kwargs)
        for gradient in gradients:
            gradient.mul_(2)

    monkeypatch.setattr(module, "sgd", step_and_write)
    live, whole_bytes = _train_twelve(f"file://{tmp_path}/run", *_nesterov(101))
    assert whole_bytes > 0
    monkeypatch.undo()
    model, optimizer = _nesterov(102)
    with Store.open(f"file://{tmp_path}/run").attach(model, optimizer) as ckpt:
        assert ckpt.restore() == 12
        assert all(torch.equal(tensor, live[name]) for name, tensor in model.state_dict().items())
