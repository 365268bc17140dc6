"""Which filesystem a path is on: memory-mapped files and their locks cannot be trusted on one that is shared over a network."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

FilesystemType = Callable[[Path], str]
"""Path -> type of the filesystem it is on, as the kernel calls it (`ext4`, `nfs4`, `fuse.sshfs`); `""` where it cannot be known."""

_NETWORK = re.compile(
    r"(9p|afs|beegfs|ceph|cifs|coda|fhgfs|gfs2?|glusterfs|gpfs|lustre|ncpfs|nfs[34]?|ocfs2|orangefs|panfs|pvfs2|smb[23]|smbfs|wekafs)\Z"
)
_NETWORK_FUSE = re.compile(r"fuse\.(?!fuse-overlayfs|fuseblk|ntfs|exfat|lxcfs)")
_OCTAL = re.compile(r"\\([0-7]{3})")


def filesystem_type(path: Path) -> str:
    """The type of the filesystem that holds `path` (which need not exist yet), from /proc/self/mountinfo."""
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
    return type_in_mountinfo(table, path.resolve())


def type_in_mountinfo(table: str, path: Path) -> str:
    """The type of the mount in `table` (text of a mountinfo file) that covers `path`: the deepest, of equals the last mounted."""
    best, kind = -1, ""
    for line in table.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = Path(_OCTAL.sub(lambda m: chr(int(m[1], 8)), fields[4]))
        if (path == point or point in path.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split(" ")[0]
    return kind


def is_network(kind: str) -> bool:
    """Whether a filesystem of this type is served by other hosts. FUSE types count, except those known to be local."""
    return _NETWORK.match(kind) is not None or _NETWORK_FUSE.match(kind) is not None
