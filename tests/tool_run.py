"""Runs a command line tool in this process, as its entry point does."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True)
class Ended:
    """How a tool ended, and what it wrote."""

    code: int
    out: str
    err: str


def run_tool(main: Callable[[], None], *arguments: str) -> Ended:
    """Call `main` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with mock.patch.object(sys, "argv", ["tool", *arguments]), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return Ended(code, out.getvalue(), err.getvalue())
