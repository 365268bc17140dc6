"""The keeper's apply thread: moves the shadow along the committed steps, and does what hangs on the shadow's step.

That is: certificates and proofs from comparisons, rolling bases on NVMe, pruning, and copying out for full checkpoints.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import prod

from adacheck.backends.errors import BackendError
from adacheck.cast import is_cast
from adacheck.keeper import certify, derive, proof, refresh
from adacheck.keeper.apply import Applied, Applier
from adacheck.keeper.certify import Certifier
from adacheck.keeper.full_thread import FullThread
from adacheck.keeper.log_thread import lose_nvme
from adacheck.keeper.protocol import advance, applicable, may_replace_base, prune, rebase, retirable, retire, with_derived
from adacheck.keeper.scan import held_of
from adacheck.keeper.shared import Shared
from adacheck.keeper.window import Window
from adacheck.manifests.record import Increment, StateSpec

PROOF_STEPS_KEPT = 1000
"""Steps whose proof is remembered, besides those of full checkpoints that wait for theirs."""


class ApplyThread:
    """The body of the thread is `run`; everything else is called from it."""

    def __init__(self, shared: Shared, window: Window, fulls: FullThread, log_steps: int) -> None:
        self._shared, self._window, self._fulls, self._log_steps = shared, window, fulls, log_steps
        self._applier = Applier(shared.chain.shadow)
        self._rolling = refresh.rolling((), log_steps)
        self._specs: dict[int, StateSpec] = {}
        self._castable: frozenset[derive.Tensor] = frozenset()  # of states with these specs
        self.cpu_s = 0.0

    def run(self) -> None:
        """Apply what is committed, step by step, until the keeper stops."""
        shared = self._shared
        while True:
            with shared.changed:
                shared.changed.wait_for(
                    lambda: shared.stopping or shared.failure is not None or self._next() is not None or self._full_due()
                )
                work, full_due = self._next(), self._full_due()
            if shared.failure is not None or (work is None and not full_due):
                return
            with shared.applying:
                if full_due:
                    self._take_full()
                elif work is not None:
                    self._apply(*work)
            self.cpu_s = time.thread_time()
            with shared.changed:
                shared.changed.notify_all()

    def _next(self) -> tuple[int, frozenset[int]] | None:
        return next(iter(applicable(self._shared.chain.memory, self._shared.committed)), None)

    def _full_due(self) -> bool:
        """Whether the cut that the shadow is at now is to be copied out before the shadow goes on."""
        chain = self._shared.chain
        # A new generation is at no cut before its first increment: it has no states yet.
        return bool(chain.shadow) and self._fulls.due(chain.memory.least_base, wanted=self._shared.full_wanted)

    def _apply(self, step: int, states: frozenset[int]) -> None:
        shared, chain, logged = self._shared, self._shared.chain, self._window.get(step)
        increment, born = logged.increment, held_of(logged.increment).whole
        applied = self._applier.apply(increment, lambda segment: self._window.read(step, segment), states | born, logged.comparable)
        self._applier.check_complete()
        chain.opaque = self._opaque(increment)
        self._learn(increment, applied)
        with shared.changed:
            chain.memory, _ = prune(advance(chain.memory, step, states))
        self._window.drop(step)
        self._roll(step)

    def _opaque(self, increment: Increment) -> list[tuple[str, bytes]]:
        items: dict[str, list[bytes]] = {}
        for segment in increment.opaque:
            items.setdefault(segment.tensor, []).append(self._window.read(increment.step, segment))
        return [(name, b"".join(parts)) for name, parts in items.items()]

    def _learn(self, increment: Increment, applied: Applied) -> None:
        chain = self._shared.chain
        certifier = chain.certifier
        for verdict in applied.verdicts:
            if not verdict.equal and not certifier.denied(verdict.state, verdict.kernel):
                fqn = chain.shadow[verdict.state].spec.fqn
                self._shared.report(f"a replay of {fqn} at step {increment.step} did not give the same bits: it goes whole from now on")
            certifier = certify.observe(
                certifier, verdict.state, verdict.kernel, equal=verdict.equal, gradient_nonzero=verdict.gradient_nonzero
            )
        certifier = self._find_casts(increment, certifier)
        whole = {v.spec.state: [(t.name, prod(t.shape)) for t in v.spec.tensors] for v in increment.values}
        before = proof.must_ship(chain.proof)
        after = proof.observe(chain.proof, increment.step, whole=whole, compared=applied.compared, removed=increment.removed)
        for state in proof.must_ship(after) - before:
            certifier = certify.drifted(certifier, state)
            self._shared.report(
                f"drift in {chain.shadow[state].spec.fqn}, found at step {increment.step}: somebody wrote it where nobody could see; "
                "it goes whole at the next step, and its cuts since its last equal comparison are inexact"
            )
        self._fulls.learn(after)
        with self._shared.changed:
            chain.certifier = certifier
            chain.proof = proof.forget(after, min(increment.step - PROOF_STEPS_KEPT, *self._fulls.pending_steps, increment.step))

    def _find_casts(self, increment: Increment, certifier: Certifier) -> Certifier:
        """Compare what was shipped whole with what it may be a cast of; the shadow is at the increment's step."""
        shadow, known = self._shared.chain.shadow, certifier.derivations
        if increment.values and (specs := {number: state.spec for number, state in shadow.items()}) != self._specs:
            self._specs, self._castable = specs, derive.castable(specs)
        wanted = {tensor for tensor in self._castable | known.rules.keys() if tensor[0] not in certifier.unsteady}
        shipped = derive.shipped(increment, wanted)
        equal = {
            (state, name): [s for s in sources if is_cast(shadow[state].tensors[name], shadow[s[0]].tensors[s[1]])]
            for (state, name), sources in derive.to_compare(known, increment.step, shipped, self._specs).items()
        }
        known = derive.observe(known, increment.step, shipped, equal, increment.derived)
        return replace(certifier, derivations=derive.forget(known, increment.removed) if increment.removed else known)

    def _roll(self, step: int) -> None:
        """Write the bases that are due to NVMe, and drop what no cut needs any more."""
        shared, chain = self._shared, self._shared.chain
        if not shared.nvme_alive or chain.nvme is None or chain.nvme_copy is None:
            return
        if self._rolling.turns.keys() != chain.shadow.keys():
            self._rolling = refresh.rolling([(n, s.size_bytes) for n, s in sorted(chain.shadow.items())], self._log_steps)
        allowed = {"committed": shared.committed, "durable": shared.durable}
        whole = {at: held.whole for at, held in chain.nvme.held.items() if at <= step}
        wanted = (*refresh.bases_due(self._rolling, chain.nvme.bases, step), *refresh.crowded(chain.nvme.bases, whole, step))
        due = [s for s in with_derived(chain.nvme, wanted, step) if s in chain.shadow and may_replace_base(chain.nvme, s, step, **allowed)]
        certificates = certify.certificates(chain.certifier)
        try:
            if due:
                chain.nvme_copy.roll([chain.shadow[state] for state in due], step, certificates)
            with shared.changed:
                chain.nvme = rebase(chain.nvme, due, step)
                ended = retirable(chain.nvme, **allowed)
                for state, at in ended:
                    chain.nvme = retire(chain.nvme, state, at)
                chain.nvme, dropped = prune(chain.nvme)
            chain.nvme_copy.prune(dropped, [state for state, _ in ended], certificates)
        except BackendError as error:
            lose_nvme(shared, error)

    def _take_full(self) -> None:
        shared, chain = self._shared, self._shared.chain
        step, states = chain.memory.least_base, [state for _, state in sorted(chain.shadow.items())]
        certificates = certify.certificates(chain.certifier)
        if shared.nvme_alive and chain.nvme_copy is not None:
            try:
                self._fulls.take_staged(step, states, chain.opaque, certificates, chain.nvme_copy)
            except BackendError as error:
                lose_nvme(shared, error)
                return
        else:
            self._fulls.take_copied(step, states, chain.opaque, certificates)
        shared.full_wanted = False
