"""What s3fs, botocore, aiohttp and fsspec raise, in this project's words."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from adacheck.backends.errors import BackendError, Denied, Full, NotFound, Unavailable
from adacheck.backends.os_errors import FULL, translate_os_error


@cache
def foreign_errors() -> tuple[type[Exception], ...]:
    """Every exception that a filesystem call may raise for a reason other than a mistake of ours."""
    kinds: list[type[Exception]] = [OSError]
    with suppress(ImportError):  # without s3fs there is no S3 to fail
        botocore = import_module("botocore.exceptions")
        kinds += [botocore.BotoCoreError, botocore.ClientError, import_module("aiohttp").ClientError]
    return tuple(kinds)


_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired", "InvalidToken"})
_PASSING = _EXPIRED | {"RequestTimeTooSkewed", "RequestTimeout", "SlowDown", "ThrottlingException", "OperationAborted"}
_QUOTA = frozenset({"QuotaExceeded", "InsufficientStorage", "InsufficientCapacity", "XMinioStorageFull", "EntityTooLarge"})
_MISSING = frozenset({"NoSuchKey", "NotFound", "404", "NoSuchUpload", "NoSuchVersion"})
_TAKEN = frozenset({"PreconditionFailed", "412"})
_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ParamValidationError")


def is_taken(error: BaseException) -> bool:
    """Whether an exclusive put was refused because the key is taken."""
    return isinstance(error, FileExistsError) or _reply(error)[0] in _TAKEN


def is_expired(error: BaseException) -> bool:
    """Whether credentials have to be looked up again."""
    return _reply(error)[0] in _EXPIRED


def translate_remote_error(error: BaseException, what: str) -> BackendError:
    """The error to raise (with `from error`); `what` names the place and the action."""
    code, status = _reply(error)
    text = f"{what}: {error or type(error).__name__}" + (f" ({code})" if code else "")
    if code in _QUOTA or status == 507:
        return Full(f"{text}; free some space there, or raise the quota")
    if code in _PASSING or status in (408, 409, 429) or status >= 500:
        return Unavailable(text)
    if code == "NoSuchBucket":
        return Denied(f"{text}; make the bucket first, or check the address")
    if code in _MISSING or status == 404 or isinstance(error, FileNotFoundError):
        return NotFound(text)
    if isinstance(error, PermissionError) or 400 <= status < 500 or type(error).__name__ in _CREDENTIALS:
        return Denied(f"{text}; check the credentials and the address")
    if isinstance(error, OSError) and error.errno in FULL:
        return translate_os_error(error, what)
    return Unavailable(text)


def _reply(error: BaseException | None) -> tuple[str, int]:
    """S3's error code and HTTP status, from the error or from what caused it; empty and 0 where it was no reply."""
    while error is not None:
        response: Any = getattr(error, "response", None)
        if isinstance(response, dict):
            code = str(response.get("Error", {}).get("Code", ""))
            return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        error = error.__cause__
    return "", 0
