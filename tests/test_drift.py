"""Writes behind the optimizer's back: what can be seen goes whole at once, what cannot is found by comparison and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import adacheck
from adacheck.checkpointer import Checkpointer
from adacheck.errors import AdacheckError
from adacheck.tools import restore
from tests.survival import adamw, job_of, mlp, plain, survives, travelled
from tests.tool_run import run_tool
from tests.training import Job, logged, opened, restored_bits

REFRESH, WRITTEN = 8, 13


def clear_state(job: Job) -> None:
    job.optimizer.state.clear()


def swap_data(job: Job) -> None:
    weight = job.model.get_parameter("0.weight")
    weight.data = weight.data * 0.5


def zero_moment(job: Job) -> None:
    job.optimizer.state[job.model.get_parameter("0.weight")]["exp_avg"].zero_()


def replace_moment(job: Job) -> None:
    entries = job.optimizer.state[job.model.get_parameter("0.weight")]
    entries["exp_avg"] = torch.ones_like(entries["exp_avg"])


def drop_one(job: Job) -> None:
    del job.optimizer.state[job.model.get_parameter("0.weight")]


@pytest.mark.parametrize("before_step", [False, True])
@pytest.mark.parametrize("write", [clear_state, swap_data, zero_moment, replace_moment, drop_one])
def test_writes_that_can_be_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture, write: Callable[[Job], None], before_step: bool) -> None:
    """Between the optimizer's step and `ckpt.step()`, or before the next optimizer step; in a state that is certified."""

    def writing(job: Job, n: int) -> None:
        if n == WRITTEN and before_step:
            write(job)
        plain(job, n)
        if n == WRITTEN and not before_step:
            write(job)

    found = survives(tmp_path, job_of(writing), caplog)
    by_step = dict(zip(sorted(found.increments), travelled(found, "0.weight"), strict=True))
    assert by_step[WRITTEN] == "value: write" and by_step[WRITTEN - 1] == "gradient"


def invisibly(parameter: torch.Tensor) -> None:
    version = parameter._version
    parameter.data.mul_(1.5)
    assert parameter._version == version


def first_found(ckpt: Checkpointer, job: Job, first: int, last: int) -> int:
    """Train until a cut is found inexact; gives the step at which it was."""
    for n in range(first, last + 1):
        job.train(ckpt, n - 1, n, settle=True)
        if ckpt.inexact(n):
            return n
    raise AssertionError(f"nothing was found up to step {last}")


def writing_at(*steps: int) -> Callable[[Job, int], None]:
    def writing(job: Job, n: int) -> None:
        plain(job, n)
        if n in steps:
            invisibly(job.model.get_parameter("0.weight"))

    return writing


def test_invisible_write_is_found_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Within `refresh` steps; the cuts since the last equal refresh are inexact, the next one is exact again, and stays so."""
    make, uri = job_of(writing_at(WRITTEN)), f"file://{tmp_path}"
    job = make(1)
    with opened(uri, job, refresh=REFRESH, log_steps=64) as ckpt:
        ckpt.restore()
        found = first_found(ckpt, job, 1, WRITTEN + REFRESH)
        assert WRITTEN <= found < WRITTEN + REFRESH
        inexact = {step for step in range(found + 1) if ckpt.inexact(step)}
        assert inexact == set(range(found - REFRESH + 1, found + 1)) and WRITTEN in inexact
        assert {ckpt.inexact(step) for step in inexact} == {("0.weight",)}
        job.train(ckpt, found, found + 1, settle=True)
        assert [r.message for r in caplog.records if f"drift in 0.weight, found at step {found}" in r.message]
        assert ckpt.inexact(found + 1) == () and {step for step in range(found + 2) if ckpt.inexact(step)} == inexact
        last = found + 1 + 2 * REFRESH
        job.train(ckpt, found + 1, last, settle=True)
        assert {step for step in range(last + 1) if ckpt.inexact(step)} == inexact
        assert (ckpt.status().proven or 0) > found
        live = job.bits()
    by_step = dict(zip(sorted(logged(tmp_path).increments), travelled(logged(tmp_path), "0.weight"), strict=True))
    assert by_step[found] == "gradient" and by_step[found + 1] == "value: drift" and by_step[last] == "gradient"
    assert restored_bits(uri, make, last, refresh=REFRESH) == live


def test_a_cut_right_after_the_drift_was_found_restores_the_live_bytes(tmp_path: Path) -> None:
    make, uri = job_of(writing_at(WRITTEN)), f"file://{tmp_path}"
    job = make(1)
    with opened(uri, job, refresh=REFRESH, log_steps=64) as ckpt:
        ckpt.restore()
        found = first_found(ckpt, job, 1, WRITTEN + REFRESH)
        job.train(ckpt, found, found + 1, settle=True)
        live = job.bits()
    assert restored_bits(uri, make, found + 1, refresh=REFRESH) == live


def test_repeated_drift_sends_a_state_whole_for_good(tmp_path: Path) -> None:
    """Written once, found, certified again, and written once more."""
    again = WRITTEN + 3 * REFRESH
    make, uri = job_of(writing_at(WRITTEN, again)), f"file://{tmp_path}"
    job = make(1)
    with opened(uri, job, refresh=REFRESH, log_steps=64) as ckpt:
        ckpt.restore()
        first = first_found(ckpt, job, 1, WRITTEN + REFRESH)
        second = first_found(ckpt, job, first + 1, again + REFRESH)
        assert again <= second
        job.train(ckpt, second, second + REFRESH, settle=True)
        live = job.bits()
    by_step = dict(zip(sorted(logged(tmp_path).increments), travelled(logged(tmp_path), "0.weight"), strict=True))
    assert by_step[second] == "gradient"
    assert {by_step[step] for step in range(second + 1, second + REFRESH + 1)} == {"value: drift"}
    assert restored_bits(uri, make, second + REFRESH, refresh=REFRESH) == live


def test_state_written_invisibly_at_every_step_goes_whole(tmp_path: Path) -> None:
    """Found once; then its replay does not give what was shipped, so it is exact at every step from there on."""
    make, uri = job_of(writing_at(*range(WRITTEN, 100))), f"file://{tmp_path}"
    job = make(1)
    with opened(uri, job, refresh=REFRESH, log_steps=64) as ckpt:
        ckpt.restore()
        found = first_found(ckpt, job, 1, WRITTEN + REFRESH)
        last = found + 2 * REFRESH
        job.train(ckpt, found, last, settle=True)
        assert all(ckpt.inexact(step) == () for step in range(found + 1, last + 1))
        live = job.bits()
    assert travelled(logged(tmp_path), "0.weight")[-1] == "value: optimizer"
    assert restored_bits(uri, make, last, refresh=REFRESH) == live


def test_frozen_tensor_that_is_written_invisibly_at_every_step(tmp_path: Path) -> None:
    """In one element, which no sample hits; no optimizer holds it, and no gradient tells that it changes."""

    def make(seed: int) -> Job:
        model = mlp(seed)
        model.register_buffer("average", torch.zeros(40_000))
        return Job(model, {"optim": adamw(model.parameters())}, averaging)

    def averaging(job: Job, n: int) -> None:
        plain(job, n)
        job.model.get_buffer("average").data[1] += n

    job, uri = make(1), f"file://{tmp_path}"
    with opened(uri, job, refresh=REFRESH, log_steps=64) as ckpt:
        ckpt.restore()
        first = first_found(ckpt, job, 1, REFRESH + 1)
        second = first_found(ckpt, job, first + 1, first + 3 * REFRESH)
        job.train(ckpt, second, second + REFRESH, settle=True)
        assert all(ckpt.inexact(step) == () for step in range(second + 1, second + REFRESH + 1))
        live = job.bits()
    assert restored_bits(uri, make, second + REFRESH, refresh=REFRESH) == live


FROZEN: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(128, 256),
    "transposed": lambda: torch.randn(256, 128).t(),
    "channels-last": lambda: torch.randn(8, 16, 16, 16).to(memory_format=torch.channels_last),
    "part of another": lambda: torch.randn(200, 300)[8:136, 3:259:2].to(torch.bfloat16)[:, ::2],
    "expanded": lambda: torch.randn(300, 1).expand(300, 100),
    "conjugated": lambda: torch.randn(100, 100, dtype=torch.complex64).conj(),
    "one element": lambda: torch.randn(()),
}


@pytest.mark.parametrize("form", FROZEN)
def test_a_frozen_tensor_of_any_form_that_is_rewritten_invisibly_goes_whole_at_that_step(tmp_path: Path, form: str) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        job = Job(model, {"optim": adamw(list(model.parameters()))}, rewriting)
        model.register_parameter("frozen", torch.nn.Parameter(FROZEN[form](), requires_grad=False))
        return job

    def rewriting(job: Job, n: int) -> None:
        plain(job, n)
        if n == WRITTEN:
            memory = torch.empty(0, dtype=torch.uint8).set_(job.model.get_parameter("frozen").untyped_storage())
            memory.numpy()[:] ^= 1

    job, uri = make(1), f"file://{tmp_path}"
    with opened(uri, job, refresh=100, log_steps=64) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, WRITTEN + 2, settle=True)
        live = job.bits()
    assert travelled(logged(tmp_path), "frozen")[WRITTEN - 2 :] == ["-", "value: unseen", "-", "-"]
    assert restored_bits(uri, make, WRITTEN + 2, refresh=100) == live


def test_a_frozen_tensor_that_is_laid_out_otherwise_in_its_memory_goes_whole_at_that_step(tmp_path: Path) -> None:
    """Neither identity nor address nor version moves, and no byte of the memory."""

    def make(seed: int) -> Job:
        model = mlp(seed)
        job = Job(model, {"optim": adamw(list(model.parameters()))}, turning)
        model.register_parameter("frozen", torch.nn.Parameter(torch.randn(150, 150), requires_grad=False))
        return job

    def turning(job: Job, n: int) -> None:
        plain(job, n)
        if n == WRITTEN:
            frozen = job.model.get_parameter("frozen")
            frozen.data = frozen.data.t()

    job, uri = make(1), f"file://{tmp_path}"
    with opened(uri, job, refresh=100, log_steps=64) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, WRITTEN + 2, settle=True)
        live = job.bits()
    assert travelled(logged(tmp_path), "frozen")[WRITTEN - 2 :] == ["-", "value: write", "-", "-"]
    assert restored_bits(uri, make, WRITTEN + 2, refresh=100) == live


def test_verify_step_compares_everything_at_every_step(tmp_path: Path) -> None:
    make, uri = job_of(writing_at(WRITTEN)), f"file://{tmp_path}"
    job = make(1)
    with opened(uri, job, verify="step") as ckpt:
        ckpt.restore()
        assert first_found(ckpt, job, 1, WRITTEN) == WRITTEN
        job.train(ckpt, WRITTEN, WRITTEN + 3, settle=True)
        assert [step for step in range(WRITTEN + 4) if ckpt.inexact(step)] == [WRITTEN]
        assert ckpt.status().proven == WRITTEN + 3
    elements = {state: sum(tensor.numel() for tensor in live.tensors().values()) for state, live in ckpt._inventory.states.items()}
    for increment in logged(tmp_path).increments.values():
        sent = {r.state: sum(segment.stop - segment.start for segment in r.segments) for r in increment.refreshes}
        whole = {value.spec.state for value in increment.values}
        assert sent == {state: count for state, count in elements.items() if state not in whole}


def test_drift_raises_with_on_error_raise(tmp_path: Path) -> None:
    job = job_of(writing_at(WRITTEN))(1)
    with opened(f"file://{tmp_path}", job, refresh=REFRESH, on_error="raise") as ckpt:
        ckpt.restore()
        found = first_found(ckpt, job, 1, WRITTEN + REFRESH)
        with pytest.raises(AdacheckError, match=rf"drift in 0\.weight, found at step {found}"):
            job.train(ckpt, found, found + 1)
        job.train(ckpt, found + 1, found + 2, settle=True)  # told once; training and checkpoints go on
        assert ckpt.status().committed == found + 2 and ckpt.inexact(found + 2) == ()


def test_drift_found_on_the_way_to_a_restored_cut_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, uri = job_of(writing_at(WRITTEN)), f"file://{tmp_path}"
    job = make(1)
    with opened(uri, job, refresh=REFRESH, log_steps=64) as ckpt:
        ckpt.restore()
        found = first_found(ckpt, job, 1, WRITTEN + REFRESH)
    restored_bits(uri, make, found, refresh=REFRESH)
    assert [r.message for r in caplog.records if f"cut at step {found} is inexact" in r.message]


def test_full_checkpoint_taken_in_between_is_listed_as_inexact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Published before the drift was found, marked after it, and said by a restore; one from before the write stays proven."""
    job = job_of(writing_at(WRITTEN))(1)
    with opened(f"file://{tmp_path}", job, refresh=REFRESH, log_steps=64) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, WRITTEN - REFRESH, settle=True)
        ckpt.publish_full()
        job.train(ckpt, WRITTEN - REFRESH, WRITTEN, settle=True)
        assert ckpt.inexact(WRITTEN) == ()  # not found yet
        ckpt.publish_full()
        found = first_found(ckpt, job, WRITTEN + 1, WRITTEN + REFRESH)
        job.train(ckpt, found, found + REFRESH, settle=True)
        ckpt.close()
    with adacheck.Store.open(f"file://{tmp_path}") as store:
        listed = {point.step: (point.exact, point.proven) for point in store.steps()}
    assert listed[WRITTEN] == (False, False)
    assert listed[WRITTEN - REFRESH] == (True, True)
    shutil.rmtree(tmp_path / "nvme")
    out = run_tool(restore.main, f"file://{tmp_path}", "--step", str(WRITTEN), "--to", str(tmp_path / "out"))
    assert out.code == 0 and f"the cut at step {WRITTEN} is inexact" in out.err
    assert json.loads((tmp_path / "out" / "restored.json").read_text())["exact"] is False
    caplog.clear()
    with opened(f"file://{tmp_path}", job_of(plain)(3)) as ckpt:
        assert ckpt.restore(WRITTEN) == WRITTEN
    (said,) = [r.message for r in caplog.records if "is inexact" in r.message]
    assert said.startswith(f"the cut at step {WRITTEN} is inexact") and "restore(proven=True)" in said
    caplog.clear()
    with opened(f"file://{tmp_path}", job_of(plain)(2)) as ckpt:
        assert ckpt.restore(proven=True) not in (WRITTEN, found)
    assert not [r.message for r in caplog.records if "is inexact" in r.message]
