"""Which states may travel as gradients alone: bookkeeping of how often replay equalled the trainer, as pure values.

A state is new under a kernel until its replay was equal `EQUAL_STEPS` times with a non-zero gradient; then it is certified. Unequal
once: denied for good, and all certificates under that kernel are revoked, since the kernel has shown that it is not what we think.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from adacheck.keeper import derive
from adacheck.keeper.derive import Derivations
from adacheck.manifests.record import Certificate, Kernel

EQUAL_STEPS = 3
"""Equal comparisons with non-zero gradients that a certificate takes."""

DRIFTS = 2
"""Drifts found by refreshes after which a state goes as `value` for good."""


@dataclass(frozen=True, slots=True)
class Proofs:
    """What is known of the states under one kernel: equal steps counted so far, and the denied ones."""

    equal: Mapping[int, int] = field(default_factory=dict)
    denied: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Certifier:
    """All verdicts of one chain. A value: every change gives a new one.

    Attributes:
        proofs: by kernel (`kernel.certificate_key`).
        drifts: drifts found in each state, under whatever kernel.
        derivations: tensors that are casts of others; found anew by every incarnation.
    """

    proofs: Mapping[Kernel, Proofs] = field(default_factory=dict)
    drifts: Mapping[int, int] = field(default_factory=dict)
    derivations: Derivations = field(default_factory=Derivations)

    def certified(self, state: int, kernel: Kernel) -> bool:
        """Whether this state's gradients alone are enough under exactly this kernel."""
        proofs = self._of(kernel)
        return proofs.equal.get(state, 0) >= EQUAL_STEPS and not self.denied(state, kernel)

    def denied(self, state: int, kernel: Kernel) -> bool:
        """Whether this state goes as `value` for good under this kernel."""
        return state in self._of(kernel).denied or state in self.unsteady

    @property
    def unsteady(self) -> frozenset[int]:
        """States, stepped or not, in which drift was found so often that they go as `value` for good."""
        return frozenset(state for state, count in self.drifts.items() if count >= DRIFTS)

    def states(self, kernel: Kernel) -> tuple[int, ...]:
        """The certified states under this kernel, in order."""
        return tuple(state for state in sorted(self._of(kernel).equal) if self.certified(state, kernel))

    def _of(self, kernel: Kernel) -> Proofs:
        return self.proofs.get(kernel, Proofs())

    def _with(self, kernel: Kernel, proofs: Proofs) -> Certifier:
        return replace(self, proofs={**self.proofs, kernel: proofs})


def observe(certifier: Certifier, state: int, kernel: Kernel, *, equal: bool, gradient_nonzero: bool) -> Certifier:
    """Take in one comparison of a replayed state with the value shipped. Equal with a gradient of all zeros proves nothing."""
    proofs = certifier._of(kernel)
    if not equal:
        return deny(certifier, state, kernel)
    if not gradient_nonzero or certifier.denied(state, kernel):
        return certifier
    count = min(proofs.equal.get(state, 0) + 1, EQUAL_STEPS)
    return certifier._with(kernel, replace(proofs, equal={**proofs.equal, state: count}))


def deny(certifier: Certifier, state: int, kernel: Kernel) -> Certifier:
    """Send a state to `value` for good under a kernel; every other state under it must prove itself again."""
    proofs = certifier._of(kernel)
    return certifier._with(kernel, Proofs({}, proofs.denied | {state}))


def drifted(certifier: Certifier, state: int) -> Certifier:
    """Take in a drift that a refresh found: the state proves itself again under every kernel, and repeated drift denies it for good."""
    proofs = {
        kernel: replace(known, equal={other: count for other, count in known.equal.items() if other != state})
        for kernel, known in certifier.proofs.items()
    }
    drifts = {**certifier.drifts, state: certifier.drifts.get(state, 0) + 1}
    return Certifier(proofs, drifts, derive.forget(certifier.derivations, {state}))


def forget(certifier: Certifier, states: Iterable[int]) -> Certifier:
    """Drop all that is known of states that were removed from the chain, or whose number starts to mean another value."""
    gone = frozenset(states)
    proofs = {
        kernel: Proofs({state: count for state, count in known.equal.items() if state not in gone}, known.denied - gone)
        for kernel, known in certifier.proofs.items()
    }
    drifts = {state: count for state, count in certifier.drifts.items() if state not in gone}
    return Certifier(proofs, drifts, derive.forget(certifier.derivations, gone))


def certificates(certifier: Certifier) -> tuple[Certificate, ...]:
    """The verdicts worth keeping, one record a kernel. States denied for drift are denied under each kernel they are known under."""
    records = []
    for kernel, known in certifier.proofs.items():
        denied = tuple(sorted(known.denied | certifier.unsteady))
        states = certifier.states(kernel)
        if states or denied:
            records.append(Certificate(kernel, states, denied))
    return tuple(records)


def reused(records: Iterable[Certificate]) -> Certifier:
    """A certifier that takes up recorded verdicts. They hold only where the whole kernel is equal again: it is the key."""
    proofs: dict[Kernel, Proofs] = {}
    for record in records:
        equal = {state: EQUAL_STEPS for state in record.states if state not in record.denied}
        proofs[record.kernel] = Proofs(equal, frozenset(record.denied))
    return Certifier(proofs)
