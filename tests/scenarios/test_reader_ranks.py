"""`dcp.load` of a cut in fresh processes, two ranks with FSDP2: every tensor, put together, is that of the one process that trained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import adacheck
from tests.dcp_job import digests, flat_state
from tests.scenarios.reader_rank import job
from tests.tidy import ROOT

DEADLINE_S = 120
FULL, NEWEST = 5, 30


def train(root: Path) -> dict[int, dict[str, str]]:
    """Train in this process, whole; gives what dcp would save, at the full checkpoint and at the newest step, which only NVMe has."""
    found: dict[int, dict[str, str]] = {}
    for seed, start, stop in ((0, 0, FULL), (1, FULL, NEWEST)):
        model, optimizer = job(seed)
        with adacheck.Store.open(f"file://{root}/objects", nvme=str(root / "nvme"), log_steps=100, full_every=1000) as store:
            ckpt = store.attach(model, optimizer)
            assert ckpt.restore() == start
            for _ in range(start, stop):
                model(torch.randint(0, 7, (4,))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()
            if stop == FULL:
                ckpt.publish_full()
            ckpt.close()
            found[stop] = digests(flat_state(model, optimizer))
        if stop == FULL:
            shutil.rmtree(root / "nvme")  # a new host, whose log begins with the bases of this cut
    return found


def load_in_ranks(root: Path, cases: dict[str, tuple[list[str], Any]]) -> dict[str, dict[str, Any]]:
    """Two fresh processes; gives what each case loaded. Both are ended and reaped whatever happens."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "tests.scenarios.reader_rank"]
    ranks = [
        subprocess.Popen(
            [*call, str(rank), "2", str(root), json.dumps(cases)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=DEADLINE_S)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return {name: json.loads((root / f"{name}.json").read_text()) for name in cases}


@pytest.mark.slow
def test_two_ranks_load_what_one_process_trained(tmp_path: Path) -> None:
    live = train(tmp_path)
    both, objects = (f"file://{tmp_path}/objects?nvme={where}" for where in (tmp_path / "nvme", "none"))
    found = load_in_ranks(
        tmp_path,
        {
            "log": ([both, both], NEWEST),
            "full": ([objects, objects], FULL),
            "agreed": ([both, objects], "latest"),  # rank 1 is on another host than the log
        },
    )
    for name, step in (("log", NEWEST), ("full", FULL), ("agreed", FULL)):
        assert found[name]["step"] == step
        assert found[name]["digests"] == live[step], name
