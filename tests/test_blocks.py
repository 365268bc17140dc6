"""The pool of blocks: pieces never overlap, a block comes back only when all of it is done, an empty pool waits and then says so."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adacheck.capture.blocks import Blocks, PoolEmpty, Slice
from adacheck.capture.copier import Copier
from adacheck.keeper.submission import Piece
from adacheck.manifests.record import SEGMENT_BYTES_MAX

LARGE = st.sampled_from([SEGMENT_BYTES_MAX, SEGMENT_BYTES_MAX // 2 + 1])
SIZES = st.lists(st.one_of(st.integers(1, 300_000), LARGE), min_size=1, max_size=12)


def assert_all_are_free(blocks: Blocks) -> None:
    """Every block can be taken, and then no other."""
    blocks.deadline_s = 0.0
    taken = [blocks.reserve(SEGMENT_BYTES_MAX) for _ in range(blocks.count)]
    assert len({id(piece.block) for piece in taken}) == blocks.count
    with pytest.raises(PoolEmpty):
        blocks.reserve(SEGMENT_BYTES_MAX)


@given(SIZES)
def test_pieces_do_not_overlap_and_every_block_comes_back(sizes: list[int]) -> None:
    blocks = Blocks(count=2 * len(sizes), deadline_s=1.0)
    taken = [blocks.reserve(size) for size in sizes]
    for number, piece in enumerate(taken):
        piece.tensor().fill_(number)
    for number, (piece, size) in enumerate(zip(taken, sizes, strict=True)):
        assert piece.tensor().numel() == size and bool((piece.tensor() == number).all())
    blocks.seal()
    for piece in taken:
        blocks.give(piece)
    assert_all_are_free(blocks)


def test_small_pieces_between_large_ones_share_blocks() -> None:
    blocks = Blocks(count=12, deadline_s=0.1)
    pieces = [blocks.reserve(size) for _ in range(6) for size in (4096, SEGMENT_BYTES_MAX)]
    assert len({id(piece.block) for piece in pieces}) == 7


def test_a_block_with_an_open_piece_is_not_reused() -> None:
    blocks = Blocks(count=1, deadline_s=0.05)
    one, two = blocks.reserve(100), blocks.reserve(100)
    blocks.seal()
    blocks.give(one)
    with pytest.raises(PoolEmpty, match="no block of 1 came back"):
        blocks.reserve(100)
    assert blocks.blocked_s > 0
    blocks.give(two)
    assert blocks.reserve(100).block is one.block


def test_who_waits_for_a_block_gets_the_next_that_comes_back() -> None:
    blocks = Blocks(count=1, deadline_s=30.0)
    held = blocks.reserve(SEGMENT_BYTES_MAX)
    got: list[Slice] = []
    thread = threading.Thread(target=lambda: got.append(blocks.reserve(SEGMENT_BYTES_MAX)))
    thread.start()
    blocks.give(held)
    thread.join(timeout=30)
    assert got and got[0].block is held.block


def test_after_wait_every_piece_is_copied_and_submitted_in_order() -> None:
    blocks, submitted = Blocks(count=4, deadline_s=1.0), list[Piece]()
    copier = Copier(submitted.append)
    for turn in range(20):
        sources = [torch.full((1000 + i,), 7 * turn + i, dtype=torch.uint8) for i in range(30)]
        pieces = [Piece("gradient", i, 0, "grad", "uint8", 0, len(s), None, blocks.reserve(len(s))) for i, s in enumerate(sources)]
        for source, piece in zip(sources, pieces, strict=True):
            copier.copy(source, piece)
        copier.wait()
        assert submitted == pieces
        assert all(torch.equal(piece.where.tensor(), source) for piece, source in zip(pieces, sources, strict=True))
        blocks.seal()
        for piece in submitted:
            blocks.give(piece.where)
        submitted.clear()
    copier.stop()
    assert_all_are_free(blocks)
