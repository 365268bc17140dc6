"""What an export can be made of. Apart from the writing, which takes torch, so that the tool knows its options without."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """What the directory is made of."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"
