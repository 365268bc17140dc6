"""The store URI: the address of the object tier, with options as query parameters. One frozen `StoreConfig` holds them all.

Keyword arguments of `Store.open` win over the URI, the URI over `ADACHECK_*` environment variables, those over the defaults.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from adacheck.backends.registry import is_known, known_options, known_schemes
from adacheck.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class NvmeMissing(ConfigError):
    """An address that does not say by itself where the log lies came without `nvme=`; who only reads can do without."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where a store is and how it behaves; the README's options table explains each option.

    Attributes:
        address: of the object tier, without options (`s3://bucket/run-42`).
        nvme: directory of the log on a local disk, `None` for none (full checkpoints only).
        agent: where the keeper runs; this version has `inprocess`, and `auto` means it.
        full_every: steps between full checkpoints.
        refresh: steps in which every byte is sent once to be compared.
        log_steps: steps in which every state's base on NVMe is rewritten once; the log holds about twice as many increments.
        verify: `rolling`, or `step` to compare everything every step.
        keep: full checkpoints kept, beside the newest proven one.
        compress: `none`, or `zstd:LEVEL` for the tensors in increments.
        bandwidth_bytes_per_s: most the uploads may use, `None` for no limit.
        on_error: `warn` logs a failed checkpoint, `raise` raises at the next `step()`.
        memory_budget_bytes: most the windows and blocks may use, `None` for half of what the host has free.
        deadline_s: how long a step may wait for the keeper, and `close()` and `drain()` for the last step.
        aside: which log on NVMe the tools and readers look at: 0 is the one in use, N the one that was set aside as `0.damaged-N`.
        storage: the object tier's own options: fsspec's, and of S3 also `part_bytes` and `request_timeout_s`. Written in a URI, `true`,
            `false`, numbers of sizes, and JSON (`client_kwargs={"region_name": "eu-1"}`) become what they say.
    """

    address: str
    nvme: str | None
    agent: str = "auto"
    peer_copies: int = 1
    redundancy: str = "stripe"
    tolerance: int = 1
    full_every: int = 1000
    refresh: int = 100
    log_steps: int = 32
    verify: str = "rolling"
    keep: int = 3
    compress: str = "none"
    bandwidth_bytes_per_s: int | None = None
    on_error: str = "warn"
    memory_budget_bytes: int | None = None
    deadline_s: float = 600.0
    aside: int = 0
    storage: Mapping[str, Any] = field(default_factory=dict, repr=False)  # it may hold a password

    @property
    def scheme(self) -> str:
        """Of the object tier: `file`, `s3`, ..."""
        return urlsplit(self.address).scheme

    @property
    def uri(self) -> str:
        """For people to hand to a tool: address and `nvme`, without the object tier's own options, which may hold a password."""
        return f"{self.address}?nvme={self.nvme or 'none'}"

    @property
    def refresh_steps(self) -> int:
        """Steps in which every byte is sent once to be compared, `verify=step` considered."""
        return 1 if self.verify == "step" else self.refresh

    @property
    def zstd_level(self) -> int | None:
        """Level of `compress=zstd:LEVEL`, `None` for no compression."""
        return int(self.compress.removeprefix("zstd:")) if self.compress != "none" else None


_CHOICES = {
    "redundancy": ("stripe", "live"),
    "verify": ("rolling", "step"),
    "on_error": ("warn", "raise"),
}
ZSTD_LEVELS = range(1, 20)
"""zstd's own, but for the negative ones, which code no literals (byte planes are nothing else), and 20 to 22 for their memory."""

_COMPRESS = ("none", *(f"zstd:{level}" for level in ZSTD_LEVELS))
_LEAST = {"full_every": 1, "refresh": 1, "log_steps": 2, "keep": 1, "peer_copies": 0, "tolerance": 0, "aside": 0}
_S3_OPTIONS = frozenset({"part_bytes", "request_timeout_s", "profile"})
_S3_USUAL = ("anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "secret", "token", "use_ssl", *sorted(_S3_OPTIONS))
_INTERNAL = frozenset({"asynchronous", "loop", "session"})
"""Parameters of fsspec's that no URI can hold."""

_SECRETS = frozenset({"key", "secret", "token", "username", "password", "profile"})
_NAMES = {"bandwidth_bytes_per_s": "bandwidth", "memory_budget_bytes": "memory_budget"}
OPTIONS = tuple(_NAMES.get(f.name, f.name) for f in fields(StoreConfig) if f.name not in ("address", "storage"))
_WITHOUT_EFFECT = ("agent", "peer_copies", "redundancy", "tolerance")
"""Of training in several processes, which this version does not do: taken, and not offered."""

_OFFERED = tuple(name for name in OPTIONS if name not in _WITHOUT_EFFECT)


def parse(uri: str, options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> StoreConfig:
    """The configuration that a URI, keyword options and the environment give together.

    Raises:
        ConfigError: no or an unknown scheme, an unknown option or `ADACHECK_*` variable (the nearest known one is offered), a value
            out of range, or an address that needs `nvme=` without one.
    """
    _check_written(uri)
    parts = urlsplit(uri, allow_fragments=False)
    uri = uri.partition("?")[0]  # what messages show: options may hold a password
    _check_scheme(uri, parts.scheme)
    of_environment = _from_environment(environment)
    given: dict[str, Any] = dict(of_environment)
    query = _query(uri, parts.query)
    given.update(query)
    given.update({name: value for name, value in options.items() if value is not None or name == "nvme"})
    storage = {name: given.pop(name) for name in list(given) if name not in OPTIONS}
    _check_storage(parts.scheme, storage, query.keys() - options.keys())
    storage = {name: value if name in options else _parsed(name, value) for name, value in storage.items()}
    storage = {name: _CHECKED[name](name, value) if name in _CHECKED else value for name, value in storage.items()}
    address = urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")) if parts.netloc or parts.path else uri
    if parts.scheme == "file":
        address = f"file://{parts.netloc}{parts.path.rstrip('/')}"
        if parts.netloc or not parts.path.rstrip("/"):
            raise ConfigError(f"{uri!r}: a file address has three slashes and an absolute path, as in file:///data/run-42")
    for name, text in of_environment.items():
        if given[name] is text:
            _check_of_environment(name, text)
    given["nvme"] = _nvme(given.get("nvme", ""), parts.scheme, parts.path, uri)
    return _build(address, given, storage)


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Options by variable. A variable that resembles none is somebody's own, such as the URI of a script."""
    variables = {f"ADACHECK_{name.upper()}": name for name in OPTIONS}
    for variable in environment:
        name = variable.removeprefix("ADACHECK_").lower()
        if variable.startswith("ADACHECK_") and variable not in variables and difflib.get_close_matches(name, OPTIONS):
            raise ConfigError(f"unknown variable {variable} in the environment{_nearest(variable.upper(), variables)}; unset it")
    return {variables[variable]: value for variable, value in environment.items() if variable in variables}


def _check_of_environment(name: str, text: str) -> None:
    """A value that is refused says where it is, for nobody looks there."""
    try:
        _build("", {"nvme": _nvme(text, "", "", "")} if name == "nvme" and text else {"nvme": None, name: text}, {})
    except ConfigError as error:
        raise ConfigError(f"{error} (it comes from the environment variable ADACHECK_{name.upper()})") from None


def _check_written(uri: str) -> None:
    """Refuse what would be taken for another path without a word: options behind no `?`, and characters that URLs leave out."""
    address = uri.partition("?")[0]  # what messages show: options may hold a password
    if left_out := re.search(r"[\x00-\x1f\x7f]", uri):
        raise ConfigError(f"{address!r} has the control character {left_out[0]!r}, which would be left out; take it away")
    for match in re.finditer(r"[^\w/](\w+)=", address):
        if match[1] in (*OPTIONS, *_S3_USUAL):
            before = address[: match.start()]
            raise ConfigError(
                f"{before!r} is followed by the option {match[1]!r} without a '?': write {before}?{match[1]}=…, and '&' between options"
            )


def _check_scheme(uri: str, scheme: str) -> None:
    if is_known(scheme):
        return
    known = known_schemes()
    if not scheme:
        raise ConfigError(f"{uri!r} has no scheme; write file:///path, or one of {', '.join(f'{s}://' for s in known)}")
    raise ConfigError(f"unknown scheme {scheme!r} in {uri!r}{_nearest(scheme, known, 0.5)}; known: {', '.join(known)}")


def _query(uri: str, query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    for at, (name, _) in enumerate(pairs):
        if name in {earlier for earlier, _ in pairs[:at]}:
            raise ConfigError(f"{uri!r} has the option {name!r} twice; give it once")
    return dict(pairs)


def _check_storage(scheme: str, storage: Mapping[str, Any], from_uri: Set[str]) -> None:
    known = _storage_options(scheme)
    for name in storage:
        if known is not None and name not in known:
            where = "in the URI" if name in from_uri else "given to Store.open"
            own = f"; of s3: {', '.join(_S3_USUAL)}, and s3fs's own" if scheme == "s3" else ""
            near = _nearest(name, (*_OFFERED, *known - _INTERNAL))
            raise ConfigError(f"unknown option {name!r} {where}{near}; options: {', '.join(_OFFERED)}{own}")


def _storage_options(scheme: str) -> frozenset[str] | None:
    """What the object tier of a scheme takes besides; `None` where only its package knows."""
    known = known_options(scheme)
    if known is None or scheme == "s3":
        return known and known | _S3_OPTIONS
    return frozenset()


def _parsed(name: str, text: str) -> Any:
    """The value of an option of the object tier that was written in a URI: a truth value, a number, JSON, or the text itself."""
    if name in _SECRETS:
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if name.endswith(("_size", "_concurrency")) and text.isdecimal():
        return int(text)
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{name}={text!r} begins like JSON and is none: {error}") from error
    return text


def _server(name: str, value: Any) -> str:
    """An address of a server: botocore would take it for one at its first request, or fail without naming the option."""
    try:
        parts = urlsplit(str(value))
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no such port, half an IPv6 address
        good = False
    if good and isinstance(value, str):
        return value
    like = value if isinstance(value, str) and re.fullmatch(r"[\w.-]+(:\d+)?", value) else "host:port"
    raise ConfigError(f"{name}={value!r} is no address of a server; write {name}=http://{like}, or https://")


def _nearest(name: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _nvme(value: Any, scheme: str, path: str, uri: str) -> str | None:
    if value is None or str(value) == "none":
        return None
    if str(value):
        folder = Path(str(value)).expanduser()
        if not folder.is_absolute():
            raise ConfigError(
                f"nvme={value!s} is relative, so a start from another directory would not find the log; write an absolute path"
            )
        return os.path.abspath(folder)  # noqa: PTH100 - resolve() would follow links
    if scheme == "file":
        return f"{path.rstrip('/')}/nvme"
    raise NvmeMissing(
        f"{uri!r} needs nvme=DIR, a directory on a local disk for the log of every step; "
        "nvme=none keeps full checkpoints only (a crash then loses the steps since the last one)"
    )


def _build(address: str, given: dict[str, Any], storage: Mapping[str, Any]) -> StoreConfig:
    values: dict[str, Any] = {"address": address, "storage": dict(storage)}
    for f in fields(StoreConfig):
        name = _NAMES.get(f.name, f.name)
        if name not in given:
            continue
        value = given[name]
        if name in _NAMES.values():
            values[f.name] = None if value is None else _amount(name, value)
        elif name in _LEAST:
            values[f.name] = _number(name, value)
        elif name == "deadline_s":
            values[f.name] = _seconds(name, value)
        else:
            values[f.name] = value if name == "nvme" else str(value)
    config = StoreConfig(**values)
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise ConfigError(f"{name}={getattr(config, name)!r} is not one of {', '.join(choices)}")
    if config.agent not in ("auto", "inprocess"):
        raise ConfigError(f"agent={config.agent!r}: this version runs the keeper in process; use agent=auto or agent=inprocess")
    if config.compress not in _COMPRESS:
        raise ConfigError(f"compress={config.compress!r} is neither none nor one of zstd:{ZSTD_LEVELS[0]} to zstd:{ZSTD_LEVELS[-1]}")
    return config


def _number(name: str, value: Any) -> int:
    if name == "refresh" and value == "auto":
        return 100
    try:
        number = int(str(value))
    except ValueError:
        raise ConfigError(f"{name}={value!r} is not a whole number") from None
    if number < _LEAST[name]:
        raise ConfigError(f"{name}={number} is too small; the least is {_LEAST[name]}")
    return number


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ConfigError(f"{name}={value!r} is not a positive number of seconds")
    return seconds


def _amount(name: str, value: Any) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?(/S)?", str(value).strip().upper())
    amount = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if amount <= 0:
        raise ConfigError(f"{name}={value!r} is not an amount of bytes; write 500M, 2GiB, ...")
    return amount


_CHECKED: dict[str, Callable[[str, Any], Any]] = {"part_bytes": _amount, "request_timeout_s": _seconds, "endpoint_url": _server}
"""Options of the object tier that are looked at here."""
