"""What went wrong behind the trainer's back, told once: to the log, or as an exception where `on_error=raise` asks for it."""

from __future__ import annotations

import logging

from adacheck.errors import AdacheckError
from adacheck.keeper.driver import Keeper

_log = logging.getLogger("adacheck")


class Reports:
    """Passes on a keeper's reports and its failure, and remembers what was said."""

    def __init__(self) -> None:
        self._said: list[str] = []

    def say(self, keeper: Keeper, *, raising: bool) -> None:
        """Log what is new.

        Raises:
            AdacheckError: with `raising`, what stopped the keeper, or what was new.
        """
        reports = keeper.take_reports()
        if keeper.failure is not None and (stopped := f"checkpoints have stopped, training goes on: {keeper.failure}") not in self._said:
            reports.append(stopped)
        for report in reports:
            _log.warning("%s", report)
        self._said = [*self._said, *reports][-20:]
        if raising and keeper.failure is not None:
            raise keeper.failure
        if raising and reports:
            raise AdacheckError("; ".join(reports))

    def why(self, keeper: Keeper) -> str:
        """The likeliest reason why something did not come about."""
        if keeper.failure is not None:
            return str(keeper.failure)
        self._said += keeper.take_reports()
        return "; ".join(self._said[-3:]) or "nothing else is known to be wrong"
