"""How the command line tools end: exit codes as fsck(8) has them, and one line on standard error for what went wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from adacheck.backends.errors import BackendError
from adacheck.errors import AdacheckError, ConfigError, NoCut
from adacheck.manifests.errors import FormatError

CLEAN, REPAIRED, UNCORRECTED, OPERATIONAL, USAGE = 0, 1, 4, 8, 16
"""No damage; all damage was repaired or given up; damage is left, or nothing can be restored; it could not work; it was called wrongly."""

_USAGE_OF_TYPER = 2


@contextmanager
def reported(nothing: int, tell: Callable[[Exception, int], None] = lambda _error, _code: None) -> Iterator[None]:
    """Turn errors into a line and an exit code; `nothing` is the code for a store without what was asked for. `tell` is told first."""
    try:
        yield
    except ConfigError as error:
        _end(error, USAGE, tell)
    except NoCut as error:
        _end(error, nothing, tell)
    except (AdacheckError, BackendError, FormatError, OSError) as error:
        _end(error, OPERATIONAL, tell)


def _end(error: Exception, code: int, tell: Callable[[Exception, int], None]) -> None:
    tell(error, code)
    Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
    raise typer.Exit(code) from error


def run(app: typer.Typer) -> None:
    """Run a tool to its end; a wrong call ends with `USAGE` instead of typer's own code."""
    try:
        app()
    except SystemExit as ended:
        sys.exit(USAGE if ended.code == _USAGE_OF_TYPER else ended.code)
