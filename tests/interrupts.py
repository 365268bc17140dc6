"""Ctrl-C at a chosen line: a `KeyboardInterrupt` between any two lines of chosen files, in the thread that calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

Line = tuple[str, int]


def lines_of(call: Callable[[], object], modules: Collection[ModuleType]) -> set[Line]:
    """The lines of these modules that a call comes through."""
    found: set[Line] = set()
    _traced(call, modules, found.add)
    return found


def interrupted(call: Callable[[], object], line: Line, modules: Collection[ModuleType]) -> bool:
    """Call it, and interrupt it before this line, once; whether it came there."""

    def interrupt(here: Line) -> None:
        if here == line:
            raise KeyboardInterrupt

    try:
        _traced(call, modules, interrupt)
    except KeyboardInterrupt:
        return True
    return False


def _traced(call: Callable[[], object], modules: Collection[ModuleType], at: Callable[[Line], None]) -> None:
    files = {str(module.__file__) for module in modules}

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return inside if frame.f_code.co_filename in files else None

    def inside(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            at((Path(frame.f_code.co_filename).name, frame.f_lineno))
        return inside

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
