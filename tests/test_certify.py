"""Certificates are given after three equal steps, taken back on one mismatch, and hold under exactly one kernel."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck.keeper.certify import DRIFTS, EQUAL_STEPS, Certifier, certificates, deny, drifted, forget, observe, reused
from adacheck.manifests.record import Certificate, Kernel

KERNEL = Kernel("torch.optim.adamw.AdamW", "fused", ("amsgrad=False",), "cpu", "2.13.0", "AVX512", 2, False)
OTHER = replace(KERNEL, implementation="loop")


def proven(*states: int, kernel: Kernel = KERNEL, certifier: Certifier | None = None) -> Certifier:
    certifier = certifier or Certifier()
    for state in states:
        for _ in range(EQUAL_STEPS):
            certifier = observe(certifier, state, kernel, equal=True, gradient_nonzero=True)
    return certifier


def test_three_equal_steps_certify_and_two_do_not() -> None:
    certifier = Certifier()
    seen = []
    for _ in range(4):
        certifier = observe(certifier, 5, KERNEL, equal=True, gradient_nonzero=True)
        seen.append(certifier.certified(5, KERNEL))
    assert seen == [False, False, True, True]
    assert not certifier.certified(6, KERNEL)


def test_equal_steps_without_a_gradient_prove_nothing() -> None:
    certifier = Certifier()
    for _ in range(10):
        certifier = observe(certifier, 5, KERNEL, equal=True, gradient_nonzero=False)
    assert not certifier.certified(5, KERNEL)


@pytest.mark.parametrize("gradient_nonzero", [True, False])
def test_one_mismatch_denies_the_state_and_revokes_all_under_that_kernel(gradient_nonzero: bool) -> None:
    certifier = proven(2, kernel=OTHER, certifier=proven(1, 2, 3))
    certifier = observe(certifier, 2, KERNEL, equal=False, gradient_nonzero=gradient_nonzero)
    assert certifier.denied(2, KERNEL)
    assert [certifier.certified(state, KERNEL) for state in (1, 2, 3)] == [False, False, False]
    assert not certifier.denied(1, KERNEL)
    assert certifier.certified(2, OTHER)


def test_denied_is_for_good_while_the_others_prove_themselves_again() -> None:
    certifier = proven(1, 2, certifier=deny(proven(1, 2), 2, KERNEL))
    assert certifier.states(KERNEL) == (1,)
    assert certifier.denied(2, KERNEL)


def test_one_drift_asks_for_new_proof_and_repeated_drift_denies_under_every_kernel() -> None:
    certifier = drifted(proven(1, 2), 1)
    assert certifier.states(KERNEL) == (2,)
    certifier = proven(1, certifier=certifier)
    assert certifier.states(KERNEL) == (1, 2)
    for _ in range(DRIFTS - 1):
        certifier = drifted(certifier, 1)
    certifier = proven(1, kernel=OTHER, certifier=proven(1, certifier=certifier))
    assert certifier.denied(1, KERNEL) and certifier.denied(1, OTHER)
    assert certifier.states(KERNEL) == (2,)
    assert certificates(certifier) == (Certificate(KERNEL, (2,), (1,)),)


def changed(kernel: Kernel, name: str) -> Kernel:
    value = getattr(kernel, name)
    new = (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int) else ("x=1",) if isinstance(value, tuple) else "x"
    fields_changed: dict[str, Any] = {name: new}
    return replace(kernel, **fields_changed)


@pytest.mark.parametrize("name", [field.name for field in fields(Kernel)])
def test_a_certificate_is_reused_only_where_the_whole_kernel_is_equal(name: str) -> None:
    again = reused(certificates(deny(proven(1, 2), 3, KERNEL)))
    again = proven(1, certifier=again)
    assert not again.certified(1, changed(KERNEL, name))
    assert not again.denied(3, changed(KERNEL, name))
    assert again.certified(1, KERNEL) and again.denied(3, KERNEL)


def test_a_restart_takes_up_verdicts_but_no_half_finished_proof() -> None:
    certifier = observe(proven(1, 4), 2, KERNEL, equal=True, gradient_nonzero=True)
    records = certificates(certifier)
    assert records == (Certificate(KERNEL, (1, 4), ()),)
    again = reused(records)
    assert again.states(KERNEL) == (1, 4)
    assert certificates(again) == records


def test_forgotten_states_start_from_nothing() -> None:
    certifier = forget(drifted(drifted(deny(proven(1, 2, kernel=OTHER), 2, KERNEL), 1), 1), [1, 2])
    assert certificates(certifier) == ()
    assert proven(1, certifier=certifier).certified(1, KERNEL)


STEPS = st.tuples(st.integers(0, 2), st.sampled_from([KERNEL, OTHER]), st.sampled_from(["equal", "zero", "unequal"]))


@given(st.lists(STEPS, max_size=40))
def test_certified_means_three_equal_steps_since_the_kernels_last_mismatch(history: list[tuple[int, Kernel, str]]) -> None:
    certifier = Certifier()
    for state, kernel, what in history:
        certifier = observe(certifier, state, kernel, equal=what != "unequal", gradient_nonzero=what == "equal")
    for kernel in (KERNEL, OTHER):
        of_kernel = [(state, what) for state, other, what in history if other == kernel]
        mismatches = [at for at, (_, what) in enumerate(of_kernel) if what == "unequal"]
        since = of_kernel[mismatches[-1] + 1 :] if mismatches else of_kernel
        for state in range(3):
            bad = (state, "unequal") in of_kernel
            assert certifier.denied(state, kernel) == bad
            assert certifier.certified(state, kernel) == (not bad and since.count((state, "equal")) >= EQUAL_STEPS)
