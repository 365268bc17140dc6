"""Hypothesis strategies for arbitrary records: any value that the annotations allow, not only sensible ones."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from adacheck.manifests.encoding import KINDS
from adacheck.manifests.record import Record

_SCALARS: dict[type[Any], st.SearchStrategy[Any]] = {
    int: st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(0, 300),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    float: st.floats(),
}


def of_class(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Any instance of a record class, or of a class that records contain."""
    hints = get_type_hints(cls)
    return st.builds(cls, **{field.name: _of_annotation(hints[field.name]) for field in fields(cls)})


def _of_annotation(annotation: Any) -> st.SearchStrategy[Any]:
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if get_origin(annotation) is tuple:
        return st.lists(_of_annotation(get_args(annotation)[0]), max_size=2).map(tuple)
    return of_class(annotation)


def records() -> st.SearchStrategy[Record]:
    """Any record of any kind."""
    return st.one_of([of_class(cls) for cls in KINDS.values()])
