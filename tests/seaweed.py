"""The one S3 server of a test process: started at the first test that needs it, stopped when the process ends."""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from pathlib import Path

from adacheck.tools.seaweed import BUCKET as BUCKET
from adacheck.tools.seaweed import Seaweed


@cache
def s3_server() -> Seaweed:
    """The server, with the bucket `BUCKET`; `options` of it are what s3fs (and `ObjectStore`) needs to reach it."""
    server = Seaweed(Path(tempfile.mkdtemp(prefix="adacheck-s3-")))
    atexit.register(server.stop)
    return server
