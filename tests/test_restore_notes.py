"""What a restore says: hyperparameters that the script set otherwise than before, and parameters that get no optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.survival import adamw, backward, mlp
from tests.training import Job, kill, opened

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


def run(root: Path, make: MakeOptimizer, steps: int = 3, iterate: Callable[[Job, int], None] | None = None) -> Job:
    """Start a script anew on the store, restore, train, and die."""
    model = mlp(1)
    job = Job(model, {"optim": make(model)}, iterate or plain)
    with opened(f"file://{root}", job) as ckpt:
        start = ckpt.restore()
        job.train(ckpt, start, start + steps)
        ckpt.drain()
        kill(ckpt)
    return job


def plain(job: Job, n: int) -> None:
    job.optimizer.zero_grad()
    backward(job.model)
    job.optimizer.step()


def said(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    return [record.message for record in caplog.records if about in record.message]


def test_a_hyperparameter_that_the_script_changed_is_named_with_both_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def halving(job: Job, n: int) -> None:
        plain(job, n)
        job.optimizer.param_groups[0]["lr"] *= 0.5

    run(tmp_path, lambda model: adamw(model.parameters(), weight_decay=0.1, fused=True), iterate=halving)
    job = run(tmp_path, lambda model: adamw(model.parameters(), weight_decay=0.3, fused=True), 0)
    assert said(caplog, "overrides") == [
        "the cut at step 3 overrides the script: weight_decay of optimizer 'optim' is 0.3 in the script, was 0.1 before, and stays 0.1; "
        "to change a hyperparameter, set it after restore()"
    ]
    assert job.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_learning_rate_that_training_changed_is_no_change_of_the_script(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def halving(job: Job, n: int) -> None:
        plain(job, n)
        job.optimizer.param_groups[0]["lr"] *= 0.5

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model.parameters())
        torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return optimizer

    run(tmp_path, make, iterate=halving)
    job = run(tmp_path, make, 2, halving)
    run(tmp_path, make, 2, halving)
    assert said(caplog, "overrides") == []
    assert job.optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**5


def test_a_change_to_what_the_cut_has_anyway_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def halving(job: Job, n: int) -> None:
        plain(job, n)
        job.optimizer.param_groups[0]["lr"] *= 0.5

    run(tmp_path, lambda model: torch.optim.AdamW(model.parameters(), lr=0.5), 1, halving)
    run(tmp_path, lambda model: torch.optim.AdamW(model.parameters(), lr=0.25), 1, halving)
    assert said(caplog, "overrides") == []


def test_changes_in_one_of_several_groups_are_named_by_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(rate: Any) -> MakeOptimizer:
        def made(model: torch.nn.Module) -> torch.optim.Optimizer:
            first, last = model.get_submodule("0"), model.get_submodule("2")
            return adamw([{"params": first.parameters()}, {"params": last.parameters(), "lr": rate}])

        return made

    run(tmp_path, make(0.1))
    run(tmp_path, make(0.2), 1)
    (line,) = said(caplog, "overrides")
    assert "lr of optimizer 'optim', group 1, is 0.2 in the script, was 0.1 before, and stays 0.1" in line


class Renamed(torch.optim.Adam):
    """The same algorithm."""


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Renamed])
def test_an_optimizer_of_another_class_goes_on_and_both_classes_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[torch.optim.Adam]
) -> None:
    before = run(tmp_path, lambda model: torch.optim.Adam(model.parameters(), weight_decay=0.1))
    job = run(tmp_path, lambda model: kind(model.parameters(), weight_decay=0.1), 0)
    assert said(caplog, "is now a") == [
        "optimizer 'optim' is now a " + f"{kind.__module__}.{kind.__qualname__}"
        " and was a torch.optim.adam.Adam at the cut at step 3: it goes on with that one's state and hyperparameters; unless both compute "
        "the same, change the script back or give a new run another URI"
    ]
    assert job.bits() == before.bits()
    run(tmp_path, lambda model: kind(model.parameters(), weight_decay=0.1), 2)
    caplog.clear()
    run(tmp_path, lambda model: kind(model.parameters(), weight_decay=0.1), 1)
    assert said(caplog, "is now a") == [], "it was said of the cut that another class had made"


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_never_stepped_before_the_cut_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, fused: bool) -> None:
    """Rebuilt in the script: what was attached is not what trains."""
    rebuilt: dict[int, torch.optim.Optimizer] = {}

    def by_another(job: Job, n: int) -> None:
        backward(job.model)
        rebuilt.setdefault(id(job), adamw(job.model.parameters(), fused=fused)).step()

    run(tmp_path, lambda model: adamw(model.parameters(), fused=fused), 3, by_another)
    caplog.clear()
    job = run(tmp_path, lambda model: adamw(model.parameters(), fused=fused), 0)
    (line,) = said(caplog, "has no state")
    assert line == (
        "the cut at step 3 has no state of optimizer 'optim' (AdamW) for any of the 4 parameters it trains, which it had not stepped: "
        "0.weight, 0.bias, 2.weight, 2.bias; they begin without"
    )
    assert not job.optimizer.state


def test_parameters_that_were_never_used_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def partly(job: Job, n: int) -> None:
        job.optimizer.zero_grad()
        torch.autograd.backward(job.model.get_submodule("0")(torch.randn(5, 12)).square().mean())
        job.optimizer.step()

    run(tmp_path, lambda model: adamw(model.parameters()), 3, partly)
    run(tmp_path, lambda model: adamw(model.parameters()), 0)
    (line,) = said(caplog, "has no state")
    assert "for 2 of 4 parameters it trains, which it had not stepped: 2.weight, 2.bias; they begin without" in line


@pytest.mark.parametrize(
    "make", [lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda m: torch.optim.LBFGS(m.parameters(), max_iter=2)]
)
def test_optimizers_that_keep_no_state_by_parameter_are_not_complained_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: MakeOptimizer
) -> None:
    def closing(job: Job, n: int) -> None:
        def closure() -> float:
            job.optimizer.zero_grad()
            backward(job.model)
            return 1.0

        job.optimizer.step(closure)

    run(tmp_path, make, 3, closing)
    run(tmp_path, make, 1, closing)
    assert said(caplog, "has no state") == []
