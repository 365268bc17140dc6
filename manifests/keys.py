"""Every object name of a store, and what a name means: one table, so that writers, readers, fsck and clean-up agree.

Numbers have a fixed width, so the order of names is the order of numbers. NVMe names are inside the LMDB of one chain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from adacheck.manifests.errors import OutOfRange


class Kind(StrEnum):
    """What the object under a name is. The first nine are on NVMe, the others in the object tier."""

    CHAIN = "chain"
    FENCE = "fence"
    INCREMENT = "increment"
    INCREMENT_SLOT = "increment slot"
    BASE = "base"
    BASE_SLOT = "base slot"
    STAGED = "staged state"
    STAGED_SLOT = "staged slot"
    HISTORY = "history"
    RUN = "run"
    INCARNATION = "incarnation"
    FORK = "fork"
    VERSION = "version"
    SHARD = "shard"
    OPAQUE = "opaque"
    HISTORY_COPY = "history copy"
    MANIFEST = "manifest"


@dataclass(frozen=True, slots=True)
class Name:
    """A parsed name. Fields that its kind does not have are 0 (`id`: empty).

    `id` tells attempts at one full checkpoint apart; `shard` counts from 1 to `shards`; `number` is a version's or a history chunk's.
    """

    kind: Kind
    generation: int = 0
    incarnation: int = 0
    step: int = 0
    state: int = 0
    slot: int = 0
    number: int = 0
    shard: int = 0
    shards: int = 0
    id: str = ""


_FULL = "full/i{incarnation}/step-{step}-{id}"
_FORMS = {
    Kind.CHAIN: "chain",
    Kind.FENCE: "fence",
    Kind.INCREMENT: "g{generation}/inc/s{step}",
    Kind.INCREMENT_SLOT: "g{generation}/inc/s{step}/{slot}",
    Kind.BASE: "g{generation}/base/{state}/s{step}",
    Kind.BASE_SLOT: "g{generation}/base/{state}/s{step}/{slot}",
    Kind.STAGED: "g{generation}/full/s{step}/{state}",
    Kind.STAGED_SLOT: "g{generation}/full/s{step}/{state}/{slot}",
    Kind.HISTORY: "history/c{number}",
    Kind.RUN: "run.msgpack",
    Kind.INCARNATION: "incarnations/i{incarnation}.msgpack",
    Kind.FORK: "forks/i{incarnation}.msgpack",
    Kind.VERSION: "versions/i{incarnation}/v{number}.msgpack",
    Kind.SHARD: _FULL + "/shard-{shard}-of-{shards}.safetensors",
    Kind.OPAQUE: _FULL + "/opaque.msgpack",
    Kind.HISTORY_COPY: _FULL + "/history.msgpack",
    Kind.MANIFEST: _FULL + "/manifest.msgpack",
}
_WIDTHS = {"generation": 8, "incarnation": 8, "step": 12, "state": 6, "slot": 6, "number": 8, "shard": 5, "shards": 5}
_ID = "[0-9a-z]{1,32}"


def _pattern(form: str) -> re.Pattern[str]:
    """The expression that matches exactly the names of a form, with a group for each field."""
    pieces = re.split(r"\{(\w+)\}", form)
    for at in range(1, len(pieces), 2):
        digits = _ID if pieces[at] == "id" else f"[0-9]{{{_WIDTHS[pieces[at]]}}}"
        pieces[at] = f"(?P<{pieces[at]}>{digits})"
    pieces[::2] = [re.escape(piece) for piece in pieces[::2]]
    return re.compile("".join(pieces) + r"\Z")


_PATTERNS = {kind: _pattern(form) for kind, form in _FORMS.items()}

CHAIN = _FORMS[Kind.CHAIN]
"""NVMe: the head record of the chain."""

FENCE = _FORMS[Kind.FENCE]
"""NVMe: the `Incarnation` record of the newest incarnation that took this copy; every transaction expects it unchanged."""

HISTORY_PREFIX = "history/"
"""NVMe: begins the names of the chunks of history."""

RUN = _FORMS[Kind.RUN]
"""Object tier: the identity of the run."""

INCARNATIONS_PREFIX, FORKS_PREFIX, VERSIONS_PREFIX, FULL_PREFIX = "incarnations/", "forks/", "versions/", "full/"
"""Object tier: what to list to find all incarnations, forks, versions, and objects of full checkpoints."""


QUARANTINE_PREFIX = "quarantine/"
"""Either tier: begins the names of what a repair set aside."""

_QUARANTINED = re.compile(r"quarantine/([0-9]{12})/(.+)\Z")


def quarantined(unix_s: int, key: str) -> str:
    """Either tier: where a repair at this time puts the object that was called `key`."""
    if not 0 <= unix_s < 10**12:
        raise OutOfRange(f"time {unix_s} does not fit the 12 digits it has in a name under {QUARANTINE_PREFIX}")
    return f"{QUARANTINE_PREFIX}{unix_s:012d}/{key}"


def parse_quarantined(name: str) -> tuple[int, str] | None:
    """When a repair set an object aside, and what it was called before; `None` for a name of another form."""
    match = _QUARANTINED.match(name)
    return (int(match[1]), match[2]) if match else None


def limit(field: str) -> int:
    """The least number that the names have no room for: of a `generation`, `incarnation`, `step`, `state`, `slot`, `number`, `shard`."""
    return int(10 ** _WIDTHS[field])


@lru_cache(maxsize=1 << 16)
def parse(key: str) -> Name | None:
    """What the object called `key` is; `None` for a name that this project never writes."""
    for kind, pattern in _PATTERNS.items():
        match = pattern.match(key)
        if match:
            found = match.groupdict()
            name = Name(kind, id=found.pop("id", ""), **{field: int(digits) for field, digits in found.items()})
            return name if kind is not Kind.SHARD or 1 <= name.shard <= name.shards else None
    return None


def key_of(name: Name) -> str:
    """The key of a parsed name: the inverse of `parse`.

    Raises:
        OutOfRange: a number is negative or has too many digits, or the id is not 1 to 32 digits and small letters.
    """
    if name.kind is Kind.SHARD and not 1 <= name.shard <= name.shards:
        raise OutOfRange(f"shard {name.shard} of {name.shards}: shards count from 1")
    return _fill(_FORMS[name.kind], {field: getattr(name, field) for field in _WIDTHS}, name.id)


def _fill(form: str, numbers: dict[str, int], identity: str = "") -> str:
    parts = {"id": identity}
    for field, value in numbers.items():
        if "{" + field + "}" not in form:
            continue
        if not 0 <= value < 10 ** _WIDTHS[field]:
            raise OutOfRange(f"{field} {value} does not fit the {_WIDTHS[field]} digits it has in the name {form}")
        parts[field] = f"{value:0{_WIDTHS[field]}d}"
    if "{id}" in form and not re.fullmatch(_ID, identity):
        raise OutOfRange(f"id {identity!r} in the name {form} must be 1 to 32 digits and small letters")
    return form.format(**parts)


def generation_prefix(generation: int) -> str:
    """NVMe: begins every name of a generation."""
    return _fill("g{generation}/", {"generation": generation})


def increments_prefix(generation: int) -> str:
    """NVMe: begins the names of a generation's increments and their slots."""
    return _fill("g{generation}/inc/", {"generation": generation})


def increment(generation: int, step: int) -> str:
    """NVMe: the `Linked` record of one step; with a `/` after it, the prefix of its slots."""
    return _fill(_FORMS[Kind.INCREMENT], {"generation": generation, "step": step})


def increment_slot(generation: int, step: int, slot: int) -> str:
    """NVMe: the bytes of one segment of an increment."""
    return _fill(_FORMS[Kind.INCREMENT_SLOT], {"generation": generation, "step": step, "slot": slot})


def base(generation: int, state: int, step: int) -> str:
    """NVMe: the `Base` record of a state at a step; with a `/` after it, the prefix of its slots."""
    return _fill(_FORMS[Kind.BASE], {"generation": generation, "state": state, "step": step})


def all_staged_prefix(generation: int) -> str:
    """NVMe: begins the names of everything staged for full checkpoints."""
    return _fill("g{generation}/full/", {"generation": generation})


def staged_prefix(generation: int, step: int) -> str:
    """NVMe: begins the names of what is staged for the full checkpoint of one step."""
    return _fill("g{generation}/full/s{step}/", {"generation": generation, "step": step})


def staged(generation: int, step: int, state: int) -> str:
    """NVMe: the `Base` record of a state staged for a full checkpoint; with a `/` after it, the prefix of its slots."""
    return _fill(_FORMS[Kind.STAGED], {"generation": generation, "step": step, "state": state})


def history(number: int) -> str:
    """NVMe: one `HistoryChunk`."""
    return _fill(_FORMS[Kind.HISTORY], {"number": number})


def incarnation(number: int) -> str:
    """Object tier: the `Incarnation` record, taken by an exclusive put."""
    return _fill(_FORMS[Kind.INCARNATION], {"incarnation": number})


def fork(number: int) -> str:
    """Object tier: the `Fork` record of an incarnation."""
    return _fill(_FORMS[Kind.FORK], {"incarnation": number})


def versions_prefix(number: int) -> str:
    """Object tier: begins the names of the versions of one incarnation."""
    return _fill("versions/i{incarnation}/", {"incarnation": number})


def version(number_of_incarnation: int, number: int) -> str:
    """Object tier: the `Version` record, published by an exclusive put."""
    return _fill(_FORMS[Kind.VERSION], {"incarnation": number_of_incarnation, "number": number})


def full_folder(number: int, step: int, identity: str) -> str:
    """Object tier: folder of one attempt at a full checkpoint by incarnation `number`, without a `/` at the end."""
    return _fill(_FULL, {"incarnation": number, "step": step}, identity)


def shard_name(shard: int, shards: int) -> str:
    """Name of a shard within its folder (`record.Shard.name`), counted from 1.

    Raises:
        OutOfRange: not `1 <= shard <= shards <= 99999`.
    """
    if not 1 <= shard <= shards:
        raise OutOfRange(f"shard {shard} of {shards}: shards count from 1")
    return _fill("shard-{shard}-of-{shards}.safetensors", {"shard": shard, "shards": shards})


def opaque(folder: str) -> str:
    """Object tier: the opaque items of a full checkpoint."""
    return f"{folder}/opaque.msgpack"


def history_copy(folder: str) -> str:
    """Object tier: the history so far, a copy of all chunks one after the other, beside a full checkpoint."""
    return f"{folder}/history.msgpack"


def manifest(folder: str) -> str:
    """Object tier: the `Full` record of a full checkpoint, the last object of its folder to be written."""
    return f"{folder}/manifest.msgpack"
