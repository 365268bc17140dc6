"""Tensors of every form: dtypes, strides, views, and what is refused by name because its bytes are not all there is to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck.errors import ConfigError, NotDurable, StateMismatch, UnsupportedTensor
from adacheck.store import Store
from tests.survival import LAST, adamw, backward, job_of, mlp, plain, survives, travelled
from tests.training import Job, opened, restored_bits

DTYPES = [
    dtype
    for name, dtype in sorted(vars(torch).items())
    if (isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and not name.startswith(("q", "int1", "uint1")))
    or name in ("int16", "uint16")
]


INT4: torch.dtype = vars(torch)["int4"]


def any_bytes(dtype: torch.dtype, elements: int = 40) -> torch.Tensor:
    """NaNs of every payload, denormals and negative zeros among them."""
    if dtype is torch.bool:
        return torch.randint(0, 2, (elements,)) == 1
    return torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8).view(dtype)


class EveryDtype(torch.nn.Module):
    """One trained layer, and a buffer and a frozen parameter of every dtype that torch has; large ones too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Linear(12, 3)
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"small_{name}", any_bytes(dtype))
            self.register_buffer(f"large_{name}", any_bytes(dtype, 70_000))
            self.register_parameter(f"frozen_{name}", torch.nn.Parameter(any_bytes(dtype), requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def every_dtype(seed: int) -> Job:
    model = EveryDtype(seed)
    return Job(model, {"optim": adamw(model.body.parameters())}, renewing)


def renewing(job: Job, n: int) -> None:
    plain(job, n)
    if n == 9:
        for name, tensor in [*job.model.named_buffers(), *job.model.named_parameters()]:
            if not name.startswith("body"):
                tensor.detach().view(torch.uint8).copy_(any_bytes(tensor.dtype, tensor.numel()).view(torch.uint8))


def test_every_dtype(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert {torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex32, torch.uint64, torch.bits16, INT4} <= set(DTYPES)
    survives(tmp_path, every_dtype, caplog)


def test_every_dtype_from_a_full_checkpoint(tmp_path: Path) -> None:
    job = every_dtype(1)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, LAST)
        ckpt.publish_full()
        live = job.bits()
    shutil.rmtree(tmp_path / "nvme")
    assert restored_bits(f"file://{tmp_path}", every_dtype, LAST) == live


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64, torch.complex128])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_trained_parameters_of_other_dtypes(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, dtype: torch.dtype) -> None:
    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Linear(12, 5, dtype=dtype)
        return Job(model, {"optim": kind(model.parameters(), lr=1e-2)}, iterate)

    def iterate(job: Job, n: int) -> None:
        job.optimizer.zero_grad()
        torch.autograd.backward(job.model(torch.randn(5, 12, dtype=dtype)).abs().square().mean())
        job.optimizer.step()

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "weight")) == {"gradient"}


class Shapes(torch.nn.Module):
    """Trained parameters that lie otherwise than row after row, and buffers that share memory with one another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.turned = torch.nn.Parameter(torch.randn(7, 12).t())
        self.permuted = torch.nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.gaps = torch.nn.Parameter(torch.randn(8, 5)[:, ::2])
        self.nothing = torch.nn.Parameter(torch.empty(3, 0).t())
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("whole", torch.randn(6, 6))
        self.register_buffer("rows", self.get_buffer("whole")[1:3])
        self.register_buffer("columns", self.get_buffer("whole").t()[4:])
        self.frozen = torch.nn.Parameter(self.get_buffer("whole")[5], requires_grad=False)
        self.register_buffer("expanded", torch.randn(1, 5).expand(4, 5))
        self.register_buffer("mask", torch.randn(1, 1, 3, 1).expand(2, 4, 3, 300))
        self.register_buffer("windows", torch.randn(20).unfold(0, 5, 2))
        pairs = torch.randn(6, dtype=torch.complex64)
        self.register_buffer("conjugate", pairs.conj())
        self.register_buffer("negative", pairs.conj().imag)
        self.register_buffer("image", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (x @ self.turned).sum() + self.permuted.square().sum() + self.gaps.sin().sum()
        return out * self.scale + self.nothing.sum()


def shapes(seed: int) -> Job:
    model = Shapes(seed)
    return Job(model, {"optim": adamw((p for p in model.parameters() if p.requires_grad), fused=False, foreach=False)}, shaping)


def shaping(job: Job, n: int) -> None:
    job.optimizer.zero_grad()
    torch.autograd.backward(job.model(torch.randn(5, 12)))
    job.optimizer.step()
    with torch.no_grad():
        job.model.get_buffer("whole").add_(n)
        job.model.get_buffer("expanded")[:1].mul_(1.5)
        job.model.get_buffer("mask")[:1, :1, :, :1].sub_(0.25)
        job.model.get_buffer("windows")[0].mul_(1.1)
        job.model.get_buffer("conjugate").mul_(1.1)


def test_every_stride_and_shared_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Shapes(1)
    assert model.get_buffer("conjugate").is_conj() and model.get_buffer("negative").is_neg()
    survives(tmp_path, shapes, caplog)


def test_frozen_parameters_without_elements(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        for at, shape in enumerate([(0,), (0, 3), (3, 0, 2)]):
            model[0].register_parameter(f"none{at}", torch.nn.Parameter(torch.empty(shape), requires_grad=False))
        return Job(model, {"optim": adamw(p for p in model.parameters() if p.requires_grad)}, plain)

    survives(tmp_path, make, caplog)


def lies(job: Job) -> dict[str, tuple[int, ...]]:
    """Strides of all tensors of a job."""
    found = {name: tensor.stride() for name, tensor in [*job.model.named_parameters(), *job.model.named_buffers()]}
    for at, entries in enumerate(job.optimizer.state.values()):
        found.update({f"{at}.{name}": entry.stride() for name, entry in entries.items()})
    return found


def images(seed: int) -> Job:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.Conv2d(5, 4, 3))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def iterate(job: Job, n: int) -> None:
        job.optimizer.zero_grad()
        torch.autograd.backward(job.model(torch.randn(2, 3, 8, 8)).square().mean())
        job.optimizer.step()

    return Job(model, {"optim": adamw(model.parameters(), fused=False)}, iterate)


@pytest.mark.parametrize("make", [shapes, images])
def test_what_is_restored_lies_in_memory_as_it_did(tmp_path: Path, make: Callable[[int], Job]) -> None:
    """Parameters as the fresh model has them, and the optimizer's tensors as the optimizer itself would have made them."""
    job, fresh = make(1), make(2)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 3, settle=True)
    with opened(f"file://{tmp_path}", fresh) as ckpt:
        assert ckpt.restore() == 3
        assert lies(fresh) == lies(job)


def test_a_cut_goes_into_a_model_that_lies_otherwise(tmp_path: Path) -> None:
    rows, channels_last = images(1), images(2)
    rows.model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    before = lies(channels_last)
    with opened(f"file://{tmp_path}", rows) as ckpt:
        ckpt.restore()
        rows.train(ckpt, 0, 6, settle=True)
        live = rows.bits()
    with opened(f"file://{tmp_path}", channels_last) as ckpt:
        assert ckpt.restore() == 6
        assert channels_last.bits() == live
        assert {name: lies(channels_last)[name] for name in before} == before


class Expanded(torch.nn.Module):
    def __init__(self, width: int, *, parameter: bool) -> None:
        super().__init__()
        self.body = torch.nn.Linear(12, 3)
        value = torch.randn(3, 4) if width else torch.randn(1, 4).expand(3, 4)
        if parameter:
            self.table = torch.nn.Parameter(value, requires_grad=False)
        else:
            self.register_buffer("table", value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("parameter", [False, True])
def test_a_value_that_an_expanded_tensor_cannot_hold(tmp_path: Path, parameter: bool) -> None:
    """A buffer is bound anew; a parameter is an error by name, before anything is written."""

    def job(width: int) -> Job:
        model = Expanded(width, parameter=parameter)
        return Job(model, {"optim": adamw(model.body.parameters())}, plain)

    first, second = job(1), job(0)
    with opened(f"file://{tmp_path}", first) as ckpt:
        ckpt.restore()
        first.train(ckpt, 0, 2, settle=True)
        live = first.bits()
    before = second.bits()
    with opened(f"file://{tmp_path}", second) as ckpt:
        if parameter:
            with pytest.raises(StateMismatch, match="table: expanded in the script"):
                ckpt.restore()
            assert second.bits() == before
        else:
            assert ckpt.restore() == 2
            assert second.bits() == live


class Tagged(torch.Tensor):
    """A subclass as libraries of quantized weights have them."""


class Scaled(torch.nn.Parameter):
    """A parameter that is not what its bytes say without what it carries."""


class Silent(torch.nn.Parameter):
    """A parameter of another name, and nothing else."""


def scaled() -> torch.nn.Parameter:
    parameter = Scaled(torch.ones(3))
    parameter.scale = torch.ones(1)  # type: ignore[attr-defined]
    return parameter


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "subclass": (lambda: torch.ones(3).as_subclass(Tagged), r"is a tests.test_forms.Tagged, which"),
    "subclass in a Parameter": (lambda: torch.nn.Parameter(torch.ones(3).as_subclass(Tagged)), "is a tests.test_forms.Tagged, which"),
    "attributes": (scaled, "is a tests.test_forms.Scaled, which"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "is a torch.sparse_coo tensor, and only dense"),
    "sparse Parameter": (lambda: torch.nn.Parameter(torch.eye(3).to_sparse()), "is a torch.sparse_coo tensor, and only dense"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_bsr((1, 1)), "is a torch.sparse_bsr tensor, and only dense"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "is quantized"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is a nested tensor"),
    "meta": (lambda: torch.ones(3, device="meta"), "is a meta tensor without bytes; materialise"),
    "lazy": (lambda: torch.nn.parameter.UninitializedParameter(), "is lazy and has no shape yet; run one batch"),
    "lazy buffer": (lambda: torch.nn.parameter.UninitializedBuffer(), "is lazy and has no shape yet; run one batch"),
    "parts of bytes": (lambda: torch.zeros(4, 4, dtype=torch.uint8).view(INT4).t(), "has elements of torch.int4"),
}


@pytest.mark.filterwarnings("ignore:Sparse|The PyTorch API of nested|torch.quantize|.*quantiz")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_more_than_its_bytes_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    made, message = REFUSED[kind]
    model = mlp(1)
    tensor = made()
    if isinstance(tensor, torch.nn.Parameter):
        model.register_parameter("odd", tensor)
    else:
        model.register_buffer("odd", tensor)
    optimizer = adamw(model[0].parameters())
    with Store.open(f"file://{tmp_path}/run") as store, pytest.raises(UnsupportedTensor, match=f"^odd {message}"):
        store.attach(model, optimizer)


def test_an_optimizer_entry_is_refused_by_name(tmp_path: Path) -> None:
    model = mlp(1)
    optimizer = adamw(model.parameters())
    optimizer.state[model.get_parameter("0.weight")]["mask"] = torch.eye(3).to_sparse()
    with Store.open(f"file://{tmp_path}/run") as store, pytest.raises(UnsupportedTensor, match=r"optimizer entry 'mask' of 0.weight is a"):
        store.attach(model, optimizer)


def test_a_buffer_that_becomes_sparse_in_mid_run_is_named(tmp_path: Path) -> None:
    def changing(job: Job, n: int) -> None:
        plain(job, n)
        if n == 5:
            job.model.register_buffer("late", torch.eye(3).to_sparse())

    job = job_of(changing)(1)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 4, settle=True)
        live = job.bits()
        with pytest.raises(UnsupportedTensor, match=r"^late is a torch.sparse_coo tensor"):
            job.train(ckpt, 4, 5)
    assert restored_bits(f"file://{tmp_path}", job_of(changing), 4) == live


class Sparsifying(torch.optim.SGD):
    """Keeps a mask that no checkpoint can hold, from its fifth step on."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        parameter = self.param_groups[0]["params"][0]
        calls = self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1
        if calls >= 5:
            self.state[parameter]["mask"] = torch.eye(3).to_sparse()
        return loss


def test_an_optimizer_entry_that_becomes_sparse_stops_checkpoints_and_not_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp(1)
    job = Job(model, {"optim": Sparsifying(model.parameters(), lr=0.1)}, plain)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 7)
        with pytest.raises(NotDurable, match=r"optimizer entry 'mask' of 0.weight is a torch.sparse_coo tensor"):
            ckpt.close()
    assert "checkpoints have stopped, training goes on" in caplog.text


def test_lazy_modules_after_their_first_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.LazyLinear(7), torch.nn.LazyBatchNorm1d(), torch.nn.Linear(7, 3))
        model(torch.randn(5, 12))
        return Job(model, {"optim": adamw(model.parameters())}, plain)

    survives(tmp_path, make, caplog)


def test_a_parameter_of_another_name_only_is_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        model = mlp(seed)
        model[0].weight = Silent(model.get_parameter("0.weight").detach())
        return Job(model, {"optim": adamw(model.parameters())}, plain)

    found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight")) == {"gradient"}


class Late(torch.nn.Module):
    """Registers its caches, and makes them in the first batch; one is dropped again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(12, 3)
        self.cache: torch.Tensor | None
        self.mean: torch.Tensor | None
        self.register_buffer("cache", None, persistent=False)
        self.register_buffer("mean", None)
        self.register_buffer("never", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None or self.mean is None:
            self.cache, self.mean = torch.zeros(3), torch.zeros(4)
        self.cache += 1
        self.mean += x.mean()
        return self.body(x)  # type: ignore[no-any-return]


def test_buffers_that_are_made_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(Late())
        return Job(model, {"optim": adamw(model.parameters())}, plain)

    survives(tmp_path, make, caplog)


class Wrapped(torch.nn.Module):
    """Calls a part of itself `module`, as wrappers do, and has another one of the same name without it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Sequential(torch.nn.Linear(12, 4))
        self.add_module("0", torch.nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("0")(self.module(x))  # type: ignore[no-any-return]


def test_names_that_only_look_like_a_wrappers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = Wrapped()
        return Job(model, {"optim": adamw(model.parameters())}, plain)

    found = survives(tmp_path, make, caplog)
    assert {base.spec.fqn for base in found.bases.values()} == {"0.weight", "0.bias", "module.0.weight", "module.0.bias"}


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    inner, outer = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.ModuleDict({"b": torch.nn.Sequential(torch.nn.Linear(2, 2))})
    optimizer = adamw([*inner.parameters(), *outer.parameters()])
    with (
        Store.open(f"file://{tmp_path}/run") as store,
        pytest.raises(ConfigError, match=r"two different tensors are called a\.b\.0\.weight"),
    ):
        store.attach({"a.b": inner, "a": outer}, optimizer)


def test_rows_of_an_expanded_gradient(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def expanding(job: Job, n: int) -> None:
        job.optimizer.zero_grad()
        backward(job.model)
        job.model.get_parameter("2.bias").grad = torch.randn(1).expand(3)
        job.optimizer.step()

    def make(seed: int) -> Job:
        model = mlp(seed)
        return Job(model, {"optim": adamw(model.parameters(), fused=False, foreach=False)}, expanding)

    survives(tmp_path, make, caplog)
