"""Restored equals live, byte for byte, for every optimizer class with its kernels, flags and dtypes; and what travelled is as promised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adacheck.keeper.certify import EQUAL_STEPS
from tests.optimizer_table import KINDS, Entry, entries, markdown
from tests.training import Job, kill, logged, opened, payloads

SHAPES = {"any": ((33, 17), (65,), ()), "not empty": ((33, 17), (65,)), "matrices": ((33, 17), (5, 20))}
CERTIFIED, LAST = 1 + EQUAL_STEPS, 8
"""The first step makes the optimizer state, as many as a certificate takes go whole and as gradients, the rest as promised."""

MUST_BE_GRADIENT = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Adadelta")
ENTRIES = {
    (kind, kernel): [e for e in entries() if (e.kind, e.kernel) == (kind, kernel)] for kind in KINDS for kernel in KINDS[kind].kernels
}


def iterate(job: Job, n: int) -> None:
    for parameter in job.model.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)
    for optimizer in job.optimizers.values():
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.99


def make(lines: list[Entry], seed: int) -> Job:
    """One job of many optimizers: one for each flags and dtype that this class has with this kernel."""
    torch.manual_seed(seed)
    model, optimizers = torch.nn.Module(), {}
    for at, line in enumerate(lines):
        shapes = SHAPES[KINDS[line.kind].shapes]
        parameters = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape, dtype=line.dtype)) for shape in shapes)
        model.add_module(str(at), parameters)
        optimizers[line.name] = getattr(torch.optim, line.kind)(parameters, lr=1e-2, **line.options())
    return Job(model, optimizers, iterate)


@pytest.mark.parametrize(("kind", "kernel"), ENTRIES)
def test_restored_equals_live_and_travelled_as_the_table_says(tmp_path: Path, kind: str, kernel: str) -> None:
    lines = [line for line in ENTRIES[kind, kernel] if line.payload != "refused"]
    job, uri = make(lines, 1), f"file://{tmp_path}"
    with opened(uri, job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, CERTIFIED, settle=True)
        job.train(ckpt, CERTIFIED, LAST)
        ckpt.drain()
        assert ckpt.status().committed == LAST
    live = job.bits()
    found = logged(tmp_path)
    owners = {state: base.spec.optimizer for state, base in found.bases.items()}
    expected = {line.name: "gradient" if line.payload == "gradient" else "value: optimizer" for line in lines}
    for step in range(CERTIFIED + 1, LAST + 1):
        travelled = payloads(found.increments[step])
        assert {state: travelled[state] for state in owners} == {state: expected[owner] for state, owner in owners.items()}
    torch.manual_seed(4711)
    restored = make(lines, 99)
    with opened(uri, restored) as ckpt:
        assert ckpt.restore() == LAST
        assert restored.bits() == live
        kill(ckpt)
    if all(line.payload == "gradient" for line in lines):  # others may take another step each time
        for one in (job, restored):
            torch.manual_seed(2)
            one.train(None, LAST, LAST + 2)
        assert restored.bits() == job.bits()


@pytest.mark.parametrize("line", [pytest.param(e, id=e.name) for e in entries() if e.payload == "refused"])
def test_what_the_table_leaves_out_torch_does_not_do(line: Entry) -> None:
    with pytest.raises(RuntimeError):
        make([line], 1).train(None, 0, 1)


def test_the_promised_classes_are_gradient_with_every_kernel() -> None:
    promised = [line for line in entries() if line.kind in MUST_BE_GRADIENT and line.dtype == torch.float32]
    assert {line.payload for line in promised} == {"gradient"}
    assert len(promised) > 50


def test_the_readme_shows_this_table() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert "\n".join(markdown()) in readme, "\n".join(markdown())
