"""What s3fs, botocore and aiohttp raise, in this project's words."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from adacheck.backends.errors import BackendError, BadOption, Denied, Full, NotFound, Unavailable
from adacheck.backends.os_errors import FULL, translate_os_error


@cache
def foreign_errors() -> tuple[type[Exception], ...]:
    """Every exception that a filesystem call may raise for a reason other than a mistake of ours."""
    kinds: list[type[Exception]] = [OSError]
    with suppress(ImportError):  # without s3fs there is no S3 to fail
        botocore = import_module("botocore.exceptions")
        kinds += [botocore.BotoCoreError, botocore.ClientError, import_module("aiohttp").ClientError]
        kinds += [import_module("botocore.parsers").ResponseParserError]
    return tuple(kinds)


class Taken(BackendError):
    """An exclusive put found its key taken; never leaves the backend that raised it."""


_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired", "InvalidToken"})
_REPLACED = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "400", "401", "403"})
"""Codes that credentials which were replaced may cause; numbers are all that the reply to a HEAD can say."""
_PASSING = _EXPIRED | {"RequestTimeTooSkewed", "RequestTimeout", "SlowDown", "ThrottlingException", "OperationAborted"}
_QUOTA = frozenset({"QuotaExceeded", "InsufficientStorage", "InsufficientCapacity", "XMinioStorageFull", "EntityTooLarge"})
_MISSING = frozenset({"NoSuchKey", "NotFound", "404", "NoSuchUpload", "NoSuchVersion"})
_TAKEN = frozenset({"PreconditionFailed", "412"})
_SAYS_ALL = frozenset({"NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied"}) | _EXPIRED
_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ParamValidationError")
_CONFIGURATION = frozenset({"ProfileNotFound", "ConfigParseError", "ConfigNotFound", "InvalidConfigError", "ValidationError"}) | frozenset(
    {"EndpointProviderError", "InvalidS3AddressingStyleError", "InvalidProxiesConfigError", "InvalidRetryConfigurationError"}
)
"""What botocore raises, these and their subclasses, before it asks anybody."""


def may_be_expired(error: BaseException) -> bool:
    """Whether credentials that are looked up again may help."""
    code, status = _reply(error)
    return code in _EXPIRED or code in _REPLACED or status == 401


def is_beyond_end(error: BaseException) -> bool:
    """Whether a range begins at or after the end of the object."""
    return _reply(error)[1] == 416


def is_misuse(error: BaseException | None) -> bool:
    """Whether a request failed before anything was sent, by an exception that a value of the wrong type causes."""
    inner: Any = getattr(error, "kwargs", {})
    return isinstance(inner, dict) and isinstance(inner.get("error"), (TypeError, AttributeError, ValueError))


def cause_of(error: BaseException) -> BaseException | None:
    """What to raise the translated error from: nothing where it says all, and three tracebacks would bury it."""
    code, _ = _reply(error)
    return None if code in _SAYS_ALL or type(error).__name__ in _CREDENTIALS else error


def translate_remote_error(error: BaseException, what: str, limit_s: float = 0.0) -> BackendError:
    """The error to raise (with `from cause_of(error)`); `what` names the place and the action, `limit_s` the time it had."""
    code, status = _reply(error)
    if isinstance(error, FileExistsError) or code in _TAKEN:
        return Taken(what)
    if isinstance(error, TimeoutError) and not str(error):
        return Unavailable(f"{what}: not done within {limit_s:.0f} s")
    if not _CONFIGURATION.isdisjoint(kind.__name__ for kind in type(error).__mro__):
        return BadOption(f"{what}: {error}")
    text = f"{what}: {error or type(error).__name__}" + (f" ({code})" if code else "")
    if code in _QUOTA or status == 507:
        return Full(f"{text}; free some space there, or raise the quota")
    if code in _EXPIRED:
        return Unavailable(f"{text}; renew the credentials where they come from: they are looked up again at every attempt")
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
