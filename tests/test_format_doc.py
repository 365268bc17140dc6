"""FORMAT.md is true: its tables are those of the code, and every numbered invariant names tests that exist."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from adacheck.manifests import encoding, keys, record

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "manifests" / "FORMAT.md").read_text()
INVARIANTS = re.findall(r"^(\d+)\. (.*)$", TEXT.split("## 9. Invariants")[1], re.MULTILINE)
CLASSES = [it for it in vars(record).values() if isinstance(it, type) and is_dataclass(it)]


def section(title: str) -> str:
    """The text from a heading to the next one."""
    return re.split(r"^#+ ", TEXT.split(f"{title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def functions_in(path: Path) -> set[str]:
    """Names of the test functions of a file, without importing it."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_invariants_are_numbered_without_gaps() -> None:
    assert [int(number) for number, _ in INVARIANTS] == list(range(1, len(INVARIANTS) + 1))
    assert len(INVARIANTS) >= 22


@pytest.mark.parametrize(("number", "text"), INVARIANTS)
def test_every_invariant_names_tests_that_exist(number: str, text: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert named, f"invariant {number} names no test"
    assert text.count("::") == len(named), f"invariant {number} names a test in a form that is not checked"
    for path, name in named:
        assert name in functions_in(ROOT / path), f"invariant {number}: no {name} in {path}"


@pytest.mark.parametrize("cls", CLASSES)
def test_every_record_is_described_field_by_field(cls: type[Any]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| \S.* \|$", section(f"### `{cls.__name__}`"), re.MULTILINE)
    assert rows == [(field.name, field.type) for field in fields(cls)]


def test_no_record_is_described_that_does_not_exist() -> None:
    assert set(re.findall(r"^### `(\w+)`$", TEXT, re.MULTILINE)) == {cls.__name__ for cls in CLASSES}


def test_every_kind_number_is_listed() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|$", section("## 1. Envelope of a record"), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [(number, cls.__name__) for number, cls in encoding.KINDS.items()]
    magic = encoding.MAGIC.hex(" ")
    assert f"magic `{magic}`" in section("## 1. Envelope of a record")


def test_every_name_is_listed() -> None:
    rows = re.findall(r"^\| (nvme|object) \| `([^`]+)` \|", section("## 7. Names"), re.MULTILINE)
    assert len(rows) == len(keys.Kind)
    kinds = []
    for _, form in rows:
        example = re.sub(r"<\w+:(\d+)>", lambda match: "7".zfill(int(match[1])), form).replace("<id>", "a1")
        name = keys.parse(example)
        assert name is not None, f"{form} is no name of this code"
        kinds.append(name.kind)
    assert kinds == list(keys.Kind)


def test_the_invariants_of_the_architecture_name_tests_that_exist() -> None:
    named = re.findall(r"^\| .* \| `(tests/[\w/]+\.py)::(\w+)` \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert len(named) >= 20
    for path, name in named:
        assert name in functions_in(ROOT / path), f"ARCHITECTURE.md names {path}::{name}, which does not exist"
