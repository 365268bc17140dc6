"""The rules of the house as pure functions over parsed files: each takes a `Source` (or all of them) and yields what offends.

`test_tidy.py` applies them to the tree, and to small bad examples, so that a rule that finds nothing any more is noticed.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("backends", "manifests", "tools")
CODE_LINES_MAX, TEST_LINES_MAX, FUNCTION_LINES_MAX = 400, 600, 70
FORBIDDEN_NAMES = ("util", "utils", "helper", "helpers", "manager", "common", "misc")
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "time_ns", "monotonic_ns", "perf_counter_ns"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Source:
    """One file: `path` relative to the root with forward slashes, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """The one name it may be imported by: `backends/base.py` is `adacheck.backends.base`."""
        parts = self.path.removesuffix(".py").removesuffix("/__init__").split("/")
        return ".".join(["adacheck", *parts] if parts[0] in LINKED else parts)

    @property
    def layer(self) -> str:
        """`backends`, `manifests`, `tools`, `tests` or `adacheck`: the folder at the root."""
        return self.path.split("/")[0]


def parse(path: str, text: str) -> Source:
    """A source from its text."""
    return Source(path, text, ast.parse(text, path))


def tree_of_sources() -> list[Source]:
    """Every Python file of the repository, once: links are not followed."""
    folders = ("adacheck", *LINKED, "tests")
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if not _through_link(path))
    return [parse(path.relative_to(ROOT).as_posix(), path.read_text()) for path in files]


def _through_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(ROOT))


def imported_modules(source: Source) -> Iterator[tuple[str, int]]:
    """Each module (or `module.name`, where it may be either) that a file imports, anywhere in it, with the line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def bare_imports(source: Source) -> Iterator[str]:
    """Imports that would load a second copy of a module under another name, and relative ones."""
    for name, line in imported_modules(source):
        if name.startswith("."):
            yield f"{source.path}:{line}: relative import; write adacheck.…"
        elif name.split(".")[0] in LINKED:
            yield f"{source.path}:{line}: imports {name}; write adacheck.{name}"


def wrong_arrows(source: Source) -> Iterator[str]:
    """Imports against tools → adacheck → {backends, manifests}."""
    for name, line in imported_modules(source):
        parts = name.split(".")
        if parts[0] == "tests" and source.layer != "tests":
            yield f"{source.path}:{line}: {source.layer} imports a test"
        if parts[0] != "adacheck" or len(parts) == 1:
            continue
        low = source.layer in ("backends", "manifests")
        if (low and parts[1] != source.layer) or (source.layer == "adacheck" and parts[1] == "tools"):
            yield f"{source.path}:{line}: {source.layer} may not import {name}"


def too_long(source: Source) -> Iterator[str]:
    """Files and functions that do more than one thing."""
    lines, limit = source.text.count("\n"), TEST_LINES_MAX if source.layer == "tests" else CODE_LINES_MAX
    if lines > limit:
        yield f"{source.path}: {lines} lines, more than {limit}"
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{source.path}:{node.lineno}: {node.name} has {length} lines, more than {FUNCTION_LINES_MAX}"


def bad_names(source: Source) -> Iterator[str]:
    """Modules named for nothing in particular."""
    for part in source.path.removesuffix(".py").split("/"):
        if set(part.split("_")).intersection(FORBIDDEN_NAMES):
            yield f"{source.path}: {part!r} says nothing; name it for what it is"


def undocumented(source: Source) -> Iterator[str]:
    """Modules that do not say why they exist, and public names without a docstring. An empty file needs none."""
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield f"{source.path}: no docstring says why it exists"
    if source.layer == "tests":
        return
    public = [node for node in source.tree.body if isinstance(node, _DEFINITIONS) and not node.name.startswith("_")]
    yield from (f"{source.path}:{node.lineno}: public {node.name} has no docstring" for node in public if not ast.get_docstring(node))


def unpickling(source: Source) -> Iterator[str]:
    """Ways to run a stranger's pickle."""
    for name, line in imported_modules(source):
        if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve", "joblib"):
            yield f"{source.path}:{line}: imports {name}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            yield f"{source.path}:{node.lineno}: torch.load"
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and any(alias.name == "load" for alias in node.names):
            yield f"{source.path}:{node.lineno}: torch.load"


def printing(source: Source) -> Iterator[str]:
    """`print`, and writing to the process's own streams: a library logs."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write"):
            yield f"{source.path}:{node.lineno}: {ast.unparse(node.func)} in a library"


def wall_clock_asserts(source: Source) -> Iterator[str]:
    """Assertions on a time that was measured: a clock was read in them, or in what a name in them was computed from."""
    for function in ast.walk(source.tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        timed: set[str] = set()
        for _ in range(2):  # a second pass finds what a loop carries backwards
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and _is_timed(node.value, timed):
                    timed.update(name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and _is_timed(node.test, timed):
                yield f"{source.path}:{node.lineno}: asserts a wall-clock time, which a busy machine breaks"


def _is_timed(node: ast.expr, timed: set[str]) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            called = ast.unparse(part.func)
            if called.removeprefix("time.") in CLOCKS and (called.startswith("time.") or called != "time"):
                return True
        if isinstance(part, ast.Name) and part.id in timed:
            return True
    return False


def entry_points() -> set[str]:
    """Modules that something outside the code starts at: commands, plug-ins, the package itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["scripts"], *project.get("entry-points", {}).values()]
    return {"adacheck"} | {target.split(":")[0] for group in groups for target in group.values()}


def dead_files(sources: list[Source], roots: set[str]) -> Iterator[str]:
    """Modules that no command, plug-in or public name leads to. A test alone keeps no module alive; a test's own parts need a test.

    A string that is a module's name counts as an import, since some are imported when first needed.
    """
    modules = {source.module: source for source in sources}
    tests = {name for name in modules if name.startswith("tests.") and name.split(".")[-1].startswith(("test_", "conftest"))}
    live, waiting = set[str](), [*roots, *tests]
    while waiting:
        name = waiting.pop()
        if name in live or name not in modules:
            continue
        live.add(name)
        wanted = {found for found, _ in imported_modules(modules[name])} | _strings(modules[name])
        waiting += [found for found in wanted if name not in tests or found.startswith("tests.")]
    for name, source in modules.items():
        if name not in live and not source.path.endswith("__init__.py"):
            yield f"{source.path}: nothing leads to it"


def _strings(source: Source) -> set[str]:
    nodes = ast.walk(source.tree)
    return {node.value.split(":")[0] for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
