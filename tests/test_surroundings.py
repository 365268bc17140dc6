"""What surrounds the calls: modes, default dtypes and devices, threads, denormals, compilers; bit for bit, or said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from adacheck.checkpointer import Checkpointer
from tests.survival import LAST, OPTIONS, adamw, backward, job_of, mlp, plain, survives, travelled
from tests.training import Job, logged, opened, restored_bits

# Modes


class Meddling(TorchFunctionMode):
    """Turns everything that is made to zeros on another device: nothing of that may reach a checkpoint."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.empty, torch.zeros, torch.full):
            return func(*args, **{**(kwargs or {}), "device": (kwargs or {}).get("device", "meta")})
        return func(*args, **(kwargs or {}))


class Looking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "device": lambda: torch.device("meta"),
    "default_dtype": default_dtype,
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "function mode": Meddling,
    "dispatch mode": Looking,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
}


def made(seed: int) -> Job:
    """A strided buffer, one that is made late, a gradient and a value payload are among the states."""
    model = mlp(seed)
    model.register_buffer("turned", torch.randn(3, 4).t())
    model.register_buffer("late", None)
    rest = torch.optim.LBFGS(model[2].parameters(), max_iter=1)
    return Job(model, {"body": adamw(model[0].parameters()), "head": rest}, iterate)


def iterate(job: Job, n: int) -> None:
    job.model.zero_grad()
    backward(job.model)
    job.optimizers["body"].step()
    job.optimizers["head"].step(lambda: 0.0)
    job.model.register_buffer("late", torch.full((3,), float(n)))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("kind", AROUND)
def test_calls_inside_a_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """`restore()` and `step()` are called in it, the training is not."""
    for name in ("restore", "step"):
        original = getattr(Checkpointer, name)

        def inside(self: Checkpointer, original: Any = original) -> Any:
            with AROUND[kind]():
                return original(self)

        monkeypatch.setattr(Checkpointer, name, inside)
    found = survives(tmp_path, made, caplog)
    assert set(travelled(found, "0.weight")) == {"gradient"}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("kind", ["default_dtype", "deterministic", "anomaly", "dispatch mode"])
def test_a_whole_script_inside_a_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    def whole(job: Job, n: int) -> None:
        if n == 12:
            job.optimizers["body"].state.clear()  # what the optimizer then makes anew is of the default dtype
        iterate(job, n)

    def make(seed: int) -> Job:
        job = made(seed)
        return Job(job.model, job.optimizers, whole)

    with AROUND[kind]():
        found = survives(tmp_path, make, caplog)
    assert set(travelled(found, "0.weight")) == {"gradient", "value: write"}


def test_a_call_inside_a_transform(tmp_path: Path) -> None:
    """`torch.func` is for pure functions; nothing of one gets into a cut that is made inside it."""
    make = job_of(plain)
    job = make(1)
    with opened(f"file://{tmp_path}", job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 6, settle=True)
        plain(job, 7)

        def function(x: torch.Tensor) -> torch.Tensor:
            ckpt.step()
            return (x * x).sum()

        torch.func.grad(function)(torch.ones(2))
        ckpt.drain()
        live = job.bits()
    assert restored_bits(f"file://{tmp_path}", make, 7) == live


# Arithmetic


@contextmanager
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def tiny(job: Job, n: int) -> None:
    """Gradients so small that the moments, or their squares, are denormal; the weights are, too."""
    for at, parameter in enumerate(job.model.parameters()):
        parameter.grad = torch.randn_like(parameter) * 10.0 ** -(18 + (n + at) % 22)
    job.optimizer.step()


def tiny_job(kind: Any, **options: Any) -> Callable[[int], Job]:
    def make(seed: int) -> Job:
        model = mlp(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1e-37)
        return Job(model, {"optim": kind(model.parameters(), lr=1e-3, **options)}, tiny)

    return make


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.Adam, {"fused": False, "foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    ],
)
def test_denormals(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, options: dict[str, Any], flush: bool) -> None:
    with flushing() if flush else nullcontext():
        found = survives(tmp_path, tiny_job(kind, **options), caplog)
    assert set(travelled(found, "0.weight")) == {"gradient"}


def test_flushing_from_some_step_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In mid-run it is another kernel, which is certified anew."""

    def switching(job: Job, n: int) -> None:
        torch.set_flush_denormal(n >= 8)
        tiny(job, n)
        torch.set_flush_denormal(False)

    def make(seed: int) -> Job:
        job = tiny_job(torch.optim.AdamW, fused=True)(seed)
        return Job(job.model, job.optimizers, switching)

    survives(tmp_path, make, caplog)


def test_flushing_with_several_threads_goes_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture, two_threads: None) -> None:
    """The mode belongs to a thread: which elements are flushed depends on who computes them, and nobody can say that afterwards."""

    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.ParameterDict({"wide": torch.nn.Parameter(torch.randn(300_000) * 1e-37)})
        return Job(model, {"optim": torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)}, tiny)

    job = make(1)
    with flushing(), opened(f"file://{tmp_path}", job, **OPTIONS) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, LAST, settle=True)
        live = job.bits()
    assert set(travelled(logged(tmp_path), "wide")) == {"value: optimizer"}
    assert "denormal" in caplog.text
    assert restored_bits(f"file://{tmp_path}", make, LAST, **OPTIONS) == live


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("foreach", [False, True])
def test_another_number_of_threads_in_mid_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, two_threads: None, foreach: bool) -> None:
    def switching(job: Job, n: int) -> None:
        torch.set_num_threads(1 + n // 7 % 2)
        for parameter in job.model.parameters():
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        job.optimizer.step()

    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.ParameterDict({"wide": torch.nn.Parameter(torch.randn(50_021).bfloat16())})
        return Job(model, {"optim": adamw(model.parameters(), fused=False, foreach=foreach)}, switching)

    survives(tmp_path, make, caplog)


# Compilers


def compiled(model: torch.nn.Module, backend: str) -> torch.nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


@pytest.mark.parametrize(("before", "after"), [("eager", ""), ("", "aot_eager"), ("aot_eager", "eager")])
def test_compiled_and_not(tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str, after: str) -> None:
    """Trained compiled and restored into the plain model, and the other way round: names are the model's own."""

    def made(seed: int, backend: str) -> Job:
        model = torch.nn.Sequential(mlp(seed), torch.nn.Linear(3, 3))
        if backend:
            model[0] = compiled(model[0], backend)
            model = compiled(model, backend)  # type: ignore[assignment]
        return Job(model, {"optim": adamw(model.parameters())}, plain)

    def again(seed: int) -> Job:
        return made(seed, after)

    job = made(1, before)
    with opened(f"file://{tmp_path}", job, **OPTIONS) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, LAST, settle=True)
        live = job.bits()
    job = again(99)
    with opened(f"file://{tmp_path}", job, **OPTIONS) as ckpt:
        assert ckpt.restore() == LAST
        assert {name.replace("_orig_mod.", ""): bits for name, bits in job.bits().items()} == {
            name.replace("_orig_mod.", ""): bits for name, bits in live.items()
        }
    assert {base.spec.fqn for base in logged(tmp_path).bases.values()} >= {"0.0.weight", "0.2.weight", "1.weight"}


def test_compiled_after_it_was_attached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def compiling(job: Job, n: int) -> None:
        if n in (5, LAST + 2):
            job.model.compile(backend="aot_eager")
        plain(job, n)

    found = survives(tmp_path, job_of(compiling), caplog)
    assert set(travelled(found, "0.weight")) == {"gradient"}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("backend", "whole"), [("eager", True), ("aot_eager", False)])
def test_a_compiled_optimizer_step(tmp_path: Path, caplog: pytest.LogCaptureFixture, backend: str, whole: bool) -> None:
    """The hooks are not traced and fire; what was compiled rounds otherwise than what is replayed, which is found out: it goes whole."""
    steps: dict[int, Callable[[], Any]] = {}

    def compiling(job: Job, n: int) -> None:
        def step() -> None:
            job.optimizer.step()

        job.optimizer.zero_grad()
        backward(job.model)
        steps.setdefault(id(job), torch.compile(step if whole else job.optimizer.step, backend=backend))()

    torch.compiler.reset()
    found = survives(tmp_path, job_of(compiling, fused=False), caplog, replayed=False)
    assert set(travelled(found, "0.weight")) == {"value: optimizer"}
    assert "did not give the same bits" in caplog.text
