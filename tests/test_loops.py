"""Training loops of every form: who steps, when, with which gradients; each is killed, restored and continued bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck.errors import StateMismatch
from tests.survival import LAST, OPTIONS, adamw, backward, job_of, mlp, plain, survives, travelled
from tests.training import Job, logged, opened, restored_bits

# Closures


def test_adam_with_a_closure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def with_closure(job: Job, n: int) -> None:
        x = torch.randn(5, 12)

        def closure() -> torch.Tensor:
            job.optimizer.zero_grad()
            loss = job.model(x).square().mean()
            torch.autograd.backward(loss)
            return loss.detach()  # type: ignore[no-any-return]

        job.optimizer.step(closure)  # type: ignore[arg-type]

    found = survives(tmp_path, job_of(with_closure, fused=False), caplog)
    assert set(travelled(found, "0.weight")) == {"value: optimizer"}


def test_lbfgs_with_several_evaluations_and_a_history(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=6, history_size=4, line_search_fn="strong_wolfe")
        return Job(model, {"optim": lbfgs}, with_closure)

    def with_closure(job: Job, n: int) -> None:
        x, calls = torch.randn(5, 12), []

        def closure() -> float:
            calls.append(1)
            job.optimizer.zero_grad()
            loss = job.model(x).square().mean()
            torch.autograd.backward(loss)
            return float(loss.detach())

        job.optimizer.step(closure)
        assert len(calls) > 1

    survives(tmp_path, make, caplog)


# Optimizers in the backward pass


def in_backward(seed: int, attached: bool) -> Job:
    """One optimizer for each parameter, stepped by a hook as soon as the gradient is there; `attached` or not."""
    model = mlp(seed)
    optimizers = {name: adamw([parameter]) for name, parameter in model.named_parameters()}
    by_parameter = {id(optimizer.param_groups[0]["params"][0]): optimizer for optimizer in optimizers.values()}

    def step(parameter: torch.Tensor) -> None:
        by_parameter[id(parameter)].step()
        by_parameter[id(parameter)].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    return Job(model, dict(optimizers) if attached else {"optim": adamw(model.parameters())}, lambda job, n: backward(job.model))


def test_optimizers_in_backward(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = survives(tmp_path, lambda seed: in_backward(seed, attached=True), caplog)
    assert set(travelled(found, "0.weight") + travelled(found, "2.bias")) == {"gradient"}


def test_optimizers_in_backward_that_are_not_attached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is attached is never stepped: every parameter goes whole, and what is missing is said, while training and at the restore."""
    job = in_backward(1, attached=False)
    with opened(f"file://{tmp_path}", job, **OPTIONS) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, LAST, settle=True)
        live = job.bits()
    assert set(travelled(logged(tmp_path), "0.weight")) == {"value: unattached"}
    assert "is stepped by an optimizer that was not given to store.attach (torch.optim.adamw.AdamW)" in caplog.text
    caplog.clear()
    assert restored_bits(f"file://{tmp_path}", lambda seed: in_backward(seed, attached=False), LAST, **OPTIONS) == live
    said = "0.bias, 0.weight, 2.bias, … were stepped by optimizers that were not given to store.attach (torch.optim.adamw.AdamW)"
    assert said in caplog.text and f"not in the cut at step {LAST}" in caplog.text


@pytest.mark.parametrize("through_data", [False, True])
def test_gradients_that_are_used_and_freed_before_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture, through_data: bool) -> None:
    """A hook does the update itself; the attached optimizer steps afterwards, and has nothing left to do."""

    def make(seed: int) -> Job:
        model = mlp(seed)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(use)  # type: ignore[no-untyped-call]
        return Job(model, {"optim": adamw(model.parameters())}, stepping)

    def use(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            (parameter.data if through_data else parameter).sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    def stepping(job: Job, n: int) -> None:
        backward(job.model)
        job.optimizer.step()

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight")) == {"value: unseen" if through_data else "value: write"}
    assert "its gradients are gone before the step" in caplog.text


# Accumulation


def test_accumulation_without_synchronisation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @contextmanager
    def no_sync() -> Iterator[None]:
        yield

    def accumulating(job: Job, n: int) -> None:
        job.optimizer.zero_grad()
        for _ in range(3):
            with no_sync():
                backward(job.model)
        backward(job.model)
        job.optimizer.step()

    found = survives(tmp_path, job_of(accumulating), caplog)
    assert set(travelled(found, "0.weight")) == {"gradient"}


@pytest.mark.parametrize("to_none", [True, False])
def test_a_cut_in_mid_accumulation_keeps_what_was_accumulated(tmp_path: Path, caplog: pytest.LogCaptureFixture, to_none: bool) -> None:
    """`ckpt.step()` after every backward pass, of which the optimizer steps every fourth: step 14 is half way."""

    def accumulating(job: Job, n: int) -> None:
        backward(job.model)
        if n % 4 == 0:
            job.optimizer.step()
            job.optimizer.zero_grad(set_to_none=to_none)

    assert LAST % 4 == 2
    found = survives(tmp_path, job_of(accumulating), caplog)
    by_step = dict(zip(sorted(found.increments), travelled(found, "0.weight"), strict=True))
    assert by_step[12] == "value: certify" and by_step[13] == by_step[14] == "-"


def test_sparse_gradients_in_mid_accumulation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Embedding(11, 4, sparse=True), torch.nn.Linear(4, 3))
        return Job(model, {"table": torch.optim.SGD(model[0].parameters(), lr=0.1), "rest": adamw(model[1].parameters())}, accumulating)

    def accumulating(job: Job, n: int) -> None:
        torch.autograd.backward(job.model(torch.randint(0, 11, (5,))).square().mean())
        if n % 4 == 0:
            for optimizer in job.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()

    survives(tmp_path, make, caplog)


# Switches


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_differentiable(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed).requires_grad_(False)
        return Job(model, {"optim": kind(model.parameters(), lr=1e-2, differentiable=True)}, given)

    def given(job: Job, n: int) -> None:
        for parameter in job.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        job.optimizer.step()

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight")) == {"value: optimizer"}


@pytest.mark.parametrize("options", [{"amsgrad": True, "maximize": True}, {"amsgrad": True, "foreach": True, "weight_decay": 0.3}])
def test_switches_together(tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]) -> None:
    found = survives(tmp_path, job_of(plain, **{"fused": False, **options}), caplog)
    assert set(travelled(found, "0.weight")) == {"gradient"}


# Groups, and optimizers that are changed in mid-run


def test_groups_in_another_order_are_an_error_by_name(tmp_path: Path) -> None:
    def made(order: str) -> Job:
        model = mlp(1)
        groups = [{"params": list(model.get_submodule(layer).parameters()), "lr": 0.01} for layer in order]
        return Job(model, {"optim": adamw(groups)}, plain)

    job, other = made("02"), made("20")
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 2, settle=True)
    before = other.bits()
    with (
        opened(f"file://{tmp_path}", other) as ckpt,
        pytest.raises(StateMismatch, match=r"group 0 begins to differ at 2.weight in the script, 0.weight in the cut"),
    ):
        ckpt.restore()
    assert other.bits() == before


def test_a_group_that_is_taken_out_and_put_back_keeps_its_moments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Out from step 8 to 16, over the restore at 14: the optimizer's entries of its parameters stay where they are."""

    def swapping(job: Job, n: int) -> None:
        if n == 8:
            job.optimizer.param_groups.pop()
        if n == 17:
            job.optimizer.add_param_group({"params": list(job.model.get_submodule("2").parameters())})
        plain(job, n)

    def made(seed: int, layers: str) -> Job:
        model = mlp(seed)
        return Job(model, {"optim": adamw([{"params": list(model.get_submodule(layer).parameters())} for layer in layers])}, swapping)

    survives(tmp_path, lambda seed: made(seed, "02"), caplog, again=lambda seed: made(seed, "0"))


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_is_rebuilt_is_missed_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture, fused: bool) -> None:
    """Its parameters are right, its moments are nobody's: said when it steps, and again by the restore."""
    rebuilt: dict[int, torch.optim.Optimizer] = {}

    def rebuilding(job: Job, n: int) -> None:
        optimizer = rebuilt.setdefault(id(job), adamw(job.model.parameters(), fused=fused)) if n >= 8 else job.optimizer
        optimizer.zero_grad()
        backward(job.model)
        optimizer.step()

    make = job_of(rebuilding, fused=fused)
    job = make(1)
    with opened(f"file://{tmp_path}", job, **OPTIONS) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, LAST, settle=True)
        live = job.bits()
    assert "0.weight is stepped by an optimizer that was not given to store.attach" in caplog.text
    caplog.clear()
    assert restored_bits(f"file://{tmp_path}", make, LAST, **OPTIONS) == live
    assert set(travelled(logged(tmp_path), "0.weight")) == {"value: unattached" if fused else "value: write"}
    assert f"their state is not in the cut at step {LAST}, and begins anew" in caplog.text


def test_load_state_dict_in_mid_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Back to an earlier state, as after a spike of the loss; hyperparameters are edited as well."""
    kept: dict[int, Any] = {}

    def loading(job: Job, n: int) -> None:
        if n == 5:
            model = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
            kept[id(job)] = (model, {**job.optimizer.state_dict()})
        if n == 11:
            job.model.load_state_dict(kept[id(job)][0])
            job.optimizer.load_state_dict(kept[id(job)][1])
            job.optimizer.param_groups[0]["lr"] = 0.3
            job.optimizer.param_groups[0]["betas"] = (0.5, 0.9)
            job.optimizer.param_groups[0]["note"] = "after the spike"
        plain(job, n)

    found = survives(tmp_path, job_of(loading), caplog, again=lambda seed: noted(job_of(loading)(seed)))
    by_step = dict(zip(sorted(found.increments), travelled(found, "0.weight"), strict=True))
    assert by_step[11] == "value: write" and by_step[12] == by_step[14] == "gradient"


def noted(job: Job) -> Job:
    job.optimizer.param_groups[0]["note"] = ""
    return job


class Counting(torch.optim.SGD):
    """Keeps what is no parameter's: under a key of its own in `state`, and beside it in `state_dict()`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.average = torch.zeros(2)

    def step(self, closure: Any = None) -> Any:
        shared: dict[Any, Any] = self.state
        shared["calls"] = shared.get("calls", 0) + 1
        self.average += torch.randn(2)
        for group in self.param_groups:
            group["lr"] = 0.1 / (shared["calls"] + float(self.average[0] ** 2))
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"].clone()
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "average"})


def test_what_an_optimizer_keeps_besides_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        return Job(model, {"optim": Counting(model.parameters())}, plain)

    survives(tmp_path, make, caplog)


def test_a_learning_rate_tensor_of_another_dtype(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int, dtype: torch.dtype = torch.float64) -> Job:
        model = mlp(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1, dtype=dtype), foreach=False)
        return Job(model, {"optim": optimizer}, plain)

    survives(tmp_path, make, caplog, again=lambda seed: make(seed, torch.float32))
