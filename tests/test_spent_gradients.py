"""Gradients that an optimizer has used: what the script does to them next is right after a restore, too.

Where a part of the model takes no part in the iteration after the restore, none, zeros and what there was are three different steps.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from adacheck.capture import accumulated
from adacheck.capture.beside import Beside
from tests.survival import LAST, MORE, OPTIONS, Make, adamw, backward, job_of, mlp, plain, survives, travelled
from tests.training import Job, logged, opened


class Sometimes(torch.nn.Module):
    """A parameter that takes no part in some iterations."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.always, self.rare = torch.nn.Linear(12, 3), torch.nn.Linear(12, 3)
        self.used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.always.weight.dtype)
        out: torch.Tensor = self.always(x)
        return out + self.rare(x) if self.used else out


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_is_not_none(tmp_path: Path, caplog: pytest.LogCaptureFixture, to_none: bool, first: bool) -> None:
    """A parameter that is unused right after the restore: with a gradient of zeros it decays and moves on, with none it stays."""

    def make(seed: int) -> Job:
        model = Sometimes(seed)
        return Job(model, {"optim": adamw(model.parameters(), weight_decay=0.1)}, zeroing)

    def zeroing(job: Job, n: int) -> None:
        job.model.used = n <= LAST  # type: ignore[assignment]
        if first:
            job.optimizer.zero_grad(set_to_none=to_none)
        backward(job.model)
        job.optimizer.step()
        if not first:
            job.optimizer.zero_grad(set_to_none=to_none)

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "rare.weight")) == {"gradient"}


def test_sparse_gradients_that_are_zeroed_stay_sparse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SparseAdam takes no dense ones, of which one would be left if the next gradient were added to dense zeros."""

    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Embedding(11, 4, sparse=True)
        return Job(model, {"optim": torch.optim.SparseAdam(model.parameters(), lr=0.05)}, zeroing)

    def zeroing(job: Job, n: int) -> None:
        job.optimizer.zero_grad(set_to_none=False)
        torch.autograd.backward(job.model(torch.randint(0, 11, (5,))).square().mean())
        job.optimizer.step()

    survives(tmp_path, make, caplog)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (["zero"] * 10, ""),
        ([""] * 10, ""),
        (["zero"] * 5 + [""] * 5, "may not have been before"),
        (["drop"] * 5 + [""] * 5, "was not dropped before"),
    ],
)
def test_a_gradient_that_is_not_treated_as_before_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: list[str], said: str
) -> None:
    """It was taken for one that is dropped or zeroed before the next backward pass, and that is in no earlier cut."""

    def zeroing(job: Job, n: int) -> None:
        if what[n - 1]:
            job.optimizer.zero_grad(set_to_none=what[n - 1] == "drop")
        backward(job.model)
        job.optimizer.step()

    job = job_of(zeroing)(1)
    with opened(f"file://{tmp_path}", job, **OPTIONS) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, len(what))
    told = [record.message for record in caplog.records if "cuts of the steps before lack it" in record.message]
    assert len(told) == bool(said) and all(said in line for line in told)


def test_gradients_that_nobody_zeroes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was stepped is still there, and the next gradient is added to it: also after a restore, and one right after that."""

    def adding(job: Job, n: int) -> None:
        backward(job.model)
        job.optimizer.step()

    make = job_of(adding)
    survives(tmp_path / "once", make, caplog)
    reference = make(1)
    reference.train(None, 0, LAST + 1 + MORE)
    expected = reference.bits()
    job, start = make(1), 0
    for last in (LAST, LAST + 1, LAST + 1 + MORE):
        with opened(f"file://{tmp_path}/twice", job, **OPTIONS) as ckpt:
            assert ckpt.restore() == start
            job.train(ckpt, start, last, settle=True)
            live = job.bits()
        job, start = make(last), last
    assert live == expected


class Odd(torch.nn.Module):
    """A parameter of one element that keeps the stride of the slice it is, and a complex one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one = torch.nn.Parameter(torch.randn(1, 5)[:, 0])
        self.pairs = torch.nn.Parameter(torch.randn(12, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.pairs).sum(1).abs() * self.one


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("last", [1, 6])
def test_gradients_whose_bytes_do_not_lie_one_after_the_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, to_none: bool, last: int
) -> None:
    def make(seed: int) -> Job:
        model = Odd(seed)
        assert model.one.stride() == (5,)
        return Job(model, {"optim": torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)}, turning)

    def turning(job: Job, n: int) -> None:
        job.optimizer.zero_grad(set_to_none=to_none)
        backward(job.model)
        pairs = job.model.get_parameter("pairs")
        assert pairs.grad is not None
        pairs.grad = pairs.grad.resolve_conj().conj()
        assert pairs.grad.is_conj()
        job.optimizer.step()

    survives(tmp_path, make, caplog, last=last)


def test_gradients_that_the_other_optimizers_backward_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a GAN's generator leaves some on the discriminator, which here takes them into its next step."""

    def make(seed: int) -> Job:
        model = mlp(seed)
        return Job(model, {"a": adamw(model[0].parameters()), "b": adamw(model[2].parameters())}, in_turn)

    def in_turn(job: Job, n: int) -> None:
        for optimizer in job.optimizers.values():
            backward(job.model)
            optimizer.step()
            optimizer.zero_grad()

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight") + travelled(found, "2.weight")) == {"gradient"}


def test_a_fresh_scripts_stale_gradients_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stepping(job: Job, n: int) -> None:
        backward(job.model)
        job.optimizer.step()
        job.optimizer.zero_grad()

    def warmed_up(seed: int) -> Job:
        job = job_of(stepping)(seed)
        backward(job.model)
        return job

    survives(tmp_path, job_of(stepping), caplog, again=warmed_up)


# What the script does with them is not known yet


@pytest.mark.parametrize("to_none", [True, False])
def test_right_after_the_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture, to_none: bool) -> None:
    def make(seed: int) -> Job:
        model = Sometimes(seed)
        return Job(model, {"optim": adamw(model.parameters(), weight_decay=0.1)}, zeroing)

    def zeroing(job: Job, n: int) -> None:
        job.model.used = n != 2  # type: ignore[assignment]
        job.optimizer.zero_grad(set_to_none=to_none)
        backward(job.model)
        job.optimizer.step()

    survives(tmp_path, make, caplog, last=1)


@pytest.mark.parametrize("bound", [accumulated.UNKNOWN_BYTES_MAX, 0])
@pytest.mark.parametrize("last", [7, 8])
def test_zeros_of_a_group_that_is_added(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, last: int, bound: int
) -> None:
    """At the begin of iteration 8: its gradients are there before. That others are zeroed shows what happens to these, however large."""
    monkeypatch.setattr(accumulated, "UNKNOWN_BYTES_MAX", bound)

    def make(seed: int, begun: int = 0) -> Job:
        model = Sometimes(seed)
        job = Job(model, {"optim": adamw(model.always.parameters(), weight_decay=0.1)}, adding)
        if begun >= 8:
            add(job)
        return job

    def add(job: Job) -> None:
        job.optimizer.add_param_group({"params": list(job.model.get_submodule("rare").parameters())})

    def adding(job: Job, n: int) -> None:
        if n == 8:
            add(job)
        job.model.used = n <= last  # type: ignore[assignment]
        job.model.zero_grad(set_to_none=False)
        backward(job.model)
        job.optimizer.step()

    survives(tmp_path, make, caplog, last=last, again=lambda seed: make(seed, last))


def test_zeros_of_parameters_that_are_unfrozen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        model = Sometimes(seed)
        model.rare.requires_grad_(False)
        return Job(model, {"optim": adamw(model.parameters(), weight_decay=0.1)}, unfreezing)

    def unfreezing(job: Job, n: int) -> None:
        if n == 8:
            job.model.get_submodule("rare").requires_grad_(True)
        job.model.used = n != 9  # type: ignore[assignment]
        job.optimizer.zero_grad(set_to_none=False)
        backward(job.model)
        job.optimizer.step()

    survives(tmp_path, make, caplog, last=8)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("how", ["in place", "anew", "anew after", "anew in a hook", "graph"])
@pytest.mark.parametrize("last", [1, 6])
def test_gradients_that_are_carried_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, last: int, how: str) -> None:
    """As a momentum that the script keeps in the gradients themselves; with `create_graph` every sum is another tensor."""

    def carrying(job: Job, n: int) -> None:
        for parameter in job.model.parameters():
            if parameter.grad is not None and how == "in place":
                parameter.grad.mul_(0.5)
            elif parameter.grad is not None and how == "anew":
                parameter.grad = parameter.grad * 0.5
        torch.autograd.backward(job.model(torch.randn(5, 12)).square().mean(), create_graph=how == "graph")
        for parameter in job.model.parameters():
            if parameter.grad is not None and how == "anew after":
                parameter.grad = parameter.grad * 0.5
        job.optimizer.step()

    def make(seed: int) -> Job:
        job = job_of(carrying, fused=False)(seed)
        for parameter in job.model.parameters() if how == "anew in a hook" else ():
            parameter.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
        return job

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5

    survives(tmp_path, make, caplog, last=last)


@pytest.mark.parametrize("last", [1, 2, 6])
def test_zeros_that_are_carried_on_as_other_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture, last: int) -> None:
    """As an average over accumulated batches makes them; of the part that was not used, too."""

    def make(seed: int) -> Job:
        model = Sometimes(seed)
        return Job(model, {"optim": adamw(model.parameters(), weight_decay=0.1)}, averaging)

    def averaging(job: Job, n: int) -> None:
        job.model.used = n in (1, 4, 5, 6)  # type: ignore[assignment]
        job.optimizer.zero_grad(set_to_none=False)
        backward(job.model)
        for parameter in job.model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / 2
        job.optimizer.step()

    survives(tmp_path, make, caplog, last=last)


# Parameters whose masters are stepped


def mastered(seed: int, dtype: torch.dtype, iterate: Callable[[Job, int], None], *, apart: bool = False) -> Job:
    """A model of which one optimizer, or (`apart`) one for each half, steps fp32 copies."""
    model = Sometimes(seed).to(dtype)
    halves = [model.always, model.rare] if apart else [model]
    copies = [[torch.nn.Parameter(p.detach().float().clone()) for p in half.parameters()] for half in halves]
    return Job(model, {str(i): adamw(each, weight_decay=0.1) for i, each in enumerate(copies)}, iterate)


def step_masters(optimizer: torch.optim.Optimizer, trained: torch.nn.Module) -> None:
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    pairs = list(zip(masters, trained.parameters(), strict=True))
    for master, parameter in pairs:
        master.grad = None if parameter.grad is None else parameter.grad.float()
    optimizer.step()
    with torch.no_grad():
        for master, parameter in pairs:
            parameter.copy_(master)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("last", [1, 6])
def test_parameters_with_masters(tmp_path: Path, caplog: pytest.LogCaptureFixture, last: int, to_none: bool, dtype: torch.dtype) -> None:
    """The masters' gradients are made anew from the model's, which are zeros where a part is unused."""

    def stepping(job: Job, n: int) -> None:
        job.model.used = n <= last  # type: ignore[assignment]
        job.model.zero_grad(set_to_none=to_none)
        backward(job.model)
        step_masters(job.optimizers["0"], job.model)

    survives(tmp_path, lambda seed: mastered(seed, dtype, stepping), caplog, last=last)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("last", [1, 2, 7, 8])
def test_accumulation_for_masters(tmp_path: Path, caplog: pytest.LogCaptureFixture, last: int, to_none: bool) -> None:
    """Over two iterations, so that every second cut lies between."""

    def accumulating(job: Job, n: int) -> None:
        job.model.used = n <= last  # type: ignore[assignment]
        if n % 2:
            job.model.zero_grad(set_to_none=to_none)
        backward(job.model)
        if n % 2 == 0:
            step_masters(job.optimizers["0"], job.model)

    survives(tmp_path, lambda seed: mastered(seed, torch.bfloat16, accumulating), caplog, last=last)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("last", [1, 2, 7, 8])
def test_one_of_two_optimizers_of_masters_rests(tmp_path: Path, caplog: pytest.LogCaptureFixture, last: int, to_none: bool) -> None:
    """What it has still to step is summed up meanwhile, beside gradients that the other one has used."""

    def resting(job: Job, n: int) -> None:
        halves = [job.model.get_submodule("always"), job.model.get_submodule("rare")]
        job.model.used = n <= last  # type: ignore[assignment]
        halves[0].zero_grad(set_to_none=to_none)
        backward(job.model)
        step_masters(job.optimizers["0"], halves[0])
        if n % 2 == 0:
            step_masters(job.optimizers["1"], halves[1])
            halves[1].zero_grad(set_to_none=to_none)

    survives(tmp_path, lambda seed: mastered(seed, torch.bfloat16, resting, apart=True), caplog, last=last)


# What is not kept


def kept(root: Path, make: Make) -> list[set[str]]:
    """Whose gradients the first, the second and the sixth cut hold."""
    found = []
    for last in (1, 2, 6):
        job = make(1)
        with opened(f"file://{root}/{last}", job, **OPTIONS) as ckpt:
            ckpt.restore()
            job.train(ckpt, 0, last, settle=True)
        names = (item.tensor for item in logged(root / str(last)).increments[last].opaque)
        found.append({name.removeprefix("gradient/") for name in names if name.startswith("gradient/")})
    return found


ALL = {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_gradients_that_are_dropped_are_kept_once(tmp_path: Path) -> None:
    assert kept(tmp_path, job_of(plain)) == [ALL, set(), set()]


def test_so_are_those_of_parameters_with_masters(tmp_path: Path) -> None:
    def stepping(job: Job, n: int) -> None:
        job.model.zero_grad()
        backward(job.model)
        step_masters(job.optimizers["0"], job.model)

    names = {f"{layer}.{name}" for layer in ("always", "rare") for name in ("weight", "bias")}
    assert kept(tmp_path, lambda seed: mastered(seed, torch.bfloat16, stepping)) == [names | {f"0.0.{i}" for i in range(4)}, set(), set()]


def test_so_are_those_that_another_optimizers_backward_adds_to_first(tmp_path: Path) -> None:
    """As a GAN's generator adds to its discriminator's, which are dropped only after that."""

    def make(seed: int) -> Job:
        model = mlp(seed)
        return Job(model, {"generator": adamw(model[0].parameters()), "discriminator": adamw(model[2].parameters())}, in_turn)

    def in_turn(job: Job, n: int) -> None:
        first, then = job.optimizers.values()
        first.zero_grad()
        backward(job.model)
        first.step()
        then.zero_grad()
        made = job.model.get_submodule("0")(torch.randn(5, 12)).detach()
        torch.autograd.backward(job.model.get_submodule("2")(made).square().mean())
        then.step()

    assert kept(tmp_path, make) == [ALL, set(), set()]


def test_so_are_those_in_memory_that_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the buckets of DistributedDataParallel with `gradient_as_bucket_view`: dropped, filled anew, and the same tensors again."""

    def make(seed: int) -> Job:
        job = job_of(plain)(seed)
        for parameter in job.model.parameters():
            bucket = torch.empty_like(parameter.detach())
            parameter.register_post_accumulate_grad_hook(partial(fill, bucket))  # type: ignore[no-untyped-call]
        return job

    def fill(bucket: torch.Tensor, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = bucket.copy_(parameter.grad)

    assert kept(tmp_path, make) == [ALL, set(), set()]
    survives(tmp_path / "survives", make, caplog, last=1)
    assert "lack it" not in caplog.text


def half_trained(iterate: Callable[[Job, int], None]) -> Make:
    """Jobs of which half the parameters are in no optimizer, and are not frozen either: their gradients sum up."""

    def make(seed: int) -> Job:
        model = mlp(seed)
        return Job(model, {"optim": adamw(model[2].parameters())}, iterate)

    return make


def test_so_are_sums_that_nobody_uses(tmp_path: Path) -> None:
    assert kept(tmp_path, half_trained(plain)) == [ALL, set(), set()]


def test_a_sum_that_an_optimizer_takes_over_after_all_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def taking_over(job: Job, n: int) -> None:
        if n == 5:
            job.optimizer.add_param_group({"params": list(job.model.get_submodule("0").parameters())})
        backward(job.model)
        job.optimizer.step()
        job.optimizer.zero_grad()

    job = half_trained(taking_over)(1)
    with opened(f"file://{tmp_path}", job, **OPTIONS) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 5)
    assert "the gradient of 0.weight was not dropped before the last backward pass: cuts of the steps before lack it" in caplog.text


@pytest.mark.parametrize("to_none", [True, False])
def test_large_ones_are_not_kept_before_the_script_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, to_none: bool
) -> None:
    size_bytes = 4 * sum(p.numel() for p in mlp(1).parameters())
    monkeypatch.setattr(accumulated, "UNKNOWN_BYTES_MAX", size_bytes - 1)

    def zeroing(job: Job, n: int) -> None:
        job.optimizer.zero_grad(set_to_none=to_none)
        backward(job.model)
        job.optimizer.step()

    later: set[str] = set() if to_none else ALL
    assert kept(tmp_path, job_of(zeroing)) == [set(), later, later]
    assert ("cuts of the steps before lack it" in caplog.text) is not to_none


# What the script does with gradients itself


def test_the_scripts_own_files_and_copies_of_gradients_hold_nothing_of_ours(tmp_path: Path) -> None:
    job = job_of(plain)(1)
    with opened(f"file://{tmp_path}/run", job, **OPTIONS) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 2)
        held = {name: p.grad for name, p in job.model.named_parameters()}
        torch.save(held, tmp_path / "gradients.pt")
        read = torch.load(tmp_path / "gradients.pt", weights_only=True)
        assert read.keys() == held.keys() and all(torch.equal(read[name], grad) for name, grad in held.items() if grad is not None)
        assert all(grad is not None and not vars(grad) and not vars(copy.deepcopy(grad)) for grad in held.values())


def test_a_note_goes_with_its_tensor() -> None:
    notes = Beside[str]()
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    notes.put(parameter.grad, "first")
    notes.put(parameter.grad, "second")
    gc.collect()
    assert notes.get(parameter.grad) == "second", "also while no name in Python refers to it"
    assert notes.get(parameter.grad.clone()) is None
    parameter.grad = None
    assert not notes._notes


def test_a_backward_pass_in_two_threads_is_no_error(tmp_path: Path) -> None:
    """The hook on a parameter may be called again while its first call is about to take it away."""
    job = job_of(plain)(1)
    with opened(f"file://{tmp_path}", job, **OPTIONS) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 1)
        gradients, live = ckpt._capture.gradients, ckpt._inventory.by_optimizer["optim"][0]
        job.optimizer.zero_grad()
        for _ in range(2):
            gradients._backward(live, torch.zeros(17, 12))
        assert gradients._questions[live.fqn].gone and live.fqn not in gradients._listening


def test_pickling_a_master_warns_of_nothing(tmp_path: Path) -> None:
    """A master is a plain tensor, of which torch warns if it has hooks; a warning is an error here."""
    copies = [torch.zeros(3, requires_grad=True)]

    def stepping(job: Job, n: int) -> None:
        copies[0].grad = torch.ones(3)
        job.optimizer.step()

    job = Job(mlp(1), {"optim": adamw(copies)}, stepping)
    with opened(f"file://{tmp_path}/run", job, **OPTIONS) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 1)
        assert ckpt._capture.gradients._listening
        torch.save(copies, tmp_path / "masters.pt")
