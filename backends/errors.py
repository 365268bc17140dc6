"""What can go wrong below the backends, in this project's own words; foreign exceptions are translated where they arise."""


class BackendError(Exception):
    """Base of all errors of a backend. The message says what happened, to which key of which backend, and what to do."""


class InvalidKey(BackendError, ValueError):
    """The key cannot be stored."""


class NotFound(BackendError, KeyError):
    """There is no object under the key."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class BackendClosed(BackendError):
    """The backend was used after `close()`."""


class Unavailable(BackendError):
    """A passing fault (time-out, reset, 5xx, expired credentials): the same call may succeed later."""


class Full(BackendError):
    """No space, quota or file-size limit left; the message names the path and the need."""


class Denied(BackendError):
    """The address cannot be used as asked: permission, a missing bucket or directory, a network filesystem."""


class Busy(BackendError):
    """Another process, or this one, has the backend open; the message names who.

    Attributes:
        holder: who, in a few words.
    """

    def __init__(self, message: str, *, holder: str = "another process") -> None:
        super().__init__(message)
        self.holder = holder


class Damaged(BackendError):
    """The backend's own files cannot be read."""


class BadOption(BackendError, ValueError):
    """An option of the backend is not what its library takes; the message names the options that were given."""


class UnknownScheme(BackendError, ValueError):
    """No backend is registered for the scheme; the message offers the nearest known one."""
