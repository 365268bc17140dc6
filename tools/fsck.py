"""`adacheck-fsck URI`: checks a store, read-only, also beside a running trainer; works without torch.

`--json` prints one object: `version` (1), `uri`, `run`, `clean` (no damage), `newest_cut` (`step`, `source`, `tier`, or null),
`checked` (`objects`, `read_bytes`, `data`: the share of bytes read, `seed`), and `findings`, each with `severity` (`damage` or
`note`), `kind`, `tier`, `name`, `expected`, `found`, `lost`, `remedy`. Fields may be added; none changes its meaning in version 1.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from adacheck.check import Check
from adacheck.check_records import Sample
from adacheck.finding import Finding, Severity
from adacheck.reading import open_objects, reading_config
from adacheck.tools.exit_codes import CLEAN, OPERATIONAL, UNCORRECTED, reported, run

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


def summary(check: Check, findings: list[Finding]) -> str:
    """The last line."""
    damaged = sum(finding.severity is Severity.DAMAGE for finding in findings)
    newest = f"newest cut: step {check.newest.step} from {check.newest.source}" if check.newest else "no cut can be restored"
    what = f"{damaged} damaged, {len(findings) - damaged} notes" if findings else "clean"
    return f"run {check.run}: {what}; {newest}; {check.objects} objects checked, {check.read_bytes / 1e6:.1f} MB read"


def as_json(uri: str, check: Check, sample: Sample, findings: list[Finding]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "version": JSON_VERSION,
        "uri": uri,
        "run": check.run,
        "clean": not any(finding.severity is Severity.DAMAGE for finding in findings),
        "newest_cut": asdict(check.newest) if check.newest else None,
        "checked": {"objects": check.objects, "read_bytes": check.read_bytes, "data": sample.fraction, "seed": sample.seed},
        "findings": [asdict(finding) for finding in findings],
    }


@app.command()
def fsck(
    uri: Annotated[str, typer.Argument(help="The store, as given to Store.open.", show_default=False)],
    read_data: Annotated[bool, typer.Option("--read-data", help="Read and digest every byte.")] = False,
    read_data_subset: Annotated[str | None, typer.Option(help="Read and digest this share of all objects, 10% for a tenth.")] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Check a store without changing it. Ends with 0: clean, 4: damage was found, 8: could not check, 16: wrong call."""
    sample = sample_of(read_data, read_data_subset)
    console = Console(soft_wrap=True)
    findings: list[Finding] = []
    with reported(nothing=OPERATIONAL):
        parsed, unseen = reading_config(uri)
        if unseen:
            typer.echo(unseen, err=True)
        with open_objects(parsed) as reading:
            check = Check(parsed, reading.objects, sample, reading.stale_uploads)
            for finding in check.findings():
                findings.append(finding)
                if not as_json_:
                    show(console, finding)
    if as_json_:
        typer.echo(json.dumps(as_json(uri, check, sample, findings), indent=2))
    else:
        console.print(summary(check, findings), markup=False, highlight=False)
    damaged = any(finding.severity is Severity.DAMAGE for finding in findings)
    raise typer.Exit(UNCORRECTED if damaged else CLEAN)


def main() -> None:
    """Entry point of `adacheck-fsck`."""
    run(app)


if __name__ == "__main__":
    main()
