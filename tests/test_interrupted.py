"""Ctrl-C at any line: the training goes on, checkpoints begin again, nothing stays locked, and what is restored is what was live."""

from __future__ import annotations

from pathlib import Path

import pytest

from adacheck import background, checkpointer, generations, reattach, start
from adacheck.backends import gate
from adacheck.capture import copier
from adacheck.errors import Detached, NotDurable
from adacheck.keeper import driver
from adacheck.keeper.driver import Keeper
from tests.interrupts import interrupted, lines_of
from tests.tiny_run import Process, differing

MODULES = (background, checkpointer, generations, reattach, driver, copier)
STEPS_MAX, WAIT_S = 100, 0.2


def until_it_works(process: Process) -> None:
    """Train on until every step is checkpointed again."""
    for _ in range(STEPS_MAX):
        process.step(drain=False)
        generations = process.ckpt._generations
        if (given_up := generations._given_up) is not None and given_up.keeper is generations.keeper:  # no step waits for its threads
            for thread in given_up.keeper._threads:
                if thread.is_alive():
                    thread.join(WAIT_S)
            if given_up.taking is not None:
                given_up.taking.done.wait(WAIT_S)
        if process.ckpt.status().failure is None:
            process.step(drain=False)
            process.ckpt.drain()
            if process.ckpt.status().committed == process.ckpt.status().step:
                return
    raise AssertionError(f"checkpoints never began again: {process.ckpt.status()}")


def restores_what_is_live(process: Process) -> None:
    last = process.ckpt.status().step
    process.ckpt.close()
    again = Process(process.root)
    assert again.ckpt.restore() == last and not differing(again.run.snapshot(), process.run.snapshot())
    again.ckpt.close()


def begin_again(process: Process) -> None:
    assert process.ckpt._keeper is not None
    process.ckpt._keeper.shared.fail(Detached("as after an interrupt in mid-step"))
    until_it_works(process)


def test_at_any_line_of_a_step_and_of_beginning_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While checkpoints begin again after a first one, and in the steps after that."""
    monkeypatch.setattr(generations, "RETRY_STEPS", 1)
    process = Process(tmp_path, options={"full_every": 1000})
    process.ckpt.restore()
    for _ in range(3):
        process.step()
    lines = lines_of(lambda: begin_again(process), MODULES)
    assert {name for name, _ in lines} == {f"{module.__name__.rpartition('.')[2]}.py" for module in MODULES}
    for line in sorted(lines):
        interrupted(lambda: begin_again(process), line, MODULES)
        until_it_works(process)
    restores_what_is_live(process)


def test_while_a_keeper_starts_and_then_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread of it runs, the others never will: `close()` says what is lost, and the store is free."""
    monkeypatch.setattr(generations, "RETRY_STEPS", 1)
    process = Process(tmp_path)
    process.ckpt.restore()
    for _ in range(3):
        process.step()
    lines = sorted(lines_of(lambda: begin_again(process), [driver]))
    first = Keeper.start.__code__.co_firstlineno
    (second_thread,) = [line for line in lines if line[1] == first + 3]
    assert interrupted(lambda: begin_again(process), second_thread, [driver])
    with pytest.raises(NotDurable, match="the keeper's start was interrupted"):
        process.ckpt.close()
    again = Process(tmp_path)
    assert again.ckpt.restore() > 0
    again.ckpt.close()


def test_at_any_line_of_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called again, or training goes on."""
    monkeypatch.setattr(generations, "RETRY_STEPS", 1)
    modules = [checkpointer, generations, driver]
    first = Process(tmp_path)
    first.ckpt.restore()
    for _ in range(3):
        first.step()
    first.ckpt.close()
    expected = [first.run.snapshot()]
    last = first.ckpt.status().step
    looking = Process(tmp_path)
    lines = sorted(lines_of(looking.ckpt.restore, modules))
    looking.ckpt.close()
    for line in lines:
        process = Process(tmp_path)
        assert interrupted(process.ckpt.restore, line, modules)
        if process.ckpt._keeper is None:
            assert process.ckpt.restore() == last
        assert process.ckpt.status().step == last and process.run.snapshot() in expected, line
        until_it_works(process)
        expected, last = [process.run.snapshot()], process.ckpt.status().step
        process.ckpt.close()


def test_at_any_line_of_close(tmp_path: Path) -> None:
    """Called again, it releases what is left; a first one that only waits is ended by the first Ctrl-C."""
    modules = [checkpointer, generations, driver, start, gate]

    def trained() -> Process:
        process = Process(tmp_path)
        process.ckpt.restore()
        process.step()
        return process

    for line in sorted(lines_of(trained().ckpt.close, modules)):
        process = trained()
        interrupted(process.ckpt.close, line, modules)
        process.ckpt.close()
        process.ckpt.close()
    restores_what_is_live(trained())
