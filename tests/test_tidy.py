"""Keeps the tree as CONTRIBUTING.md describes it: layers, one import name, sizes, names, docstrings, no pickle, no dead files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests import tidy
from tests.tidy import Source, parse

SOURCES = tidy.tree_of_sources()
CODE = [source for source in SOURCES if source.layer != "tests"]
LIBRARY = [source for source in CODE if source.layer != "tools"]
TESTS = [source for source in SOURCES if source.layer == "tests"]

MAY_UNPICKLE = {"adacheck/export.py"}
"""Files that may write pickle, and read back what they just wrote, to compare it: the exports in formats made of it."""

Rule = Callable[[Source], Iterator[str]]
RULES: list[tuple[Rule, list[Source]]] = [
    (tidy.bare_imports, SOURCES),
    (tidy.wrong_arrows, SOURCES),
    (tidy.too_long, SOURCES),
    (tidy.bad_names, SOURCES),
    (tidy.undocumented, SOURCES),
    (tidy.unpickling, [source for source in CODE if source.path not in MAY_UNPICKLE]),
    (tidy.printing, LIBRARY),
    (tidy.wall_clock_asserts, TESTS),
]


@pytest.mark.parametrize(("rule", "sources"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_the_tree_is_tidy(rule: Rule, sources: list[Source]) -> None:
    assert [offence for source in sources for offence in rule(source)] == []


def test_no_file_is_dead() -> None:
    assert list(tidy.dead_files(SOURCES, tidy.entry_points())) == []


def test_every_folder_was_read_once() -> None:
    assert {source.layer for source in SOURCES} == {"adacheck", "backends", "manifests", "tools", "tests"}
    assert len({source.module for source in SOURCES}) == len(SOURCES)


BAD: list[tuple[Rule, str, str]] = [
    (tidy.bare_imports, "tools/fsck.py", "from backends.base import Backend"),
    (tidy.bare_imports, "tools/fsck.py", "def f():\n    import manifests"),
    (tidy.bare_imports, "backends/memory.py", "from .base import Backend"),
    (tidy.wrong_arrows, "backends/memory.py", "from adacheck.manifests.record import Fork"),
    (tidy.wrong_arrows, "manifests/keys.py", "import adacheck.digest"),
    (tidy.wrong_arrows, "manifests/keys.py", "from adacheck import Store"),
    (tidy.wrong_arrows, "adacheck/store.py", "def f():\n    from adacheck import tools"),
    (tidy.wrong_arrows, "tools/demo.py", "from tests.seaweed import server"),
    (tidy.too_long, "adacheck/store.py", "\n" * 401),
    (tidy.too_long, "tests/test_x.py", "\n" * 601),
    (tidy.too_long, "adacheck/store.py", "class A:\n    def f(self):\n" + "        pass\n" * 70),
    (tidy.bad_names, "adacheck/io_utils.py", ""),
    (tidy.bad_names, "adacheck/helpers/blocks.py", ""),
    (tidy.undocumented, "tests/test_x.py", "import os"),
    (tidy.undocumented, "adacheck/store.py", '"""Why."""\ndef open():\n    pass'),
    (tidy.undocumented, "adacheck/store.py", '"""Why."""\nclass Store:\n    pass'),
    (tidy.unpickling, "adacheck/store.py", "import pickle"),
    (tidy.unpickling, "adacheck/store.py", "x = torch.load(path, weights_only=True)"),
    (tidy.unpickling, "adacheck/store.py", "from torch import load"),
    (tidy.printing, "adacheck/store.py", "def f():\n    print(1)"),
    (tidy.printing, "backends/memory.py", "sys.stderr.write('')"),
    (tidy.wall_clock_asserts, "tests/test_x.py", "def test():\n    assert time.monotonic() < 3"),
    (
        tidy.wall_clock_asserts,
        "tests/test_x.py",
        "def test():\n    a = perf_counter()\n    b = perf_counter() - a\n    c = b * 2\n    assert c < 3",
    ),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_each_rule_finds_what_it_forbids(rule: Rule, path: str, text: str) -> None:
    assert len(list(rule(parse(path, text)))) >= 1


GOOD: list[tuple[Rule, str, str]] = [
    (tidy.wrong_arrows, "tools/fsck.py", "import adacheck.store\nfrom adacheck.backends.base import Backend"),
    (tidy.wrong_arrows, "adacheck/store.py", "from adacheck.manifests.record import Fork\nimport tomllib"),
    (tidy.too_long, "adacheck/store.py", "\n" * 400),
    (tidy.undocumented, "backends/__init__.py", ""),
    (tidy.undocumented, "adacheck/store.py", '"""Why."""\ndef _open():\n    pass'),
    (
        tidy.wall_clock_asserts,
        "tests/test_x.py",
        "def test():\n    end = time.monotonic() + 3\n    while time.monotonic() < end:\n        assert poll()",
    ),
    (tidy.wall_clock_asserts, "tests/test_x.py", "def test():\n    assert time(5) == 5"),
]


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_no_rule_forbids_what_is_right(rule: Rule, path: str, text: str) -> None:
    assert list(rule(parse(path, text))) == []


def test_a_dead_file_is_found_even_if_a_test_imports_it() -> None:
    sources = [
        parse("adacheck/__init__.py", '_HOMES = {"Store": "adacheck.store"}'),
        parse("adacheck/store.py", "from adacheck.backends import base"),
        parse("adacheck/forgotten.py", ""),
        parse("backends/base.py", ""),
        parse("tools/demo.py", ""),
        parse("tests/test_forgotten.py", "import adacheck.forgotten\nfrom tests.faults import Disk"),
        parse("tests/faults.py", ""),
        parse("tests/unused.py", ""),
    ]
    found = list(tidy.dead_files(sources, {"adacheck", "adacheck.tools.demo"}))
    assert [line.split(":")[0] for line in found] == ["adacheck/forgotten.py", "tests/unused.py"]


def test_what_fsck_needs_is_imported_without_torch() -> None:
    names = [source.module for source in SOURCES if source.layer in ("backends", "manifests")] + [
        "adacheck",
        "adacheck.digest",
        "adacheck.errors",
    ]
    script = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n    assert 'torch' not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_is_known_without_torch() -> None:
    script = "import adacheck, sys; assert adacheck.__version__ == '0.1.0' and 'torch' not in sys.modules; adacheck.Status(3)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
