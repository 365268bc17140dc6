"""`adacheck-fsck URI`: checks a store, read-only, also beside a running trainer; `--repair` repairs it, `--gc` clears it up. No torch.

`--json` prints one object: `version` (1), `uri`, `run`, `clean` (no damage), `newest_cut` (`step`, `source`, `tier`, or null),
`checked` (`objects`, `read_bytes`, `data`: the share of bytes read, `seed`), and `findings`, each with `severity` (`damage` or
`note`), `kind`, `tier`, `name`, `expected`, `found`, `lost`, `remedy`. With `--repair` also `actions` (`tier`, `name`, `what`,
`given_up`: a cut is lost by it) and `left`, the findings after it (`clean` and `newest_cut` are then those after it, too). `--gc`
prints `version`, `uri`, `removed` (`tier`, `name`, `size_bytes`, `what`), `removed_bytes`, and `kept` (`tier`, `name`, `why`). Text
tells what was done to many objects in one line, JSON for each. What could not work prints `version`, `uri`, `error` and `exit_code`
instead (8, or 16 for a wrong address or option of a store; what the command line itself does not take is told as text only). Fields
may be added; none changes its meaning in version 1.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from adacheck.check import Check
from adacheck.check_cut import NewestCut
from adacheck.check_records import Sample
from adacheck.config import StoreConfig
from adacheck.finding import Finding, Severity
from adacheck.garbage import Garbage, Kept, Removed
from adacheck.reading import open_objects, reading_config
from adacheck.repair import repair
from adacheck.repair_case import Action
from adacheck.tools.exit_codes import CLEAN, OPERATIONAL, REPAIRED, UNCORRECTED, reported, run
from adacheck.tools.summed import summed

JSON_VERSION = 1

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def sample_of(read_data: bool, subset: str | None) -> Sample:
    """How much of the data is read.

    Raises:
        typer.BadParameter: the subset is no percentage, or was given beside `--read-data`.
    """
    if subset is None:
        return Sample(1.0 if read_data else 0.0)
    number, sign, rest = subset.partition("%")
    try:
        share = float(number) / 100
    except ValueError:
        share = 0.0
    if not sign or rest or not 0 < share <= 1:
        raise typer.BadParameter(f"--read-data-subset {subset!r} is not a percentage above 0; write 10%")
    if read_data:
        raise typer.BadParameter("--read-data reads everything; leave out one of it and --read-data-subset")
    return Sample(share, secrets.randbits(32))


def show(console: Console, finding: Finding) -> None:
    """Print one finding for people."""
    style = "bold red" if finding.severity is Severity.DAMAGE else "yellow"
    console.print(f"{finding.kind}: ", style=style, end="")
    console.print(f"{finding.tier} {finding.name}", markup=False, highlight=False)
    for word, text in (("expected", finding.expected), ("found", finding.found), ("lost", finding.lost), ("to do", finding.remedy)):
        console.print(f"    {word:<9}{text}", markup=False, highlight=False)


def age_s(text: str) -> float:
    """Seconds of an age such as `90m`, `12h` or `7d`.

    Raises:
        typer.BadParameter: it is none.
    """
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"--older-than {text!r} is no age; write 7d, 12h, 90m or 0s")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def summary(run: str | None, newest: NewestCut | None, objects: int, read_bytes: int, findings: list[Finding]) -> str:
    """The last line."""
    damaged = sum(finding.severity is Severity.DAMAGE for finding in findings)
    cut = f"newest cut: step {newest.step} from {newest.source}" if newest else "no cut can be restored"
    what = f"{damaged} damaged, {len(findings) - damaged} notes" if findings else "clean"
    return f"run {run}: {what}; {cut}; {objects} objects checked, {read_bytes / 1e6:.1f} MB read"


def as_json(
    uri: str, run: str | None, newest: NewestCut | None, objects: int, read_bytes: int, sample: Sample, findings: list[Finding]
) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "version": JSON_VERSION,
        "uri": uri,
        "run": run,
        "clean": not damaged(findings),
        "newest_cut": asdict(newest) if newest else None,
        "checked": {"objects": objects, "read_bytes": read_bytes, "data": sample.fraction, "seed": sample.seed},
        "findings": [asdict(finding) for finding in findings],
    }


def damaged(findings: Iterable[Finding]) -> bool:
    """Whether any of them is damage."""
    return any(finding.severity is Severity.DAMAGE for finding in findings)


@app.command()
def fsck(
    uri: Annotated[str, typer.Argument(help="The store, as given to Store.open.", show_default=False)],
    read_data: Annotated[bool, typer.Option("--read-data", help="Read and digest every byte.")] = False,
    read_data_subset: Annotated[str | None, typer.Option(help="Read and digest this share of all objects, 10% for a tenth.")] = None,
    repair_: Annotated[bool, typer.Option("--repair", help="Read every byte, and repair what is damaged.")] = False,
    gc: Annotated[bool, typer.Option("--gc", help="Instead: remove what nobody refers to.")] = False,
    older_than: Annotated[str, typer.Option(help="Least age of what --gc removes.")] = "7d",
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Check a store, without changing it unless asked to.

    Ends with 0: no damage, 1: all damage was repaired or given up, 4: damage is left, 8: it could not work, 16: it was called wrongly.
    """
    sample, age = sample_of(read_data, read_data_subset), age_s(older_than)
    if gc and (repair_ or read_data or read_data_subset):
        raise typer.BadParameter("--gc does nothing else; repair first, then call it by itself")
    console = Console(soft_wrap=True, quiet=as_json_)

    def tell(error: Exception, code: int) -> None:
        if as_json_:
            typer.echo(json.dumps({"version": JSON_VERSION, "uri": uri, "error": str(error), "exit_code": code}, indent=2))

    with reported(nothing=OPERATIONAL, tell=tell):
        parsed, unseen = reading_config(uri)
        if unseen:
            typer.echo(unseen, err=True)
        if gc:
            code = _collect(parsed, uri, age, console)
        elif repair_:
            code = _repair(parsed, uri, sample if read_data_subset else Sample(1.0), console)
        else:
            code = _check(parsed, uri, sample, console)
    raise typer.Exit(code)


def _check(parsed: StoreConfig, uri: str, sample: Sample, console: Console) -> int:
    findings: list[Finding] = []
    with open_objects(parsed) as objects:
        check = Check(parsed, objects, sample)
        for finding in check.findings():
            findings.append(finding)
            show(console, finding)
    seen = (check.run, check.newest, check.objects, check.read_bytes)
    if console.quiet:
        typer.echo(json.dumps(as_json(uri, *seen, sample, findings), indent=2))
    console.print(summary(*seen, findings), markup=False, highlight=False)
    return UNCORRECTED if damaged(findings) else CLEAN


def _repair(parsed: StoreConfig, uri: str, sample: Sample, console: Console) -> int:
    said: list[Action] = []
    try:
        with open_objects(parsed, writing=True) as objects:
            done = repair(parsed, objects, sample, say=said.append)
    finally:  # a repair that failed has done these, too
        for line in summed((action.tier, action.name, action.what) for action in said):
            console.print(line, markup=False, highlight=False)
    seen = (done.run, done.newest, done.objects, done.read_bytes)
    for finding in done.left:
        show(console, finding)
    if console.quiet:
        found = as_json(uri, *seen, sample, done.found)
        after = {"clean": not done.damage_left, "actions": [asdict(action) for action in done.actions]}
        typer.echo(json.dumps({**found, **after, "left": [asdict(finding) for finding in done.left]}, indent=2))
    console.print(summary(*seen, done.left), markup=False, highlight=False)
    return UNCORRECTED if done.damage_left else REPAIRED if damaged(done.found) or done.actions else CLEAN


def _collect(parsed: StoreConfig, uri: str, older_than_s: float, console: Console) -> int:
    removed: list[Removed] = []
    kept: list[Kept] = []
    try:
        with open_objects(parsed, writing=True) as objects:
            for each in Garbage(parsed, objects, older_than_s=older_than_s).collect():
                if isinstance(each, Removed):
                    removed.append(each)
                else:
                    kept.append(each)
    finally:  # a collection that failed has removed these, too
        for line in summed((each.tier, each.name, each.what) for each in removed):
            console.print(f"removed {line}", markup=False, highlight=False)
        for left in kept:
            console.print(f"kept {left.tier} {left.name}: {left.why}", markup=False, highlight=False)
    removed_bytes = sum(each.size_bytes for each in removed)
    if console.quiet:
        said = {"removed": [asdict(each) for each in removed], "removed_bytes": removed_bytes, "kept": [asdict(each) for each in kept]}
        typer.echo(json.dumps({"version": JSON_VERSION, "uri": uri, **said}, indent=2))
    console.print(f"{len(removed)} removed, {removed_bytes} bytes; {len(kept)} kept", markup=False, highlight=False)
    return CLEAN


def main() -> None:
    """Entry point of `adacheck-fsck`."""
    run(app)


if __name__ == "__main__":
    main()
