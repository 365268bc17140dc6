"""How the command line tools end: exit codes as fsck(8) has them, and one line on standard error for what went wrong."""

from __future__ import annotations

import sys
import traceback
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
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        tell(error, OPERATIONAL)
        _say_bug(error)
        raise typer.Exit(OPERATIONAL) from error


def _say_bug(error: Exception) -> None:
    traceback.print_exception(error)
    _line(f"{type(error).__name__}: {error}: this is a bug, report it with the traceback above")


def _line(text: object) -> None:
    Console(stderr=True, soft_wrap=True).print(f"error: {text}", markup=False, highlight=False)


def _end(error: Exception, code: int, tell: Callable[[Exception, int], None]) -> None:
    tell(error, code)
    _line(error)
    raise typer.Exit(code) from error


def run(app: typer.Typer) -> None:
    """Run a tool to its end; a wrong call ends with `USAGE` instead of typer's own code, a bug with `OPERATIONAL` instead of Python's 1."""
    try:
        app()
    except SystemExit as ended:
        sys.exit(USAGE if ended.code == _USAGE_OF_TYPER else ended.code)
    except Exception as error:
        _say_bug(error)
        sys.exit(OPERATIONAL)
