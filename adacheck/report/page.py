"""A report as one HTML page that needs nothing else: styles and charts are in it, no script, no address outside. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import mean, median

from adacheck.finding import Severity
from adacheck.report.charts import PAYLOADS, byte_unit, charts, cut_name, payload_bytes, ranges, when
from adacheck.report.facts import Facts
from adacheck.report.svg import draw, escape, number

_STARTS_SHOWN = 200
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 980px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin-bottom: .1em } h2 { font-size: 1.15em; margin-top: 1.8em }
p.where { color: #57606a; margin-top: 0; overflow-wrap: anywhere }
table { border-collapse: collapse; width: 100%; margin: .6em 0 }
td, th { padding: .25em .6em; border-bottom: 1px solid #d8dee4; text-align: left; vertical-align: top; overflow-wrap: anywhere }
th { font-weight: 600 } td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
svg { display: block; width: 100%; height: auto; margin: 1em 0; font-family: system-ui, sans-serif }
svg .title { font-size: 15px; font-weight: 600; fill: #1b1f24 } svg .label { font-size: 12px; fill: #57606a }
svg .tick { font-size: 11px; fill: #57606a } svg .legend { font-size: 12px; fill: #1b1f24 }
svg .grid { stroke: #eaeef2 } svg .axis { stroke: #8c959f } svg .rule { stroke: #8c959f; stroke-dasharray: 3 3 }
.damage { color: #c92a2a; font-weight: 600 } .note { color: #8a6d00; font-weight: 600 } .good { color: #2a7d3f; font-weight: 600 }
"""


def render(facts: Facts) -> str:
    """The page."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>adacheck: run {escape(facts.run)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Run {escape(facts.run)}</h1>",
        f'<p class="where">{escape(facts.address)}, looked at {when(facts.made_unix_s)}</p>',
        *(f'<p class="damage">not read: {escape(line)}</p>' for line in facts.unread),
        table(("", ""), summary(facts), numbers=()),
        *(draw(chart) for chart in charts(facts)),
        "<h2>Full checkpoints</h2>",
        table(("step", "status", "finite", "incarnation", "bytes", "folder"), _fulls(facts), numbers=(0, 3, 4)),
        "<h2>Starts</h2>",
        table(("incarnation", "started", "host", "pid", "from", "steps logged", "of them lost"), _starts(facts), numbers=(0, 3, 5, 6)),
        "<h2>Findings of the check</h2>",
        _findings(facts),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    """A table of escaped text; the columns in `numbers` are set as figures."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = [
        "<tr>"
        + "".join(f'<td class="n">{escape(cell)}</td>' if at in numbers else f"<td>{escape(cell)}</td>" for at, cell in enumerate(row))
        + "</tr>"
        for row in rows
    ]
    if not body:
        return "<p>None.</p>"
    return "\n".join(["<table>", f"<thead><tr>{head}</tr></thead>" if any(titles) else "", "<tbody>", *body, "</tbody></table>"])


def summary(facts: Facts) -> list[tuple[str, str]]:
    """The figures at the top, as name and value."""
    live, lost = facts.live, len(facts.steps) - len(facts.live)
    found = [("newest cut", f"step {facts.newest.step}, from {facts.newest.source}" if facts.newest else "none can be restored")]
    spans = ", ".join(f"{first} to {last}" if first < last else str(first) for first, last in ranges(facts.nvme_steps))
    found.append(("steps on this host's NVMe", spans or "none"))
    proven = max((full.step for full in facts.fulls if full.status == "proven"), default=None)
    found.append(("newest full checkpoint that is proven", "none yet" if proven is None else f"step {proven}"))
    if not live:
        return [*found, ("steps remembered", "none")]
    found.append(("steps remembered", f"{live[0].row.step} to {live[-1].row.step}, and {lost} more that were lost and done again"))
    totals = [sum(payload_bytes(step.row).values()) for step in live]
    size, unit = byte_unit(max(totals))
    found.append((f"stored by a step, {unit}", f"median {number(median(totals) / size)}, most {number(max(totals) / size)}"))
    for payload in PAYLOADS:
        stored = [payload_bytes(step.row)[payload] for step in live]
        found.append((f"of it {payload}, {unit}", f"mean {number(mean(stored) / size)}"))
    found.append(("tensors not sent, derived from others", f"{live[-1].row.derived_tensors} at step {live[-1].row.step}"))
    blocked = sorted(step.blocked_ms for step in live if step.blocked_ms is not None)
    if blocked:
        p99 = blocked[min(len(blocked) - 1, round(0.99 * (len(blocked) - 1)))]
        found.append(("training blocked by a step, ms", f"median {number(median(blocked))}, P99 {number(p99)}, most {number(blocked[-1])}"))
    last = live[-1].row
    marks = ", ".join(
        f"{name} {value if value >= 0 else 'none'}" for name, value in _marks(last.acked, last.committed, last.durable, last.proven)
    )
    found.append((f"when step {last.step} was logged", marks))
    return found


def _marks(*values: int) -> list[tuple[str, int]]:
    return list(zip(("acked", "committed", "durable", "proven"), values, strict=True))


def _fulls(facts: Facts) -> list[tuple[str, ...]]:
    return [
        (str(full.step), full.status, "yes" if full.finite else "no", str(full.incarnation), f"{full.size_bytes:,}", full.folder)
        for full in facts.fulls
    ]


def _starts(facts: Facts) -> list[tuple[str, ...]]:
    forks = {fork.incarnation: fork.cut for fork in facts.forks}
    logged = Counter(step.incarnation for step in facts.steps)
    lost = Counter(step.incarnation for step in facts.steps if not step.live)
    return [
        (
            str(one.incarnation),
            when(one.started_unix_s),
            one.host,
            str(one.pid),
            cut_name(forks.get(one.incarnation)),
            str(logged[one.incarnation]),
            str(lost[one.incarnation]),
        )
        for one in facts.incarnations[-_STARTS_SHOWN:]
    ]


def _findings(facts: Facts) -> str:
    if not facts.findings:
        return '<p class="good">None: every record and link is as it should be. Bytes are read by adacheck-fsck --read-data.</p>'
    rows = []
    for finding in facts.findings:
        kind = "damage" if finding.severity is Severity.DAMAGE else "note"
        cells = (f"{finding.tier} {finding.name}", f"expected {finding.expected}; found {finding.found}", finding.lost, finding.remedy)
        rows.append(
            f'<tr><td class="{kind}">{escape(str(finding.kind))}</td>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        )
    head = "".join(f"<th>{title}</th>" for title in ("", "where", "what", "lost", "to do"))
    return "\n".join(["<table>", f"<thead><tr>{head}</tr></thead><tbody>", *rows, "</tbody></table>"])
