"""A thread's intra-op count and denormal mode change for that thread alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from adacheck import threads
from adacheck.threads import arithmetic, flushes_denormals, set_threads


def on_a_thread(body: Callable[[], int]) -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(body()))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize("with_openmp", [True, False])
def test_the_count_is_set_for_this_thread_and_no_other(with_openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_openmp:
        monkeypatch.setattr(threads, "_library_calls", lambda: None)
    trainer, inherited = torch.get_num_threads(), on_a_thread(torch.get_num_threads)

    def keeper() -> int:
        set_threads(3)
        assert on_a_thread(torch.get_num_threads) == inherited
        return torch.get_num_threads()

    assert on_a_thread(keeper) == 3
    assert torch.get_num_threads() == trainer
    assert on_a_thread(torch.get_num_threads) == inherited


def test_openmp_and_mkl_are_found_in_this_build_of_torch() -> None:
    calls = threads._library_calls()
    assert calls is not None
    assert len(calls) == (2 if torch.backends.mkl.is_available() else 1)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("count", [1, 2])
def test_torch_starts_as_many_workers_as_were_set(count: int) -> None:
    # Additions are threaded by torch itself, square roots by MKL. Workers stay; a finished thread may take a moment to be gone.
    program = f"""
import os, threading, time, torch
from adacheck.threads import set_threads
torch.set_num_threads(2)
def work():
    set_threads({count})
    time.sleep(0.2)
    before = set(os.listdir("/proc/self/task"))
    torch.sqrt(torch.ones(1 << 20) + 1)
    print(len(set(os.listdir("/proc/self/task")) - before), torch.get_num_threads())
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(count - 1), str(count), "2"]


@pytest.mark.parametrize("mode", [True, False])
def test_the_denormal_mode_is_told_and_put_back(mode: bool) -> None:
    tiny = torch.full((64,), 1e-30)
    with arithmetic(flush_denormal=not mode), arithmetic(flush_denormal=mode):
        assert flushes_denormals() is mode
        assert bool((tiny * 1e-10 == 0).all()) is mode
    assert flushes_denormals() is False


def test_both_are_put_back_after_an_exception() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), arithmetic(threads=before + 1, flush_denormal=True):
        raise KeyError
    assert (torch.get_num_threads(), flushes_denormals()) == (before, False)
