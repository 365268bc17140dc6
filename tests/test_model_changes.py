"""Models that change while they are trained: averages of the weights, parametrizations, replaced, resized and tied parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from adacheck.capture.quiet import SMALL_BYTES
from adacheck.errors import StateMismatch
from tests.survival import LAST, OPTIONS, adamw, backward, job_of, mlp, plain, survives, travelled
from tests.training import Job, logged, opened, restored_bits

# Averages of the weights


def with_average(update: Callable[[torch.nn.Parameter, torch.nn.Parameter], None], *, trainable: bool) -> Callable[[int], Job]:
    """A second copy of the model that follows the first; both are attached, under one module."""

    def make(seed: int) -> Job:
        model = mlp(seed)
        average = copy.deepcopy(model).requires_grad_(trainable)
        both = torch.nn.ModuleDict({"model": model, "average": average})
        return Job(both, {"optim": adamw(model.parameters())}, averaging)

    def averaging(job: Job, n: int) -> None:
        job.optimizer.zero_grad()
        backward(job.model.get_submodule("model"))
        job.optimizer.step()
        parts = (job.model.get_submodule(name).parameters() for name in ("average", "model"))
        with torch.no_grad():
            for average, parameter in zip(*parts, strict=True):
                update(average, parameter)

    return make


def lerp(average: torch.nn.Parameter, parameter: torch.nn.Parameter) -> None:
    average.lerp_(parameter, 0.1)


def through_data(average: torch.nn.Parameter, parameter: torch.nn.Parameter) -> None:
    average.data.mul_(0.9).add_(parameter.data, alpha=0.1)


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("update", [lerp, through_data])
def test_an_average_kept_as_a_second_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, update: Callable[..., None], trainable: bool
) -> None:
    """Also where it is written through `.data`, which no version counter shows."""
    found = survives(tmp_path, with_average(update, trainable=trainable), caplog)
    assert set(travelled(found, "model.0.weight")) == {"gradient"}
    assert len(set(travelled(found, "average.0.weight"))) == 1 and "-" not in travelled(found, "average.0.weight")


def with_average_in_a_buffer(seed: int) -> Job:
    """A follower of the weights in one large buffer, written through `.data`."""
    model = mlp(seed)
    model.register_buffer("average", torch.zeros(SMALL_BYTES // 4))

    def averaging(job: Job, n: int) -> None:
        plain(job, n)
        job.model.get_buffer("average").data.mul_(0.9).add_(job.model.get_parameter("0.weight").data.mean(), alpha=0.1)

    return Job(model, {"optim": adamw(model.parameters())}, averaging)


@pytest.mark.parametrize("make", [with_average(through_data, trainable=False), with_average_in_a_buffer], ids=["parameters", "buffer"])
@pytest.mark.parametrize("steps", [1, 2])
def test_an_average_written_through_data_moves_in_every_step_after_a_restart(
    tmp_path: Path, make: Callable[[int], Job], steps: int
) -> None:
    """Also with one step per start: the first is compared with what was restored."""
    reference, expected = make(1), {}
    begins = range(0, 4 * steps, steps)
    for begin in begins:
        reference.train(None, begin, begin + steps)
        expected[begin + steps] = reference.bits()
    for begin in begins:
        job = make(1 + begin)
        with opened(f"file://{tmp_path}", job, **OPTIONS) as ckpt:
            assert ckpt.restore() == begin
            assert begin == 0 or job.bits() == expected[begin]
            job.train(ckpt, begin, begin + steps, settle=True)
            assert job.bits() == expected[begin + steps]


def test_averaged_model_in_extra(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        model = torch.nn.Sequential(mlp(seed), torch.nn.BatchNorm1d(3))
        average = AveragedModel(
            model,
            multi_avg_fn=get_ema_multi_avg_fn(0.9),  # type: ignore[no-untyped-call]
            use_buffers=True,
        )
        return Job(model, {"optim": adamw(model.parameters())}, averaging, {"average": average})

    def averaging(job: Job, n: int) -> None:
        plain(job, n)
        job.extra["average"].update_parameters(job.model)

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.0.weight")) == {"gradient"}


@pytest.mark.parametrize("swap", ["data", "copy"])
def test_weights_are_swapped_with_their_average(tmp_path: Path, caplog: pytest.LogCaptureFixture, swap: str) -> None:
    """For an evaluation within the iteration, and at steps 10 and 14 over `ckpt.step()` too: what is live is kept."""
    averages: dict[int, list[torch.Tensor]] = {}

    def exchange(job: Job) -> None:
        with torch.no_grad():
            for parameter, average in zip(job.model.parameters(), averages[id(job)], strict=True):
                if swap == "data":
                    parameter.data, average.data = average.data, parameter.data
                else:
                    held = parameter.clone()
                    parameter.copy_(average)
                    average.copy_(held)

    def swapping(job: Job, n: int) -> None:
        mine = averages.setdefault(id(job), [p.detach().clone() * 0.5 for p in job.model.parameters()])
        if n in (11, LAST + 1):
            exchange(job) if n == 11 else None
        plain(job, n)
        with torch.no_grad():
            for average, parameter in zip(mine, job.model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
        exchange(job)
        if n not in (10, LAST):
            exchange(job)

    job = job_of(swapping)(1)
    with opened(f"file://{tmp_path}", job, **OPTIONS) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, LAST, settle=True)
        assert all(ckpt.inexact(step) == () for step in range(LAST + 1))
        live = job.bits()
    assert restored_bits(f"file://{tmp_path}", job_of(swapping), LAST, **OPTIONS) == live
    by_step = dict(zip(sorted(logged(tmp_path).increments), travelled(logged(tmp_path), "0.weight"), strict=True))
    assert by_step[LAST] == "value: write"


# Parametrizations


def weight_norm(model: torch.nn.Sequential) -> None:
    parametrizations.weight_norm(model[0])


def spectral_norm(model: torch.nn.Sequential) -> None:
    parametrizations.spectral_norm(model[0])


def old_weight_norm(model: torch.nn.Sequential) -> None:
    torch.nn.utils.weight_norm(model[0])


def old_spectral_norm(model: torch.nn.Sequential) -> None:
    torch.nn.utils.spectral_norm(model[0])


def orthogonal(model: torch.nn.Sequential) -> None:
    parametrizations.orthogonal(model[2])


@pytest.mark.filterwarnings("ignore:`torch.nn.utils")
@pytest.mark.parametrize("parametrize", [weight_norm, spectral_norm, old_weight_norm, old_spectral_norm, orthogonal])
def test_parametrizations(tmp_path: Path, caplog: pytest.LogCaptureFixture, parametrize: Callable[[torch.nn.Sequential], None]) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        parametrize(model)
        return Job(model, {"optim": adamw(model.parameters())}, plain)

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "2.bias")) == {"gradient"}


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_a_parametrization_is_registered_and_removed_in_mid_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same parameter has another name from step 5 to 9, and again from step 12 on, so over the restore."""

    def register(job: Job) -> None:
        parametrize.register_parametrization(job.model.get_submodule("0"), "weight", Doubled())

    def changing(job: Job, n: int) -> None:
        if n in (5, 12):
            register(job)
        if n == 9:
            parametrize.remove_parametrizations(job.model.get_submodule("0"), "weight", leave_parametrized=False)
        plain(job, n)

    def again(seed: int) -> Job:
        job = job_of(changing)(seed)
        register(job)
        return job

    found = survives(tmp_path, job_of(changing), caplog, again=again)
    assert "0.parametrizations.weight.original" in {value.spec.fqn for i in found.increments.values() for value in i.values} | {
        base.spec.fqn for base in found.bases.values()
    }


# Parameters that are replaced, resized, frozen, tied


def test_a_parameter_is_replaced_in_model_and_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def replacing(job: Job, n: int) -> None:
        if n == 12:
            layer, group = job.model.get_submodule("0"), job.optimizer.param_groups[0]
            old = layer.get_parameter("weight")
            layer.weight = torch.nn.Parameter(old.detach() * 0.5)
            group["params"] = [layer.weight if p is old else p for p in group["params"]]
            del job.optimizer.state[old]
        plain(job, n)

    found = survives(tmp_path, job_of(replacing), caplog)
    assert "gradient" in travelled(found, "0.weight")


def test_a_parameter_that_is_replaced_in_the_model_only_is_an_error_by_name(tmp_path: Path) -> None:
    """The new one is trained by nobody, and the old one has no name any more: no other script has both."""

    def replacing(job: Job, n: int) -> None:
        if n == 9:
            layer = job.model.get_submodule("0")
            layer.weight = torch.nn.Parameter(layer.get_parameter("weight").detach() * 0.5)
        plain(job, n)

    job, fresh = job_of(replacing)(1), job_of(replacing)(2)
    with opened(f"file://{tmp_path}", job, **OPTIONS) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, LAST, settle=True)
    before = fresh.bits()
    with opened(f"file://{tmp_path}", fresh, **OPTIONS) as ckpt:
        with pytest.raises(StateMismatch) as caught:
            ckpt.restore()
        assert "missing in the script: optim.0.0" in str(caught.value)
        assert "0.weight: in optimizer optim in the script, none in the cut" in str(caught.value)
        assert fresh.bits() == before


def grown(seed: int, rows: int) -> Job:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(rows, 4), torch.nn.Linear(4, 3))
    return Job(model, {"optim": adamw(model.parameters(), fused=False)}, growing)


def growing(job: Job, n: int) -> None:
    table = job.model.get_submodule("0")
    assert isinstance(table, torch.nn.Embedding)
    if n == 8:
        old, group = table.weight, job.optimizer.param_groups[0]
        table.weight = torch.nn.Parameter(torch.cat([old.detach(), torch.zeros(3, 4)]))
        table.num_embeddings += 3
        group["params"] = [table.weight if p is old else p for p in group["params"]]
        entries: dict[str, Any] = job.optimizer.state.pop(old)
        job.optimizer.state[table.weight] = {
            name: torch.cat([entry, torch.zeros(3, 4)]) if entry.dim() else entry for name, entry in entries.items()
        }
    job.optimizer.zero_grad()
    torch.autograd.backward(job.model(torch.randint(0, table.num_embeddings, (5,))).square().mean())
    job.optimizer.step()


def test_an_embedding_that_grows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = survives(tmp_path, lambda seed: grown(seed, 11), caplog, again=lambda seed: grown(seed, 14))
    assert travelled(found, "0.weight")[-1] == "gradient"


def test_an_embedding_of_another_size_is_an_error_by_name(tmp_path: Path) -> None:
    job, fresh = grown(1, 11), grown(2, 11)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 9, settle=True)
    with (
        opened(f"file://{tmp_path}", fresh) as ckpt,
        pytest.raises(StateMismatch, match=r"0.weight: shape \[11, 4\] in the script, \[14, 4\]"),
    ):
        ckpt.restore()


def test_weights_are_tied_in_mid_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two parameters become one, which has both names from then on."""

    def tie(job: Job) -> None:
        second, group = job.model.get_submodule("1"), job.optimizer.param_groups[0]
        old = second.get_parameter("weight")
        second.weight = job.model.get_submodule("0").get_parameter("weight")
        group["params"] = [p for p in group["params"] if p is not old]
        job.optimizer.state.pop(old, None)

    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Linear(12, 12))
        return Job(model, {"optim": adamw(model.parameters())}, tying)

    def tying(job: Job, n: int) -> None:
        if n == 8:
            tie(job)
        plain(job, n)

    def again(seed: int) -> Job:
        job = make(seed)
        tie(job)
        return job

    survives(tmp_path, make, caplog, again=again)


def test_weights_that_are_tied_in_one_script_only_are_an_error_by_name(tmp_path: Path) -> None:
    def made(tied: bool) -> Job:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Linear(12, 12))
        if tied:
            model[1].weight = model[0].weight
        return Job(model, {"optim": adamw(model.parameters())}, plain)

    for tied, message in (
        (True, "1.weight: tied to 0.weight in the cut, and not in the script"),
        (False, "1.weight: tied to 0.weight in the script, and not in the cut"),
    ):
        job, other = made(tied), made(not tied)
        with opened(f"file://{tmp_path}/{tied}", job) as ckpt:
            ckpt.restore()
            job.train(ckpt, 0, 2, settle=True)
        with opened(f"file://{tmp_path}/{tied}", other) as ckpt, pytest.raises(StateMismatch, match=message):
            ckpt.restore()


def test_the_dtype_is_changed_in_mid_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`model.to(bfloat16)` under an optimizer that keeps its fp32 moments: they come back as they are."""

    def changing(job: Job, n: int) -> None:
        if n == 8:
            job.model.to(torch.bfloat16)
        job.optimizer.zero_grad()
        dtype = job.model.get_parameter("0.weight").dtype
        torch.autograd.backward(job.model(torch.randn(5, 12, dtype=dtype)).square().mean())
        job.optimizer.step()

    def again(seed: int) -> Job:
        job = made(seed)
        job.model.to(torch.bfloat16)
        return job

    def made(seed: int) -> Job:
        model = mlp(seed)
        return Job(model, {"optim": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)}, changing)

    survives(tmp_path, made, caplog, again=again)
