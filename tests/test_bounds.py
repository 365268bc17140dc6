"""The NVMe log stays within its stated bound, however fast the trainer is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adacheck.keeper.refresh import crowded
from tests.survival import adamw
from tests.training import Job, nvme_folder, opened

STEPS, ELEMENTS, TENSORS = 500, 256_000, 8


def same_gradients(job: Job, n: int) -> None:
    """A step without a backward pass: the trainer is as fast as it can be, faster than its keeper."""
    for parameter in job.model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()  # a new one each time; one that nobody drops is a part of the cut
    job.optimizer.step()


@pytest.mark.parametrize("bytes_a_gradient", [4, 2])
def test_log_file_over_500_steps(tmp_path: Path, bytes_a_gradient: int) -> None:
    """(state bytes) + 2.2 × `log_steps` × (step bytes), with everything a step writes, at every one of 500 steps."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(ELEMENTS // TENSORS)) for _ in range(TENSORS)])
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).to(torch.bfloat16 if bytes_a_gradient == 2 else torch.float32).float()
    job = Job(model, {"optim": adamw(model.parameters())}, same_gradients)
    sizes, payloads = [], dict[int, int]()
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        for n in range(1, STEPS + 1):
            job.train(ckpt, n - 1, n)
            sizes.append((nvme_folder(tmp_path) / "data.mdb").stat().st_size)
        ckpt.drain()
        assert ckpt._keeper is not None and ckpt.status().committed == STEPS
        payloads = {step: sum(parts.values()) for step, parts in ckpt._keeper.payloads().items()}
    state_bytes = ELEMENTS * 4 * 3 + TENSORS * 4
    steady = [size for step, size in payloads.items() if step > 20]
    step_bytes = sum(steady) / len(steady)
    assert bytes_a_gradient * ELEMENTS < step_bytes < (bytes_a_gradient + 0.3) * ELEMENTS
    bound = state_bytes + 2.2 * ckpt._config.log_steps * step_bytes
    print(f"{bytes_a_gradient} B a gradient: file at most {max(sizes) / bound:.2f} of its bound")  # noqa: T201 - a figure to read
    assert max(sizes) <= bound


def test_states_that_were_whole_several_times_get_a_base_before_their_turn() -> None:
    whole = {1: {0, 1, 2}, 2: {0, 1, 2}, 3: {0, 1}, 4: {1}}
    assert crowded({}, whole, 4) == (0,)  # 1 is whole at this very step, 2 was whole twice
    assert crowded({0: 1}, whole, 4) == ()
    assert crowded({}, {**whole, 5: set()}, 5) == (0, 1)
    assert crowded({0: 4, 1: 4}, {**whole, 5: set()}, 5) == ()
