"""What a module keeps besides tensors (`get_extra_state`) is part of every cut; what `state_dict()` has beyond is named when attaching."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import adacheck
from adacheck.errors import ConfigError, StateMismatch, UnsupportedTensor
from adacheck.tools import restore as tool
from tests.test_opaque import placed, same
from tests.tool_run import run_tool

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Scaled(nn.Module):
    """A layer that counts its calls and multiplies by what it counted, as layers with fp8 scales do."""

    def __init__(self, kept: Callable[[int], Any] = lambda calls: {"calls": calls}) -> None:
        super().__init__()
        self.inner, self.calls, self.kept, self.asked, self.put = nn.Linear(6, 6), 0, kept, 0, 0
        self.state: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * (1 + self.calls / 100)  # type: ignore[no-any-return]

    def get_extra_state(self) -> Any:
        self.asked += 1
        return self.kept(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self.put += 1
        self.state = state
        if isinstance(state, Mapping) and "calls" in state:
            self.calls = state["calls"]


def trained(uri: str, model: nn.Module | dict[str, nn.Module], last: int) -> int:
    """Train up to a step, and give the step that was restored."""
    models = model if isinstance(model, dict) else {"": model}
    parameters = dict.fromkeys(parameter for each in models.values() for parameter in each.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    with adacheck.Store.open(uri) as store, store.attach(model, optimizer) as ckpt:
        start = ckpt.restore()
        for _ in range(start, last):
            optimizer.zero_grad()
            for each in models.values():
                each(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            ckpt.step()
        ckpt.publish_full()
    return start


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"file://{tmp_path}/run"


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, uri: str) -> None:
    torch.manual_seed(3)
    whole = nn.Sequential(Scaled(), Scaled())
    trained(f"file://{tmp_path}/whole", whole, 8)
    torch.manual_seed(3)
    trained(uri, nn.Sequential(Scaled(), Scaled()), 5)
    resumed = nn.Sequential(Scaled(), Scaled())
    assert trained(uri, resumed, 8) == 5
    assert resumed.state_dict().keys() == whole.state_dict().keys()
    assert all(same(value, resumed.state_dict()[key]) for key, value in whole.state_dict().items())


@pytest.mark.parametrize(
    "kept",
    [
        lambda _: b"\x00\xff",
        lambda _: placed(b"\x00scales\xff", 3),
        lambda _: None,
        lambda calls: torch.full((3,), calls, dtype=torch.uint8),
        lambda calls: {"scale": torch.tensor([calls, float("nan")], dtype=torch.bfloat16), "amax": [numpy.arange(2.0), (1, "x")]},
    ],
    ids=["bytes", "BytesIO", "None", "tensor", "nested"],
)
def test_every_type_comes_back_to_the_bit(uri: str, kept: Callable[[int], Any]) -> None:
    before = Scaled(kept)
    trained(uri, before, 2)
    after = Scaled(kept)
    assert trained(uri, after, 2) == 2
    assert after.put == 1
    assert same(kept(before.calls), after.state)


def test_what_cannot_be_stored_is_refused_by_name_when_attaching(uri: str) -> None:
    model = nn.Sequential(nn.Identity(), Scaled(lambda _: {"scales": [object()]}))
    with pytest.raises(UnsupportedTensor, match=r"1\._extra_state\.scales\[0\] is a builtins\.object"):
        trained(uri, model, 1)


def test_a_module_that_only_gives_its_state_is_refused_when_attaching(uri: str) -> None:
    class Gives(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    with pytest.raises(ConfigError, match=r"1 \(a Gives\) has get_extra_state\(\) and no set_extra_state\(\)"):
        trained(uri, nn.Sequential(nn.Identity(), Gives(6, 6)), 1)


def test_only_one_side_has_it(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Sequential())
    plain[0].add_module("inner", nn.Linear(6, 6))
    trained(f"file://{tmp_path}/with", nn.Sequential(Scaled()), 2)
    trained(f"file://{tmp_path}/without", plain, 2)
    weight = plain[0].inner.weight.clone()  # type: ignore[union-attr, operator]
    with pytest.raises(StateMismatch, match=r"missing in the script: 0\._extra_state"):
        trained(f"file://{tmp_path}/with", plain, 3)
    assert torch.equal(weight, plain[0].inner.weight)  # type: ignore[union-attr, arg-type]
    with pytest.raises(StateMismatch, match=r"not in the cut: 0\._extra_state"):
        trained(f"file://{tmp_path}/without", nn.Sequential(Scaled()), 3)


def test_a_shared_module_is_asked_once_and_set_once(uri: str) -> None:
    shared = Scaled()
    model = nn.Sequential(shared, shared)
    with adacheck.Store.open(uri).attach(model, torch.optim.SGD(model.parameters(), lr=1e-2)) as ckpt:
        ckpt.restore()
        model(torch.randn(4, 6))
        before = shared.asked
        ckpt.step()
        assert shared.asked == before + 1
    again = Scaled()
    assert trained(uri, nn.Sequential(again, again), 1) == 1
    assert (again.calls, again.put) == (2, 1)
    with pytest.raises(
        StateMismatch, match=r"1\._extra_state: of the same module as 1\._extra_state in the script, as 0\._extra_state in the cut"
    ):
        trained(uri, nn.Sequential(Scaled(), Scaled()), 1)


def test_wrappers_and_several_models(uri: str) -> None:
    wrapped = torch.compile(nn.Sequential(Scaled()), backend="eager")
    trained(uri, {"one": wrapped, "two": Scaled()}, 2)  # type: ignore[dict-item]
    one, two = nn.Sequential(Scaled()), Scaled()
    assert trained(uri, {"one": one, "two": two}, 2) == 2
    assert [one[0].calls, two.calls] == [2, 2]


class Outer(nn.Module):
    """Calls a part of itself `module`, as wrappers do; that has a part of the name of one of its own, in this order or the other."""

    def __init__(self, inner_first: bool) -> None:
        super().__init__()
        if inner_first:
            self.module = nn.ModuleDict({"x": Scaled()})
        self.x = Scaled()
        if not inner_first:
            self.module = nn.ModuleDict({"x": Scaled()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.x(self.x(self.module["x"](x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("inner_first", [True, False])
def test_names_that_only_look_like_a_wrappers(uri: str, inner_first: bool) -> None:
    trained(uri, Outer(inner_first), 2)
    other = Outer(inner_first)
    assert trained(uri, other, 2) == 2
    assert [other.module["x"].calls, other.x.calls] == [2, 4]


def test_a_module_that_comes_later_is_kept_from_then_on(uri: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    late = Scaled()
    late.inner = nn.Identity()  # type: ignore[assignment]
    with adacheck.Store.open(uri).attach(model, optimizer) as ckpt:
        ckpt.restore()
        for n in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            ckpt.step()
            if n == 0:
                model.append(late)
    again = nn.Sequential(nn.Linear(6, 6), Scaled())
    again[1].inner = nn.Identity()
    assert trained(uri, again, 3) == 3
    assert again[1].calls == 2


def job(kept: Callable[[int], Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    shared = Scaled(kept)
    model = nn.Sequential(shared, nn.Identity(), shared)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


KEPT = {
    "plain": lambda calls: {"calls": calls, "nested": {"scale": torch.tensor([1.5, float("nan")]), "empty": {}}},
    "tensor": lambda calls: torch.full((3,), calls, dtype=torch.uint8),
    "BytesIO": lambda _: placed(b"\x00scales\xff", 3),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("source", ["reader", "dcp", "torch"])
def test_a_cut_gives_it_to_others_under_torchs_keys(tmp_path: Path, uri: str, kept: Callable[[int], Any], source: str) -> None:
    before, _ = job(kept)
    trained(uri, before, 3)
    model, optimizer = job(kept)
    if source == "torch":
        ended = run_tool(tool.main, uri, "--to", str(tmp_path / "out"), "--format", "torch")
        assert ended.code == 0, ended.err
        model.load_state_dict(torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=kept is not KEPT["BytesIO"])["model"])
    else:
        model_state, optim_state = get_state_dict(model, optimizer, options=FLAT)
        state: dict[str, Any] = {"model": model_state, "optim": optim_state}
        if source == "dcp":
            ended = run_tool(tool.main, uri, "--to", str(tmp_path / "out"), "--format", "dcp")
            assert ended.code == 0, ended.err
            dcp_load(state, checkpoint_id=tmp_path / "out", no_dist=True)
        else:
            with adacheck.Store.open(uri) as store:
                dcp_load(state, storage_reader=store.reader(), no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state, options=FLAT)
    wanted, got = kept(before[0].calls), model[0].state  # type: ignore[index]
    assert same(wanted, got)


def test_an_export_renames_it_with_its_module(tmp_path: Path, uri: str) -> None:
    trained(uri, nn.Sequential(Scaled()), 2)
    ended = run_tool(tool.main, uri, "--to", str(tmp_path / "out"), "--format", "torch", "--map-fqn", "0.=layer.")
    assert ended.code == 0, ended.err
    model = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["model"]
    assert sorted(model) == ["layer._extra_state", "layer.inner.bias", "layer.inner.weight"]
    assert model["layer._extra_state"] == {"calls": 2}


class Packs(nn.Linear):
    """Keeps a number that only its own code puts into `state_dict()`."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "zero_point"] = 7


def attach(uri: str, model: nn.Module, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said when a model is attached."""
    with caplog.at_level(logging.WARNING, "adacheck"), adacheck.Store.open(uri) as store:
        store.attach(model, torch.optim.SGD(model.parameters(), lr=1e-2)).close()
    return [record.message for record in caplog.records]


def test_what_no_cut_holds_is_named_when_attaching(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Packs(6, 6), Scaled())

    def add_epoch(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
        state[f"{prefix}epoch"] = 3

    model.register_state_dict_post_hook(add_epoch)  # type: ignore[no-untyped-call]
    (said,) = attach(uri, model, caplog)
    assert "0.zero_point, epoch, which are" in said and "extra" in said


def test_a_state_dict_that_fails_is_said(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("no state today")

    (said,) = attach(uri, Broken(6, 6), caplog)
    assert "no state today" in said


def normalized() -> nn.Module:
    model: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    return model


def transient() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model.register_buffer("mask", torch.ones(3), persistent=False)
    model.register_buffer("slot", None)
    return model


def checkpoint_wrapped() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))))


def split() -> nn.Module:
    """`state_dict()` gives parts of a parameter under names of their own."""
    model = nn.Linear(6, 6)

    def add_upper(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
        state[f"{prefix}upper"] = state[f"{prefix}weight"][:3]

    model.register_state_dict_post_hook(add_upper)  # type: ignore[no-untyped-call]
    return model


@pytest.mark.parametrize(
    "make",
    [
        normalized,
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),
        tied,
        transient,
        checkpoint_wrapped,
        split,
        Scaled,
        lambda: torch.compile(nn.Sequential(Scaled()), backend="eager"),
        lambda: nn.DataParallel(nn.Sequential(Scaled(), nn.BatchNorm1d(6))),
        lambda: nn.LSTM(6, 6),
        lambda: nn.TransformerEncoderLayer(6, 2),
    ],
)
def test_nothing_is_said_of_what_is_held(uri: str, caplog: pytest.LogCaptureFixture, make: Callable[[], nn.Module]) -> None:
    assert attach(uri, make(), caplog) == []
