"""A long run whose object tier fails at one request in twenty: the same bytes in the end, and nothing grows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adacheck.catalogue import head
from adacheck.incarnations import read_run
from adacheck.manifests import keys
from adacheck.retention import VERSIONS_KEPT
from tests.fault_proxy import PASSING, FaultProxy, seeded
from tests.scenarios.fault_trainer import LAST, OPTIONS, WIDTH, fingerprint, objects
from tests.seaweed import BUCKET, s3_server
from tests.tiny_run import Process, TinyRun

RATE, SEED = 0.05, 7
KEEP = 3


@pytest.mark.slow
def test_500_steps_under_faults_end_with_the_same_bytes_and_nothing_grows(tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/faulty-run"
    with FaultProxy(s3_server().endpoint, seeded(SEED, RATE)) as proxy:
        options = {**s3_server().options, "endpoint_url": proxy.endpoint, "request_timeout_s": 0.5}
        command = [sys.executable, "-m", "tests.scenarios.fault_trainer", str(tmp_path), url, json.dumps(options)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2], check=False)
        met, requests = proxy.met, proxy.requests
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["warnings"]) < 20, "what was cured by trying again is not worth a line"
    print(report, requests, met)  # noqa: T201 - figures to read
    assert met.keys() == set(PASSING) and met.total() > 0.03 * requests
    assert (report["published"], report["durable"], report["failure"]) == (LAST, LAST, None)

    at_first, at_last = report["sizes"]
    for what, size in at_last.items():
        assert size <= 1.1 * at_first[what] + (4 if what == "descriptors" else 0), (what, at_first, at_last)

    without_checkpoints = TinyRun(WIDTH)
    for _ in range(LAST):
        without_checkpoints.train_one_step()
    assert report["fingerprint"] == fingerprint(without_checkpoints.snapshot())

    _check_leftovers(url)
    elsewhere = Process(tmp_path / "elsewhere", objects(url, **s3_server().options), options=OPTIONS, width=WIDTH)
    assert elsewhere.ckpt.restore() == LAST
    assert fingerprint(elsewhere.run.snapshot()) == report["fingerprint"]
    elsewhere.abandon()


def _check_leftovers(url: str) -> None:
    """Of everything that was tried in 500 steps, what is kept is there, and little else."""
    with objects(url, **s3_server().options) as backend:
        run = read_run(backend)
        assert run is not None
        listed = {full.folder for full in head(backend, run.run).fulls}
        folders = {key.rpartition("/")[0] for key in backend.list(keys.FULL_PREFIX)}
        assert listed <= folders and len(folders) <= KEEP + 3, (listed, folders)
        assert len(list(backend.list(keys.VERSIONS_PREFIX))) <= VERSIONS_KEPT + 4
        assert len(list(backend.uploads())) <= 1
