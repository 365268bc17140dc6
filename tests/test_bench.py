"""The benchmark compares fairly only if every arm really stores the state of its step, and if its statistics are right."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from typer.testing import CliRunner

from adacheck.tools.bench import cores, rates
from adacheck.tools.bench.all_arms import ARMS
from adacheck.tools.bench.alone import run_alone
from adacheck.tools.bench.arms import WholeState
from adacheck.tools.bench.main import SMALL_JOB, app
from adacheck.tools.bench.packing import LEVELS, measure_packing
from adacheck.tools.bench.paired import block_order, run_paired
from adacheck.tools.bench.rates import compare, measure_rates
from adacheck.tools.bench.statistics import median, median_ratio, p99
from adacheck.tools.training import TrainingJob

WHOLE_STATE = [name for name, make in ARMS.items() if isinstance(make(), WholeState)]


def test_the_arms_are_those_of_the_comparison() -> None:
    assert {"none", "torch.save", "dcp.save", "dcp.async_save"} <= set(ARMS)
    assert len(WHOLE_STATE) == 5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", WHOLE_STATE)
def test_an_arm_stores_the_state_of_its_step_although_training_goes_on(name: str, tmp_path: Path) -> None:
    job, arm = TrainingJob(SMALL_JOB), ARMS[name]()
    assert isinstance(arm, WholeState)
    arm.attach(job, tmp_path)
    job.train_one_step()
    arm.step_done(1)
    expected = flat({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()})
    job.train_one_step()
    arm.wait()
    if name == "torch.save":
        stored = flat(torch.load(tmp_path / "step-000001" / "checkpoint.pt", weights_only=False))
    else:
        template = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        load(template, storage_reader=FileSystemReader(tmp_path / "step-000001"), no_dist=True)
        stored = flat(template)
    assert {key: value for key, value in stored.items() if key in expected} == expected
    arm.end_block(last=True)
    assert arm.written_bytes() > 3 * 4 * sum(p.numel() for p in job.model.parameters())
    arm.close()


def flat(tree: Any, prefix: str = "") -> dict[str, bytes]:
    """Every tensor in nested dicts and lists, as bytes under its path."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {path: value for key, inner in items for path, value in flat(inner, f"{prefix}/{key}").items()}


def test_alone_counts_what_is_written_and_who_worked(tmp_path: Path) -> None:
    result = run_alone("torch.save", SMALL_JOB, 3, tmp_path / "store")
    assert result.steps == 3
    assert result.written_bytes_per_step > 1_000_000
    assert result.checkpoint_cpu_s > 0
    assert result.training_cpu_s > 0
    assert list((tmp_path / "store").iterdir()) == []


def test_pairs_run_in_blocks_of_five_and_say_what_ended_them(tmp_path: Path) -> None:
    result = run_paired("torch.save", SMALL_JOB, 8, pinned=True, directory=tmp_path)
    assert [len(block) for block in result.none_blocks_ms] == [len(block) for block in result.arm_blocks_ms] == [5, 5]
    assert result.steps_per_arm == 10
    assert [sorted(apart) for apart in result.apart_ms] == [["drain"], ["drain"]]


def test_blocks_alternate_which_side_is_first() -> None:
    assert "".join(block_order(4)) == "ABBAABBA"


def test_a_ratio_of_medians_has_an_interval_around_it() -> None:
    reference = [[10.0, 11.0, 9.0, 10.0, 10.0]] * 4
    doubled = [[2 * value for value in block] for block in reference]
    found = median_ratio(doubled, reference)
    assert found.ratio == 2.0
    assert 1.6 < found.low <= 2.0 <= found.high < 2.5
    assert median_ratio([[3.0]], [[2.0]]) == median_ratio([[3.0]], [[2.0]])
    with pytest.raises(ValueError, match="1 blocks cannot be paired with 0"):
        median_ratio([[1.0]], [])


def test_drift_between_blocks_widens_the_interval() -> None:
    still, drifting = [[10.0] * 5] * 4, [[8.0] * 5, [10.0] * 5, [12.0] * 5, [14.0] * 5]
    assert median_ratio(still, still) == median_ratio(drifting, drifting)
    wide = median_ratio(drifting, still)
    assert wide.high - wide.low > 0.2


def test_median_and_tail() -> None:
    assert median([1.0, 9.0, 2.0]) == 2.0
    assert p99([0.0, 100.0]) == pytest.approx(99.0)


def test_placement_puts_background_threads_on_the_other_core() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("this machine has one core only")
    done, seen = threading.Event(), dict[str, set[int]]()

    def wait() -> None:
        done.wait()
        seen["background"] = os.sched_getaffinity(0)

    thread = threading.Thread(target=wait)
    thread.start()
    with cores.Placement(pinned=True):
        seen["trainer"] = os.sched_getaffinity(0)
        done.set()
        thread.join()
    assert len(seen["trainer"]) == len(seen["background"]) == 1
    assert seen["trainer"] != seen["background"]
    assert os.sched_getaffinity(0) == before


def test_rates_stand_beside_what_bounds_them(tmp_path: Path) -> None:
    found = measure_rates(tmp_path, size_bytes=5 << 20, shapes=[(64, 32), (64,)])
    assert [result.part for result in found] == ["replay", "narrowing", "narrowing, clipped", "digest", "NVMe log"]
    assert all(result.bare > 0 and result.ratio is not None and result.ratio > 0 for result in found)
    assert (tmp_path / "raw").stat().st_size == 5 << 20


def test_packing_is_measured_for_every_kind_and_level() -> None:
    found = measure_packing(SMALL_JOB)
    kinds = list(dict.fromkeys(result.kind for result in found))
    assert [(result.kind, result.level) for result in found] == [(kind, level) for kind in kinds for level in LEVELS]
    assert all(0 < result.packed_bytes <= result.unpacked_bytes and result.pack_gb_per_s > 0 < result.unpack_gb_per_s for result in found)
    narrowed = {result.kind: result.unpacked_bytes / result.raw_bytes for result in found}
    assert narrowed["gradient, autocast"] < 0.6 and narrowed["gradient, autocast, clipped"] < 0.6 and narrowed["gradient, fp32"] == 1.0
    assert all(0.5 < result.ratio < 0.9 for result in found if result.kind == "gradient, autocast")


def test_a_part_that_takes_twice_the_time_has_half_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def spend(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    found = compare("part", "clock", "calls/s", 1, lambda: spend(0.02), lambda: spend(0.04))
    assert (found.bare, found.ours, found.ratio) == pytest.approx((50.0, 25.0, 0.5))


def test_cpu_time_goes_to_the_role_that_used_it() -> None:
    def burn() -> None:
        end_s = time.thread_time() + 0.2
        while time.thread_time() < end_s:
            pass

    before = cores.cpu_times()
    thread = threading.Thread(target=burn, name="burner-1")
    thread.start()
    thread.join()
    spent = cores.cpu_times().since(before)
    assert spent.background_s > spent.trainer_s


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_every_figure(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = [
        "--small",
        "--arm",
        "none",
        "--arm",
        "dcp.async_save",
        "--alone-steps",
        "2",
        "--paired",
        "torch.save",
        "--paired-steps",
        "5",
        "--no-rates",
    ]
    done = CliRunner().invoke(app, [*options, "--directory", str(tmp_path), "--json", str(figures)])
    assert done.exit_code == 0, done.output
    assert "ratio" in done.output
    assert "peak RSS" in done.output
    content = json.loads(figures.read_text())
    assert [(result["arm"], result["pinned"]) for result in content["paired"]] == [("torch.save", True), ("torch.save", False)]
    assert [result["arm"] for result in content["alone"]] == ["none", "dcp.async_save"]


def test_an_unknown_arm_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(app, ["--arm", "zip"])
    assert done.exit_code == 2
    assert "no arm zip" in done.output
