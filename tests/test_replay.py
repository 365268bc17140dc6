"""A replay of recorded steps equals the live optimizer byte for byte, for every kernel that may travel as gradients."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from adacheck.capture import opaque
from adacheck.errors import ReplayRefused
from adacheck.keeper.replay import BATCH_BYTES, GradientMemory, Replayed, Replayer, batches, replay_threads, spec_of
from adacheck.kernel import kernel_of, replayable
from adacheck.same import differing
from adacheck.threads import arithmetic
from tests.live_optimizer import Live, shadow
from tests.optimizer_table import KINDS, Entry, entries, first_of_each_kernel


def replay(live: Live, events: list[Any], limit_bytes: int = BATCH_BYTES, replayer: Replayer | None = None) -> None:
    replayer = replayer or Replayer()
    for kernel, given in events:
        members = [Replayed(live.shadows[number], hyperparameters, gradient) for number, hyperparameters, gradient in given]
        for batch in batches(members, lambda member: member.gradient.nbytes, limit_bytes):
            replayer.apply(kernel, batch)


def made(kind: str, kernel: str, dtype: torch.dtype, flags: str = "none", **options: Any) -> Live:
    line = Entry(kind, kernel, flags, dtype, None)
    return Live(getattr(torch.optim, kind), line.options(), dtype, shapes=KINDS[kind].shapes, **options)


PLAIN = [pytest.param(line, id=line.name) for line in first_of_each_kernel() if line.payload == "gradient"]
LINES = [pytest.param(line, id=line.name) for line in entries() if line.payload == "gradient"]


@pytest.mark.parametrize("line", LINES)
def test_replay_equals_live_byte_for_byte_from_the_first_step_on(line: Entry) -> None:
    live = made(line.kind, line.kernel, line.dtype, line.flags, large=False)
    group = live.optimizer.param_groups[0]
    replayer = Replayer()
    for _ in range(5):
        events = live.step()
        assert replayable(live.optimizer, group, live.parameters[0], events[0][0]) is None
        replay(live, events, replayer=replayer)
        assert live.unequal() == {}
    assert kernel_of(live.optimizer, group).implementation == line.kernel


@pytest.mark.parametrize("line", PLAIN)
def test_any_batching_and_one_thread_give_the_bits_of_two_threads(line: Entry) -> None:
    live = made(line.kind, line.kernel, line.dtype, line.flags)
    with arithmetic(threads=2):
        steps = [live.step() for _ in range(4)]
    assert steps[0][0][0].threads == 2
    for at, events in enumerate(steps):
        replay(live, events, limit_bytes=(1, 4_000, 40_000, 1 << 30)[at])
    assert live.unequal() == {}


@pytest.mark.parametrize("line", [pytest.param(line, id=line.name) for line in entries() if line.payload == "value"])
def test_what_goes_as_value_says_why(line: Entry) -> None:
    live = made(line.kind, line.kernel, line.dtype, line.flags)
    kernel, _ = live.step()[0]
    assert line.reason is not None
    assert line.reason in (replayable(live.optimizer, live.optimizer.param_groups[0], live.parameters[0], kernel) or "")


def test_loop_kernels_below_fp32_depend_on_the_thread_count_so_it_is_taken_as_recorded() -> None:
    kernel = replace(made("AdamW", "loop", torch.float32).recorded()[0][0], threads=2)
    assert replay_threads(kernel, "loop", torch.bfloat16) == replay_threads(kernel, "foreach", torch.bfloat16) == 2
    assert replay_threads(kernel, "loop", torch.float32) == replay_threads(kernel, "fused", torch.bfloat16) == 1
    assert replay_threads(replace(kernel, optimizer_class="torch.optim._muon.Muon"), "default", torch.float32) == 2


def test_a_tensor_lr_is_replayed() -> None:
    for implementation in ("fused", "loop"):
        live = made("AdamW", implementation, torch.float32, lr=torch.tensor(0.01))
        for _ in range(3):
            replay(live, live.step())
        assert live.unequal() == {}


def test_groups_of_one_event_may_differ_in_implementation_and_dtype() -> None:
    live = Live(AdamW, {}, torch.bfloat16)
    live.optimizer.param_groups[0]["fused"] = True
    live.optimizer.param_groups[1]["foreach"] = True
    replayer = Replayer()
    with arithmetic(threads=2):
        for _ in range(3):
            events = live.step()
            event_kernel = events[0][0]
            assert [kernel.implementation for kernel, _ in events] == ["fused", "foreach"]
            together = [Replayed(live.shadows[number], group, gradient) for _, given in events for number, group, gradient in given]
            replayer.apply(event_kernel, together)
    assert live.unequal() == {}


def test_a_momentum_buffer_made_late_gives_other_bits_and_says_so() -> None:
    live = made("SGD", "foreach", torch.bfloat16, "momentum")
    live.step()
    live.look_again()
    del live.optimizer.state[live.parameters[0]]
    kernel, given = live.step()[0]
    assert "mixed=True" in kernel.flags
    replay(live, [(kernel, [one for one in given if one[0] == 4])])
    assert "momentum_buffer" in live.unequal()[4], "torch's two ways agree now: tell them apart no longer"


def test_several_events_of_one_increment_are_replayed_in_order() -> None:
    live = made("AdamW", "fused", torch.float32)
    replay(live, [*live.step(), *live.step()])
    assert live.unequal() == {}


@pytest.mark.parametrize("flush", [True, False])
def test_the_recorded_denormal_mode_is_used_and_put_back(flush: bool) -> None:
    parameter = torch.nn.Parameter(torch.full((64,), 2.0**-126))
    parameter.grad = torch.full((64,), 2.0**-127)
    optimizer = SGD([parameter], lr=0.5)
    copied = shadow(0, parameter)
    hyperparameters = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    gradient = parameter.grad.clone()
    with arithmetic(flush_denormal=flush):
        kernel = kernel_of(optimizer, optimizer.param_groups[0])
        optimizer.step()
    with arithmetic(flush_denormal=not flush):
        Replayer().apply(kernel, [Replayed(copied, hyperparameters, gradient)])
    assert differing({"param": parameter}, copied.tensors) == ()
    assert parameter[0].item() == (2.0**-126 if flush else 2.0**-127 + 2.0**-128)


def test_nan_and_infinite_gradients_are_replayed() -> None:
    for kind, flags in (("AdamW", "none"), ("SGD", "momentum")):
        live = made(kind, "fused", torch.float32, flags)
        live.step()
        live.look_again()
        for parameter in live.parameters:
            parameter.grad = torch.full_like(parameter, float("inf"))
            if parameter.numel() > 3:
                parameter.grad.view(-1).view(torch.int32)[3] = 0x7FA00001
        events = live.recorded()
        live.optimizer.step()
        replay(live, events)
        assert live.unequal() == {}


def test_no_hook_fires_no_class_is_patched_and_no_gradient_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    live = made("AdamW", "fused", torch.float32)
    events = live.step()
    happened: list[str] = []
    monkeypatch.setattr(torch.optim.Optimizer, "_patch_step_function", lambda _: happened.append("patched"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: happened.append("pre")),
        register_optimizer_step_post_hook(lambda *_: happened.append("post")),
    ]
    try:
        with torch.autograd.profiler.profile() as profile:
            replay(live, events)
    finally:
        for handle in handles:
            handle.remove()
    assert live.unequal() == {}
    assert happened == []
    assert not [event.name for event in profile.function_events if event.name.startswith("Optimizer.step")]
    assert all(shadow.tensors["param"].grad is None for shadow in live.shadows)


@pytest.mark.parametrize(
    "change", [{"optimizer_class": "os.system"}, {"torch_build": "other"}, {"cpu_capability": "VSX"}, {"device": "cuda"}]
)
def test_another_kernel_is_refused_and_nothing_changed(change: dict[str, str]) -> None:
    live = made("AdamW", "fused", torch.float32)
    kernel, given = live.step()[0]
    before = [copy.deepcopy(shadow.tensors) for shadow in live.shadows]
    with pytest.raises(ReplayRefused, match=next(iter(change.values()))):
        replay(live, [(replace(kernel, **change), given)])
    assert [differing(one, shadow.tensors) for one, shadow in zip(before, live.shadows, strict=True)] == [()] * len(live.shadows)


def test_what_torch_raises_comes_as_refusal_naming_the_state() -> None:
    live = made("AdamW", "fused", torch.float32)
    kernel, given = live.step()[0]
    del given[0][1]["betas"]
    replayer = Replayer()
    with pytest.raises(ReplayRefused, match=r"layer\..*betas"):
        replay(live, [(kernel, given)], replayer=replayer)
    assert all(shadow.tensors["param"].grad is None for shadow in live.shadows)


def test_new_tensors_take_the_parameters_place_in_its_global_tensor() -> None:
    live = made("AdamW", "fused", torch.float32)
    whole = live.shadows[4].spec.tensors[0]
    chunk = replace(whole, global_shape=(66, 17, 19), offsets=(33, 0, 0))
    live.shadows[4].spec = replace(live.shadows[4].spec, tensors=(chunk,))
    replay(live, live.step())
    placed = {spec.name: (spec.global_shape, spec.offsets) for spec in live.shadows[4].spec.tensors}
    assert placed == dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), ((66, 17, 19), (33, 0, 0))) | {"step": ((), ())}


def test_scalars_are_written_as_the_trainer_writes_them() -> None:
    state = shadow(0, torch.ones(3))
    assert spec_of(state.spec, state.tensors, {}).scalars == b""
    assert opaque.decode(spec_of(state.spec, state.tensors, {"momentum_buffer": None, "k": 2}).scalars) == {"momentum_buffer": None, "k": 2}


def test_batches_keep_order_and_stay_under_the_limit() -> None:
    sizes = [3, 4, 4, 20, 1, 9, 2]
    found = list(batches(sizes, lambda size: size, 10))
    assert found == [[3, 4], [4], [20], [1, 9], [2]]
    assert list(batches([], lambda size: size, 10)) == []


def test_gradient_memory_is_reused_and_its_tensors_do_not_overlap() -> None:
    memory = GradientMemory()
    wanted = [((3, 5), torch.float32), ((), torch.bfloat16), ((0,), torch.float32), ((7,), torch.float64)]
    first = memory.take(wanted)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in first] == wanted
    for number, tensor in enumerate(first):
        tensor.fill_(number)
    assert [set(tensor.view(-1).tolist()) for tensor in first] == [{0.0}, {1.0}, set(), {3.0}]
    assert memory.take(wanted[:1])[0].data_ptr() == first[0].data_ptr()
