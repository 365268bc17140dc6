"""The README's code runs as it is printed, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tidy import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def code(begins: str) -> str:
    """The one Python block of the README that has this text."""
    (found,) = [block for block in re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.S) if begins in block]
    return str(found)


def test_the_quickstart_goes_on_where_it_was(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for total, printed in ((20, "starting at step 0"), (30, "starting at step 20")):
        text = code("CosineAnnealingLR").replace("file:///tmp/adacheck-example", f"file://{tmp_path}/run").replace("2000", str(total))
        assert str(tmp_path) in text and f"range(start, {total})" in text
        script.write_text(text)
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.splitlines()[0], done.stderr) == (0, printed, "")


def test_the_loader_goes_on_where_it_was_and_leaves_the_global_generator_alone() -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(code("class Batches"), names)
    data = torch.arange(20)
    loader = names["Batches"](data, 6)
    before = torch.get_rng_state()
    seen = [next(loader) for _ in range(7)]
    again = names["Batches"](data, 6)
    again.load_state_dict(loader.state_dict())
    assert all(torch.equal(next(loader), next(again)) for _ in range(5))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(torch.cat(seen[:3]).tolist())) == 18 and not torch.equal(seen[0], seen[3])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_nothing_is_left_to_fill_in() -> None:
    for page in PAGES:
        assert not re.search(r"\b[A-Z]+_TABLE\b|TODO|FIXME", page.read_text()), page
