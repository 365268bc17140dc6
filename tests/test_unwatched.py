"""Writes that leave no trace on the tensor itself: shared memory, addresses used again, inference tensors, other optimizers.

In each case what is restored after a crash is what was live, byte for byte, or the state is known to be inexact.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adacheck.errors import AdacheckError, Closed
from adacheck.store import Store
from tests.training import kill, logged, payloads

Job = tuple[torch.nn.Module, torch.optim.Optimizer]


class Sharing(torch.nn.Module):
    """A trained weight of 128 KiB, and a second name for its memory that no module ties."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(128, 256)
        if kind == "buffer":
            self.register_buffer("tied", self.inner.weight.detach())
        elif kind == "frozen":
            self.tied = torch.nn.Parameter(self.inner.weight.detach(), requires_grad=False)
        elif kind == "trained":
            self.tied = torch.nn.Parameter(self.inner.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out @ self.tied if hasattr(self, "tied") else out


def job(kind: str = "", seed: int = 0) -> Job:
    torch.manual_seed(seed)
    model = Sharing(kind)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    found = {name: t.detach().numpy().tobytes() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for at, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for name, entry in optimizer.state.get(parameter, {}).items():
            found[f"{at}.{name}"] = entry.detach().numpy().tobytes()
    return found


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 128)).square().mean().backward()
    optimizer.step()


def leave_alone(job: Job, step: int) -> None:
    """Nothing happens besides training."""


def survives(root: Path, made: Callable[[int], Job], steps: int, meddle: Callable[[Job, int], None] = leave_alone) -> None:
    """Train, kill, restore into another seed: live and restored bytes are equal."""
    model, optimizer = made(0)
    ckpt = Store.open(f"file://{root}/run").attach(model, optimizer)
    ckpt.restore()
    for step in range(1, steps + 1):
        train(model, optimizer)
        meddle((model, optimizer), step)
        ckpt.step()
    ckpt.drain()
    live = bits(model, optimizer)
    kill(ckpt)
    fresh, fresh_optimizer = made(1)
    again = Store.open(f"file://{root}/run").attach(fresh, fresh_optimizer)
    assert again.restore() == steps
    assert bits(fresh, fresh_optimizer) == live
    again.close()


@pytest.mark.parametrize("kind", ["buffer", "frozen", "trained"])
@pytest.mark.parametrize("steps", [4, 8])
def test_memory_that_an_optimizer_steps_under_another_name(tmp_path: Path, kind: str, steps: int) -> None:
    survives(tmp_path, lambda seed: job(kind, seed), steps)


def test_memory_that_is_shared_from_some_step_on(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(self.a(x))
            return out

    def made(seed: int) -> Job:
        torch.manual_seed(seed)
        model = Two()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def tie(made: Job, step: int) -> None:
        model = made[0]
        assert isinstance(model, Two)
        if step == 8:
            model.b.weight.data = model.a.weight.data

    survives(tmp_path, made, 12, tie)


def test_an_optimizer_tensor_that_was_made_anew_at_the_same_address(tmp_path: Path) -> None:
    def scale_twice(made: Job, step: int) -> None:
        if step == 15:
            for entries in made[1].state.values():
                entries["exp_avg"] = entries["exp_avg"] * 0.5
                entries["exp_avg"] = entries["exp_avg"] * 0.5

    def made(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Linear(128, 64, bias=False)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    survives(tmp_path, made, 17, scale_twice)


def test_a_fused_optimizer_that_was_not_attached(tmp_path: Path) -> None:
    def made(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(128, 16), torch.nn.Linear(16, 4))
        return model, torch.optim.AdamW(model[0].parameters(), lr=1e-2, fused=True)

    others: dict[int, torch.optim.Optimizer] = {}

    def step_the_rest(made: Job, step: int) -> None:
        model = made[0]
        assert isinstance(model, torch.nn.Sequential)
        others.setdefault(id(model), torch.optim.SGD(model[1].parameters(), lr=0.1, fused=True)).step()

    survives(tmp_path, made, 12, step_the_rest)


@pytest.mark.parametrize("where", ["buffer", "step"])
def test_inference_tensors_do_not_end_the_training(tmp_path: Path, where: str) -> None:
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(128, 8)
            self.register_buffer("cache", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)
            return out

    torch.manual_seed(0)
    model = Cached()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckpt = Store.open(f"file://{tmp_path}/run").attach(model, optimizer)
    ckpt.restore()
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(5, 128)).square().mean().backward()
        with torch.inference_mode(where == "step"):
            optimizer.step()
        if where == "buffer" and step == 3:
            with torch.inference_mode():
                model.cache = torch.ones(4) * 2
        ckpt.step()
    ckpt.drain()
    live = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    kill(ckpt)
    fresh = Cached()
    with Store.open(f"file://{tmp_path}/run").attach(fresh, torch.optim.AdamW(fresh.parameters(), lr=1e-2)) as again:
        assert again.restore() == 8
        assert all(torch.equal(tensor, live[name]) for name, tensor in fresh.state_dict().items())


def test_a_forked_child_that_steps_is_left_alone(tmp_path: Path) -> None:
    model, optimizer = job()
    with Store.open(f"file://{tmp_path}/run").attach(model, optimizer) as ckpt:
        ckpt.restore()
        for _ in range(7):
            train(model, optimizer)
            ckpt.step()
        child = os.fork()
        if child == 0:
            try:
                train(model, optimizer)
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        train(model, optimizer)
        ckpt.step()
        ckpt.drain()
        assert ckpt.status().committed == 8


@pytest.mark.parametrize("call", ["step", "drain", "publish_full", "status"])
def test_what_needs_the_keeper_is_refused_in_a_forked_child(tmp_path: Path, call: str) -> None:
    model, optimizer = job()
    with Store.open(f"file://{tmp_path}/run").attach(model, optimizer) as ckpt:
        ckpt.restore()
        ckpt.step()

        def child() -> None:
            with pytest.raises(AdacheckError, match=rf"^{call}\(\) was called in a forked child, which has no keeper"):
                getattr(ckpt, call)()

        assert in_a_fork(child) == 0


def test_a_child_that_was_forked_after_attach_must_attach_itself(tmp_path: Path) -> None:
    """The hooks are the parent's: nothing of what the child trains would be captured."""
    model, optimizer = job()
    uri = f"file://{tmp_path}/run"
    ckpt = Store.open(uri).attach(model, optimizer)

    def child() -> None:
        with pytest.raises(
            AdacheckError, match=r"^restore\(\) was called in a forked child, .*open the store and attach in the process that"
        ):
            ckpt.restore()
        with Store.open(uri).attach(model, optimizer) as own:
            assert own.restore() == 0
            for _ in range(8):
                train(model, optimizer)
                own.step()
            own.drain()
            assert own.status().committed == 8

    assert in_a_fork(child) == 0
    assert set(payloads(logged(tmp_path / "run").increments[8]).values()) == {"gradient"}
    ckpt.close()
    with Store.open(uri).attach(model, optimizer) as again:
        assert again.restore() == 8


def test_a_forked_child_that_leaves_the_block_does_not_wait_and_the_parent_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = job()
    handler = signal.getsignal(signal.SIGTERM)
    with Store.open(f"file://{tmp_path}/run").attach(model, optimizer) as ckpt:
        ckpt.restore()
        for _ in range(4):
            train(model, optimizer)
            ckpt.step()

        def child() -> None:
            ckpt._on_sigterm()  # as from whoever ends data-loader workers
            with pytest.raises(ZeroDivisionError), ckpt:
                raise ZeroDivisionError
            with pytest.raises(Closed):
                ckpt.step()
            ckpt.close()
            train(model, optimizer)
            assert signal.getsignal(signal.SIGTERM) is handler and not caplog.records

        assert in_a_fork(child) == 0
        train(model, optimizer)
        ckpt.step()
        live = bits(model, optimizer)
    fresh, again = job(seed=1)
    with Store.open(f"file://{tmp_path}/run").attach(fresh, again) as restored:
        assert restored.restore() == 5
        assert bits(fresh, again) == live


def in_a_fork(body: Callable[[], None]) -> int:
    """The exit status of a child that did this: 0 if nothing was raised; a child that hangs is ended by its alarm."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(30)
    status = 1
    try:
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def test_many_small_values_do_not_fill_the_pool(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.randn(16_000)) for _ in range(300)]
    model = torch.nn.Module()
    model.p = torch.nn.ParameterList(parameters)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    with Store.open(f"file://{tmp_path}/run", deadline_s=20).attach(model, optimizer) as ckpt:
        ckpt.restore()
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            ckpt.step()
        ckpt.drain()
        assert ckpt.status().failure is None and ckpt.status().durable == 3
