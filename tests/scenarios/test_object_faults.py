"""Every fault of a network and a server, at every operation of the object tier: tried again within bounds, and nothing is lost.

The server is real, and a proxy before it fails as planned. Times are short here: what is tested is what happens, not how long.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from adacheck import retention
from adacheck.backends import s3_objects
from adacheck.backends.base import Backend, Created, Exists
from adacheck.backends.errors import Denied, Unavailable
from adacheck.backends.object_store import ObjectStore
from adacheck.backends.retry import Retry
from adacheck.backends.wrappers import Retrying
from adacheck.errors import AdacheckError, NotDurable
from adacheck.incarnations import read_run
from adacheck.manifests import keys
from adacheck.store import Store
from adacheck.tools.seaweed import ACCESS_KEY, RENEWED_KEY, SECRET_KEY
from tests.fault_proxy import PASSING, TIMED, Fault, FaultProxy, Request, always, nothing, seeded, times
from tests.seaweed import BUCKET, s3_server
from tests.tiny_run import Process, Snapshot, differing, reference

MIB = 1 << 20
TIMEOUT_S = 0.5
FAST = Retry(attempts=4, base_delay_s=0.01, max_delay_s=0.02)
FASTER = Retry(attempts=2, base_delay_s=0.01)
ONCE = (*PASSING, Fault.EXPIRED)
BREAKING = (Fault.RESET_BEFORE, Fault.RESET_REQUEST, Fault.LOST_REPLY, Fault.RESET_RESPONSE, Fault.TRUNCATED)
OUTAGES = (
    *(Fault.ERROR_500, Fault.RESET_BEFORE, Fault.LOST_REPLY, Fault.TRUNCATED),
    *(Fault.STALLED_REQUEST, Fault.STALLED_RESPONSE, Fault.EXPIRED, Fault.NO_BUCKET),
)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    """One for all tests of this file; each sets its own plan."""
    with pytest.MonkeyPatch.context() as patched, FaultProxy(s3_server().endpoint) as proxy:
        patched.setattr(s3_objects, "LEAST_BYTES_PER_S", 100 * MIB)
        yield proxy


@pytest.fixture(autouse=True)
def calm(proxy: FaultProxy) -> Iterator[None]:
    """No faults before and after a test."""
    proxy.plan, proxy.holding = nothing, True
    proxy.met.clear()
    yield
    proxy.plan = nothing


@pytest.fixture(scope="module")
def store(proxy: FaultProxy) -> Iterator[ObjectStore]:
    """Shared by the tests that need no store of their own: a connection takes a while to make."""
    with opened(proxy, "matrix") as store:
        yield store


@pytest.fixture(scope="module")
def expected() -> list[Snapshot]:
    return reference(60)


@cache
def session() -> Any:
    """One for all, since each parses the descriptions of the service anew."""
    return import_module("aiobotocore.session").AioSession()


def opened(proxy: FaultProxy, prefix: str = "", **options: Any) -> ObjectStore:
    """A store behind the proxy, with short times."""
    prefix = prefix or f"run-{secrets.token_hex(8)}"
    given = {**s3_server().options, "endpoint_url": proxy.endpoint, "request_timeout_s": TIMEOUT_S, "part_bytes": 5 * MIB}
    return ObjectStore(f"s3://{BUCKET}/{prefix}", **{**given, "part_retry": FASTER, "session": session(), **options})


def until(done: Callable[[], bool], what: str) -> None:
    """Wait for something that the keeper does by itself."""
    end = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > end:
            pytest.fail(f"{what} did not come about in {WAIT_S:.0f} s")
        time.sleep(0.02)


# --- one operation


def put(backend: Backend, key: str) -> None:
    assert backend.put(key, b"small") == Created()
    assert backend.get(key) == b"small"


def put_exclusively(backend: Backend, key: str) -> None:
    assert backend.put(key, b"mine", exclusive=True) == Created(), "a lost reply is no lost race"
    assert backend.put(key, b"theirs", exclusive=True) == Exists(key)
    assert backend.get(key) == b"mine"


def put_in_parts(backend: Backend, key: str) -> None:
    assert backend.put(key, [bytes([at]) * MIB for at in range(6)]) == Created()
    assert backend.get(key, (5 * MIB - 1, 5 * MIB + 1)) == b"\x04\x05"
    assert (found := backend.stat(key)) is not None and found.size_bytes == 6 * MIB


def get(backend: Backend, key: str) -> None:
    backend.put(key, bytes(range(256)) * 64)
    assert backend.get(key) == bytes(range(256)) * 64
    assert backend.get(key, (250, 260)) == bytes([250, 251, 252, 253, 254, 255, 0, 1, 2, 3])


def look(backend: Backend, key: str) -> None:
    backend.put(key, b"12345")
    assert (found := backend.stat(key)) is not None and found.size_bytes == 5


def listed(backend: Backend, key: str) -> None:
    for name in ("a", "b"):
        backend.put(f"{key}/{name}", b"")
    assert list(backend.list(f"{key}/")) == [f"{key}/a", f"{key}/b"]


def deleted(backend: Backend, key: str) -> None:
    backend.put(key, b"")
    backend.delete(key)
    assert backend.stat(key) is None


OPERATIONS: dict[str, Callable[[Backend, str], None]] = {
    "PutObject": put,
    "PutObject exclusive": put_exclusively,
    "CreateMultipartUpload": put_in_parts,
    "UploadPart": put_in_parts,
    "CompleteMultipartUpload": put_in_parts,
    "GetObject": get,
    "HeadObject": look,
    "ListObjectsV2": listed,
    "DeleteObject": deleted,
}


@pytest.mark.parametrize("fault", ONCE)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_meets_a_fault_once_is_carried_out(proxy: FaultProxy, store: ObjectStore, operation: str, fault: Fault) -> None:
    proxy.plan = times(1, fault, operation.split()[0])
    OPERATIONS[operation](Retrying(store, FAST), f"once/{secrets.token_hex(8)}")
    assert proxy.met == {fault: 1}


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_stays_is_given_up_and_said(proxy: FaultProxy, store: ObjectStore, fault: Fault) -> None:
    key = f"stays/{secrets.token_hex(8)}"
    proxy.plan = times(1000, fault, "PutObject", key)
    with pytest.raises(Unavailable, match=rf"s3://{BUCKET}/matrix: write '{key}': .*given up after 2 attempts in"):
        Retrying(store, FASTER).put(key, b"whole")
    again = 2 if fault in BREAKING else 1  # aiohttp sends once more where a connection breaks
    assert proxy.met == {fault: 2 * again}, "nobody beneath tries again by itself"
    assert store.stat(key) is None or store.get(key) == b"whole"
    proxy.plan = nothing
    put(Retrying(store, FAST), key)


@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.RESET_REQUEST, Fault.STALLED_REQUEST, Fault.TRUNCATED])
def test_an_upload_that_fails_leaves_neither_object_nor_upload(proxy: FaultProxy, store: ObjectStore, fault: Fault) -> None:
    key = f"parts/{secrets.token_hex(8)}"
    proxy.plan = times(1000, fault, "UploadPart", key)
    with pytest.raises(Unavailable, match=r"given up after 2 attempts"):
        store.put(key, [bytes(MIB)] * 6)
    assert store.stat(key) is None
    assert not [upload for upload in store.uploads() if upload.name.startswith(key)]


@pytest.mark.parametrize("operation", ["PutObject", "GetObject", "ListObjectsV2", "DeleteObject", "UploadPart"])
def test_a_bucket_that_is_gone_is_denied_at_once_and_never_an_empty_one(proxy: FaultProxy, store: ObjectStore, operation: str) -> None:
    proxy.plan = times(1000, Fault.NO_BUCKET, operation)
    with pytest.raises(Denied, match="bucket"):
        OPERATIONS[operation](Retrying(store, FAST), f"gone/{secrets.token_hex(8)}")
    assert proxy.met == {Fault.NO_BUCKET: 1}


# --- opening


@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN_503, Fault.RESET_BEFORE, Fault.SILENT, Fault.TRUNCATED, Fault.TRICKLE, Fault.EXPIRED])
def test_opening_is_tried_again(proxy: FaultProxy, fault: Fault) -> None:
    proxy.plan = times(1, fault)
    with FAST(lambda: opened(proxy)) as store:
        assert list(store.list("")) == []
    assert proxy.met == {fault: 1}


def test_a_store_opens_through_faults(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user opens it."""
    for name, value in {**s3_server().environment, "AWS_ENDPOINT_URL": proxy.endpoint}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("adacheck.store.Retry", lambda: Retry(3, 0.01))
    proxy.plan = times(2, Fault.SLOW_DOWN_503)
    with Store.open(f"s3://{BUCKET}/opened?nvme=none") as store:
        assert store.steps() == []
    proxy.plan = always(Fault.ERROR_500)
    with pytest.raises(Unavailable, match=rf"s3://{BUCKET}/opened: find the bucket: .*given up after 3 attempts"):
        Store.open(f"s3://{BUCKET}/opened?nvme=none")
    proxy.plan = always(Fault.NO_BUCKET)
    with pytest.raises(Denied, match=f"{BUCKET}.*make the bucket first"):
        Store.open(f"s3://{BUCKET}/opened?nvme=none")


# --- credentials


def test_renewed_credentials_are_taken_up_from_where_they_come_from(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a job that rewrites `~/.aws/credentials` every hour does it."""
    file = tmp_path / "credentials"

    def write(access_key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {SECRET_KEY}\n")

    def plan(request: Request) -> Fault | None:
        return Fault.EXPIRED if request.access_key == ACCESS_KEY else None

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    write(ACCESS_KEY)
    with opened(proxy, "credentials", key=None, secret=None, session=None) as store:
        backend = Retrying(store, FAST)
        put(backend, "before")
        proxy.plan = plan
        with pytest.raises(Unavailable, match=r"ExpiredToken.*renew the credentials where they come from.*given up after 4 attempts"):
            backend.put("late", b"")
        write(RENEWED_KEY)
        for operation, act in OPERATIONS.items():
            act(backend, f"after/{operation.replace(' ', '-')}")
        write(ACCESS_KEY)


# --- a run


class Run:
    """A tiny run whose object tier is behind the proxy."""

    def __init__(self, proxy: FaultProxy, root: Path, **options: object) -> None:
        self.proxy, self.root, self.options = proxy, root, options
        self.prefix = f"run-{secrets.token_hex(8)}"

    def start(self, **options: object) -> Process:
        backend = Retrying(opened(self.proxy, self.prefix), FAST)
        return Process(self.root, backend, options={"full_every": 4, "log_steps": 4, **self.options, **options})

    def restart_elsewhere(self) -> Process:
        """On a host that has no log of it."""
        shutil.rmtree(self.root / "nvme", ignore_errors=True)
        return self.start()


@pytest.fixture
def run(proxy: FaultProxy, tmp_path: Path) -> Run:
    return Run(proxy, tmp_path)


def train(process: Process, count: int) -> None:
    """So many steps, each applied, whatever the object tier does meanwhile."""
    for _ in range(count):
        process.run.train_one_step()
        process.ckpt.step()
        process.ckpt.drain()


@pytest.mark.parametrize("fault", OUTAGES)
def test_training_goes_on_through_an_outage_and_a_later_checkpoint_succeeds(
    run: Run, proxy: FaultProxy, expected: list[Snapshot], caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    process = run.start()
    process.ckpt.restore()
    for _ in range(5):
        process.step()
    assert process.ckpt.status().published == 4 and process.ckpt.status().object_failure is None
    proxy.plan = always(fault)
    train(process, 6)
    assert process.ckpt.status().durable == 11, "NVMe goes on"
    until(lambda: "full checkpoint at step" in (process.ckpt.status().object_failure or ""), "the failure in status()")
    status = process.ckpt.status()
    assert status.failure is None and status.published == 4
    assert f"s3://{BUCKET}/{run.prefix}" in (status.object_failure or "")
    proxy.plan = nothing
    train(process, 1)
    assert "next try is at step" in caplog.text, "the next step() says it"
    for _ in range(12):
        process.step()
    status = process.ckpt.status()
    assert status.object_failure is None and (status.published or 0) >= 16
    process.abandon()
    again = run.restart_elsewhere()
    step = again.ckpt.restore()
    assert step >= (status.published or 0) and not differing(again.run.snapshot(), expected[step])
    again.abandon()


def test_a_server_that_is_silent_does_not_hold_up_the_trainer(proxy: FaultProxy, tmp_path: Path, expected: list[Snapshot]) -> None:
    """The request is still under way when 40 steps are done and durable on NVMe."""
    backend = opened(proxy, request_timeout_s=WAIT_S)
    process = Process(tmp_path, Retrying(backend, FAST), options={"full_every": 4, "log_steps": 4})
    process.ckpt.restore()
    proxy.plan = always(Fault.SILENT)
    train(process, 40)
    assert proxy.met == {Fault.SILENT: 1}, "one request, unanswered"
    status = process.ckpt.status()
    assert (status.durable, status.published) == (40, None)
    proxy.plan, proxy.holding = nothing, False
    process.ckpt.close()
    again = Process(tmp_path, Retrying(opened(proxy, backend.name.rpartition("/")[2]), FAST))
    assert again.ckpt.restore() == 40 and not differing(again.run.snapshot(), expected[40])
    again.abandon()


def test_on_error_raise_raises_at_the_next_step_and_at_close(run: Run, proxy: FaultProxy) -> None:
    process = run.start(on_error="raise")
    process.ckpt.restore()
    for _ in range(3):
        process.step()
    proxy.plan = always(Fault.SLOW_DOWN_503)
    with pytest.raises(AdacheckError, match=rf"s3://{BUCKET}/{run.prefix}: .*given up after 4 attempts"):
        for _ in range(1000):
            train(process, 1)
    with pytest.raises(AdacheckError, match="reduce your request rate"):
        process.ckpt.close()


def test_close_without_nvme_says_why_the_last_step_is_not_durable(run: Run, proxy: FaultProxy) -> None:
    process = run.start(nvme="none", deadline_s=2)
    process.ckpt.restore()
    train(process, 3)
    proxy.plan = always(Fault.RESET_BEFORE)
    with pytest.raises(NotDurable, match=r"step 3 .*given up after 4 attempts"):
        process.ckpt.close()


def test_verdicts_that_could_not_be_published_are_published_later(run: Run, proxy: FaultProxy) -> None:
    process = run.start(refresh=2, keep=9)
    process.ckpt.restore()
    for _ in range(4):
        process.step()
    proxy.plan = always(Fault.ERROR_500)
    train(process, 3)
    until(lambda: process.ckpt.status().object_failure is not None, "the failure in status()")
    proxy.plan = nothing
    for _ in range(10):
        process.step()
    process.ckpt.close()
    proven = {point.step: point.proven for point in run.start().store.steps() if "object" in point.tiers}
    assert proven[4], proven


# --- restoring


@pytest.fixture
def finished(run: Run) -> Run:
    """A run of 9 steps, with full checkpoints at 4 and 8, whose host is gone."""
    process = run.start()
    process.ckpt.restore()
    for _ in range(9):
        process.step()
    process.abandon()
    return run


def test_a_restore_through_faults_gives_the_newest_cut(finished: Run, proxy: FaultProxy, expected: list[Snapshot]) -> None:
    process = finished.restart_elsewhere()
    proxy.plan = seeded(3, 0.2, tuple(fault for fault in PASSING if fault not in TIMED))
    assert process.ckpt.restore() == 8
    assert not differing(process.run.snapshot(), expected[8])
    assert proxy.met
    process.abandon()


@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.TRUNCATED, Fault.STALLED_RESPONSE, Fault.NO_BUCKET])
def test_an_older_cut_never_takes_the_place_of_one_that_is_out_of_reach(
    finished: Run, proxy: FaultProxy, expected: list[Snapshot], fault: Fault
) -> None:
    """It would cut off the newer one for good."""
    process = finished.restart_elsewhere()
    proxy.plan = times(1000, fault, "GetObject", "/step-000000000008-")
    with pytest.raises(
        (Unavailable, Denied), match=r"the cut at step 8 cannot be read: .*try again when .* answers, or name an older step"
    ):
        process.ckpt.restore()
    process.abandon()
    proxy.plan = nothing
    process = finished.restart_elsewhere()
    assert process.ckpt.restore() == 8 and not differing(process.run.snapshot(), expected[8])
    process.abandon()


def test_bytes_that_were_wrong_on_the_way_are_read_again(finished: Run, proxy: FaultProxy, expected: list[Snapshot]) -> None:
    """Neither a version record nor a shard counts as damaged, and gives way to an older one, because of one bad answer."""
    process = finished.restart_elsewhere()
    for key in ("versions/i00000001/", "shard-"):
        proxy.plan = times(1, Fault.FLIPPED, "GetObject", key)
        proxy.met.clear()
        if key == "shard-":
            assert process.ckpt.restore() == 8 and not differing(process.run.snapshot(), expected[8])
        else:
            assert max(point.step for point in process.store.steps()) == 8
        assert proxy.met == {Fault.FLIPPED: 1}
    process.abandon()


def test_bytes_that_are_wrong_every_time_give_way_to_an_older_cut(finished: Run, proxy: FaultProxy, expected: list[Snapshot]) -> None:
    process = finished.restart_elsewhere()
    proxy.plan = times(1000, Fault.FLIPPED, "GetObject", "/step-000000000008-")
    assert process.ckpt.restore() == 4 and not differing(process.run.snapshot(), expected[4])
    process.abandon()


def test_unfinished_uploads_of_earlier_attempts_are_ended(finished: Run, proxy: FaultProxy) -> None:
    """One whose first reply was lost has an id that its own process never learned; nobody else could end it."""
    with opened(proxy, finished.prefix) as store:
        for key in (keys.full_folder(1, 4, "old"), keys.full_folder(1, 8, "retried"), keys.full_folder(1, 9, "underway"), "elsewhere"):
            proxy.plan = times(1, Fault.LOST_REPLY, "CreateMultipartUpload")
            with pytest.raises(Unavailable):
                store.put(f"{key}/{keys.shard_name(1, 1)}", [bytes(MIB)] * 6)
        assert len(list(store.uploads())) == 4
        run = read_run(store)
        assert run is not None
        retention.prune(store, run.run, 1, 3)
        assert {upload.folder.rpartition("/")[2] for upload in store.uploads()} == {"elsewhere", "step-000000000009-underway"}


def test_an_older_step_can_be_named_instead(finished: Run, proxy: FaultProxy, expected: list[Snapshot]) -> None:
    process = finished.restart_elsewhere()
    proxy.plan = times(1000, Fault.ERROR_500, "GetObject", "/step-000000000008-")
    assert process.ckpt.restore(step=4) == 4 and not differing(process.run.snapshot(), expected[4])
    process.abandon()
