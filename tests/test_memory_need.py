"""Need and limit are compared before the first step: on made-up hosts, and on this one with limits set."""

from __future__ import annotations

import logging
import resource
import subprocess
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from adacheck.capture.inventory import take_inventory
from adacheck.config import StoreConfig
from adacheck.errors import ConfigError
from adacheck.history import BYTES_MAX
from adacheck.manifests.record import SEGMENT_BYTES_MAX
from adacheck.memory_need import DESCRIPTORS, available_bytes, block_count, check_descriptors, check_disk, fit, memory_budget, step_bytes
from tests.tiny_run import Process

GIB = 1 << 30


def host(root: Path, files: dict[str, str], available_kib: int = 8 << 20) -> Path:
    """A made-up root directory with `/proc` and `/sys`."""
    for name, content in {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\nHugePages_Total: 0\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_a_host_without_limits_has_what_it_says(tmp_path: Path) -> None:
    assert available_bytes(host(tmp_path, {})) == 8 * GIB
    assert available_bytes(host(tmp_path, {"proc/self/cgroup": "0::/\n"})) == 8 * GIB
    assert 0 < available_bytes() < 1 << 50, "this host"


def test_the_tightest_cgroup_counts_up_to_the_top(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slurm/job7/step0\n",
        "sys/fs/cgroup/slurm/job7/step0/memory.max": "max\n",
        "sys/fs/cgroup/slurm/job7/step0/memory.current": "5\n",
        "sys/fs/cgroup/slurm/job7/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/slurm/job7/memory.current": f"{1 * GIB}\n",
    }
    assert available_bytes(host(tmp_path, files)) == 3 * GIB


def test_a_container_sees_its_limit_at_the_top(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
    }
    assert available_bytes(host(tmp_path, files)) == GIB


def test_pages_of_files_that_can_be_dropped_are_not_used(tmp_path: Path) -> None:
    """A job that has read its data set has a cgroup full of it; that must not keep it from starting."""
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon {GIB}\ninactive_file {3 * GIB}\n",
    }
    assert available_bytes(host(tmp_path, files)) == 3 * GIB


def test_the_older_kind_of_cgroup(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu:/job\n4:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 0\n",
    }
    assert available_bytes(host(tmp_path, files)) == 2 * GIB


def test_blocks_hold_a_step() -> None:
    assert block_count(1000, 3000, 100) == 16
    assert step_bytes(1 << 30, 300 << 20, 100) == (1 << 30) + (3 << 20)
    assert block_count(1 << 30, 300 << 20, 100) * SEGMENT_BYTES_MAX >= step_bytes(1 << 30, 300 << 20, 100)


def test_too_little_memory_is_refused_with_need_and_limit() -> None:
    blocks = 16 * SEGMENT_BYTES_MAX
    assert memory_budget(None, 16, GIB, GIB + blocks + 100 * SEGMENT_BYTES_MAX) == 50 * SEGMENT_BYTES_MAX
    assert memory_budget(123, 16, GIB, 2 * GIB) == 123
    with pytest.raises(ConfigError, match=f"needs {GIB + blocks} bytes .* {GIB} are available"):
        memory_budget(None, 16, GIB, GIB)
    with pytest.raises(ConfigError, match=f"needs {2 * GIB + blocks} bytes .*without NVMe"):
        memory_budget(None, 16, GIB, 2 * GIB, nvme=False)


def test_what_a_restore_has_read_is_not_needed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = 16 * SEGMENT_BYTES_MAX
    monkeypatch.setattr("adacheck.memory_need.available_bytes", lambda: blocks)
    config = StoreConfig("file:///d", None)
    with pytest.raises(ConfigError, match="bytes of memory"):
        fit(config, 1000, 3000, 0, 100, tmp_path)
    assert fit(config, 1000, 3000, 3000, 100, tmp_path) == (16, SEGMENT_BYTES_MAX)


Disk = namedtuple("Disk", "f_bavail f_frsize f_blocks")


def test_disk_space_is_compared_with_what_the_log_grows_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "adacheck")
    room = 0
    monkeypatch.setattr("os.statvfs", lambda path: Disk(room, 1, 1 << 40))
    states, step, log_steps = 1000, 100, 32
    need = 2 * states + round(2.2 * log_steps * step) + BYTES_MAX
    room = need
    check_disk(tmp_path, states, step, log_steps)
    assert not caplog.records
    room = need - 1
    check_disk(tmp_path, states, step, log_steps)
    assert f"room for {need - 1} bytes" in caplog.text and f"about {need}" in caplog.text
    room = states + 4 * step - 1
    with pytest.raises(ConfigError, match=f"room for {room} bytes, .* needs {need}"):
        check_disk(tmp_path, states, step, log_steps)
    (tmp_path / "data.mdb").write_bytes(b"x")
    check_disk(tmp_path, states, step, log_steps)


def test_a_low_limit_of_descriptors_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    check_descriptors()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (20, 20))
    with pytest.raises(ConfigError, match=rf"up to {DESCRIPTORS} files, .* of at most 20 open"):
        check_descriptors()


@pytest.mark.parametrize(
    ("target", "value", "says"),
    [
        ("adacheck.memory_need.available_bytes", lambda: 1000, "needs .* bytes of memory"),
        ("adacheck.memory_need.free_bytes", lambda path: -(1 << 20), "has room for"),
        ("adacheck.memory_need.resource.getrlimit", lambda which: (20, 20), "ulimit -n"),
    ],
)
def test_a_run_is_refused_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, value: object, says: str
) -> None:
    process = Process(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(target, value)
        with pytest.raises(ConfigError, match=says):
            process.ckpt.restore()
    process.ckpt.close()
    process = Process(tmp_path)
    assert process.ckpt.restore() == 0, "once there is enough, the run starts"
    process.step()
    process.ckpt.close()


def test_a_filesystem_too_small_for_the_states_is_refused(tmp_path: Path) -> None:
    mount = tmp_path / "nvme"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True).returncode:
        pytest.skip("only root can mount a small filesystem")
    try:
        process = Process(tmp_path, width=10_000)
        with pytest.raises(ConfigError, match=rf"{mount}.* has room for \d+ bytes, and the log of every step needs \d+"):
            process.ckpt.restore()
        process.ckpt.close()
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=0.1),
        partial(torch.optim.Adam, lr=0.1, amsgrad=True),
        partial(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.9),
    ],
)
def test_what_an_optimizer_will_keep_is_expected_before_its_first_step(make: Callable[..., torch.optim.Optimizer]) -> None:
    model = torch.nn.Linear(30, 20)
    inventory = take_inventory(model, make(model.parameters()))
    expected = inventory.expected_bytes()
    model(torch.randn(2, 30)).sum().backward()
    inventory.optimizers["optim"].step()
    inventory.refresh()
    tensors = [tensor for live in inventory.states.values() for name, tensor in live.tensors().items() if tensor.dim()]
    assert expected == (4 * 620, sum(4 * tensor.numel() for tensor in tensors))
