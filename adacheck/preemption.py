"""SIGTERM, as schedulers send it before they kill: the last finished step becomes durable, then the process ends as it would have.

Only where nobody handles SIGTERM: a script with a handler of its own is left alone, and calls `ckpt.close()` in it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_finishers: list[Callable[[], None]] = []


def finish_on_sigterm(finish: Callable[[], None]) -> bool:
    """Have `finish` called when SIGTERM comes; `False` if the script handles it, or this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _on_sigterm):
        return False
    signal.signal(signal.SIGTERM, _on_sigterm)
    if finish not in _finishers:
        _finishers.append(finish)
    return True


def forget(finish: Callable[[], None]) -> None:
    """Undo `finish_on_sigterm`; the last one puts the default back."""
    if finish in _finishers:
        _finishers.remove(finish)
    if not _finishers and threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
    for finish in list(_finishers):
        finish()
    os.kill(os.getpid(), signal.SIGTERM)
