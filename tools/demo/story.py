"""What the demo tells on the terminal: stages in plain words, each check with its verdict, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adacheck.tools.demo.comparison import Figures
from adacheck.tools.demo.process import Event
from adacheck.tools.demo.task import VARIANTS


class Story:
    """Prints, and remembers whether everything held.

    Attributes:
        failed: the checks that did not hold, as they were printed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.failed: list[str] = []

    def stage(self, title: str) -> None:
        """Begin a part."""
        self._console.print(Text(f"\n{title}", style="bold"))

    def say(self, text: str) -> None:
        """One line of what is happening."""
        self._console.print(Text(f"  {text}"))

    def check(self, text: str, holds: bool) -> bool:
        """Say whether something that must hold does."""
        self._console.print(Text("  yes  " if holds else "  NO   ", style="green" if holds else "bold red").append(text, style="default"))
        if not holds:
            self.failed.append(text)
        return holds

    def watch(self, what: str, events: Iterable[Event], steps: int) -> Iterator[Event]:
        """Pass events through, showing on a terminal which step training is at."""
        with self._console.status(f"  {what}: starting") as status:
            for event in events:
                if event["event"] == "trained":
                    status.update(f"  {what}: step {event['step']} of {steps}")
                yield event

    def table(self, figures: Mapping[str, Figures], equal: Mapping[str, bool]) -> None:
        """What a checkpoint at each step costs, a column a variant."""
        table = Table(title="A checkpoint at every step", title_justify="left")
        table.add_column("medians")
        for variant in figures:
            table.add_column(VARIANTS[variant], justify="right")
        columns = [_column(each, equal[variant]) for variant, each in figures.items()]
        for name in columns[0] if columns else ():
            table.add_row(name, *(column[name] for column in columns))
        self._console.print()
        self._console.print(table)


def _column(figures: Figures, equal: bool) -> dict[str, str]:
    total = figures.payload_bytes + figures.refresh_bytes
    return {
        "parameters": f"{figures.parameters:,}",
        "full checkpoint": _size(figures.state_bytes, figures),
        "payload a step": _size(figures.payload_bytes, figures),
        "refresh a step (mean)": _size(figures.refresh_bytes, figures),
        "payload + refresh": _size(total, figures),
        "  of a full checkpoint": f"1/{figures.state_bytes / total:.1f}",
        "training blocked a step": f"{figures.blocked_ms:.1f} ms",
        "step time with that": f"{figures.step_ms:.0f} ms",
        "steps counted": str(figures.steps),
        "recovery: restore()": f"{figures.recovery_s:.2f} s",
        "equal bit for bit": "yes" if equal else "NO",
    }


def _size(size_bytes: float, figures: Figures) -> str:
    return f"{size_bytes / 1e6:.2f} MB, {size_bytes / figures.parameters:.2f} B/param"
