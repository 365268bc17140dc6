"""What a step costs, read off the log: bytes a parameter for each kind of gradient, and the share of refreshes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.keeper.assembly import payload_bytes
from adacheck.manifests import chain as links
from adacheck.manifests import keys
from adacheck.manifests.record import SEGMENT_BYTES_MAX, Increment
from tests.survival import adamw
from tests.training import Job, logged, names, nvme_folder, opened

REFRESH, STEPS = 10, 40
WIDTHS = {"a": (100, 1000), "b": (150_000,), "c": (77, 301), "tiny": (7,)}


class Net(torch.nn.Module):
    """Parameters without a forward pass: gradients are made up."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in WIDTHS.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape)))


def rounded(job: Job, n: int) -> None:
    """fp32 gradients whose values are bf16 values, over many magnitudes, zeros and negative zeros among them."""
    for i, parameter in enumerate(job.model.parameters()):
        gradient = torch.randn(parameter.shape) * 10.0 ** ((n + i) % 7 - 4)
        gradient.view(-1)[::17] = -0.0
        parameter.grad = gradient.bfloat16().float()


def full(job: Job, n: int) -> None:
    """fp32 gradients that use all their bits."""
    for parameter in job.model.parameters():
        parameter.grad = torch.randn(parameter.shape)


def clipped(job: Job, n: int) -> None:
    """bf16 values, multiplied by a clip coefficient other than one."""
    rounded(job, n)
    norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    assert norm > 1.0


def mixed(job: Job, n: int) -> None:
    """The third tensor alone has fp32 gradients, as norms and biases have under autocast."""
    rounded(job, n)
    job.model.get_parameter("c").grad = torch.randn(WIDTHS["c"])


def trained(root: Path, gradients: Callable[[Job, int], None]) -> Job:
    """A job with that many steps in the log, all of them there."""

    def iterate(job: Job, n: int) -> None:
        gradients(job, n)
        job.optimizer.step()

    torch.manual_seed(1)
    model = Net()
    job = Job(model, {"optim": adamw(model.parameters())}, iterate)
    with opened(f"file://{root}", job, refresh=REFRESH, log_steps=64) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 5, settle=True)
        job.train(ckpt, 5, STEPS)
        ckpt.drain()
        newest = ckpt.status().payload_bytes
    assert newest == payload_bytes(logged(root).increments[STEPS])
    return job


def steady(root: Path) -> list[Increment]:
    """Increments in the log after certification, in order."""
    return [increment for step, increment in sorted(logged(root).increments.items()) if step > 5]


def stored_bytes(increment: Increment, state: int) -> int:
    """Gradient and value bytes of one state."""
    segments = [s for g in increment.gradients if g.state == state for s in g.segments]
    segments += [s for v in increment.values if v.spec.state == state for s in v.segments]
    return sum(segment.stored_bytes for segment in segments)


@pytest.mark.parametrize(
    ("gradients", "narrow"), [(rounded, set(WIDTHS)), (clipped, set(WIDTHS)), (full, set()), (mixed, set(WIDTHS) - {"c"})]
)
def test_bytes_a_parameter(tmp_path: Path, gradients: Callable[[Job, int], None], narrow: set[str]) -> None:
    job = trained(tmp_path, gradients)
    numbers = {name: number for number, name in names(logged(tmp_path)).items()}
    groups = [(narrow, 2.02), (set(WIDTHS) - narrow, 4.02)]
    elements = {name: job.model.get_parameter(name).numel() for name in WIDTHS}
    increments = steady(tmp_path)
    assert len(increments) == STEPS - 5
    for increment in increments:
        for group, most in groups:
            if group:
                spent = sum(stored_bytes(increment, numbers[name]) for name in group)
                assert spent <= most * sum(elements[name] for name in group)
                assert spent >= (most - 0.02) * sum(elements[name] for name in group)  # it cannot be less without compression
    total, parameters = payload_bytes(increments[-1]), sum(elements.values())
    shares = ", ".join(f"{name} {size / parameters:.3f}" for name, size in total.items())
    print(f"{gradients.__name__}: whole step {sum(total.values()) / parameters:.3f} B/parameter ({shares})")  # noqa: T201 - a figure to read


def test_the_log_has_the_bytes_that_records_name(tmp_path: Path) -> None:
    trained(tmp_path, mixed)
    increments = steady(tmp_path)
    backend = LmdbBackend(nvme_folder(tmp_path), create=False, read_only=True)
    try:
        for increment in increments:
            for segment in links.segments(increment):
                found = backend.stat(keys.increment_slot(increment.generation, increment.step, segment.slot))
                assert found is not None and found.size_bytes == segment.stored_bytes
            prefix = keys.increment(increment.generation, increment.step) + "/"
            assert len(list(backend.list(prefix))) == len(list(links.segments(increment)))
    finally:
        backend.close()


def test_refreshes_of_any_consecutive_steps_are_one_state(tmp_path: Path) -> None:
    """Every byte is sent once in any `refresh` steps, and no step sends much more than its share."""
    job = trained(tmp_path, rounded)
    entries = [entry for parameter in job.model.parameters() for entry in job.optimizer.state[parameter].values()]
    state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in [*job.model.parameters(), *entries])
    sent = [payload_bytes(increment)["refresh"] for increment in steady(tmp_path)]
    for first in range(len(sent) - REFRESH + 1):
        window = sum(sent[first : first + REFRESH])
        assert window <= state_bytes + SEGMENT_BYTES_MAX
        assert window == state_bytes  # nobody went whole, so each byte exactly once
    assert max(sent) <= state_bytes / REFRESH + max(state_bytes / REFRESH, 64 << 10)
    print(f"refresh: {min(sent)} to {max(sent)} bytes a step, {state_bytes} of state in {REFRESH} steps")  # noqa: T201 - a figure to read
