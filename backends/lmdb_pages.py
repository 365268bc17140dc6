"""Reads an LMDB data file page by page, with plain reads, before it is mapped.

LMDB trusts its pages: a file cut short is a SIGBUS, and a damaged tree page an abort or a wild read, all of which kill the
trainer. So the tree is walked once when a store is opened: a few hundred pages, since values live outside of it. The
bytes of values are not looked at; their digests are with whoever refers to them.

Layout: LMDB 0.9 (data format 1) on a little-endian machine with 64-bit page numbers.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from adacheck.backends.base import is_key
from adacheck.backends.errors import Damaged

_HEADER = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_NODE = struct.Struct("<HHHH")
_MAGIC, _FORMAT, _EMPTY = 0xBEEFC0DE, 1, 2**64 - 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE, _DIRTY = 1, 2, 4, 8, 0x10
_BIG_DATA, _DEPTH_MAX = 1, 32


@dataclass(frozen=True, slots=True)
class Tree:
    """One of the two B-trees of a file (free pages, content), as its meta page describes it."""

    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    root: int


@dataclass(frozen=True, slots=True)
class Meta:
    """One of the two meta pages: the state after one transaction."""

    page_bytes: int
    trees: tuple[Tree, Tree]
    last_page: int
    transaction: int


def check_header(path: Path) -> None:
    """Check the two meta pages only, which is all that LMDB reads when it opens a file.

    Raises:
        Damaged: one of them is absent or none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _metas(descriptor, path)
    finally:
        os.close(descriptor)


def check_file(path: Path, transaction: int | None = None) -> bool:
    """Check that every page which LMDB could follow in the file is there and well-formed.

    Args:
        transaction: the one to check (a reader holds it open); otherwise the newest, and nobody may be writing.

    Returns:
        `False` if that transaction's meta page is there no more, because two newer ones were committed meanwhile.

    Raises:
        Damaged: it is not; the message says where.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        metas = _metas(descriptor, path)
        chosen = max(metas, key=lambda meta: meta.transaction)
        if transaction is not None:
            matching = [meta for meta in metas if meta.transaction == transaction]
            if not matching:
                return False
            chosen = matching[0]
        free, content = chosen.trees
        _Walk(descriptor, path, chosen, named=False).tree(free)
        _Walk(descriptor, path, chosen, named=True).tree(content)
        return True
    finally:
        os.close(descriptor)


def _metas(descriptor: int, path: Path) -> list[Meta]:
    """The two meta pages. Both are written when the file is made, and later each in place, in one sector."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        raise Damaged(f"{path} has no bytes; restore from another tier and move the directory away")
    first = _meta(os.pread(descriptor, 256, 0), path, 0)
    return [first, _meta(os.pread(descriptor, 256, first.page_bytes), path, 1)]


def _meta(page: bytes, path: Path, number: int) -> Meta:
    if len(page) < 16 + _META.size + 2 * _TREE.size + 16:
        raise Damaged(f"{path} ends within meta page {number}; restore from another tier and move the directory away")
    flags = _HEADER.unpack_from(page)[2]
    magic, version, _, map_bytes = _META.unpack_from(page, 16)
    if not flags & _META_PAGE or magic != _MAGIC:
        raise Damaged(f"{path} is no LMDB file: meta page {number} has flags {flags:#x} and magic {magic:#x}")
    if version != _FORMAT:
        raise Damaged(f"{path} has LMDB data format {version}, this version reads {_FORMAT}")
    at = 16 + _META.size
    fields = [_TREE.unpack_from(page, at + i * _TREE.size) for i in (0, 1)]
    last_page, transaction = struct.unpack_from("<QQ", page, at + 2 * _TREE.size)
    page_bytes = fields[0][0]
    if page_bytes < 512 or page_bytes > 65536 or page_bytes & (page_bytes - 1):
        raise Damaged(f"{path} meta page {number} names a page size of {page_bytes}")
    if (last_page + 1) * page_bytes > map_bytes:  # LMDB would make its map as large as that, and write behind it
        raise Damaged(f"{path} meta page {number} says its last page is {last_page}, which no map of {map_bytes} bytes has")
    free, content = (Tree(f[2], f[3], f[4], f[5], f[7]) for f in fields)
    return Meta(page_bytes, (free, content), last_page, transaction)


class _Walk:
    """One pass over one tree; counts its pages, which the meta page knows too. `named`: its keys are names, in their order."""

    def __init__(self, descriptor: int, path: Path, meta: Meta, *, named: bool) -> None:
        self._descriptor, self._path, self._meta, self._named = descriptor, path, meta, named
        self._last, self._at_branch = b"", False
        self._size = os.fstat(descriptor).st_size
        self._pages: Counter[str] = Counter()

    def tree(self, tree: Tree) -> None:
        if tree.root != _EMPTY:
            if not 0 < tree.depth <= _DEPTH_MAX:
                raise self._bad(tree.root, f"the tree has depth {tree.depth}")
            self._node_page(tree.root, tree.depth)
        found = (self._pages["branch"], self._pages["leaf"], self._pages["overflow"])
        expected = (tree.branch_pages, tree.leaf_pages, tree.overflow_pages)
        if found != expected:
            raise self._bad(tree.root, f"the tree has {found} branch, leaf and overflow pages where {expected} were written")

    def _bad(self, number: int, what: str) -> Damaged:
        return Damaged(f"{self._path} is damaged at page {number}: {what}; restore from another tier and move the directory away")

    def _read(self, number: int, pages: int, size: int) -> bytes:
        end = (number + pages) * self._meta.page_bytes
        if not 1 < number <= self._meta.last_page or number + pages > self._meta.last_page + 1 or end > self._size:
            raise self._bad(number, f"{pages} pages from there reach beyond the file, which has {self._size} bytes: cut short?")
        return os.pread(self._descriptor, size, number * self._meta.page_bytes)

    def _node_page(self, number: int, levels: int) -> None:
        """Check a branch or leaf page and all below it; `levels` is how many there must be, this one included."""
        page = self._read(number, 1, self._meta.page_bytes)
        own, _, flags, lower, upper = _HEADER.unpack_from(page)
        expected = _LEAF if levels == 1 else _BRANCH
        if own != number or flags & ~_DIRTY != expected or not 16 <= lower <= upper <= len(page) or lower % 2:
            raise self._bad(number, f"header (page {own}, flags {flags:#x}, free space {lower}-{upper}) of no page of level {levels}")
        self._pages["leaf" if levels == 1 else "branch"] += 1
        if self._pages["leaf"] + self._pages["branch"] > self._meta.last_page:
            raise self._bad(number, "the tree runs in a circle")
        for at in struct.unpack_from(f"<{(lower - 16) // 2}H", page, 16):
            if not upper <= at <= len(page) - _NODE.size:
                raise self._bad(number, f"a node at offset {at}, outside of {upper}-{len(page)}")
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, at)
            if self._named and (levels == 1 or key_bytes):  # the first of a branch page is empty
                self._key(number, page[at + _NODE.size : at + _NODE.size + key_bytes], leaf=levels == 1)
            if levels > 1:
                self._node_page(low | high << 16 | node_flags << 32, levels - 1)
            else:
                self._leaf_node(number, page, at + _NODE.size + key_bytes, low | high << 16, node_flags)

    def _key(self, number: int, key: bytes, *, leaf: bool) -> None:
        """Names rise from node to node; that of a branch is the first below it. Else a name would be listed and never be found."""
        rises = key > self._last if leaf and not self._at_branch else key >= self._last
        if not rises or (leaf and not is_key(key.decode("ascii", "replace"))):
            raise self._bad(number, f"the name {key!r} after {self._last!r}")
        self._last, self._at_branch = key, not leaf

    def _leaf_node(self, number: int, page: bytes, data_at: int, data_bytes: int, flags: int) -> None:
        stored_here = 8 if flags & _BIG_DATA else data_bytes
        if flags & ~_BIG_DATA or data_at + stored_here > len(page):
            raise self._bad(number, f"a value of {data_bytes} bytes with flags {flags:#x} does not fit")
        if not flags & _BIG_DATA:
            return
        (first,) = struct.unpack_from("<Q", page, data_at)
        pages = (15 + data_bytes) // self._meta.page_bytes + 1
        own, _, kind, low, high = _HEADER.unpack_from(self._read(first, pages, _HEADER.size))
        if own != first or kind & ~_DIRTY != _OVERFLOW or low | high << 16 != pages:
            raise self._bad(first, f"header (page {own}, flags {kind:#x}) of no value of {pages} pages")
        self._pages["overflow"] += pages
