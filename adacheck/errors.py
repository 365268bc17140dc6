"""What the library raises: each message says what happened, where, and what to do."""


class AdacheckError(Exception):
    """Base of every error of this library."""


class ConfigError(AdacheckError, ValueError):
    """A store URI or an option cannot be used as given."""


class UnsupportedTensor(AdacheckError, TypeError):
    """A tensor, or an item of `extra`, of a kind that cannot be stored without loss."""


class StateMismatch(AdacheckError):
    """Model, optimizer or `extra` differ from the checkpoint: names what is missing, extra, of another shape or dtype."""


class NotRestored(AdacheckError):
    """`ckpt.step()` was called without `restore()` on a run that has cuts."""


class Closed(AdacheckError):
    """The checkpointer was used after `close()`."""


class ForeignRun(AdacheckError):
    """The NVMe directory and the object tier do not belong to the same run, or to copies of it that went on apart."""


class StoreBusy(AdacheckError):
    """Another process has this run's NVMe directory open; the message names its pid."""


class Superseded(AdacheckError):
    """A later incarnation of the run has started; this process may not write any more."""


class NoCut(AdacheckError):
    """There is no cut to restore, or not the one asked for."""


class DamagedCut(AdacheckError):
    """The bytes of a cut do not match their digests. `step`: the increment that holds them, `None` where it is not one's."""

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class ReplayRefused(AdacheckError):
    """Gradients cannot be replayed bit for bit here: names what differs between this machine and the recorded kernel."""


class NotDurable(AdacheckError):
    """`close()` or `drain()` could not make the last step durable."""


class Detached(AdacheckError):
    """The keeper stopped (full disk, dead thread): training goes on, checkpoints do not; names the cause."""


class ExportFailed(AdacheckError):
    """A cut could not be written for others to load; nothing is left under the name it was to have."""
