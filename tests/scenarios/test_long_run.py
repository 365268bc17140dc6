"""A thousand steps in a process of its own: memory, the log's file and descriptors stand still."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ELEMENTS, TENSORS = 4_200_000, 12  # 50.4 MB with the two moments of AdamW
FIRST, LAST, FULL_EVERY = 300, 1000, 100


@pytest.mark.slow
def test_nothing_grows_between_steps_300_and_1000(tmp_path: Path) -> None:
    """With a full checkpoint every 100 steps: at step 1,000 at most 1.1 times what there was at step 300."""
    command = [sys.executable, "-m", "tests.scenarios.test_long_run", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)  # noqa: T201 - figures to read
    at_first, at_last = report["sizes"]
    assert report["state_bytes"] >= 50_000_000
    assert report["published"] == LAST and report["failure"] is None and report["lost"] == []
    for what, size in at_last.items():
        assert size <= 1.1 * at_first[what], (what, at_first, at_last)


def sizes(root: Path) -> dict[str, int]:
    """What must not grow: resident bytes, of which those of mapped files apart; the log's file; descriptors; threads."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    (log,) = (root / "nvme").rglob("data.mdb")
    return {
        "rss_kb": int(status["VmRSS"].split()[0]),
        "anonymous_kb": int(status["RssAnon"].split()[0]),
        "log_bytes": log.stat().st_size,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def run(root: Path) -> dict[str, object]:
    """Train with gradients that are made once: a step then takes milliseconds, and the keeper is what is measured."""
    from tests.survival import adamw
    from tests.training import Job, opened

    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(ELEMENTS // TENSORS)) for _ in range(TENSORS)])
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).bfloat16().float()

    def same_gradients(job: Job, n: int) -> None:
        for parameter in job.model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()  # a new one each time; one that nobody drops is a part of the cut
        job.optimizer.step()

    job = Job(model, {"optim": adamw(model.parameters())}, same_gradients)
    with opened(f"file://{root}", job, full_every=FULL_EVERY) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, FIRST)
        ckpt.publish_full()
        at_first = sizes(root)
        job.train(ckpt, FIRST, LAST)
        ckpt.publish_full()
        at_last = sizes(root)
        status = ckpt.status()
    state_bytes = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    return {
        "state_bytes": state_bytes,
        "published": status.published,
        "failure": status.failure,
        "lost": list(status.lost_copies),
        "sizes": [at_first, at_last],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(Path(sys.argv[1]))) + "\n")
