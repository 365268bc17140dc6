"""The demo must say "equal" when it is, and fail when anything is not: a demo that cannot fail shows nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.manifests import keys
from adacheck.tools.demo import process as demo_process
from adacheck.tools.demo import stages
from adacheck.tools.demo.comparison import differing, figures_of, joined_losses
from adacheck.tools.demo.main import app
from adacheck.tools.demo.process import DemoError, Event, Training
from adacheck.tools.demo.story import Story
from adacheck.tools.demo.task import Task, task_of

COMMAND = [sys.executable, "-c", "from adacheck.tools.demo import main; main()"]
STEPS, RESTORED = stages.STEPS, 40


def test_a_small_demo_finds_everything_equal_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--small", "--variant", "bf16", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal to the uninterrupted run") == 6
    assert "it came from the object tier" in done.stdout
    assert "adacheck-fsck found it (exit status 4" in done.stdout
    assert "NO " not in done.stdout
    assert list(tmp_path.iterdir()) == []


# A demo whose training processes are recordings, so that any one thing can be made wrong.


def witness_at(step: int) -> dict[str, str]:
    return {"parameters": f"p{step}", "optimizer": f"o{step}", "schedule, loader, random numbers": f"r{step}"}


def trained(step: int) -> Event:
    return {"event": "trained", "step": step, "loss": float(1 + 1 / step).hex(), "step_ms": 1.0, "witness": witness_at(step)}


def checkpointed(step: int) -> Event:
    payload = {"gradient": 200, "value": 0 if step > 5 else 1200, "refresh": 12, "opaque": 2}
    return {
        "event": "checkpointed",
        "step": step,
        "step_ms": 1.0,
        "committed": step - 1,
        "durable": step - 1,
        "published": 25,
        "blocked_ms": 0.5,
        "payload_bytes": payload,
        "failure": None,
    }


def restored(step: int, tier: str) -> Event:
    found = {"tier": tier, "source": "there", "replayed": [3, 31], "witness": witness_at(step)} if step else {"tier": "", "replayed": []}
    return {"event": "restored", "step": step, "restore_s": 0.1, **found}


def from_step(start: int, tier: str) -> list[Event]:
    steps = [event for step in range(start + 1, STEPS + 1) for event in (trained(step), checkpointed(step))]
    end = {"event": "finished", "step": STEPS, "witness": witness_at(STEPS), "state_bytes": 1200, "parameters": 100}
    return [restored(start, tier), *steps, end]


def recordings() -> dict[str, list[Event]]:
    return {
        "uninterrupted": [trained(step) for step in range(1, STEPS + 1)],
        "killed": from_step(0, ""),
        "restored": from_step(RESTORED, "nvme"),
        "new-host": from_step(25, "object"),
    }


class Recorded:
    """Plays a recording as if it were a process."""

    def __init__(self, events: list[Event]) -> None:
        self._events, self.killed = iter(events), False

    def events(self) -> Iterator[Event]:
        return iter(()) if self.killed else self._events

    def kill(self) -> None:
        self.killed = True

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def run_recorded(monkeypatch: pytest.MonkeyPatch, folder: Path, told: dict[str, list[Event]]) -> tuple[int, str]:
    class Kill:
        """Where the recording is killed: restores are of step 40, so its kill must come at 40."""

        def __init__(self, _: object) -> None: ...

        def randrange(self, *_: int) -> int:
            return RESTORED

        def random(self) -> float:
            return 0.0

    def play(name: str, script: str, task: Task, at: Path, environment: object) -> Recorded:
        Path(task.options.get("nvme") or at / "none").mkdir(exist_ok=True)  # type: ignore[arg-type]
        return Recorded(told[name])

    monkeypatch.setattr(stages, "random", SimpleNamespace(Random=Kill))
    monkeypatch.setattr(stages, "Training", play)
    monkeypatch.setattr("adacheck.tools.demo.main.flip_bit", lambda *_: None)
    result = CliRunner().invoke(app, ["--variant", "bf16", "--dir", str(folder)])
    assert not isinstance(result.exception, Exception), result.exception
    return result.exit_code, result.output


def test_recordings_that_agree_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, output = run_recorded(monkeypatch, tmp_path, recordings())
    assert (code, output.count("NO ")) == (0, 0), output
    assert "committed before the kill: step 39" in output
    assert "increments replayed per state: 3 to 31" in output
    assert "1/5.6" in output  # 1200 bytes of state; 202 of payload and 12 of refresh


def one(event: str, step: int, **changes: Any) -> Callable[[list[Event]], None]:
    def change(events: list[Event]) -> None:
        next(e for e in events if e["event"] == event and e["step"] == step).update(changes)

    return change


def bad_witness(step: int, name: str) -> dict[str, str]:
    return {**witness_at(step), name: "other"}


WRONG: list[tuple[str, str, Callable[[list[Event]], None], str]] = [
    ("parameter at the end", "restored", one("finished", STEPS, witness=bad_witness(STEPS, "parameters")), "in parameters"),
    ("optimizer at the end", "restored", one("finished", STEPS, witness=bad_witness(STEPS, "optimizer")), "in optimizer"),
    ("parameter at the restore", "restored", one("restored", RESTORED, witness=bad_witness(RESTORED, "parameters")), "step 40"),
    ("loss before the kill", "killed", one("trained", 12, loss=(1.5).hex()), "in step 12"),
    ("loss after the restore", "restored", one("trained", 41, loss=(1.5).hex()), "in step 41"),
    ("step skipped", "restored", lambda events: events.__delitem__(1), "in step 41"),
    ("committed step lost", "killed", one("checkpointed", RESTORED, committed=41), "committed 41, restored 40"),
    ("too few replayed", "restored", one("restored", RESTORED, replayed=[1, 19]), "at least 20 increments"),
    ("checkpoints stopped", "killed", one("checkpointed", RESTORED, failure="disk full"), "disk full"),
    ("object tier not used", "new-host", one("restored", 25, tier="nvme"), "from the object tier"),
    ("object tier wrong", "new-host", one("restored", 25, witness=bad_witness(25, "optimizer")), "restored step 25"),
    ("nothing restored", "restored", one("restored", RESTORED, witness={}), "restored step 40"),
]


@pytest.mark.parametrize(("process", "change", "said"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_anything_wrong_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process: str, change: Callable[[list[Event]], None], said: str
) -> None:
    told = recordings()
    change(told[process])
    code, output = run_recorded(monkeypatch, tmp_path, told)
    failures = output.partition("FAILED")[2]
    assert code == 1
    assert said in " ".join(failures.split()), output


# Single parts.


def a_log_with_one_increment(nvme: Path) -> str:
    key = keys.increment_slot(1, 7, 0)
    with LmdbBackend(nvme / "run" / "0") as backend:
        backend.put(keys.increment(1, 7), b"the record")
        backend.put(key, b"the segment")
    return key


@pytest.mark.parametrize(
    ("first", "second", "fails"), [(0, 4, 0), (4, 4, 1), (0, 0, 1), (0, 8, 1)], ids=["found", "false alarm", "not found", "fsck broken"]
)
def test_a_flipped_bit_must_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: int, second: int, fails: int) -> None:
    setup = stages.Setup(tmp_path, "file:///objects")
    key = a_log_with_one_increment(setup.nvme("bf16"))
    answers = iter([(first, "clean"), (second, f"{key}: digest")])
    monkeypatch.setattr(stages, "run_fsck", lambda uri, environment: next(answers))
    story = Story(Console(file=StringIO()))
    stages.flip_bit(setup, "bf16", story)
    assert len(story.failed) == fails
    with LmdbBackend(tmp_path / "bf16" / "nvme-damaged" / "run" / "0", read_only=True) as copy:
        flipped = int.from_bytes(copy.get(key)) ^ int.from_bytes(b"the segment")
    with LmdbBackend(setup.nvme("bf16") / "run" / "0", read_only=True) as original:
        assert original.get(key) == b"the segment"
    assert flipped.bit_count() == 1


def test_differing_names_what_is_missing_too() -> None:
    assert differing({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == ["b", "c"]
    assert differing({"a": "1", "d": "2"}, {"a": "1"}) == ["d"]
    assert differing(witness_at(3), witness_at(3)) == []


def test_steps_after_the_restored_one_are_those_of_the_second_process() -> None:
    assert joined_losses({1: "a", 2: "b", 3: "lost"}, 2, {3: "c"}) == {1: "a", 2: "b", 3: "c"}


def test_figures_need_a_gradient_step() -> None:
    with pytest.raises(ValueError, match="not certified"):
        figures_of([checkpointed(3)], 0.1, from_step(0, "")[-1])


def test_a_task_comes_back_from_json() -> None:
    task = Task("bf16", True, 60, "file:///x", {"nvme": "/y", "full_every": 25}, 54)
    assert task_of(task.to_json()) == task


def test_an_unknown_variant_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, ["--variant", "fp8"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "fp8" in result.output


SCRIPTS = {
    "fails": "import sys; print('{\"event\": 1}', flush=True); sys.exit('no such thing')",
    "hangs": "import time; time.sleep(600)",
}


@pytest.mark.parametrize(("script", "said"), [("fails", "no such thing"), ("hangs", "said nothing")])
def test_a_process_that_fails_or_hangs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str) -> None:
    (tmp_path / "job.py").write_text(SCRIPTS[script])
    if script == "hangs":
        monkeypatch.setattr(demo_process, "SILENCE_S", 0.2)
    environment = {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(DemoError, match=said), Training("it", "job", Task("bf16", True, 1), tmp_path, environment) as process:
        list(process.events())
    assert process.returncode is not None


def test_what_was_told_before_the_kill_is_heard(tmp_path: Path) -> None:
    said = tmp_path / "said"
    lines = "for i in range(500): print('{\"event\": %d}' % i, flush=True)"
    end = f"print('cut sho', end='', flush=True); pathlib.Path({str(said)!r}).touch(); time.sleep(600)"
    (tmp_path / "job.py").write_text(f"import pathlib, time\n{lines}\n{end}")
    with Training("it", "job", Task("bf16", True, 1), tmp_path, {"PYTHONPATH": str(tmp_path)}) as process:
        assert next(process.events()) == {"event": 0}
        while not said.exists():
            time.sleep(0.01)
        process.kill()
        assert process.returncode == -9
        assert [*process.events()] == [{"event": number} for number in range(1, 500)]
