"""Declared optimizers: torch's own table is right about torch, other packages add theirs, and nothing else is ever loaded."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lion_pytorch
import pytest
import torch

from adacheck.errors import ReplayRefused
from adacheck.keeper.replay import Replayed, Replayer
from adacheck.kernel import environment, kernel_of, refusal, replayable
from adacheck.optimizers import BUILT_IN, Declaration, class_name, declaration
from tests.eight_bit import Adam8bit
from tests.live_optimizer import Live
from tests.optimizer_table import KINDS, entries
from tests.training import Job, logged, opened, payloads, restored_bits

LION = '''
"""A package's optimizer, and its declaration for adacheck."""
from importlib.metadata import version
import lion_pytorch
import torch
from adacheck.optimizers import Declaration


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, sharpness=1.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.sharpness = sharpness
        self.direction = torch.sign

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                first, second = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].lerp(p.grad * self.sharpness, 1 - first)
                p.add_(self.direction(update), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - second)


class Nested(torch.optim.Optimizer):
    """Keeps its last gradients in a list, and writes into it."""

    def __init__(self, params, lr=1e-4):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            last = self.state[p].setdefault("last", [torch.zeros_like(p), None, 0])
            last[0].mul_(0.5).add_(p.grad)
            last[1], last[2] = {"norm": p.grad.norm()}, last[2] + 1
            p.sub_(last[0], alpha=self.param_groups[0]["lr"] / last[2])


NESTED = Declaration(kind=Nested, entries=("last",))


class Other(Lion):
    """Not declared."""


PUBLIC = Declaration(
    kind=lion_pytorch.Lion,
    entries=("exp_avg",),
    attributes=("decoupled_wd", "_init_lr"),
    elementwise=True,
    writes_gradients=False,
    version=version("lion-pytorch"),
    make=lambda: lion_pytorch.Lion([torch.zeros(1)]),
)
DECLARED = Declaration(
    kind=Lion,
    entries=("exp_avg",),
    attributes=("sharpness",),
    elementwise=True,
    writes_gradients=False,
    version="1.0",
    make=lambda: Lion([torch.zeros(1)]),
)
'''
ENTRY_POINTS = """[adacheck.replay]
lion_package.Lion = lion_package:DECLARED
lion_package.Nested = lion_package:NESTED
lion_pytorch.lion_pytorch.Lion = lion_package:PUBLIC
tests.eight_bit.Adam8bit = tests.eight_bit:DECLARED
lion_package.Absent = lion_package:ABSENT
lion_package.Wrong = lion_package:DECLARED
lion_package.Number = lion_package:torch
broken_package.Any = broken_package:DECLARED
torch.optim.adam.Adam = lion_package:DECLARED
"""


@pytest.fixture
def lion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The installed package, imported."""
    folder = tmp_path / "site"
    metadata = folder / "lion_package-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "lion_package.py").write_text(LION)
    (folder / "broken_package.py").write_text("raise OSError('no such library')")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lion-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder))
    declaration.cache_clear()
    yield __import__("lion_package")
    for name in ("lion_package", "broken_package"):
        sys.modules.pop(name, None)
    declaration.cache_clear()


def iterate(job: Job, n: int) -> None:
    for parameter in job.model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer: Any = job.optimizer
    optimizer.sharpness = 1.0 + n % 3
    job.optimizer.step()


def make(kind: Any, seed: int) -> Job:
    torch.manual_seed(seed)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape)) for shape in ((33, 17), (65,))])
    return Job(model, {"optim": kind(model.parameters(), lr=0.01)}, iterate)


KINDS_OF_OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "Lion, with an attribute that changes": (lambda package: package.Lion, "gradient"),
    "a subclass, which is another class": (lambda package: package.Other, "value: optimizer"),
    "Lion of a public package": (lambda package: lion_pytorch.Lion, "gradient"),
    "state in a list": (lambda package: package.Nested, "gradient"),
    "8-bit Adam": (lambda package: Adam8bit, "gradient"),
}


@pytest.mark.parametrize("name", KINDS_OF_OTHERS)
def test_a_package_declares_an_optimizer(tmp_path: Path, lion: Any, name: str) -> None:
    of_package, payload = KINDS_OF_OTHERS[name]
    kind, uri = of_package(lion), f"file://{tmp_path / 'run'}"
    job = make(kind, 1)
    with opened(uri, job) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 9, settle=True)
    live = job.bits()
    assert set(payloads(logged(tmp_path / "run").increments[9]).values()) == {payload}
    assert restored_bits(uri, partial(make, kind), 9) == live


def test_another_version_of_the_code_is_refused_naming_both(lion: Any) -> None:
    optimizer = make(lion.Lion, 1).optimizer
    kernel = kernel_of(optimizer, optimizer.param_groups[0])
    assert {"version=1.0", "weight_decay=zero", "sharpness=nonzero"} <= set(kernel.flags)
    assert refusal(kernel, environment()) is None
    lion.DECLARED = Declaration(kind=lion.Lion, version="2.0")
    declaration.cache_clear()
    assert "recorded with version=1.0, and here is version=2.0" in (refusal(kernel, environment()) or "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lion_package.Other", "not declared for replay"),
        ("os.system", "not declared for replay"),
        ("lion_package.Absent", "cannot be loaded"),
        ("broken_package.Any", "no such library"),
        ("lion_package.Wrong", "is no adacheck.optimizers.Declaration of this class"),
        ("lion_package.Number", "is no adacheck.optimizers.Declaration of this class"),
    ],
)
def test_what_is_not_declared_or_wrongly_says_why(lion: Any, name: str, said: str) -> None:
    found = declaration(name)
    assert isinstance(found, str) and said in found and name in found


def test_torchs_own_cannot_be_replaced(lion: Any) -> None:
    assert declaration("torch.optim.adam.Adam") is BUILT_IN["torch.optim.adam.Adam"]


@contextmanager
def without_mkldnn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # torch's own, whatever is set
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@contextmanager
def bfloat16_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


OTHERWISE = {"mkldnn": without_mkldnn, "default_dtype": bfloat16_by_default}


@pytest.mark.parametrize("setting", OTHERWISE)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_a_step_depend_on_the_declared_settings_and_no_others(kind: str, setting: str) -> None:
    """Where they do, the replay is refused naming both sides, also by a replayer that has accepted the kernel before."""
    start, gradients = torch.randn(257, 300), torch.randn(2, 257, 300)

    def stepped(other: AbstractContextManager[None]) -> tuple[bytes, ...]:
        parameter = torch.nn.Parameter(start.clone())
        optimizer = getattr(torch.optim, kind)([parameter], lr=0.01)
        contexts: list[AbstractContextManager[None]] = [nullcontext(), other]
        for gradient, context in zip(gradients, contexts, strict=True):
            parameter.grad = gradient.clone()
            with context:
                optimizer.step()
        return tuple(tensor.detach().numpy().tobytes() for tensor in (parameter, *optimizer.state[parameter].values()))

    optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(start)])
    kernel, replayer = kernel_of(optimizer, optimizer.param_groups[0]), Replayer()
    replayer.apply(kernel, [])
    depends = stepped(nullcontext()) != stepped(OTHERWISE[setting]())
    assert depends == (setting in BUILT_IN[class_name(type(optimizer))].settings)
    said = f"recorded with {setting}=.*, and here is"
    outcome: AbstractContextManager[Any] = pytest.raises(ReplayRefused, match=said) if depends else nullcontext()
    with OTHERWISE[setting](), outcome:
        replayer.apply(kernel, [])


@pytest.mark.parametrize("kind", KINDS)
def test_the_declared_entries_are_those_the_class_keeps_once_it_has_stepped(kind: str) -> None:
    """Neither too few, or a replay would begin from nothing, nor a misspelt one, which would never be there."""
    for flags in KINDS[kind].variants:
        line = next(e for e in entries() if e.kind == kind and e.flags == flags and e.dtype == torch.float32 and e.payload == "gradient")
        live = Live(getattr(torch.optim, kind), line.options(), torch.float32, shapes=KINDS[kind].shapes)
        known = declaration(class_name(type(live.optimizer)))
        assert isinstance(known, Declaration)
        group, first = live.optimizer.param_groups[0], live.parameters[0]
        before = dict(live.optimizer.state.get(first, {}))
        live.step()
        kept = live.optimizer.state.get(first, {})
        assert known.complete(group, kept)
        if kept.keys() != before.keys():
            assert not known.complete(group, before)
        shaped = {name for name, entry in kept.items() if isinstance(entry, torch.Tensor)}
        needed = {*known.entries, *(n for key, names in known.entries_if.items() if group.get(key) for n in names)}
        assert needed == shaped if known.elementwise else needed <= shaped


def test_elements_are_independent_where_that_is_declared_and_parameters_always() -> None:
    """Each half of a tensor stepped alone gives the bits of the whole, for fp32 and cuts at multiples of 64."""
    for kind, known in KINDS.items():
        declared = BUILT_IN[class_name(getattr(torch.optim, kind))]
        if not declared.elementwise:
            continue
        for kernel in known.kernels:
            line = next(e for e in entries() if (e.kind, e.kernel, e.dtype) == (kind, kernel, torch.float32))
            values, gradients = torch.randn(3, 256), torch.randn(4, 3, 256)

            def stepped(part: slice, line: Any = line, values: Any = values, gradients: Any = gradients) -> torch.Tensor:
                parameter = torch.nn.Parameter(values[:, part].clone())
                optimizer = getattr(torch.optim, line.kind)([parameter], lr=0.01, **line.options())
                for gradient in gradients:
                    parameter.grad = gradient[:, part].clone()
                    optimizer.step()
                return parameter.detach()

            halves = torch.cat([stepped(slice(0, 64)), stepped(slice(64, 256))], 1)
            assert torch.equal(halves.view(torch.int32), stepped(slice(0, 256)).view(torch.int32)), line.name


def test_adafactor_with_several_dtypes_in_a_group_goes_whole() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adafactor(parameters)
    group = optimizer.param_groups[0]
    assert "epsilon" in (replayable(optimizer, group, parameters[1], kernel_of(optimizer, group)) or "")
    group["eps"] = (1e-30, 1e-3)
    assert replayable(optimizer, group, parameters[1], kernel_of(optimizer, group)) is None


def test_what_sums_over_a_tensor_is_replayed_only_where_it_lies_in_row_major_order() -> None:
    for kind, expected in ((torch.optim.AdamW, False), (torch.optim.Muon, True), (torch.optim.Adafactor, True)):
        parameter = torch.nn.Parameter(torch.ones(64, 32).t())
        parameter.grad = torch.ones(64, 32).t()
        optimizer: Any = kind([parameter])
        kernel = kernel_of(optimizer, optimizer.param_groups[0])
        assert ("row-major" in (replayable(optimizer, optimizer.param_groups[0], parameter, kernel) or "")) == expected


def test_a_made_instance_does_not_see_the_attributes_of_another_event(lion: Any) -> None:
    live = Live(lion.Lion, {}, torch.float32)
    replayer, optimizer = Replayer(), live.optimizer
    for sharpness in (1.0, 7.0, 1.0):
        vars(optimizer)["sharpness"] = sharpness
        for kernel, given in live.step():
            replayer.apply(kernel, [Replayed(live.shadows[number], used, gradient) for number, used, gradient in given])
        assert live.unequal() == {}
