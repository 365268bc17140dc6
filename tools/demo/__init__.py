"""`adacheck-demo`: trains, kills, restores, and compares bit for bit. See `main.py`; this only keeps the child processes' start light."""

from __future__ import annotations


def main() -> None:
    """Entry point of `adacheck-demo`."""
    import signal
    import sys

    from adacheck.tools.demo.main import app

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that processes and files are cleaned up

    app()
