"""Opaque items are in both tiers while the log holds the increment that a full checkpoint is of: each is mended from the other."""

from __future__ import annotations

import pytest

from adacheck.check_records import Sample
from adacheck.config import StoreConfig, parse
from adacheck.finding import Tier
from adacheck.keeper.stored import slot_key
from adacheck.manifests import keys
from adacheck.manifests.encoding import decode
from adacheck.manifests.record import Increment, Linked
from adacheck.repair import Repaired, repair_opened
from tests.damaged_store import CHANGES, Copy
from tests.flipped_store import Content, content_of, loaded
from tests.tiny_run import Process

FULL = 8
WAYS = [way for way in CHANGES if way != "flip"]
"""A flipped bit is turned back in place."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Content:
    """Full checkpoints to step 8, and a log from before it on."""
    root = tmp_path_factory.mktemp("store")
    process = Process(root, options={"log_steps": 16})
    process.ckpt.restore()
    for _ in range(FULL + 2):
        process.step()
    process.abandon()
    with Copy(root).open(keys.Kind.CHAIN) as nvme, Copy(root).open(keys.Kind.RUN) as objects:
        return Content(content_of(objects), content_of(nvme))


def repaired(content: Content) -> tuple[Repaired, Content]:
    config: StoreConfig = parse("file:///gone?nvme=/gone/nvme", {})
    objects, nvme = loaded(content.objects), loaded(content.nvme)
    done = repair_opened(config, objects, nvme, Sample(1.0))
    return done, Content(content_of(objects), content_of(nvme))


def opaque_key(content: Content) -> str:
    (key,) = (key for key in content.objects if f"step-{FULL:012d}" in key and key.endswith("/opaque.msgpack"))
    return key


def increment_of(content: Content) -> tuple[str, dict[str, str]]:
    """The record of the full checkpoint's step in the log, and the key of each opaque item's bytes."""
    key = keys.increment(1, FULL)
    increment = decode(decode(content.nvme[key], Linked).entry, Increment)
    return key, {segment.tensor: slot_key(key, segment.slot) for segment in increment.opaque}


@pytest.mark.parametrize("way", WAYS)
def test_those_of_a_full_checkpoint_come_back_from_the_increment_of_its_step(store: Content, way: str) -> None:
    key, (record, _) = opaque_key(store), increment_of(store)
    done, after = repaired(store.with_object(Tier.OBJECT, key, CHANGES[way](store.objects[key])))
    assert [(action.name, action.what) for action in done.actions] == [(key, f"put together from {record} on NVMe")]
    assert after == store and not done.damage_left


@pytest.mark.parametrize("way", WAYS)
def test_those_of_an_increment_come_back_from_the_full_checkpoint_of_its_step(store: Content, way: str) -> None:
    _, slots = increment_of(store)
    bad = store
    for slot in slots.values():
        bad = bad.with_object(Tier.NVME, slot, CHANGES[way](store.nvme[slot]))
    done, after = repaired(bad)
    what = {action.name: action.what for action in done.actions}
    assert what.keys() == set(slots.values()) and what[slots["rng"]] == f"copied from {opaque_key(store).rpartition('/')[0]}"
    assert after == store and not done.damage_left


def test_what_each_tier_has_a_part_of_is_put_together(store: Content) -> None:
    """The object is cut short within its last items; its first is damaged in the log."""
    key, (_, slots) = opaque_key(store), increment_of(store)
    held = store.objects[key]
    first = next(iter(slots.values()))
    done, after = repaired(store.with_object(Tier.OBJECT, key, held[:-3]).with_object(Tier.NVME, first, b"gone"))
    assert after == store and not done.damage_left and {action.name for action in done.actions} == {key, first}


def test_what_is_right_nowhere_is_not_made_up(store: Content) -> None:
    key, (_, slots) = opaque_key(store), increment_of(store)
    done, after = repaired(store.with_object(Tier.OBJECT, key, None).with_object(Tier.NVME, slots["rng"], b"gone"))
    assert not [action for action in done.actions if "put together" in action.what] and key not in after.objects
    assert [action.name for action in done.actions if action.given_up] and not done.damage_left
