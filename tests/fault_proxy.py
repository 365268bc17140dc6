"""An HTTP proxy in front of the real S3 server, which fails on purpose: what a network, a load balancer and a server under load do.

Requests pass unchanged (with the Host that the client signed) unless the plan has a fault for them. A plan is a function of the
request, so a test can aim at one call of one operation, at everything, or at a seeded share of all.
"""

from __future__ import annotations

import http.client
import random
import re
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

_HELD_S = 60.0
"""Longest that a connection which gets no answer is held: the client has given it up long before."""


class Fault(StrEnum):
    """What becomes of a request. Before the server has seen it, unless it says otherwise."""

    ERROR_500 = "500"
    SLOW_DOWN_503 = "503"
    TOO_MANY_429 = "429"
    RESET_BEFORE = "reset before the body is read"
    RESET_REQUEST = "reset in the middle of the body"
    SILENT = "read and never answered"
    STALLED_REQUEST = "not read beyond its first bytes, and never answered"
    LOST_REPLY = "carried out by the server, and reset instead of its answer"
    RESET_RESPONSE = "carried out, and reset in the middle of the answer"
    TRUNCATED = "carried out, and closed in the middle of the answer"
    STALLED_RESPONSE = "carried out, and the answer stops in its middle"
    TRICKLE = "carried out, and the answer comes a byte at a time"
    FLIPPED = "carried out, and a bit of the answer's body is another"
    EXPIRED = "credentials have expired"
    NO_BUCKET = "there is no such bucket"


PASSING = tuple(fault for fault in Fault if fault not in (Fault.EXPIRED, Fault.NO_BUCKET, Fault.FLIPPED))
"""Faults that show, and that the next attempt need not meet."""

TIMED = frozenset({Fault.SILENT, Fault.STALLED_REQUEST, Fault.STALLED_RESPONSE, Fault.TRICKLE})
"""Those that end only when the client gives up."""

_REPLIES = {
    Fault.ERROR_500: (500, "InternalError", "We encountered an internal error. Please try again."),
    Fault.SLOW_DOWN_503: (503, "SlowDown", "Please reduce your request rate."),
    Fault.TOO_MANY_429: (429, "TooManyRequests", "Too many requests."),
    Fault.EXPIRED: (400, "ExpiredToken", "The provided token has expired."),
    Fault.NO_BUCKET: (404, "NoSuchBucket", "The specified bucket does not exist"),
}


@dataclass(frozen=True)
class Request:
    """What a plan decides by.

    Attributes:
        number: of all requests, from 1.
        operation: S3's name for it, as in `PutObject`.
        key: with the prefix, without the bucket.
        exclusive: it creates only what is not there.
        access_key: whose signature it has.
    """

    number: int
    operation: str
    key: str
    exclusive: bool
    access_key: str


Plan = Callable[[Request], Fault | None]


def nothing(request: Request) -> Fault | None:
    """No faults."""
    return None


def times(count: int, fault: Fault, operation: str = "", key: str = "") -> Plan:
    """The fault for the first `count` requests of this operation with `key` in theirs."""
    left = count
    lock = threading.Lock()

    def plan(request: Request) -> Fault | None:
        nonlocal left
        if operation not in ("", request.operation) or key not in request.key:
            return None
        with lock:
            left -= 1
            return fault if left >= 0 else None

    return plan


def always(fault: Fault) -> Plan:
    """The fault for every request."""
    return lambda request: fault


def seeded(seed: int, rate: float, faults: tuple[Fault, ...] = PASSING) -> Plan:
    """One of the faults for this share of all requests, chosen by chance; the n-th request meets the same in every run."""

    def plan(request: Request) -> Fault | None:
        chance = random.Random(f"{seed}/{request.number}")
        return chance.choice(faults) if chance.random() < rate else None

    return plan


class FaultProxy:
    """The proxy, on a port the kernel chose, until `stop`.

    Attributes:
        plan: what fails from now on; may be replaced at any time.
        met: how often each fault came up.
        requests: how many came.
        holding: connections that get no answer are kept while this is true; then they are reset.
    """

    def __init__(self, endpoint: str, plan: Plan = nothing) -> None:
        self.plan = plan
        self.met: Counter[Fault] = Counter()
        self.requests = 0
        self.holding = True
        self.server = urlsplit(endpoint).netloc
        self._lock = threading.Lock()
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.proxy = self
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="fault-proxy", daemon=True)
        self._thread.start()

    def decide(self, operation: str, key: str, *, exclusive: bool, access_key: str) -> Fault | None:
        """The fault of a request that has just come."""
        with self._lock:
            self.requests += 1
            fault = self.plan(Request(self.requests, operation, key, exclusive, access_key))
            if fault is not None:
                self.met[fault] += 1
            return fault

    def stop(self) -> None:
        """Answer no more, and let go of what is held."""
        self.holding = False
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    proxy: FaultProxy
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is what this is about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _HELD_S
    server: _Server
    _fault: Fault | None

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def handle_expect_100(self) -> bool:
        """Left to `_serve`: a fault comes before the client is told to send its body."""
        return True

    def _serve(self) -> None:
        operation, key = _operation(self.command, self.path)
        exclusive = self.headers.get("If-None-Match") == "*"
        signed = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        fault = self.server.proxy.decide(operation, key, exclusive=exclusive, access_key=signed[1] if signed else "")
        if fault is Fault.RESET_BEFORE:
            return self._reset()
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        size = int(self.headers.get("Content-Length", 0))
        if fault in (Fault.RESET_REQUEST, Fault.STALLED_REQUEST):
            self.rfile.read(size // 2 if fault is Fault.RESET_REQUEST else min(size, 1))
            return self._reset() if fault is Fault.RESET_REQUEST else self._hold()
        body = self.rfile.read(size)
        if fault is Fault.SILENT:
            return self._hold()
        if fault in _REPLIES:
            return self._answer(*_error(fault, head=self.command == "HEAD"))
        self._answer(*self._forward(body), fault)
        return None

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 - the names are the base class's

    def _forward(self, body: bytes) -> tuple[int, str, list[tuple[str, str]], bytes]:
        """Status, reason, headers and body of the real server's answer."""
        connection = http.client.HTTPConnection(self.server.proxy.server, timeout=_HELD_S)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, answer.reason, answer.getheaders(), content
        finally:
            connection.close()

    def _answer(self, status: int, reason: str, headers: list[tuple[str, str]], body: bytes, fault: Fault | None = None) -> None:
        if fault is Fault.LOST_REPLY:
            return self._reset()
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(body)))
        kept = [pair for pair in headers if pair[0].lower() not in ("content-length", "transfer-encoding", "connection")]
        head = f"HTTP/1.1 {status} {reason}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in kept)
        content = f"{head}Content-Length: {length}\r\n\r\n".encode("latin-1") + body
        if fault is Fault.TRICKLE:
            return self._trickle(content)
        if fault is Fault.FLIPPED and body:
            content = content[: -len(body)] + body[:-1] + bytes([body[-1] ^ 1])
        if fault in (None, Fault.FLIPPED):
            self.wfile.write(content)
            return None
        self.wfile.write(content[: len(content) - max(len(body) // 2, 10)])
        if fault is Fault.STALLED_RESPONSE:
            return self._hold()
        if fault is Fault.RESET_RESPONSE:
            time.sleep(0.01)  # so that the client has begun to read
            return self._reset()
        self.close_connection = True
        return None

    def _trickle(self, content: bytes) -> None:
        for at in range(len(content)):
            self.wfile.write(content[at : at + 1])
            if self._is_left(0.01):
                break
        self.close_connection = True

    def _hold(self) -> None:
        """Keep the connection and do nothing, until the client goes away."""
        end = time.monotonic() + _HELD_S
        while time.monotonic() < end and not self._is_left(0.05):
            pass
        self._reset()

    def _is_left(self, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(wait_s * 1000)) or not self.server.proxy.holding

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def _error(fault: Fault, *, head: bool) -> tuple[int, str, list[tuple[str, str]], bytes]:
    status, code, message = _REPLIES[fault]
    text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    body = b"" if head else text.encode()
    return status, http.client.responses.get(status, code), [("Content-Type", "application/xml")], body


def _operation(method: str, path: str) -> tuple[str, str]:
    """S3's name of what a request does, and the key."""
    parts = urlsplit(path)
    query = parse_qs(parts.query, keep_blank_values=True)
    key = parts.path.lstrip("/").partition("/")[2]
    if "uploads" in query:
        return ("CreateMultipartUpload" if method == "POST" else "ListMultipartUploads"), key
    if "uploadId" in query:
        return {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}.get(method, method), key
    if not key:
        return {"GET": "ListObjectsV2", "HEAD": "HeadBucket"}.get(method, method), query.get("prefix", [""])[0]
    return {"GET": "GetObject", "PUT": "PutObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}.get(method, method), key
