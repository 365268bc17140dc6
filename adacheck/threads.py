"""Intra-op threads and denormal mode of the *calling* thread, set without touching any other thread's.

Both belong to the kernel of an optimizer step. `torch.set_num_threads` would also set the count that threads started later take
over, so a keeper thread that used it would slow down the trainer; OpenMP's own call sets the calling thread's count alone.
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
def _openmp() -> Callable[[int], None] | None:
    """`omp_set_num_threads` of the OpenMP library that torch has loaded, or `None` where there is none to be found."""
    library_folder = Path(torch.__file__).parent / "lib"
    mapped = Path("/proc/self/maps").read_text().split() if sys.platform == "linux" else []
    candidates = [word for word in mapped if "omp" in word.rpartition("/")[2] and word.startswith("/")]
    candidates += [str(path) for pattern in ("libgomp*", "libiomp*", "libomp*") for path in library_folder.glob(pattern)]
    for candidate in dict.fromkeys(candidates):
        try:
            function = ctypes.CDLL(candidate).omp_set_num_threads
        except (OSError, AttributeError):
            continue
        if _is_torchs(function):
            return lambda count: function(count)
    return None


def _is_torchs(function: Callable[[int], object]) -> bool:
    """Whether this OpenMP is the one whose thread count torch goes by; tried on a thread of its own."""
    seen: list[int] = []

    def probe() -> None:
        wanted = torch.get_num_threads() + 1
        function(wanted)
        seen.append(int(torch.get_num_threads() == wanted))

    thread = threading.Thread(target=probe, name="adacheck-openmp-probe")
    thread.start()
    thread.join()
    return seen == [1]


def set_threads(count: int) -> None:
    """Let torch's operations use `count` threads when called from this thread; no other thread, running or future, is changed."""
    before = torch.get_num_threads()  # also makes torch set this thread up, which would undo an earlier setting
    if before == count:
        return
    setter = _openmp()
    if setter is not None:
        setter(count)
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
