"""DTensors of one process: parameters, optimizer entries and gradients are stored as what this rank holds of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.survival import adamw, backward, survives
from tests.training import Job


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


class Sharded(torch.nn.Module):
    """A layer whose parameters are DTensors that lie otherwise than row after row."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(distribute_tensor(torch.randn(12, 3).t(), mesh, [Shard(0)]))
        self.bias = torch.nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (p.to_local() for p in (self.weight, self.bias))  # type: ignore[attr-defined]
        return torch.nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("last", [1, 3])
@pytest.mark.parametrize("by_fsdp", [True, False])
def test_gradients_that_are_dtensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mesh: DeviceMesh, by_fsdp: bool, last: int, to_none: bool
) -> None:
    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(12, 3)) if by_fsdp else Sharded(mesh)
        if by_fsdp:
            fully_shard(model, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return Job(model, {"optim": adamw(model.parameters(), fused=False, foreach=False)}, zeroing)

    def zeroing(job: Job, n: int) -> None:
        job.optimizer.zero_grad(set_to_none=to_none)
        if n != 2:
            backward(job.model)
            assert all(isinstance(parameter.grad, DTensor) for parameter in job.model.parameters())
        job.optimizer.step()

    survives(tmp_path / "run", make, caplog, last=last)
