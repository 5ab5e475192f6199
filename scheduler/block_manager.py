"""Block tables: which blocks of the pool hold the tokens of which sequence."""

from __future__ import annotations

import numpy as np

from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.plan import Int32
from scheduler.prefix_index import ROOT
from scheduler.sequence import NO_ROW, Sequence


class BlockManager:
    """Gives blocks to sequences and keeps their block tables as rows of one array.

    A row's entries behind the blocks of its sequence are the null block.

    With prefix caching, a full block is indexed once its tokens are known to the host and the
    plan that computes it has been handed out; what another sequence then reads there was written
    by an earlier step. A sequence is admitted with the blocks of its longest indexed prefix.

    Args:
        config: sizes of the pool and of the tables.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self._block_size = config.block_size
        self._caching = config.prefix_caching
        self._tables = np.zeros((config.max_num_seqs, config.max_blocks_per_seq), np.int32)
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._copies: list[tuple[int, int]] = []

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still be given blocks at the same time."""
        return len(self._free_rows)

    def admit(self, seq: Sequence, *, keep_free: int) -> bool:
        """Give a waiting sequence a row and the blocks of all the tokens it has.

        The blocks of its longest cached prefix are shared, and its `num_computed` starts there.

        Args:
            seq: the sequence; it owns no blocks and a row is free.
            keep_free: how many blocks must be free afterwards.

        Returns:
            Whether it was admitted; nothing has changed if not.
        """
        pool = self.pool
        if keep_free >= pool.num_free:  # it needs a block at least, so spare the search
            return False
        hits = self._find_prefix(seq)
        num_new = -(-seq.num_tokens // self._block_size) - len(hits)
        num_free_hits = sum(not pool.num_owners(block) for block in hits)
        if num_new + num_free_hits + keep_free > pool.num_free:
            return False
        pool.share(hits)  # before any block is taken, which might evict them
        seq.row = self._free_rows.pop()
        self._append(seq, hits + pool.take(num_new))
        seq.num_computed = len(hits) * self._block_size
        seq.num_indexed = len(hits)
        if self._caching:
            seq.parent = pool.index.number(hits[-1]) if hits else ROOT
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens of a sequence in all.

        Returns:
            Whether there is room now; nothing has changed if not.
        """
        needed = -(-num_tokens // self._block_size) - len(seq.blocks)
        if needed > self.pool.num_free:
            return False
        if needed > 0:
            self._append(seq, self.pool.take(needed))
        return True

    def free(self, seq: Sequence) -> None:
        """Take all blocks and the row of a sequence; does nothing if it has none.

        The end of a prefix is of use only with its beginning, so it is to be evicted first.
        """
        if seq.row == NO_ROW:
            return
        self.index_full_blocks(seq)
        self.pool.release(reversed(seq.blocks))
        self._tables[seq.row, : len(seq.blocks)] = 0
        self._free_rows.append(seq.row)
        seq.row = NO_ROW
        seq.blocks = []
        seq.capacity = 0
        seq.parent = None

    def index_full_blocks(self, seq: Sequence) -> None:
        """Let others find the blocks of a sequence that are full of computed, known tokens."""
        size = self._block_size
        next_end = (seq.num_indexed + 1) * size
        if seq.num_known < next_end or seq.num_computed < next_end or seq.parent is None:
            return
        full = min(seq.num_computed, seq.num_known) // size
        tokens = seq.known_bytes(seq.num_indexed * size, full * size)
        seq.parent = self.pool.index.add(seq.blocks[seq.num_indexed : full], seq.parent, tokens)
        seq.num_indexed = full

    def reset_prefix_cache(self, running: list[Sequence]) -> None:
        """Forget all content, and never index what the running sequences go on computing."""
        self.pool.forget()
        for seq in running:
            seq.parent = None

    def take_copies(self) -> Int32:
        """The block copies that the plan being made has to start with.

        Returns:
            int32[num_copies, 2], source and destination; they are not returned again.
        """
        copies = np.array(self._copies, np.int32).reshape(-1, 2)
        self._copies.clear()
        return copies

    def tables(self, rows: list[int], num_tokens: int) -> Int32:
        """Copy the tables of some rows, none of which holds more than `num_tokens` tokens.

        Returns:
            int32[len(rows), max_blocks_per_seq].
        """
        # Zeroed memory comes untouched from the system: only the columns in use cost time.
        copy = np.zeros((len(rows), self._tables.shape[1]), np.int32)
        width = -(-num_tokens // self._block_size)
        copy[:, :width] = self._tables[rows, :width]
        return copy

    def table(self, seq: Sequence) -> Int32:
        """The whole row of a sequence that has one, int32[max_blocks_per_seq]; do not write."""
        return self._tables[seq.row]

    def _find_prefix(self, seq: Sequence) -> list[int]:
        """Indexed blocks with which a sequence may start.

        At least its last token is left to compute, since that is where the next one is sampled,
        and so are the prompt tokens whose logits are still wanted.
        """
        if not self._caching:
            return []
        end = min(seq.num_known, seq.num_tokens - 1)
        if seq.score_from < len(seq.prompt):
            end = min(end, seq.score_from)
        return self.pool.index.find(seq.known_bytes(0, end))

    def _append(self, seq: Sequence, blocks: list[int]) -> None:
        end = len(seq.blocks) + len(blocks)
        self._tables[seq.row, len(seq.blocks) : end] = blocks
        seq.blocks += blocks
        seq.capacity = end * self._block_size
