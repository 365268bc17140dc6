"""`adacheck-restore URI --to DIR`: takes a cut out of a store without a trainer or a GPU, also beside a running trainer.

It takes neither lock nor incarnation, and changes nothing in the store. The directory appears under its name when all of it is
written and compared; until then it is called `.DIR.partial-…` beside it. `restored.json` in it says what it is, tensor by tensor.

`--list --json` prints `version` (1), `run` and `points`, each with `step`, `tiers`, `intact`, `proven`, `exact`, oldest first.
`--report FILE.html` writes one page that works offline, and nothing else: cuts, bytes, blocked time, lags, starts and findings.
`--to … --json` prints what `restored.json` holds, with `directory`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from adacheck.backends.local_files import LocalFiles
from adacheck.config import StoreConfig
from adacheck.errors import ConfigError, NoCut
from adacheck.export_format import Format
from adacheck.nvme_directory import GENERATION
from adacheck.reading import open_objects, open_sources, reading_config
from adacheck.report.facts import gather_facts
from adacheck.report.page import render
from adacheck.restore_points import RestorePoint, restore_points
from adacheck.sources import Sources
from adacheck.tools.exit_codes import UNCORRECTED, reported, run

if TYPE_CHECKING:
    from adacheck.full_checkpoint import CutId
    from adacheck.recovery import Cut

BYTES_NOT_READ = "intact: the records link up. No bytes were read: adacheck-fsck --read-data reads and checks them, and so does a restore."

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@contextmanager
def sources_of(store: StoreConfig) -> Iterator[Sources]:
    """What the store offers; the NVMe copy as it is at this moment, whatever its trainer does meanwhile.

    Raises:
        NoCut: there is no run.
        ForeignRun: the NVMe directory belongs to another run.
    """
    with open_objects(store) as objects, open_sources(store, objects) as sources:
        if sources is None:
            raise NoCut(f"there is no run at {store.address}; check the address")
        yield sources


def read_cut(sources: Sources, step: int | None) -> tuple[Cut, CutId]:
    """The cut, and whose it is.

    Raises:
        NoCut: nothing can be restored, or not this step; says why.
    """
    from adacheck import recovery
    from adacheck.full_checkpoint import CutId

    cut = recovery.read_newest(sources, step=step)
    if cut is None:
        raise NoCut(f"run {sources.run} has no cut yet")
    incarnation = next((full.incarnation for full in sources.fulls if full.folder == cut.source), None)
    if incarnation is None:
        assert sources.scan is not None, "a cut of no full checkpoint is one of the NVMe copy"
        incarnation = sources.scan.increments[cut.step].incarnation
    return cut, CutId(sources.run, GENERATION, incarnation, cut.step)


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A temporary sibling that gets the name `directory` at the end, or is removed.

    Raises:
        ConfigError: the name is taken by a file, or a directory with content.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists already and is not empty; choose another --to")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.parent / f".{directory.name}.partial-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        yield temporary
        LocalFiles().fsync_dir(temporary)
        temporary.rename(directory)
        LocalFiles().fsync_dir(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def step_of(text: str) -> int | None:
    """The step asked for, `None` for the newest.

    Raises:
        typer.BadParameter: neither a number nor `latest`.
    """
    if text == "latest":
        return None
    if not text.isdecimal():
        raise typer.BadParameter(f"--step {text!r} is neither a step nor 'latest'")
    return int(text)


def rules_of(texts: list[str]) -> dict[str, str]:
    """`old=new` pairs.

    Raises:
        typer.BadParameter: not of that form.
    """
    pairs = [text.partition("=") for text in texts]
    for text, (old, sign, new) in zip(texts, pairs, strict=True):
        if not (old and sign and new):
            raise typer.BadParameter(f"--map-fqn {text!r} is not of the form old=new")
    return {old: new for old, _, new in pairs}


def show_points(points: list[RestorePoint], run_name: str, as_json: bool) -> None:
    """Print the list of cuts."""
    if as_json:
        typer.echo(json.dumps({"version": 1, "run": run_name, "points": [asdict(point) for point in points]}, indent=2))
        return
    table = Table(title=f"run {run_name}", title_justify="left")
    for title in ("step", "tiers", "intact", "proven", "exact"):
        table.add_column(title, justify="right" if title == "step" else "left")
    for point in points:
        table.add_row(str(point.step), ", ".join(point.tiers), *("yes" if it else "no" for it in (point.intact, point.proven, point.exact)))
    Console().print(table)
    typer.echo(BYTES_NOT_READ)


def export(store: StoreConfig, step: int | None, directory: Path, kind: Format, rules: dict[str, str]) -> dict[str, Any]:
    """Read the cut, write it, compare it; gives the description of what was written."""
    from adacheck.export import Export, rename, write  # torch: seconds, that a list of cuts does not take
    from adacheck.recovery import inexact

    console = Console(stderr=True, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with (
        new_directory(directory) as temporary,
        Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar,
    ):
        task = bar.add_task("reading", total=None)
        with sources_of(store) as sources:
            try:
                cut, name = read_cut(sources, step)
            finally:
                for line in sources.rejected:
                    console.print(f"rejected: {line}", markup=False, highlight=False)
        if not cut.exact:
            console.print(inexact(cut.step), markup=False, highlight=False)
        cut, names = rename(cut, rules)
        out = Export(cut, name, names)
        bar.update(task, description=f"writing step {cut.step}, and reading it back", total=2 * out.size_bytes)
        described = write(out, temporary, kind, lambda size: bar.advance(task, size))
    return {**described, "directory": str(directory)}


def write_report(store: StoreConfig, file: Path) -> None:
    """Write the report of a run, replacing an earlier one.

    Raises:
        NoCut: there is no run.
    """
    page = render(gather_facts(store))
    temporary = file.with_name(f".{file.name}.partial-{secrets.token_hex(4)}")
    try:
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def report_file(file: Path) -> Path:
    """Where the report goes.

    Raises:
        typer.BadParameter: something else than HTML is asked for, or its directory does not exist.
    """
    if file.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"--report {file}: the report is HTML; write FILE.html, and print it from a browser for a PDF or an image")
    if not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"--report {file}: there is no directory {file.parent}")
    return file


@app.command()
def restore(
    uri: Annotated[str, typer.Argument(help="The store, as given to Store.open.", show_default=False)],
    step: Annotated[str, typer.Option(help="Which cut: a step, or latest.")] = "latest",
    to: Annotated[Path | None, typer.Option(help="Directory to write; it must not exist, or be empty.", show_default=False)] = None,
    kind: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.SAFETENSORS,
    list_: Annotated[bool, typer.Option("--list", help="List what can be restored, and write nothing.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write a page about the run to FILE.html.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    map_fqn: Annotated[list[str] | None, typer.Option(help="Rename a parameter: old=new, or old.=new. for a prefix.")] = None,
) -> None:
    """Take a cut out of a store. Ends with 0: done, 4: nothing can be restored, 8: it could not work, 16: it was called wrongly."""
    logging.getLogger("adacheck").addHandler(logging.NullHandler())
    wanted, rules = step_of(step), rules_of(map_fqn or [])
    if not list_ and to is None and report is None:
        raise typer.BadParameter("give --to DIR, --list, or --report FILE.html")
    file = report_file(report) if report is not None else None
    with reported(nothing=UNCORRECTED):
        store, note = reading_config(uri)
        if note:
            typer.echo(note, err=True)
        if file is not None:
            write_report(store, file)
            typer.echo(f"the report is in {file.absolute()}", err=as_json)
            if not list_ and to is None:
                return
        if list_:
            with sources_of(store) as sources:
                points, run_name = restore_points(sources), sources.run
                for line in sources.rejected:
                    typer.echo(f"not listed: {line}", err=True)
            show_points(points, run_name, as_json)
            if not points:
                raise NoCut(f"run {run_name} has no cut that can be restored")
            return
        assert to is not None
        described = export(store, wanted, Path(os.path.abspath(to)), kind, rules)  # noqa: PTH100 - resolve() would follow links
    if as_json:
        typer.echo(json.dumps(described, indent=2))
        return
    console, count = Console(soft_wrap=True), len(described["tensors"])
    text = f"step {described['step']} from {described['source']} is in {described['directory']}: {count} tensors written as {kind}"
    console.print(f"{text}, read back, and equal to the digests of the cut", markup=False, highlight=False)


def main() -> None:
    """Entry point of `adacheck-restore`."""
    run(app)


if __name__ == "__main__":
    main()
