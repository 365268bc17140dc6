"""What training scripts do besides `loss.backward(); optimizer.step()`: every case is killed, restored and continued bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.survival import adamw, backward, job_of, mlp, plain, survives, travelled
from tests.training import Job


def test_plain_loop_goes_as_gradients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = survives(tmp_path, job_of(plain), caplog)
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert set(travelled(found, name)) == {"gradient"}


def test_two_optimizers_over_one_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        sgd = torch.optim.SGD(model[2].parameters(), lr=0.05, momentum=0.9)
        return Job(model, {"body": adamw(model[0].parameters()), "head": sgd}, plain)

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight") + travelled(found, "2.weight")) == {"gradient"}


def test_two_optimizer_steps_in_one_iteration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def twice(job: Job, n: int) -> None:
        plain(job, n)
        plain(job, n)

    found = survives(tmp_path, job_of(twice), caplog)
    assert set(travelled(found, "0.weight")) == {"gradient"}
    assert all(len(increment.events) == 2 for increment in found.increments.values())


@pytest.mark.parametrize("every", [10, 3, 1])
def test_clamp_after_some_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int) -> None:
    """A visible write makes the state go whole in that cut, and tells nothing against its replay: with `every=3` it is certified."""

    def clamping(job: Job, n: int) -> None:
        plain(job, n)
        if n % every == 0:
            with torch.no_grad():
                job.model.get_parameter("0.weight").clamp_(-0.1, 0.1)

    found = survives(tmp_path, job_of(clamping), caplog)
    expected = ["value: write" if step % every == 0 else "gradient" for step in sorted(found.increments)]
    assert travelled(found, "0.weight") == expected
    assert set(travelled(found, "2.weight")) == {"gradient"}


@pytest.mark.parametrize("before", [False, True])
def test_requires_grad_changes_in_mid_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, before: bool) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        model[0].requires_grad_(before)
        return Job(model, {"optim": adamw(model.parameters())}, switching)

    def switching(job: Job, n: int) -> None:
        if n == 6:
            job.model.get_parameter("0.weight").requires_grad_(not before)
        plain(job, n)

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight")) <= ({"-"} if before else {"gradient", "value: certify"})
    assert set(travelled(found, "2.weight")) == {"gradient"}


def test_scheduler_changes_lr_and_betas_each_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        optimizer = adamw(model.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40, cycle_momentum=True)
        return Job(model, {"optim": optimizer}, scheduled, {"scheduler": scheduler})

    def scheduled(job: Job, n: int) -> None:
        plain(job, n)
        job.extra["scheduler"].step()

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight")) == {"gradient"}


class Odd(torch.nn.Module):
    """Parameters of every unusual kind."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(12, 12)
        self.head = torch.nn.Linear(12, 12)
        self.head.weight = self.body.weight  # tied
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.empty(0, 4))
        self.unused = torch.nn.Parameter(torch.randn(5))
        self.frozen = torch.nn.Parameter(torch.randn(7), requires_grad=False)
        self.sometimes = torch.nn.Parameter(torch.randn(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale + self.empty.sum() + self.frozen.sum()  # type: ignore[no-any-return]


def test_parameters_of_unusual_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tied, 0-dim, without elements, never trained, frozen, and one whose gradient is None, zero and something in turn."""

    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = Odd()
        return Job(model, {"optim": adamw(model.parameters(), weight_decay=0.1)}, in_turn)

    def in_turn(job: Job, n: int) -> None:
        job.optimizer.zero_grad()
        backward(job.model)
        sometimes = job.model.get_parameter("sometimes")
        sometimes.grad = (None, torch.zeros(12), torch.randn(12))[n % 3]
        job.optimizer.step()

    found = survives(tmp_path, make, caplog)
    (tied,) = [base.spec for base in found.bases.values() if "weight" in base.spec.fqn]
    assert {tied.fqn, *tied.aliases} == {"body.weight", "head.weight"}
    assert set(travelled(found, "body.weight") + travelled(found, "scale")) == {"gradient"}
    assert set(travelled(found, "unused") + travelled(found, "frozen")) == {"-"}
    assert set(travelled(found, "sometimes")) == {"-", "gradient"}


class Normalised(torch.nn.Module):
    """Batch norm (its kernel writes its buffers where no version counter moves), wide and narrow, and buffers of other kinds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.average: torch.Tensor
        self.cache: torch.Tensor
        self.width = width
        self.body = torch.nn.Linear(12, 1)
        self.norm = torch.nn.BatchNorm1d(width)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = self.average * 0.9 + x.mean()  # rebound
        self.cache.add_(1)
        return self.norm(self.body(x).expand(-1, self.width) * torch.linspace(0, 1, self.width))  # type: ignore[no-any-return]


@pytest.mark.parametrize("width", [9, 20_000])
def test_buffers(tmp_path: Path, caplog: pytest.LogCaptureFixture, width: int) -> None:
    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = Normalised(width)
        return Job(model, {"optim": adamw(model.parameters())}, plain)

    survives(tmp_path, make, caplog)


def test_noncontiguous_gradients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A gradient that lies otherwise in memory than its parameter from step 8 on: the kernel then is another one in effect."""

    def transposing(job: Job, n: int) -> None:
        job.optimizer.zero_grad()
        backward(job.model)
        weight = job.model.get_parameter("0.weight")
        assert weight.grad is not None
        if n >= 8:
            weight.grad = weight.grad.t().contiguous().t()
        job.optimizer.step()

    for foreach in (False, True):
        survives(tmp_path / str(foreach), job_of(transposing, fused=False, foreach=foreach), caplog)


@pytest.mark.parametrize("fused", [False, True])
def test_channels_last(tmp_path: Path, caplog: pytest.LogCaptureFixture, fused: bool) -> None:
    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.ReLU(), torch.nn.Conv2d(5, 64, 1)).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        )
        return Job(model, {"optim": adamw(model.parameters(), fused=fused)}, images)

    def images(job: Job, n: int) -> None:
        job.optimizer.zero_grad()
        x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        torch.autograd.backward(job.model(x).square().mean())
        job.optimizer.step()

    survives(tmp_path, make, caplog)


def test_groups_with_different_kernels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        groups = [
            {"params": list(model[0].parameters()), "fused": True, "foreach": False},
            {"params": list(model[2].parameters()), "fused": False, "foreach": True, "lr": 0.1, "weight_decay": 0.0},
        ]
        return Job(model, {"optim": torch.optim.AdamW(groups, lr=1e-2)}, plain)

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight") + travelled(found, "2.weight")) == {"gradient"}
    assert {event.kernel.implementation for increment in found.increments.values() for event in increment.events} == {"fused", "foreach"}


def test_alternating_optimizers_cost_nothing_while_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a GAN trains: one optimizer in even iterations, the other in odd ones."""

    def make(seed: int) -> Job:
        model = mlp(seed)
        sgd = torch.optim.SGD(model[2].parameters(), lr=0.05, momentum=0.9, fused=True)
        return Job(model, {"a": adamw(model[0].parameters()), "b": sgd}, alternating)

    def alternating(job: Job, n: int) -> None:
        job.model.zero_grad()
        backward(job.model)
        job.optimizers["ab"[n % 2]].step()

    found = survives(tmp_path, make, caplog)
    steps = sorted(found.increments)
    assert travelled(found, "0.weight") == ["-" if n % 2 else "gradient" for n in steps]
    assert travelled(found, "2.weight") == ["gradient" if n % 2 else "-" for n in steps]
