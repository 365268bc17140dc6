"""A gradient scaler beside the optimizer: what it unscales, and what it skips on infinities, is in the chain as it happened.

A fused kernel is given scaled gradients and skips by itself; any other optimizer is not called on an infinity.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adacheck.keeper.replay import Replayed, Replayer
from adacheck.kernel import writes_gradients
from adacheck.same import differing
from tests.live_optimizer import Live
from tests.training import Job, logged, opened, payloads, restored_bits

INFINITE = frozenset({3, 7, 8, 12, 15})
"""Steps whose loss overflows: alone, twice running, and often enough that skipping itself is certified."""
LAST = 18
WAYS = [("fused", False), ("fused", True), ("foreach", False), ("loop", True)]
CHOICES: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False, "fused": False}}
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}


def iterate(unscale: bool, job: Job, n: int) -> None:
    scaler = job.extra["scaler"]
    job.optimizer.zero_grad()
    loss = job.model(torch.randn(5, 9)).square().mean() * (float("inf") if n in INFINITE else 1.0)
    torch.autograd.backward(scaler.scale(loss))
    if unscale:
        scaler.unscale_(job.optimizer)
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
    scaler.step(job.optimizer)
    scaler.update()


def make(kind: str, how: str, unscale: bool, seed: int) -> Job:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **OPTIONS.get(kind, {}), **CHOICES[how])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return Job(model, {"optim": optimizer}, partial(iterate, unscale), {"scaler": scaler})


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize(("how", "unscale"), WAYS)
def test_restored_equals_live_after_and_between_skipped_steps(tmp_path: Path, kind: str, how: str, unscale: bool) -> None:
    reference, expected = make(kind, how, unscale, 1), dict[int, dict[str, str]]()
    for cut in (8, LAST):
        reference.train(None, max((c for c in expected), default=0), cut)
        expected[cut] = reference.bits()
    uri, start = f"file://{tmp_path}", 0
    for cut in (8, LAST):  # the first is right after an infinity
        job = make(kind, how, unscale, 1 + start)
        with opened(uri, job) as ckpt:
            assert ckpt.restore() == start
            assert start == 0 or job.bits() == expected[start]
            job.train(ckpt, start, cut, settle=True)
            start = cut
            assert job.bits() == expected[cut]
    assert restored_bits(uri, partial(make, kind, how, unscale), LAST) == expected[LAST]
    counters = [entry["step"].item() for entry in job.optimizer.state.values() if "step" in entry]
    assert set(counters) <= {LAST - len(INFINITE)}
    check_payloads(tmp_path, fused=how == "fused")


def check_payloads(root: Path, *, fused: bool) -> None:
    found = logged(root).increments
    travelled = {step: set(payloads(found[step]).values()) for step in found if step > 8}
    assert travelled.keys() >= set(range(11, LAST + 1))
    for step in travelled.keys() - INFINITE:
        assert travelled[step] == {"gradient"}, step
    if fused:  # the three comparisons that a certificate for skipping takes were before
        assert [travelled[step] for step in (12, 15)] == [{"gradient"}] * 2
    else:
        assert not found[12].events and not found[15].events


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("skipped", [False, True])
def test_scale_and_infinity_are_recorded_and_replayed(kind: str, skipped: bool) -> None:
    live = Live(getattr(torch.optim, kind), {"fused": True, **OPTIONS.get(kind, {})}, torch.float32)
    live.step()
    live.look_again()
    before = [copy.deepcopy(state.tensors) for state in live.shadows]
    optimizer: Any = live.optimizer
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(float(skipped))
    for parameter in live.parameters:
        parameter.grad = torch.randn(parameter.shape) * 1024
    events = live.recorded()
    live.optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
    replayer = Replayer()
    for kernel, given in events:
        assert {"grad_scale=nonzero", f"found_inf={'nonzero' if skipped else 'zero'}"} <= set(kernel.flags)
        assert writes_gradients(kernel)
        replayer.apply(kernel, [Replayed(live.shadows[number], used, gradient) for number, used, gradient in given])
    assert live.unequal() == {}
    changed = [differing(one, shadow.tensors) for one, shadow in zip(before, live.shadows, strict=True)]
    assert any(changed) != skipped
    for kernel, given in live.step():  # the scale of one event is not there at the next
        assert not any(flag.startswith("grad_scale") for flag in kernel.flags)
        replayer.apply(kernel, [Replayed(live.shadows[number], used, gradient) for number, used, gradient in given])
    assert live.unequal() == {}
