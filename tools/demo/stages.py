"""The demo's stages, each over processes that it starts and ends: train, kill and restore, lose NVMe, flip a bit."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.manifests import keys
from adacheck.tools.demo.comparison import Figures, Reference, differing, figures_of, joined_losses, losses_of, reference_of
from adacheck.tools.demo.process import CHECKPOINTED, UNINTERRUPTED, DemoError, Event, Training, run_fsck
from adacheck.tools.demo.story import Story
from adacheck.tools.demo.task import VARIANTS, Task

STEPS, FULL_EVERY, LOG_STEPS = 60, 25, 32
KILL_FROM, KILL_TO, WAIT_AFTER = 36, 50, 54
"""The kill comes during one of these steps: the log then holds more than 20 increments above its oldest base."""
REPLAYED_LEAST = 20


@dataclass(frozen=True)
class Setup:
    """Where and how the demo runs.

    Attributes:
        folder: everything is written below it.
        objects: address of the object tier, a folder or a bucket; a variant's store is below it.
        environment: variables that the processes need to reach it.
        small: a tiny model.
        seed: of the moment of the kill and of the bit that is flipped.
    """

    folder: Path
    objects: str
    environment: Mapping[str, str] = field(default_factory=dict)
    small: bool = False
    seed: int = 1

    def variant_folder(self, variant: str) -> Path:
        """Where a variant's files are."""
        return self.folder / variant

    def nvme(self, variant: str) -> Path:
        """The NVMe tier: any folder on a local disk."""
        return self.variant_folder(variant) / "nvme"

    def uri(self, variant: str) -> str:
        """The object tier of a variant's store."""
        return f"{self.objects}/{variant}"

    def task(self, variant: str) -> Task:
        """Train a variant with checkpoints."""
        options: dict[str, str | int] = {"nvme": str(self.nvme(variant)), "full_every": FULL_EVERY, "log_steps": LOG_STEPS}
        return Task(variant, self.small, STEPS, self.uri(variant), options)

    def training(self, variant: str, name: str, script: str, task: Task) -> Training:
        """Start a process."""
        folder = self.variant_folder(variant)
        folder.mkdir(parents=True, exist_ok=True)
        return Training(name, script, task, folder, self.environment)


def train_uninterrupted(setup: Setup, variants: list[str], story: Story) -> dict[str, Reference]:
    """Train each variant without checkpoints and without a kill, side by side, a process each."""
    with ExitStack() as stack:
        processes = {
            variant: stack.enter_context(setup.training(variant, "uninterrupted", UNINTERRUPTED, Task(variant, setup.small, STEPS)))
            for variant in variants
        }
        references = {
            variant: reference_of(story.watch(VARIANTS[variant], process.events(), STEPS)) for variant, process in processes.items()
        }
    for variant, reference in references.items():
        losses = [float.fromhex(reference.losses[step]) for step in (1, STEPS)]
        story.say(f"{VARIANTS[variant]}: loss {losses[0]:.3f} at step 1, {losses[1]:.3f} at step {STEPS}")
    return references


@dataclass(frozen=True, slots=True)
class Killed:
    """A process that was killed: all it told, and the last step that it told to be committed."""

    events: list[Event]
    committed: int
    durable: int
    at: float


def train_and_kill(setup: Setup, variant: str, story: Story) -> Killed:
    """Train with a checkpoint at each step, and kill the process at a random moment.

    Raises:
        DemoError: the checkpoints stopped before.
    """
    chance = random.Random(f"{setup.seed} {variant}")
    kill_after, share = chance.randrange(KILL_FROM, KILL_TO), chance.random()
    events: list[Event] = []
    with setup.training(variant, "killed", CHECKPOINTED, replace(setup.task(variant), wait_after=WAIT_AFTER)) as process:
        for event in story.watch(VARIANTS[variant], process.events(), STEPS):
            events.append(event)
            if event["event"] == "checkpointed" and event["step"] == kill_after:
                time.sleep(event["step_ms"] / 1e3 * share)
                process.kill()
                killed_at = time.monotonic()
                break
        events += process.events()
    if not process.killed:
        raise DemoError(f"the process ended before step {kill_after}, where it was to be killed")
    last = [event for event in events if event["event"] == "checkpointed"][-1]
    if last["failure"]:
        raise DemoError(f"checkpoints stopped before the kill: {last['failure']}")
    story.say(f"SIGKILL after step {last['step']}; committed before the kill: step {last['committed']}, durable: {last['durable']}")
    return Killed(events, last["committed"], last["durable"], killed_at)


def restore_and_finish(setup: Setup, variant: str, killed: Killed, reference: Reference, story: Story) -> tuple[Figures, bool]:
    """Start the killed training again, let it finish, and compare with the uninterrupted run; the figures, and whether it was equal."""
    with setup.training(variant, "restored", CHECKPOINTED, setup.task(variant)) as process:
        stream = story.watch(VARIANTS[variant], process.events(), STEPS)
        restored = next(stream)
        back_s = time.monotonic() - killed.at
        events = list(stream)
    step, replayed = restored["step"], restored["replayed"] or [0]
    story.say(
        f"restored step {step} from {restored['tier']} in {restored['restore_s']:.2f} s, {back_s:.1f} s after the kill with Python's start"
    )
    story.say(f"increments replayed per state: {replayed[0]} to {replayed[-1]}")
    checks = [
        story.check(f"nothing that was committed is lost (committed {killed.committed}, restored {step})", step >= killed.committed),
        story.check(f"at least {REPLAYED_LEAST} increments above the oldest base were replayed", replayed[-1] >= REPLAYED_LEAST),
        _check_state(story, restored, reference, f"restored step {step}"),
        *_check_end(story, joined_losses(losses_of(killed.events), step, losses_of(events)), events[-1], reference),
    ]
    return figures_of(killed.events, restored["restore_s"], events[-1]), all(checks)


def lose_nvme(setup: Setup, variant: str, reference: Reference, story: Story) -> None:
    """Delete the NVMe tier, as a lost host would, and restore from the object tier."""
    shutil.rmtree(setup.nvme(variant))
    story.say(f"deleted {setup.nvme(variant)}")
    with setup.training(variant, "new-host", CHECKPOINTED, setup.task(variant)) as process:
        restored, *events = story.watch(VARIANTS[variant], process.events(), STEPS)
    step = restored["step"]
    story.say(f"restored step {step}, the newest full checkpoint, from {restored['source']} in {restored['restore_s']:.2f} s")
    story.check("it came from the object tier", restored["tier"] == "object")
    _check_state(story, restored, reference, f"restored step {step}")
    losses = {at: loss for at, loss in reference.losses.items() if at <= step} | losses_of(events)
    _check_end(story, losses, events[-1], reference)


def flip_bit(setup: Setup, variant: str, story: Story) -> None:
    """Flip one bit of an increment in a copy of the NVMe tier; `adacheck-fsck` must find it, and nothing before."""
    copy = setup.variant_folder(variant) / "nvme-damaged"
    shutil.copytree(setup.nvme(variant), copy)
    uri = f"{setup.uri(variant)}?nvme={quote(str(copy))}"
    status, printed = run_fsck(uri, setup.environment)
    if not story.check(f"adacheck-fsck finds nothing wrong in an intact copy (exit status {status})", status == 0):
        story.say(printed.strip())
    key = _flip_in_increment(copy, random.Random(setup.seed))
    story.say(f"flipped one bit of {key}; adacheck-fsck --read-data says:")
    status, printed = run_fsck(uri, setup.environment)
    for line in printed.strip().splitlines():
        story.say(f"| {line}")
    story.check(f"adacheck-fsck found it (exit status {status}: errors left uncorrected)", status == 4 and key in printed)


def _flip_in_increment(nvme: Path, chance: random.Random) -> str:
    chain = next(nvme.glob("*/*/data.mdb")).parent
    with LmdbBackend(chain, create=False) as backend:
        names = [name for key in backend.list("g") if (name := keys.parse(key)) and name.kind is keys.Kind.INCREMENT_SLOT]
        key = keys.key_of(chance.choice(names))
        content = bytearray(backend.get(key))
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        backend.put(key, content)
    return key


def _check_state(story: Story, restored: Event, reference: Reference, what: str) -> bool:
    wrong = differing(restored.get("witness", {}), reference.witnesses.get(restored["step"], {}))
    return story.check(_verdict(f"{what}: parameters, optimizer, schedule, loader, random numbers", wrong), not wrong)


def _check_end(story: Story, losses: dict[int, str], finished: Event, reference: Reference) -> list[bool]:
    last = max(reference.witnesses)
    wrong = differing(finished["witness"], reference.witnesses[last])
    unequal = [step for step in sorted(losses.keys() | reference.losses.keys()) if losses.get(step) != reference.losses.get(step)]
    return [
        story.check(_verdict(f"step {last}: parameters, optimizer, schedule, loader, random numbers", wrong), not wrong),
        story.check(_verdict(f"loss of all {last} steps", [f"step {step}" for step in unequal[:3]]), not unequal),
    ]


def _verdict(what: str, wrong: list[str]) -> str:
    return f"{what}: DIFFERENT from the uninterrupted run in {', '.join(wrong)}" if wrong else f"{what}: equal to the uninterrupted run"
