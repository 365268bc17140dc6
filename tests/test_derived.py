"""A bf16 weight that is the cast of an fp32 master is not sent at all, and comes back bit for bit, whatever the script does to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

import adacheck
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.object_store import ObjectStore
from adacheck.cast import CHUNK_ELEMENTS, FIRST_ELEMENTS, cast_into, is_cast
from adacheck.check_cut import newest_cut
from adacheck.config import parse
from adacheck.errors import DamagedCut
from adacheck.keeper.certify import EQUAL_STEPS
from adacheck.keeper.nvme import NvmeCopy
from adacheck.keeper.scan import Scan
from adacheck.manifests import keys
from adacheck.nvme_reader import NvmeReader
from adacheck.optimizers import BUILT_IN, Declaration, class_name, declaration
from adacheck.recovery import read_newest
from adacheck.same import same_bytes
from adacheck.sources import Sources, gather
from adacheck.tools import fsck, restore
from tests.crash_images import Recorder
from tests.survival import LAST, Make, adamw, mlp, survives, travelled
from tests.test_drift import first_found
from tests.tool_run import run_tool
from tests.training import Job, kill, logged, names, nvme_folder, opened, payloads, restored_bits

PROVEN = EQUAL_STEPS + 2
"""From this step on, at the latest, a rule is used by a job that lets the keeper settle."""

Write = Callable[[torch.Tensor, torch.Tensor], object]


def copy_seen(weight: torch.Tensor, master: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(master)


def copy_unseen(weight: torch.Tensor, master: torch.Tensor) -> None:
    weight.data.copy_(master)


def pairs(job: Job) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    return zip(job.model.parameters(), job.optimizer.param_groups[0]["params"], strict=False)


def with_masters(write: Callable[[Job, int], None]) -> Make:
    """A model in bf16 whose masters, outside of it, are what the optimizer steps; `write` puts them back into the model."""

    def iterate(job: Job, n: int) -> None:
        job.model.zero_grad()
        torch.autograd.backward(job.model(torch.randn(5, 12).bfloat16()).square().mean())
        for weight, master in pairs(job):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        job.optimizer.step()
        write(job, n)

    def make(seed: int) -> Job:
        model = mlp(seed).bfloat16()
        masters = [weight.detach().float().requires_grad_() for weight in model.parameters()]
        return Job(model, {"optim": adamw(masters)}, iterate)

    return make


def each(write: Write) -> Callable[[Job, int], None]:
    def all_pairs(job: Job, n: int) -> None:
        for weight, master in pairs(job):
            write(weight, master)

    return all_pairs


class Own(torch.optim.Optimizer):
    """The user's own optimizer: bf16 parameters, and a master of each in its state."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state.update(master=parameter.float(), moment=torch.zeros_like(parameter, dtype=torch.float32))
                state["moment"].lerp_(parameter.grad.float(), 0.1)
                state["master"].sub_(state["moment"], alpha=self.param_groups[0]["lr"])
                parameter.copy_(state["master"])


def with_own(after: Callable[[Job, int], None] = lambda job, n: None) -> Make:
    def iterate(job: Job, n: int) -> None:
        job.optimizer.zero_grad()
        torch.autograd.backward(job.model(torch.randn(5, 12).bfloat16()).square().mean())
        job.optimizer.step()
        after(job, n)

    def make(seed: int) -> Job:
        model = mlp(seed).bfloat16()
        return Job(model, {"optim": Own(model.parameters())}, iterate)

    return make


def test_gradients_for_a_master_that_are_not_used_yet_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`ckpt.step()` after every backward pass, of which the masters take every fourth sum: step 14 is half way."""

    def accumulate(job: Job, n: int) -> None:
        torch.autograd.backward(job.model(torch.randn(5, 12).bfloat16()).square().mean())
        if n % 4 == 0:
            for weight, master in pairs(job):
                assert weight.grad is not None
                master.grad = weight.grad.float()
            job.optimizer.step()
            each(copy_seen)(job, n)
            job.model.zero_grad()

    def make(seed: int) -> Job:
        job = with_masters(each(copy_seen))(seed)
        return Job(job.model, job.optimizers, accumulate)

    survives(tmp_path, make, caplog)


@pytest.mark.parametrize("copy", [copy_seen, copy_unseen])
def test_a_weight_whose_master_is_elsewhere_is_not_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture, copy: Write) -> None:
    found = survives(tmp_path, with_masters(each(copy)), caplog)
    for weight in ("0.weight", "0.bias", "2.weight", "2.bias"):
        by_step = dict(zip(sorted(found.increments), travelled(found, weight), strict=True))
        assert {how for step, how in by_step.items() if step > PROVEN} == {"derived"}
    assert set(travelled(found, "optim.0.0")) == {"gradient"}


def test_a_weight_whose_master_is_in_its_own_state_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = survives(tmp_path, with_own(), caplog)
    for step, increment in found.increments.items():
        sent = {value.spec.fqn: {segment.tensor for segment in value.segments} for value in increment.values}
        assert sent["0.weight"] == {"master", "moment"} if step > PROVEN else sent["0.weight"]


def test_a_declared_optimizer_with_masters_goes_as_gradients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step makes the parameter from the master itself, so nothing is derived."""
    declared = Declaration(kind=Own, entries=("master", "moment"), elementwise=True, branches=())
    monkeypatch.setitem(cast(dict[str, Declaration], BUILT_IN), class_name(Own), declared)
    declaration.cache_clear()
    try:
        found = survives(tmp_path, with_own(), caplog)
    finally:
        declaration.cache_clear()
    assert {how for step, increment in found.increments.items() if step > PROVEN for how in payloads(increment).values()} == {"gradient"}


class Wide(torch.nn.Module):
    """Parameters without a forward pass: gradients are made up."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"a": (100, 1000), "b": (150_000,), "tiny": (7,)}.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape).bfloat16()))


def test_a_step_costs_two_bytes_a_parameter(tmp_path: Path) -> None:
    def iterate(job: Job, n: int) -> None:
        for weight, master in pairs(job):
            master.grad = torch.randn(weight.shape).bfloat16().float()
        job.optimizer.step()
        each(copy_seen)(job, n)

    torch.manual_seed(1)
    model = Wide()
    job = Job(model, {"optim": adamw([weight.detach().float() for weight in model.parameters()])}, iterate)
    with opened(f"file://{tmp_path}", job, log_steps=64) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, PROVEN, settle=True)
        for n in range(PROVEN, 20):
            job.train(ckpt, n, n + 1)
            ckpt.drain()
            payload, parameters = ckpt.status().payload_bytes, sum(weight.numel() for weight in model.parameters())
            assert payload["value"] == 0 and 2 * parameters <= payload["gradient"] <= 2.02 * parameters


def clamped(job: Job, n: int) -> None:
    each(copy_seen)(job, n)
    if n % 6 == 0:
        with torch.no_grad():
            for weight, _ in pairs(job):
                weight.clamp_(-0.1, 0.1)


def stops(job: Job, n: int) -> None:
    """The masters go on; so bases of theirs are written of steps at which the weights are no casts any more."""
    if n <= LAST - 6:
        each(copy_unseen)(job, n)


def averaged(job: Job, n: int) -> None:
    for weight, master in pairs(job):
        with torch.no_grad():
            weight.copy_(master if n % 7 else torch.lerp(master, weight.float(), 0.5))


def not_finite(job: Job, n: int) -> None:
    """A NaN in one weight, whose bits a cast does not settle, and infinities, whose it does."""
    if n == 9:
        with torch.no_grad():
            next(iter(pairs(job)))[1][3, 3:5] = torch.tensor([torch.inf, -0.0])
            list(pairs(job))[2][1][2, 1] = torch.nan
    each(copy_seen)(job, n)


@pytest.mark.parametrize("write", [clamped, stops, averaged, not_finite])
def test_what_is_no_cast_at_a_step_is_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture, write: Callable[[Job, int], None]) -> None:
    found = survives(tmp_path, with_masters(write), caplog)
    if write is clamped:
        by_step = dict(zip(sorted(found.increments), travelled(found, "0.weight"), strict=True))
        assert by_step[12].startswith("value") and by_step[11] == by_step[13] == "derived"
    if write is stops:
        assert travelled(found, "0.weight")[-1] == "-"


def clamp(weight: torch.Tensor, master: torch.Tensor) -> None:
    with torch.no_grad():
        weight.clamp_(-0.05, 0.05)


def swap(weight: torch.Tensor, master: torch.Tensor) -> None:
    weight.data = master.detach().bfloat16()


def write_both(weight: torch.Tensor, master: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(master.mul_(0.5))


def leave(weight: torch.Tensor, master: torch.Tensor) -> None:
    pass


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_writes_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int) -> None:
    def write(job: Job, n: int) -> None:
        chance = random.Random(100 * seed + n)
        for weight, master in pairs(job):
            chance.choice([copy_seen, copy_unseen, copy_unseen, copy_seen, clamp, swap, write_both, leave])(weight, master)

    survives(tmp_path, with_masters(write), caplog)


def cleared(job: Job, n: int) -> None:
    if n == 9:
        job.optimizer.state.clear()


def clamped_own(job: Job, n: int) -> None:
    if n % 4 == 0:
        with torch.no_grad():
            job.model.get_parameter("0.weight").clamp_(-0.1, 0.1)


@pytest.mark.parametrize("after", [cleared, clamped_own])
def test_a_state_that_holds_the_master_is_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, after: Callable[[Job, int], None]
) -> None:
    survives(tmp_path, with_own(after), caplog)


def test_the_master_goes_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def drop(job: Job) -> None:
        job.optimizer.state.pop(job.optimizer.param_groups[0]["params"].pop(), None)

    def write(job: Job, n: int) -> None:
        each(copy_seen)(job, n)
        if n == 8:
            drop(job)

    def again(seed: int) -> Job:
        job = with_masters(write)(seed)
        drop(job)
        return job

    found = survives(tmp_path, with_masters(write), caplog, again=again)
    assert travelled(found, "2.bias")[-1] == "-" and travelled(found, "2.weight")[-1] == "derived"


def test_a_write_that_nobody_sees_is_found_by_comparison(tmp_path: Path) -> None:
    """One element of a weight without gradient, written through `.data` when the script copies no more and the master has gone on."""

    def write(job: Job, n: int) -> None:
        for at, (weight, master) in enumerate(pairs(job)):
            weight.requires_grad_(False)
            if at == 0 and n >= 10:
                weight.data[0, 5] *= 1.5 if n == 12 else 1.0
            else:
                copy_seen(weight, master)

    def iterate(job: Job, n: int) -> None:
        for weight, master in pairs(job):
            master.grad = torch.randn(weight.shape)
        job.optimizer.step()
        write(job, n)

    def make(seed: int) -> Job:
        job = with_masters(write)(seed)
        return Job(job.model, job.optimizers, iterate)

    job, uri = make(1), f"file://{tmp_path}"
    with opened(uri, job, refresh=8, log_steps=64) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 12, settle=True)
        found = first_found(ckpt, job, 13, 20)
        assert ckpt.inexact(found) == ("0.weight",)
        job.train(ckpt, found, found + 3, settle=True)
        live = job.bits()
    assert restored_bits(uri, make, found + 3, refresh=8) == live


def test_a_restarted_run_finds_the_rule_again(tmp_path: Path) -> None:
    make, uri, how = with_masters(each(copy_seen)), f"file://{tmp_path}", dict[int, str]()
    for first, last in ((0, 8), (8, 16)):
        job = make(1)
        with opened(uri, job, log_steps=64) as ckpt:
            assert ckpt.restore() == first
            job.train(ckpt, first, last, settle=True)
        found = logged(tmp_path)
        how.update(zip(sorted(found.increments), travelled(found, "0.weight"), strict=True))
    assert how[8] == how[16] == "derived" and how[9].startswith("value")


def test_a_crash_at_any_transaction_loses_nothing_durable(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bases of masters are written one after the other, and of steps at which the weights had been derived before."""

    def write(job: Job, n: int) -> None:
        if n % 5 < 4:
            each(copy_unseen)(job, n)

    make, expected = with_masters(write), list[dict[str, str]]()
    reference = make(1)
    for n in range(15):
        expected.append(reference.bits())
        reference.train(None, n, n + 1)
    recorder, job = Recorder(fast / "run", fast / "images"), make(1)
    monkeypatch.setattr("adacheck.keeper.nvme.BATCH_BYTES", 1)  # each base is a transaction of its own
    with monkeypatch.context() as patched:
        patched.setattr("adacheck.start.LmdbBackend", recorder.open_nvme)
        objects = ObjectStore(f"file://{recorder.root}/objects", files=recorder.files)
        options = {"nvme": str(recorder.root / "nvme"), "log_steps": 4, "full_every": 1000}
        ckpt = job.attach(adacheck.Store(parse(f"file://{recorder.root}/objects", options), objects))
        recorder.durable = lambda: ckpt.status().durable
        ckpt.restore()
        job.train(ckpt, 0, 14, settle=True)
        recorder.take("the end")
        kill(ckpt)
    restored = set()
    for image in recorder.images:
        job = make(99)
        with opened(f"file://{image.path}/objects", job, nvme=str(image.path / "nvme")) as ckpt:
            step = ckpt.restore()
            assert step >= image.durable and (step == 0 or job.bits() == expected[step]), f"crash {image.path.name}"
            restored.add(step)
    assert restored >= set(range(PROVEN, 15))


def test_tools_read_such_a_store(tmp_path: Path) -> None:
    make, uri = with_masters(each(copy_seen)), f"file://{tmp_path}/run"
    job = make(1)
    with opened(uri, job, log_steps=4) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, LAST, settle=True)
    assert run_tool(fsck.main, uri, "--read-data").code == 0
    ended = run_tool(restore.main, uri, "--to", str(tmp_path / "out"))
    assert ended.code == 0, ended.err
    tensors = {key: tensor for file in (tmp_path / "out").glob("*.safetensors") for key, tensor in load_file(file).items()}
    for name, weight in job.model.named_parameters():
        assert torch.equal(tensors[f"model.{name}"].view(torch.int16), weight.detach().view(torch.int16))


def test_a_weight_alone_is_read_with_its_master(tmp_path: Path) -> None:
    """Whoever reads few states of a cut gets those they are derived from replayed, and not handed out."""
    job = with_masters(each(copy_seen))(1)
    with opened(f"file://{tmp_path}", job, log_steps=64) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 9, settle=True)
    found = logged(tmp_path)
    (number,) = (number for number, name in names(found).items() if name == "2.weight")
    backend = LmdbBackend(nvme_folder(tmp_path), create=False, read_only=True)
    try:
        states = NvmeReader(backend, found, 9).states([number])
    finally:
        backend.close()
    assert list(states) == [number]
    assert same_bytes(states[number].tensors["param"], job.model.get_parameter("2.weight"))


def test_a_check_promises_no_weight_whose_master_has_only_a_later_base(tmp_path: Path) -> None:
    """As no keeper writes it (`protocol.with_derived`)."""
    job, uri = with_masters(each(copy_seen))(1), f"file://{tmp_path}"
    with opened(uri, job, log_steps=64) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 9, settle=True)
    found = logged(tmp_path)
    (weight,) = (number for number, name in names(found).items() if name == "2.weight")
    derived = min(step for step, one in found.increments.items() if any(d.state == weight for d in one.derived))
    (master,) = {d.from_state for d in found.increments[derived].derived if d.state == weight}
    with LmdbBackend(nvme_folder(tmp_path), create=False) as nvme:
        (later,) = NvmeReader(nvme, found, 9).states([master]).values()
        copy = NvmeCopy(nvme, found.chain, nvme.get(keys.FENCE), found.stored_increments(), found.stored_bases())
        copy.roll([later], 9, found.chain.certificates)
        with ObjectStore(uri) as objects:
            sources = gather(found.chain.run, objects, nvme)
            promised, cut = newest_cut(sources, ()), read_newest(sources)
            with pytest.raises(DamagedCut, match=f"state {weight} was derived from one whose oldest base here is later"):
                NvmeReader(nvme, logged_in(sources), 9)
    assert promised is not None and cut is not None
    assert (promised.step, promised.source) == (cut.step, cut.source) and cut.step < derived


def logged_in(sources: Sources) -> Scan:
    assert sources.scan is not None
    return sources.scan


def special(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    return torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, info.tiny, info.smallest_normal / 4, info.max, info.eps, 1 / 3], dtype=torch.float64
    )


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float32, torch.float64),
    ],
)
@pytest.mark.parametrize("elements", [0, 1, 9, FIRST_ELEMENTS + 13, CHUNK_ELEMENTS + FIRST_ELEMENTS + 7])
def test_a_cast_is_the_same_everywhere(dtype: torch.dtype, wide: torch.dtype, elements: int, flush: bool) -> None:
    """Whatever the denormal mode, the strides and the length: exactly torch's cast, and no difference of one bit is missed."""
    source = torch.cat([special(dtype), torch.randn(elements, dtype=torch.float64)])[:elements].to(wide)
    tensor = source.to(dtype)
    expected = tensor.clone()
    torch.set_flush_denormal(flush)
    try:
        assert is_cast(tensor, source)
        cast_into(tensor, source)
        strided = torch.stack([source, source], 1)[:, 0]
        assert is_cast(tensor, strided)
    finally:
        torch.set_flush_denormal(False)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(tensor.view(bits), expected.view(bits))
    for at in {0, elements // 2, elements - 1} if elements else ():
        tensor.view(bits)[at] ^= 1
        assert not is_cast(tensor, source)
        tensor.view(bits)[at] ^= 1
        kept, source[at] = source[at].clone(), torch.nan
        assert not is_cast(source.to(dtype), source)
        source[at] = kept
    assert is_cast(tensor, source) and not is_cast(tensor, source.view(1, -1))
