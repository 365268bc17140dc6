"""The recorded kernel is what really runs, and a different one is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from inspect import signature
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim import SGD, AdamW

from adacheck.kernel import certificate_key, environment, kernel_of, refusal, replayable
from adacheck.optimizers import BUILT_IN
from adacheck.threads import arithmetic

KINDS: list[Any] = [declared.kind for declared in BUILT_IN.values()]
CHOICES: list[dict[str, Any]] = [
    {},
    {"fused": True, "foreach": "late"},
    {"fused": True},
    {"fused": False},
    {"foreach": True},
    {"foreach": False},
    {"fused": False, "foreach": True},
    {"fused": True, "foreach": False},
]


def parameter(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4,)) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    made.grad = torch.ones(shape, dtype=dtype)
    return made


@contextmanager
def functions_called(kind: type) -> Iterator[list[str]]:
    """Record which of torch's implementations a step really calls."""
    name = "adam" if kind is AdamW else kind.__name__.lower()
    underscored = "_" if kind.__module__ == "torch.optim" else ""  # where its code is: Adafactor and Muon
    module = import_module(f"torch.optim.{underscored}{name}")
    loop = "default" if kind is torch.optim.Muon else "loop"
    functions = {"fused": f"_fused_{name}", "foreach": f"_multi_tensor_{name}", loop: f"_single_tensor_{name}"}
    called: list[str] = []
    namespace = vars(module)

    def recording(name: str, original: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return record

    with mock.patch.dict(namespace, {f: recording(way, namespace[f]) for way, f in functions.items() if f in namespace}):
        yield called


def takes(kind: Any, choice: dict[str, Any]) -> bool:
    return choice.keys() <= signature(kind).parameters.keys()


@pytest.mark.parametrize(("kind", "choice"), [(kind, choice) for kind in KINDS for choice in CHOICES if takes(kind, choice)])
def test_the_implementation_is_the_one_that_runs(kind: Any, choice: dict[str, Any]) -> None:
    late = choice.get("foreach") == "late"
    optimizer = kind([parameter(shape=(4, 1))], **({"fused": True} if late else choice))
    if late:
        optimizer.param_groups[0]["foreach"] = True
    expected = kernel_of(optimizer, optimizer.param_groups[0]).implementation
    with functions_called(kind) as called:
        optimizer.step()
    assert called == [expected]


def test_groups_of_one_optimizer_have_kernels_of_their_own() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [parameter()]},
        {"params": [parameter()], "amsgrad": True, "foreach": True, "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups)
    first, second = (kernel_of(optimizer, group) for group in optimizer.param_groups)
    assert (first.implementation, second.implementation) == ("loop", "foreach")
    assert "amsgrad=False" in first.flags and "amsgrad=True" in second.flags
    assert "weight_decay=nonzero" in first.flags and "weight_decay=zero" in second.flags


def test_a_kernel_says_class_switches_and_environment() -> None:
    optimizer = SGD([parameter()], momentum=0.9, nesterov=True, fused=True)
    here = environment()
    with arithmetic(threads=here.threads + 1, flush_denormal=True):
        kernel = kernel_of(optimizer, optimizer.param_groups[0])
    assert kernel.optimizer_class == "torch.optim.sgd.SGD"
    assert kernel.flags == ("differentiable=False", "maximize=False", "momentum=nonzero", "nesterov=True", "weight_decay=zero")
    assert (kernel.device, kernel.threads, kernel.flush_denormal) == ("cpu", here.threads + 1, True)
    assert torch.__version__ in kernel.torch_build
    assert (kernel.torch_build, kernel.cpu_capability) == (here.torch_build, here.cpu_capability)


@pytest.mark.parametrize(("dtype", "mixed"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_group_whose_foreach_step_runs_other_code_has_a_kernel_of_its_own(dtype: torch.dtype, mixed: bool) -> None:
    old, new = parameter(dtype), parameter(dtype)
    optimizer = SGD([old, new], momentum=0.9, foreach=True)
    usual = kernel_of(optimizer, optimizer.param_groups[0])
    new.grad = None
    optimizer.step()
    assert kernel_of(optimizer, optimizer.param_groups[0]) == usual
    new.grad = torch.ones_like(new)
    assert ("mixed=True" in kernel_of(optimizer, optimizer.param_groups[0]).flags) == mixed
    optimizer.step()
    assert kernel_of(optimizer, optimizer.param_groups[0]) == usual


def test_optimizers_without_a_known_rule_say_default() -> None:
    class Mine(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "foreach": None})

    optimizer = Mine([parameter()])
    assert kernel_of(optimizer, optimizer.param_groups[0]).implementation == "default"
    rmsprop = torch.optim.RMSprop([parameter()])
    assert kernel_of(rmsprop, rmsprop.param_groups[0]).implementation == "loop"


def test_dtypes_are_part_of_a_certificates_key() -> None:
    optimizer = AdamW([parameter()])
    kernel = kernel_of(optimizer, optimizer.param_groups[0])
    key = certificate_key(kernel, torch.bfloat16, torch.float32)
    assert {"parameter=bfloat16", "gradient=float32"} <= set(key.flags)
    assert certificate_key(key, torch.bfloat16, torch.float32) == key
    assert certificate_key(key, torch.float32, torch.float32) != key
    assert key.flags == tuple(sorted(key.flags))


def test_what_cannot_be_set_is_refused_naming_both_sides() -> None:
    optimizer = AdamW([parameter()])
    kernel, here = kernel_of(optimizer, optimizer.param_groups[0]), environment()
    assert refusal(kernel, here) is None
    assert refusal(replace(kernel, threads=77, flush_denormal=True), here) is None
    changes: list[dict[str, Any]] = [
        {"torch_build": "1.0"},
        {"cpu_capability": "VSX"},
        {"device": "cuda"},
        {"optimizer_class": "os.system"},
    ]
    for change in changes:
        reason = refusal(replace(kernel, **change), here)
        assert reason is not None and next(iter(change.values())) in reason
    for name in ("torch_build", "cpu_capability"):
        other: dict[str, Any] = {name: "other"}
        reason = refusal(replace(kernel, **other), here)
        assert reason is not None and getattr(here, name) in reason


@pytest.mark.parametrize(
    ("recorded", "here", "refused"),
    [
        ("AVX2", "AVX512", False),
        ("AVX512", "AVX2", False),
        ("DEFAULT", "AVX2", True),
        ("AVX512", "DEFAULT", True),
        ("DEFAULT", "DEFAULT", False),
    ],
)
def test_avx2_and_avx512_agree(recorded: str, here: str, refused: bool) -> None:
    optimizer = AdamW([parameter()])
    kernel = replace(kernel_of(optimizer, optimizer.param_groups[0]), cpu_capability=recorded)
    assert (refusal(kernel, replace(environment(), cpu_capability=here)) is not None) == refused


class Subclass(AdamW):
    """Somebody's own."""


def test_what_is_known_to_go_as_value_says_why() -> None:
    def reason(optimizer: torch.optim.Optimizer) -> str | None:
        group = optimizer.param_groups[0]
        return replayable(optimizer, group, group["params"][0], kernel_of(optimizer, group))

    for kind in KINDS:
        assert reason(kind([parameter(shape=(2, 2))])) is None
        if takes(kind, {"differentiable": True}):
            assert "differentiable" in (reason(kind([parameter()], differentiable=True)) or "")
    assert "Subclass" in (reason(Subclass([parameter()])) or "")
    assert "LBFGS" in (reason(torch.optim.LBFGS([parameter()])) or "")
    assert "momentum" in (reason(SGD([parameter(torch.bfloat16)], momentum=0.9, fused=True)) or "")
    assert reason(SGD([parameter(torch.bfloat16)], momentum=0.9)) is None
    assert reason(SGD([parameter(torch.bfloat16)], fused=True)) is None
    sparse = torch.nn.Embedding(3, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    assert "sparse" in (reason(SGD(sparse.parameters())) or "")
