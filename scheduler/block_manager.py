"""Block tables: which blocks of the pool hold the tokens of which sequence."""

from __future__ import annotations

import numpy as np

from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.plan import Int32
from scheduler.sequence import NO_ROW, Sequence


class BlockManager:
    """Gives blocks to sequences and keeps their block tables as rows of one array.

    A row's entries behind the blocks of its sequence are the null block.

    Args:
        config: sizes of the pool and of the tables.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(config.num_blocks)
        self._block_size = config.block_size
        self._tables = np.zeros((config.max_num_seqs, config.max_blocks_per_seq), np.int32)
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still be given blocks at the same time."""
        return len(self._free_rows)

    def admit(self, seq: Sequence, *, keep_free: int) -> bool:
        """Give a waiting sequence a row and the blocks of all the tokens it has.

        Args:
            seq: the sequence; it owns no blocks and a row is free.
            keep_free: how many blocks must be free afterwards.

        Returns:
            Whether it was admitted; nothing has changed if not.
        """
        needed = -(-seq.num_tokens // self._block_size)
        if needed + keep_free > self.pool.num_free:
            return False
        seq.row = self._free_rows.pop()
        self._append(seq, self.pool.take(needed))
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
        """Take all blocks and the row of a sequence; does nothing if it has none."""
        if seq.row == NO_ROW:
            return
        self.pool.release(seq.blocks)
        self._tables[seq.row, : len(seq.blocks)] = 0
        self._free_rows.append(seq.row)
        seq.row = NO_ROW
        seq.blocks = []
        seq.capacity = 0

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

    def _append(self, seq: Sequence, blocks: list[int]) -> None:
        end = len(seq.blocks) + len(blocks)
        self._tables[seq.row, len(seq.blocks) : end] = blocks
        seq.blocks += blocks
        seq.capacity = end * self._block_size
