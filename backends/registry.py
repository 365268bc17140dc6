"""From the scheme of an address to a backend: those built in, and those that other packages offer.

A package adds one with the entry-point group `adacheck.backends`; its factory takes `(address, options)`, where `address` is what
follows `scheme://`, and returns a `Backend`. Its tests inherit `BackendTests`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import fsspec

from adacheck.backends.base import Backend
from adacheck.backends.errors import BackendError, BadOption, Denied, UnknownScheme
from adacheck.backends.object_store import ObjectStore

GROUP = "adacheck.backends"
Factory = Callable[[str, Mapping[str, Any]], Backend]


def _object_store(scheme: str) -> Factory:
    return lambda address, options: ObjectStore(f"{scheme}://{address}", **options)


_BUILT_IN: dict[str, Factory] = {scheme: _object_store(scheme) for scheme in ("file", "memory", "s3")}


def known_schemes() -> tuple[str, ...]:
    """Every scheme that `open_backend` takes, sorted."""
    return tuple(sorted({*_BUILT_IN, *_entry_points()}))


def is_known(scheme: str) -> bool:
    """Whether `open_backend` takes it; installed packages are looked through only for what is not built in."""
    return scheme in _BUILT_IN or scheme in _entry_points()


def open_backend(scheme: str, address: str, options: Mapping[str, Any] | None = None) -> Backend:
    """Open the backend of a scheme; the built-in ones cannot be replaced.

    Raises:
        UnknownScheme: nobody offers it; the message names the nearest one.
        Denied: the package that offers it cannot be imported, or does not return a `Backend`.
        BadOption: its library takes an option otherwise; whatever it raised itself is the cause.
        BackendError: whatever the backend raises when it opens.
    """
    factory = _BUILT_IN.get(scheme) or _load(scheme)
    try:
        backend = factory(address, dict(options or {}))
    except BadOption as error:
        raise BadOption(f"{error} ({_given(options)})") from error.__cause__
    except (BackendError, OSError):
        raise
    except Exception as error:  # of a library that looked at a value only when it used it
        raise BadOption(f"{scheme}://{address} cannot be opened: {type(error).__name__}: {error} ({_given(options)})") from error
    if not isinstance(backend, Backend):
        raise Denied(f"the factory of {scheme!r} returned a {type(backend).__name__}, which is no Backend; report it to its package")
    return backend


def _given(options: Mapping[str, Any] | None) -> str:
    """Names alone: a value may be a password."""
    return f"options given: {', '.join(sorted(options or {})) or 'none'}; correct the refused one, or the library's own settings (AWS_…)"


def _load(scheme: str) -> Factory:
    offered = _entry_points()
    if scheme not in offered:
        known = known_schemes()
        near = difflib.get_close_matches(scheme.lower(), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "check the address, or install the package that offers it"
        raise UnknownScheme(f"no backend is known for {scheme!r} (there are {', '.join(known)}); {hint}")
    try:
        factory: Factory = offered[scheme].load()
    except (ImportError, AttributeError) as error:
        raise Denied(f"the backend {scheme!r} of {offered[scheme].value} cannot be loaded: {error}; reinstall its package") from error
    return factory


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def known_options(scheme: str) -> frozenset[str] | None:
    """Names of the options that the built-in backend of a scheme passes on to fsspec; `None` where only its package knows them."""
    if scheme not in _BUILT_IN:
        return None
    names: set[str] = set()
    for kind in fsspec.get_filesystem_class(scheme).__mro__:
        names.update(inspect.signature(kind.__init__).parameters)
    return frozenset(names - {"self", "args", "kwargs", "storage_options"})
