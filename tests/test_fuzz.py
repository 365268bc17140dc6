"""Random training scripts, killed at random steps: what is restored has every byte of what was live at that step.

Each program runs once without this project. The same program then runs under it, dies, is restored into fresh objects of another
seed, and goes on: at every step all it holds must be what the first run held. What fails prints as the program that fails;
`HYPOTHESIS_PROFILE=search` looks for others, and shrinks what it finds.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from adacheck.store import Store
from tests.random_programs import Sequence, programs, sequences
from tests.random_training import Program
from tests.training import Job, kill

SHARES, EXAMPLES = 4, 80
SHARED_MEMORY = Path("/dev/shm")
"""Memory that looks like a disk, so that an fsync costs nothing."""

SEARCHING = os.environ.get("HYPOTHESIS_PROFILE") == "search"
PHASES = tuple(Phase) if SEARCHING else (Phase.generate,)


@pytest.mark.slow
@pytest.mark.timeout(900)
# torch's complaint of a script whose optimizer rests in its first iteration, at a milestone of SequentialLR
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before")
@pytest.mark.parametrize("share", range(SHARES))
def test_a_random_script_survives_its_crashes(share: int, caplog: pytest.LogCaptureFixture) -> None:
    @seed(share)
    @settings(max_examples=EXAMPLES, database=None, phases=PHASES, suppress_health_check=list(HealthCheck))
    @given(program=programs(), sequence=sequences())
    def survives(program: Program, sequence: Sequence) -> None:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder, program.surroundings():
            caplog.clear()
            survive(f"file://{folder}/run", program, sequence)
            assert [line for line in caplog.messages if "did not give the same bits" in line] == []

    survives()


def survive(uri: str, program: Program, sequence: Sequence) -> None:
    """Train, die and restore as `sequence` says; every byte is compared at every step."""
    expected = undisturbed(program, sequence.crashes[-1])
    promised = last = 0
    for life, crash in enumerate(sequence.crashes):
        with Store.open(uri, **sequence.options) as store:
            begin = newest(store)
            assert promised <= begin <= last, f"promised was step {promised}, done {last}"
            job = program.job(100 + life if begin else 1, begin)
            ckpt = job.attach(store)
            try:
                assert ckpt.restore() == begin
                compare(job, expected[begin], f"restored step {begin}")
                for n in range(begin + 1, crash + 1):
                    program.iterate(job, n)
                    ckpt.step()
                    compare(job, expected[n], f"trained step {n}")
                    if n in sequence.drains:
                        ckpt.drain()
                    if n == sequence.full:
                        ckpt.publish_full()
                assert not any(ckpt.inexact(step) for step in range(begin, crash + 1)), "a comparison of the keeper's found a difference"
                assert ckpt.status().failure is None
                if sequence.torn:
                    program.iterate(job, crash + 1)
                promised, last = ckpt.status().durable, crash
            finally:
                kill(ckpt)
    with Store.open(uri, **sequence.options) as store:
        assert promised <= newest(store) <= last
        step = [0, *(point.step for point in store.steps())][-1 - min(sequence.back, len(store.steps()))]
        if step == 0:
            return
        job = program.job(200, step)
        ckpt = job.attach(store)
        try:
            assert ckpt.restore(step) == step
            compare(job, expected[step], f"restored step {step}")
        finally:
            kill(ckpt)


def undisturbed(program: Program, last: int) -> list[dict[str, str]]:
    """What the script holds after each iteration where nobody looks on."""
    job = program.job(1)
    expected = [job.bits()]
    for n in range(1, last + 1):
        program.iterate(job, n)
        expected.append(job.bits())
    return expected


def newest(store: Store) -> int:
    """The newest restore point, 0 for none."""
    return max((point.step for point in store.steps()), default=0)


def compare(job: Job, expected: dict[str, str], when: str) -> None:
    """Every name and every byte."""
    found = job.bits()
    assert [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)] == [], when
