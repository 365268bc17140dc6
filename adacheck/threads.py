"""Intra-op threads and denormal mode of the *calling* thread, set without touching any other thread's.

Both belong to the kernel of an optimizer step. `torch.set_num_threads` would also set the count that threads started later take
over, so a keeper thread that used it would slow down the trainer. OpenMP's own call sets the calling thread's count alone, and so
does MKL's, which square roots go through.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_SMALLEST_NORMAL = sys.float_info.min


@cache
def _library_calls() -> tuple[Callable[[int], object], ...] | None:
    """OpenMP's and (where torch has it) MKL's calls that set the calling thread's count; `None` where torch's OpenMP is not found.

    The process's own symbols come first: an OpenMP that was preloaded is the one torch uses.
    """
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for name in (None, str(torch_library)):
        try:
            library = ctypes.CDLL(name)
            openmp = library.omp_set_num_threads
        except (OSError, AttributeError):
            continue
        if _is_torchs(openmp):
            mkl = getattr(ctypes.CDLL(str(torch_library)), "MKL_Set_Num_Threads_Local", None)
            return (openmp,) if mkl is None else (openmp, mkl)
    return None


def _is_torchs(openmp: Callable[[int], object]) -> bool:
    """Whether this OpenMP is the one whose thread count torch goes by; tried on a thread of its own."""
    seen: list[bool] = []

    def probe() -> None:
        wanted = torch.get_num_threads() + 1
        openmp(wanted)
        seen.append(torch.get_num_threads() == wanted)

    thread = threading.Thread(target=probe, name="adacheck-openmp-probe")
    thread.start()
    thread.join()
    return seen == [True]


def set_threads(count: int) -> None:
    """Let torch's operations use `count` threads when called from this thread; no other thread, running or future, is changed."""
    before = torch.get_num_threads()  # also makes torch set this thread up, which would undo an earlier setting
    if before == count:
        return
    calls = _library_calls()
    if calls is not None:
        for call in calls:
            call(count)
        return
    torch.set_num_threads(count)
    # Threads to come take over what was set last: put that back from a thread that ends at once.
    restorer = threading.Thread(target=torch.set_num_threads, args=(before,), name="adacheck-thread-count")
    restorer.start()
    restorer.join()


def flushes_denormals() -> bool:
    """Whether this thread's arithmetic flushes denormal numbers to zero; torch can set the mode but not tell it."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


@contextmanager
def arithmetic(threads: int | None = None, flush_denormal: bool | None = None) -> Iterator[None]:
    """Run the body in this thread with so many intra-op threads and this denormal mode (`None`: as they are), then put both back."""
    threads_before, flush_before = torch.get_num_threads(), flushes_denormals()
    try:
        if threads is not None:
            set_threads(threads)
        if flush_denormal is not None and flush_denormal != flush_before:
            torch.set_flush_denormal(flush_denormal)
        yield
    finally:
        set_threads(threads_before)
        if flushes_denormals() != flush_before:
            torch.set_flush_denormal(flush_before)
