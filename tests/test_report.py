"""The report of a run: every number in it is that of the store, every text is escaped, and any run renders."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adacheck.config import parse
from adacheck.errors import NoCut
from adacheck.finding import Finding, Severity, Tier
from adacheck.finding import Kind as FindingKind
from adacheck.history import Row
from adacheck.keeper.cut import NO_CUT, NO_LIMIT, ForkEntry
from adacheck.manifests import keys
from adacheck.manifests.record import Fork, FullEntry, Incarnation
from adacheck.report import charts
from adacheck.report.facts import Facts, LoggedStep, gather_facts, logged_steps
from adacheck.report.page import render, summary
from adacheck.report.svg import POINTS_MAX, Chart, Point, Series, draw, number, thinned, ticks
from adacheck.tools import restore
from tests.damaged_store import Copy
from tests.record_strategies import of_class
from tests.test_history import read
from tests.test_outage import steps
from tests.tiny_run import Process
from tests.tool_run import run_tool

VOID = {"meta", "link", "br", "hr", "img", "input"}
EMPTY = Facts("a run", "file:///somewhere", 1.5e9)


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps the tables and the addresses that a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.loads: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.loads += [value or "" for name, value in attrs if name in ("src", "href") or tag in ("script", "iframe", "object")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A run of two starts: 9 steps, a fall back to step 4, and 3 more."""
    root = tmp_path_factory.mktemp("run")
    first = Process(root)
    first.ckpt.restore()
    steps(first, 9)
    first.abandon()
    second = Process(root)
    assert second.ckpt.restore(4) == 4
    steps(second, 3)
    second.abandon()
    return Copy(root)


@pytest.fixture(scope="module")
def facts(store: Copy) -> Facts:
    return gather_facts(parse(store.uri, {}))


def test_the_facts_are_those_of_the_store(store: Copy, facts: Facts) -> None:
    assert [(step.incarnation, step.row) for step in facts.steps] == read(store.root)
    assert [(s.incarnation, s.row.step) for s in facts.live] == [*((1, n) for n in range(1, 5)), *((2, n) for n in range(5, 8))]
    assert [one.incarnation for one in facts.incarnations] == [1, 2]
    assert [(fork.incarnation, fork.cut) for fork in facts.forks] == [(1, NO_CUT), (2, 4)]
    assert [full.step for full in facts.fulls] == [1, 4]
    assert facts.newest is not None and facts.newest.step == 7 == facts.nvme_steps[-1]
    assert facts.unread == () and all(finding.severity is Severity.NOTE for finding in facts.findings)


def test_the_charts_hold_every_live_step(facts: Facts) -> None:
    rows = [step.row for step in facts.live]
    by_name = {series.name: series.points for series in charts.payloads(facts).series}
    size, unit = charts.byte_unit(max(sum(charts.payload_bytes(row).values()) for row in rows))
    assert charts.payloads(facts).y_label == unit == "kB" and list(by_name) == list(charts.PAYLOADS)
    assert by_name["gradient"] == tuple((row.step, row.gradient_bytes / size) for row in rows)
    assert by_name["refresh"] == tuple((row.step, row.refresh_bytes / size) for row in rows)
    cost = {(s.incarnation, s.row.step): s.row.blocked_us for s in facts.steps}
    (blocked,) = charts.blocked(facts).series
    told_by = {1: (1, 2), 2: (1, 3), 3: (1, 4), 4: (1, 5), 5: (2, 6), 6: (2, 7)}
    assert blocked.points == tuple((step, cost[after] / 1e3) for step, after in told_by.items())
    behind = {series.name: known(series.points) for series in charts.watermarks(facts).series}
    assert behind["committed"] == {row.step: row.step - row.committed for row in rows if row.committed >= 0}
    (proven,) = charts.proven_lag(facts).series
    assert known(proven.points) == {row.step: row.step - row.proven for row in rows if row.proven >= 0}
    times = charts.timeline(facts)
    assert [len(series.points) for series in times.series] == [9, 3] and len(times.rules) == 2
    assert [(marker.y, marker.name) for marker in times.markers] == [(full.step, f"full, {full.status}") for full in facts.fulls]
    cuts = charts.cuts(facts)
    assert [(series.points[0][0], series.points[1][0]) for series in cuts.series] == charts.ranges(facts.nvme_steps)
    assert [marker.x for marker in cuts.markers] == [1, 4]


def known(points: Iterable[Point]) -> dict[float, float]:
    return {x: y for x, y in points if not math.isnan(y)}


def test_a_line_is_broken_where_nothing_is_known() -> None:
    points = ((1.0, 1.0), (2.0, 2.0), (3.0, math.nan), (4.0, 1.0), (5.0, math.inf), (6.0, 1.0), (7.0, 2.0))
    svg = ElementTree.fromstring(draw(Chart("t", "x", "y", (Series("a", "#000", points),))))
    lines = [len((e.get("points") or "").split()) for e in svg.iter() if e.tag.endswith("polyline")]
    assert lines == [2, 2] and sum(e.tag.endswith("circle") for e in svg.iter()) == 1


def test_the_page_says_what_the_store_holds(facts: Facts) -> None:
    page = Page(render(facts))
    said = {row[0]: row[1:] for row in page.rows if row}
    full = facts.fulls[1]
    assert said["4"] == [full.status, "yes", "1", f"{full.size_bytes:,}", full.folder]
    one, two = facts.incarnations
    assert said["1"] == [charts.when(one.started_unix_s), one.host, str(one.pid), "nothing: a new run", "9", "5"]
    assert said["2"] == [charts.when(two.started_unix_s), two.host, str(two.pid), "step 4", "3", "0"]
    assert said["newest cut"] == [f"step 7, from {facts.newest.source}" if facts.newest else ""]
    assert said["steps remembered"] == ["1 to 7, and 5 more that were lost and done again"]
    totals = sorted(sum(charts.payload_bytes(step.row).values()) for step in facts.live)
    assert said["stored by a step, kB"] == [f"median {number(totals[3] / 1e3)}, most {number(totals[-1] / 1e3)}"]
    blocked = sorted(step.blocked_ms for step in facts.live if step.blocked_ms is not None)
    assert said["training blocked by a step, ms"][0].startswith(f"median {number((blocked[2] + blocked[3]) / 2)}, P99")
    last = facts.live[-1].row
    assert said["tensors not sent, derived from others"] == ["0 at step 7"]
    marks = f"acked {last.acked}, committed {last.committed}, durable {last.durable}, proven {last.proven if last.proven >= 0 else 'none'}"
    assert said["when step 7 was logged"] == [marks]


def test_the_page_needs_nothing_else(facts: Facts) -> None:
    text = render(facts)
    assert Page(text).loads == [] and "<script" not in text and "url(" not in text and "@import" not in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"] * 6, "the namespace only, which nobody loads"
    drawn = svgs(text)
    assert len(drawn) == 6
    for svg in drawn:
        words = [element.text or "" for element in svg.iter() if element.tag.endswith("}text")]
        assert "step" in words or any(word.startswith(("seconds since", "minutes since")) for word in words)
        for element in svg.iter():
            for name in ("x", "x1", "x2", "cx", "y", "y1", "y2", "cy"):
                assert -1 <= float(element.get(name, 0)) <= 921


def test_the_tool_writes_it(store: Copy, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    ended = run_tool(restore.main, store.uri, "--report", str(file))
    assert (ended.code, ended.out, ended.err) == (0, f"the report is in {file}\n", "")
    listed = run_tool(restore.main, store.uri, "--report", str(file), "--list", "--json")
    assert json.loads(listed.out)["points"] and listed.err == f"the report is in {file}\n"
    assert Page(file.read_text()).rows and [path.name for path in tmp_path.iterdir()] == ["run.html"]


@pytest.mark.parametrize(
    ("name", "message"), [("run.png", "the report is HTML"), ("run", "the report is HTML"), ("no/run.html", "there is no directory")]
)
def test_the_tool_refuses_what_it_cannot_write(store: Copy, tmp_path: Path, name: str, message: str) -> None:
    ended = run_tool(restore.main, store.uri, "--report", str(tmp_path / name))
    assert ended.code == 16 and message in " ".join(ended.err.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_no_run_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    with pytest.raises(NoCut, match="there is no run"):
        gather_facts(parse(f"file://{tmp_path}/objects", {}))


def test_from_the_object_tier_alone(store: Copy, tmp_path: Path) -> None:
    facts = gather_facts(parse(f"file://{store.root}/objects?nvme={tmp_path}/none-here", {}))
    assert [step.row.step for step in facts.steps][:4] == [1, 2, 3, 4] and facts.nvme_steps == ()
    assert facts.newest is not None and facts.newest.step == 4
    Page(render(facts))


@pytest.mark.parametrize("kind", [keys.Kind.FORK, keys.Kind.RUN, keys.Kind.CHAIN, keys.Kind.HISTORY, keys.Kind.MANIFEST, keys.Kind.VERSION])
def test_a_damaged_store_has_a_report_that_names_the_damage(store: Copy, tmp_path: Path, kind: keys.Kind) -> None:
    damaged = store.copied(tmp_path / "damaged")
    name = damaged.names(kind)[0 if kind is keys.Kind.MANIFEST else -1]
    content = damaged.read(kind, name)
    damaged.write(kind, name, content[:50] + bytes([content[50] ^ 1]) + content[51:])
    facts = gather_facts(parse(damaged.uri, {}))
    assert name in {finding.name for finding in facts.findings if finding.severity is Severity.DAMAGE}
    page = Page(render(facts))
    assert any(f" {name}" in cell for row in page.rows for cell in row)


def logged(count: int) -> tuple[LoggedStep, ...]:
    rows = [
        (1, Row(n, 1.5e9 + n, 1000, 0, 0, 10, 20, 500 if n != 7001 else 90_000, n - 1, n - 1, n - 2, n - 50)) for n in range(1, count + 1)
    ]
    return tuple(logged_steps(rows, []))


@pytest.mark.parametrize("count", [0, 1, 2, 8000])
def test_runs_of_any_length_render(count: int) -> None:
    facts = replace(EMPTY, steps=logged(count))
    text = render(facts)
    assert Page(text).rows and len(svgs(text)) == 6 and len(text) < 300_000
    if count == 0:
        assert text.count("nothing recorded") == 6 and dict(summary(facts))["steps remembered"] == "none"
    if count == 8000:
        assert "most 90" in dict(summary(facts))["training blocked by a step, ms"]


def test_long_lines_keep_their_peaks() -> None:
    points = [(float(at), math.sin(at / 500)) for at in range(20_000)]
    points[7003], points[12_345] = (7003.0, 50.0), (12_345.0, -50.0)
    kept = thinned(points)
    assert len(kept) <= POINTS_MAX + 2 and kept[0] == points[0] and kept[-1] == points[-1]
    assert points[7003] in kept and points[12_345] in kept and list(kept) == sorted(kept)
    assert thinned(points[:POINTS_MAX]) == tuple(points[:POINTS_MAX])


def test_a_line_is_where_its_numbers_are() -> None:
    svg = ElementTree.fromstring(draw(Chart("t", "x", "y", (Series("a", "#000", ((0.0, 0.0), (10.0, 100.0))),))))
    (line,) = (element for element in svg.iter() if element.tag.endswith("polyline"))
    words = {element.text: element for element in svg.iter() if element.tag.endswith("}text")}
    (x0, y0), (x1, y1) = (tuple(map(float, point.split(","))) for point in (line.get("points") or "").split())
    assert (float(words["10"].get("x", 0)), float(words["100"].get("y", 0)) - 4) == pytest.approx((x1, y1), abs=0.11)
    assert {"t", "x", "y", "a"} <= words.keys() and x0 < x1 and y0 > y1


def test_layers_are_on_top_of_each_other() -> None:
    series = (Series("a", "#000", ((1.0, 2.0), (2.0, 4.0))), Series("b", "#111", ((1.0, 6.0), (2.0, 2.0))))
    svg = ElementTree.fromstring(draw(Chart("t", "x", "y", series, stacked=True)))
    lower, upper = ([tuple(map(float, p.split(","))) for p in e.get("points", "").split()] for e in svg.iter() if e.tag.endswith("polygon"))
    assert lower[:2] == upper[3:1:-1], "where one ends the other begins"
    floor = lower[2][1]
    assert (floor - upper[0][1]) / (floor - lower[0][1]) == pytest.approx(8 / 2, rel=0.01)


@given(st.floats(-1e15, 1e15), st.floats(1e-6, 1e15))
def test_ticks_are_round_and_within(low: float, span: float) -> None:
    high = low + span
    if high - low < span / 2 or abs(low) > span * 1e6:
        return
    found = ticks(low, high)
    assert 1 <= len(found) <= 8 and all(low - span * 1e-6 <= tick <= high + span * 1e-6 for tick in found)


HOSTILE = "<script>alert(1)</script>&\"'"


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 9), of_class(Row)), max_size=6),
    st.lists(of_class(Incarnation), max_size=2),
    st.lists(st.integers(-1, 9) | st.just(NO_LIMIT), max_size=3),
    st.lists(of_class(FullEntry), max_size=2),
)
def test_whatever_a_store_says_renders(
    rows: list[tuple[int, Row]], incarnations: list[Incarnation], cuts: list[int], fulls: list[FullEntry]
) -> None:
    table = [ForkEntry(number, cut, True) for number, cut in enumerate(cuts)]
    finding = Finding(Severity.DAMAGE, FindingKind.WRONG_BYTES, Tier.NVME, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    facts = Facts(
        HOSTILE,
        HOSTILE,
        1e300,
        tuple(logged_steps(rows, table)),
        (*incarnations, Incarnation(HOSTILE, 1, math.inf, HOSTILE, 0, HOSTILE)),
        tuple(Fork("run", entry.incarnation, entry.cut, True) for entry in table),
        (1, 2, 5),
        (*fulls, FullEntry(1, 5, HOSTILE, b"", 3, HOSTILE)),
        (finding,),
        None,
        (HOSTILE,),
    )
    text = render(facts)
    Page(text)
    assert len(svgs(text)) == 6
    assert "<script" not in text and "alert(1)&lt;/script&gt;&amp;&quot;&#x27;" in text
