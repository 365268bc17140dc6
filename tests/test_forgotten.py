"""What users forget to attach is named once, with what to write; what is attached is never complained about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from adacheck.checkpointer import Checkpointer
from tests.survival import adamw, backward, mlp
from tests.training import Job, opened

STEPS = 14
MakeExtra = Callable[[torch.optim.Optimizer], tuple[Any, dict[str, Any]]]


def train(job: Job, ckpt: Checkpointer, driver: Any, steps: int = STEPS) -> None:
    for _ in range(steps):
        job.optimizer.zero_grad()
        backward(job.model)
        job.optimizer.step()
        if isinstance(driver, lr_scheduler.ReduceLROnPlateau):
            driver.step(1.0)
        elif driver is not None:
            driver.step()
        ckpt.step()


def idle(job: Job, n: int) -> None:
    raise AssertionError("the tests here have loops of their own")


def warnings(root: Path, caplog: pytest.LogCaptureFixture, make: MakeExtra, steps: int = STEPS) -> list[str]:
    """What is logged while a job trains with what `make` gives: the scheduler that it steps, and `extra`."""
    model = mlp(1)
    optimizer = adamw(model.parameters())
    driver, extra = make(optimizer)
    job = Job(model, {"optim": optimizer}, idle, extra)
    with opened(f"file://{root}", job) as ckpt:
        ckpt.restore()
        train(job, ckpt, driver, steps)
    return [record.message for record in caplog.records]


def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    first, second = lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [3])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 3), sequential(optimizer)]),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_that_is_not_in_extra_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    (said,) = warnings(tmp_path, caplog, lambda optimizer: (SCHEDULERS[kind](optimizer), {}))
    assert said == (
        f"{kind} drives the optimizer and is not in extra: after a restore it would begin anew; "
        'write store.attach(..., extra={"scheduler": scheduler})'
    )


class Sampler:
    """Something else that a script keeps."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(("name", "wanted"), [("sampler", "scheduler"), ("scheduler", "scheduler2")])
def test_what_extra_has_already_stays_when_the_advice_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, wanted: str
) -> None:
    (said,) = warnings(tmp_path, caplog, lambda optimizer: (lr_scheduler.StepLR(optimizer, 3), {name: Sampler()}))
    assert said.endswith(f'would begin anew; add "{wanted}": scheduler to extra in store.attach')


class Trainer:
    """As scripts have them: an object that keeps the scheduler somewhere inside."""

    def __init__(self, scheduler: Any) -> None:
        self.parts = {"schedules": [scheduler]}

    def state_dict(self) -> Any:
        return [each.state_dict() for each in self.parts["schedules"]]

    def load_state_dict(self, state: Any) -> None:
        for each, saved in zip(self.parts["schedules"], state, strict=True):
            each.load_state_dict(saved)


class ByClosure:
    """Keeps the scheduler in the closures of its methods only."""

    def __init__(self, scheduler: Any) -> None:
        self.state_dict: Callable[[], Any] = lambda: scheduler.state_dict()
        self.load_state_dict: Callable[[Any], Any] = lambda state: scheduler.load_state_dict(state)


@pytest.mark.parametrize("wrap", [lambda scheduler: scheduler, Trainer, ByClosure])
@pytest.mark.parametrize("kind", sorted(SCHEDULERS.keys() - {"LambdaLR"}))
def test_a_scheduler_that_is_in_extra_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, wrap: Callable[[Any], Any]
) -> None:
    def make(optimizer: torch.optim.Optimizer) -> tuple[Any, dict[str, Any]]:
        scheduler = SCHEDULERS[kind](optimizer)
        return scheduler, {"state": wrap(scheduler)}

    assert warnings(tmp_path, caplog, make) == []


def test_a_scheduler_of_another_optimizer_or_none_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = lr_scheduler.StepLR(adamw(mlp(2).parameters()), 3)
    assert warnings(tmp_path, caplog, lambda optimizer: (None, {})) == []
    assert other.last_epoch == 0


class Warmup:
    """A scheduler that is none of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.001 * min(self.count, 5)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_scheduler_of_ones_own_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (said,) = warnings(tmp_path, caplog, lambda optimizer: (Warmup(optimizer), {}))
    assert said.startswith("Warmup drives the optimizer and is not in extra")


def scaled(
    root: Path, caplog: pytest.LogCaptureFixture, *, fused: bool, kept: bool, enabled: bool = True, scale: float = 64.0
) -> list[str]:
    """What is logged while a job trains under a scaler, which skips its first steps for a large enough scale."""
    model = mlp(1)
    optimizer = adamw(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
    job = Job(model, {"optim": optimizer}, idle, {"scaler": scaler} if kept else {})
    with opened(f"file://{root}", job) as ckpt:
        ckpt.restore()
        for _ in range(STEPS):
            scaler.scale(1e4 * model(torch.randn(5, 12)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            ckpt.step()
    return [record.message for record in caplog.records if "go whole" not in record.message]


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_is_not_in_extra_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, fused: bool) -> None:
    (said,) = scaled(tmp_path, caplog, fused=fused, kept=False)
    assert said == (
        "GradScaler drives the optimizer and is not in extra: after a restore it would begin anew; "
        'write store.attach(..., extra={"scaler": scaler})'
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_is_in_extra_disabled_or_skips_its_first_steps_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fused: bool
) -> None:
    assert scaled(tmp_path / "1", caplog, fused=fused, kept=True) == []
    assert scaled(tmp_path / "2", caplog, fused=fused, kept=False, enabled=False) == []
    assert scaled(tmp_path / "3", caplog, fused=fused, kept=True, scale=2.0**118) == []


def test_scheduler_and_scaler_are_named_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = mlp(1)
    optimizer = adamw(model.parameters())
    scaler, scheduler = torch.amp.GradScaler("cpu", init_scale=64.0), lr_scheduler.StepLR(optimizer, 3)
    job = Job(model, {"optim": optimizer}, idle)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(5, 12)).square().mean()).backward()
            scaler.step(optimizer)
            scheduler.step()
            scaler.update()
            ckpt.step()
    (said,) = [record.message for record in caplog.records if "extra" in record.message]
    assert said.startswith("GradScaler and StepLR drive the optimizer and are not in extra")
    assert said.endswith('extra={"scheduler": scheduler, "scaler": scaler})')


def test_nothing_looks_on_after_the_end(tmp_path: Path) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    before = len(_global_optimizer_pre_hooks)
    model = mlp(1)
    job = Job(model, {"optim": adamw(model.parameters())}, idle)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        assert len(_global_optimizer_pre_hooks) == before + 1
        train(job, ckpt, None, 2)
        ckpt.close()
        assert len(_global_optimizer_pre_hooks) == before
