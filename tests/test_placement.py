"""Where `ckpt.step()` may stand in a loop: what is wrong is said once, and what loops in the field do is not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from adacheck.capture.placement import Placement
from adacheck.checkpointer import Checkpointer
from tests.survival import adamw, backward, mlp, plain
from tests.training import Job, opened


def said(calls: str) -> list[str]:
    """What is said of calls after a step (`x`), after a backward pass alone (`b`), or after nothing (`.`)."""
    placement = Placement()
    return [line for done in calls if (line := placement.call(done == "x", done == "b"))]


@pytest.mark.parametrize("calls", ["x" * 30, "x", "bbbb" + "x" * 20, "bbbx" * 10, "xx.xxx.xxxx.xxxxxx", "b" * 30, ""])
def test_loops_that_are_right(calls: str) -> None:
    assert said(calls) == []


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ("x." * 20, ["at 6 of the first 12 calls of ckpt.step() nothing had been trained since the call before"]),
        (".x" * 20, ["ckpt.step() was called before anything", "at 5 of the first 12 calls"]),
        (".", ["ckpt.step() was called before anything was trained: call it at the end of each iteration"]),
        ("." * 40, ["ckpt.step() was called before anything", "no attached optimizer has stepped in the first 12 calls of ckpt.step()"]),
    ],
)
def test_loops_that_are_wrong(calls: str, says: list[str]) -> None:
    assert [line[: len(begin)] for line, begin in zip(said(calls), says, strict=True)] == says


def logged(root: Path, caplog: pytest.LogCaptureFixture, loop: Callable[[Job, Checkpointer], None]) -> list[str]:
    gc.collect()  # a live gradient scaler would explain calls after nothing
    model = mlp(1)
    job = Job(model, {"optim": adamw(model.parameters())}, plain)
    with opened(f"file://{root}", job) as ckpt:
        loop(job, ckpt)
    return [record.message for record in caplog.records]


def test_a_call_before_the_iteration_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loop(job: Job, ckpt: Checkpointer) -> None:
        for n in range(ckpt.restore(), 14):
            ckpt.step()
            plain(job, n)

    (line,) = logged(tmp_path, caplog, loop)
    assert line.startswith("ckpt.step() was called before anything was trained")


def test_two_calls_in_an_iteration_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loop(job: Job, ckpt: Checkpointer) -> None:
        for n in range(ckpt.restore(), 14):
            plain(job, n)
            ckpt.step()
            ckpt.step()

    (line,) = logged(tmp_path, caplog, loop)
    assert line.startswith("at 6 of the first 12 calls of ckpt.step() nothing had been trained since the call before")


def test_a_call_at_every_micro_batch_is_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loop(job: Job, ckpt: Checkpointer) -> None:
        for n in range(ckpt.restore(), 28):
            backward(job.model)
            if n % 4 == 3:
                job.optimizer.step()
                job.optimizer.zero_grad()
            ckpt.step()

    assert logged(tmp_path, caplog, loop) == []


def test_a_restore_after_an_optimizer_step_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loop(job: Job, ckpt: Checkpointer) -> None:
        plain(job, 0)
        ckpt.restore()

    (line,) = logged(tmp_path, caplog, loop)
    assert line.startswith("restore() was called after an optimizer step")
