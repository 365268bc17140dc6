"""What the keeper's threads share: the chain's protocol values behind one lock, held only for the moment of a change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from adacheck.errors import AdacheckError
from adacheck.history import History
from adacheck.keeper.assembly import ChainName
from adacheck.keeper.certify import Certifier
from adacheck.keeper.nvme import NvmeCopy
from adacheck.keeper.progress import Progress
from adacheck.keeper.proof import Proof
from adacheck.keeper.protocol import Copy
from adacheck.manifests.record import Fork, Incarnation
from adacheck.states import State

MEMORY, NVME = "memory", "nvme"
"""Names of the two copies of a chain that a keeper in process has."""


@dataclass
class ChainState:
    """All that a keeper starts from: what a restore left, or an empty chain.

    Attributes:
        cut: the step it starts from.
        shadow: every state at the cut; owned by the apply thread from then on.
        memory, nvme: the protocol's view of both copies.
        nvme_copy: the stored one, `None` without NVMe.
        link: of the last increment at or below the cut.
        opaque: opaque items of the cut.
        progress, certifier, proof: as the restore left them.
        identity: the records of the object tier that say whose it is: this incarnation, and the fork table with its own entry.
        history: of all steps so far; a new value with each that is logged.
    """

    name: ChainName
    cut: int
    shadow: dict[int, State]
    memory: Copy
    nvme: Copy | None
    nvme_copy: NvmeCopy | None
    link: bytes
    opaque: list[tuple[str, bytes]]
    progress: Progress
    certifier: Certifier
    proof: Proof
    identity: tuple[Incarnation, tuple[Fork, ...]]
    history: History


@dataclass
class Shared:
    """A chain in the hands of a keeper.

    Attributes:
        lock: guards `chain`'s protocol values and everything below. The trainer's thread takes it by itself, not through `changed`, whose
            `with` is made of several lines: an interrupt between them would leave it locked.
        changed: notified at every change.
        applying: held while the shadow moves.
        nvme_alive: whether increments go to NVMe.
        committed, durable: how far the announcements allow the copies to go.
        failure: what stopped the keeper.
        reports: what went wrong without stopping it, newest last.
    """

    chain: ChainState
    nvme_alive: bool
    committed: int
    durable: int
    lock: threading.RLock = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)
    applying: threading.Lock = field(default_factory=threading.Lock)
    stopping: bool = False
    full_wanted: bool = False
    failure: AdacheckError | None = None
    reports: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)

    def allow(self, committed: int, durable: int) -> None:
        """Learn watermarks that an announcement carries; they only grow."""
        with self.lock:
            self.committed, self.durable = max(self.committed, committed), max(self.durable, durable)
            self.changed.notify_all()

    def report(self, text: str) -> None:
        """Note something the user must hear of."""
        with self.lock:
            self.reports.append(text)

    def fail(self, failure: AdacheckError) -> None:
        """Stop the keeper: the first failure is the one told."""
        with self.lock:
            self.failure = self.failure or failure
            self.changed.notify_all()

    def wait(self, done: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until `done` (called with the lock held), the keeper fails, or so many seconds have passed; whether it is done."""
        with self.lock:
            end = time.monotonic() + deadline_s
            self.changed.wait_for(lambda: done() or self.failure is not None, timeout=max(0.0, end - time.monotonic()))
            return done()
