"""Mistakes that people make in their first hour: each gets a message that says what to do, and none loses anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck.errors import ConfigError, NotDurable, StateMismatch, StoreBusy
from adacheck.keeper import full_thread
from adacheck.store import Store


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(3, 8)).square().mean().backward()
    optimizer.step()


def trained(uri: str, steps: int, **options: Any) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with Store.open(uri, **options).attach(model, optimizer) as ckpt:
        ckpt.restore()
        for _ in range(steps):
            train(model, optimizer)
            ckpt.step()


@pytest.mark.parametrize("kind", [torch.optim.RAdam, torch.optim.SGD, torch.optim.RMSprop])
def test_another_optimizer_than_in_the_cut_is_refused(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    trained(f"file://{tmp_path}/run", 5)
    model = torch.nn.Linear(8, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ckpt = Store.open(f"file://{tmp_path}/run").attach(model, kind(model.parameters(), lr=0.1))  # type: ignore[call-arg]
    with pytest.raises(StateMismatch, match=f"is a {kind.__name__} in the script, and of another kind in the cut"):
        ckpt.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    ckpt.close()


def test_a_hyperparameter_that_was_added_in_mid_run_comes_back(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(8, 4)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    with Store.open(f"file://{tmp_path}/run").attach(model, optimizer) as ckpt:
        ckpt.restore()
        train(model, optimizer)
        optimizer.param_groups[0]["lr_scale"] = 0.5
        ckpt.step()
    model, optimizer = made()
    with Store.open(f"file://{tmp_path}/run").attach(model, optimizer) as ckpt:
        assert ckpt.restore() == 1
        assert optimizer.param_groups[0]["lr_scale"] == 0.5


def test_a_scheduler_made_before_restore_is_no_difference(tmp_path: Path) -> None:
    trained(f"file://{tmp_path}/run", 5)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with Store.open(f"file://{tmp_path}/run").attach(model, optimizer) as ckpt:
        assert ckpt.restore() == 5


def test_a_superseded_process_hears_of_it_long_before_the_next_full_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_thread, "NEWEST_CHECK_STEPS", 5)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    first = Store.open(f"file://{tmp_path}/run", nvme=str(tmp_path / "one")).attach(model, optimizer)
    first.restore()
    for _ in range(3):
        train(model, optimizer)
        first.step()
    first.drain()
    trained(f"file://{tmp_path}/run", 2, nvme=str(tmp_path / "two"))
    for _ in range(8):
        train(model, optimizer)
        first.step()
    with pytest.raises(NotDurable, match="may not write any more"):
        first.close()


def test_a_superseded_process_does_not_close_as_if_all_were_well(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    first = Store.open(f"file://{tmp_path}/run", nvme=str(tmp_path / "one")).attach(model, optimizer)
    first.restore()
    train(model, optimizer)
    first.step()
    first.drain()
    trained(f"file://{tmp_path}/run", 2, nvme=str(tmp_path / "two"))
    with pytest.raises(NotDurable, match="may not write any more"):
        first.close()


def test_a_notebook_cell_that_is_run_again(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 4)
    first = Store.open(f"file://{tmp_path}/run").attach(model, torch.optim.AdamW(model.parameters()))
    first.restore()
    again = Store.open(f"file://{tmp_path}/run").attach(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(StoreBusy, match=r"call close\(\) on the earlier checkpointer"):
        again.restore()
    first.close()
    assert again.restore() == 0
    again.close()


@pytest.mark.parametrize(("uri", "extra"), [(Path("/tmp/x"), None), (None, None), ("file:///tmp/adacheck-never", [1])])
def test_arguments_of_another_type(uri: Any, extra: Any) -> None:
    model = torch.nn.Linear(8, 4)
    with pytest.raises(ConfigError, match=r"a store URI is a string|extra is a dict"):
        Store.open(uri).attach(model, torch.optim.AdamW(model.parameters()), extra=extra)


def test_entries_of_a_restored_optimizer_are_in_torchs_order(tmp_path: Path) -> None:
    trained(f"file://{tmp_path}/run", 5)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with Store.open(f"file://{tmp_path}/run").attach(model, optimizer) as ckpt:
        ckpt.restore()
        assert list(optimizer.state[model.weight]) == ["step", "exp_avg", "exp_avg_sq"]
