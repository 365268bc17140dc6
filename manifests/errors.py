"""What can be wrong with the bytes of a record: one class for each cause, because each calls for another remedy."""

from __future__ import annotations


class FormatError(Exception):
    """Base of every error of this layer. The message says what was expected and what was found; the caller knows the key."""


class ZeroLength(FormatError):
    """The object is there and has no bytes, as a file is after a power cut that came before its data."""


class Truncated(FormatError):
    """The object ends before the record does."""


class NotARecord(FormatError):
    """The object does not begin with the magic: something else wrote it."""


class NewerFormat(FormatError):
    """A later release wrote the record, undamaged, in a format this one cannot read.

    Attributes:
        found: format version of the record.
        known: newest format version this release reads.
    """

    def __init__(self, found: int, known: int) -> None:
        super().__init__(
            f"the record has format version {found}, this release reads up to {known}; use the release that wrote it, or a newer one"
        )
        self.found = found
        self.known = known


class BitFlip(FormatError):
    """The bytes do not match the record's own checksum."""


class WrongRecord(FormatError):
    """An undamaged record of another kind than this place should hold."""


class Malformed(FormatError, ValueError):
    """The checksum is right (or is yet to be made), but a field is missing, unknown, of the wrong type or out of range."""


class OutOfRange(FormatError, ValueError):
    """A number or an id does not fit into the object name it is meant for."""
