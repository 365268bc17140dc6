"""Restored equals live, byte for byte: every optimizer that is replayed, in every implementation, killed and restored in mid-run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import Job, logged, opened, payloads, restored_bits

CUTS = (5, 12, 60)

PAYLOAD = {
    # (optimizer, implementation): payload with fp32 parameters, with bf16 parameters
    ("Adam", "fused"): ("gradient", "gradient"),
    ("Adam", "foreach"): ("gradient", "gradient"),
    ("Adam", "loop"): ("gradient", "gradient"),
    ("AdamW", "fused"): ("gradient", "gradient"),
    ("AdamW", "foreach"): ("gradient", "gradient"),
    ("AdamW", "loop"): ("gradient", "gradient"),
    ("SGD", "fused"): ("gradient", "value"),  # differs from run to run below fp32
    ("SGD", "foreach"): ("gradient", "gradient"),
    ("SGD", "loop"): ("gradient", "gradient"),
}
COMBINATIONS = [
    pytest.param(kind, how, dtype, payload, id=f"{kind}-{how}-{str(dtype).removeprefix('torch.')}")
    for (kind, how), both in PAYLOAD.items()
    for dtype, payload in zip((torch.float32, torch.bfloat16), both, strict=True)
]
LARGE = ("AdamW-fused-float32", "AdamW-foreach-bfloat16", "AdamW-loop-bfloat16", "SGD-foreach-float32", "SGD-loop-bfloat16")
OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 3e-3, "weight_decay": 0.01},
    "AdamW": {"lr": 3e-3, "betas": (0.8, 0.99)},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4},
}


class Net(torch.nn.Module):
    """Odd sizes, a 0-dim parameter, dropout (so that generators matter) and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: torch.Tensor
        self.embed = torch.nn.Embedding(19, 33)
        self.layers = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.LayerNorm(65))
        self.head = torch.nn.Linear(65, 19)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        return self.head(self.layers(self.embed(tokens))) * self.scale  # type: ignore[no-any-return]


def iterate(job: Job, n: int) -> None:
    tokens = torch.randint(0, 19, (6, 7))
    job.optimizer.zero_grad()
    logits = job.model(tokens[:, :-1])
    torch.autograd.backward(torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()))
    torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    job.optimizer.step()
    job.extra["scheduler"].step()


def make(kind: str, how: str, dtype: torch.dtype, seed: int) -> Job:
    torch.manual_seed(seed)
    model = Net().to(dtype)
    choice = {"fused": how == "fused", "foreach": how == "foreach"}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **OPTIONS[kind], **choice)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)
    return Job(model, {"optim": optimizer}, iterate, {"scheduler": scheduler})


@pytest.mark.parametrize(("kind", "how", "dtype", "payload"), COMBINATIONS)
def test_restored_equals_live(tmp_path: Path, kind: str, how: str, dtype: torch.dtype, payload: str) -> None:
    """Killed after each of `CUTS`: what comes back is what was live, and what an uninterrupted run without adacheck has there."""
    reference, expected = make(kind, how, dtype, seed=1), {}
    for first, last in zip((0, *CUTS), CUTS, strict=False):
        reference.train(None, first, last)
        expected[last] = reference.bits()
    uri, start, live = f"file://{tmp_path}", 0, dict[str, str]()
    for cut in CUTS:
        job = make(kind, how, dtype, seed=1 + start)  # only the first start is from the seed
        with opened(uri, job) as ckpt:
            assert ckpt.restore() == start
            assert start == 0 or job.bits() == live
            job.train(ckpt, start, cut)
            ckpt.drain()
            assert ckpt.status().committed == cut
            live, start = job.bits(), cut
        if payload == "gradient":  # the other one is not equal between two runs that nobody disturbs
            assert live == expected[cut]
    assert restored_bits(uri, partial(make, kind, how, dtype), CUTS[-1]) == live
    check_payload(tmp_path, payload)


def check_payload(root: Path, expected: str) -> None:
    """What the log says of every trained state, after certification (and a restart that took up its certificates)."""
    found = logged(root)
    steps = [increment for step, increment in found.increments.items() if step > CUTS[1]]
    assert len(steps) > 20
    trained = {base.spec.state for base in found.bases.values() if base.spec.kind == "parameter"}
    for increment in steps:
        travelled = payloads(increment)
        assert {travelled[state] for state in trained} == {"gradient" if expected == "gradient" else "value: optimizer"}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def synthetic(job: Job, n: int) -> None:
    for parameter in job.model.parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
    job.optimizer.step()


@pytest.mark.parametrize(("kind", "how", "dtype", "payload"), [c for c in COMBINATIONS if c.id in LARGE])
def test_tensors_of_several_segments_and_threads(
    tmp_path: Path, two_threads: None, kind: str, how: str, dtype: torch.dtype, payload: str
) -> None:
    """An odd number of elements over more than one segment, stepped by two threads: bits depend on both where kernels are vectorised."""

    def large(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.ParameterDict({"wide": torch.nn.Parameter(torch.randn(1031, 1033)), "narrow": torch.nn.Parameter(torch.randn(7))})
        choice = {"fused": how == "fused", "foreach": how == "foreach"}
        parameters = model.to(dtype).parameters()
        return Job(model, {"optim": getattr(torch.optim, kind)(parameters, **OPTIONS[kind], **choice)}, synthetic)

    job = large(1)
    with opened(f"file://{tmp_path}", job, refresh=4) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 10, settle=True)
        assert all(ckpt.inexact(step) == () for step in range(11))
        live = job.bits()
    assert {payloads(logged(tmp_path).increments[10])[state] for state in (0, 1)} == {payload}
    assert restored_bits(f"file://{tmp_path}", large, 10, refresh=4) == live
