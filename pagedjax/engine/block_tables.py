"""The block tables as the device has them, and what a step has to change in them.

Tables are by far the largest input of a step: one number per block of every sequence, of which a
decode step changes one in `block_size` per sequence at most. So they stay on the device, a row per
sequence, and a step brings the changes. The host keeps a mirror to find these by comparison.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

from scheduler import StepPlan


class TableChanges(NamedTuple):
    """What one step means for the tables.

    Attributes:
        rows: int32[seqs], the row of each sequence of the plan.
        edits: int32[edits, 3], (row, column, block): entries that are other than on the device.
    """

    rows: np.ndarray
    edits: np.ndarray


class TableMirror:
    """What is in the tables on the device, if every change has been sent.

    Args:
        max_seqs: rows, and most sequences of a plan.
        max_blocks: columns.
        block_size: tokens per block.
    """

    def __init__(self, max_seqs: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((max_seqs, max_blocks), np.int32)
        self._rows: dict[int, int] = {}  # by sequence
        self._free = list(range(max_seqs - 1, -1, -1))
        self._latest: tuple[list[int], np.ndarray] = [], np.zeros(0, np.int32)
        self._columns = np.arange(max_blocks, dtype=np.int32)

    def changes(self, plan: StepPlan) -> TableChanges:
        """Rows and edits for a plan; they count as sent from now on.

        Only entries that the step looks at are compared: a sequence's blocks up to its last token.
        """
        seq_ids, rows = self._latest
        if plan.seq_ids is not seq_ids:  # most steps are of the same sequences as the one before
            rows = np.array(self._rows_of(plan.seq_ids), np.int32)
            self._latest = plan.seq_ids, rows
        used = -(-plan.seq_lens() // self._block_size)
        width = int(used.max(initial=0))
        wanted = plan.block_tables[:, :width]
        differing = wanted != self._tables[rows, :width]
        differing &= self._columns[:width] < used[:, None]
        seqs, columns = np.divmod(np.flatnonzero(differing), width)  # quicker than `np.nonzero`
        edits = np.empty((len(seqs), 3), np.int32)
        edits[:, 0] = edited = rows[seqs]
        edits[:, 1] = columns
        edits[:, 2] = self._tables[edited, columns] = wanted[seqs, columns]
        return TableChanges(rows, edits)

    def _rows_of(self, seq_ids: list[int]) -> list[int]:
        missing = [seq_id for seq_id in seq_ids if seq_id not in self._rows]
        if len(missing) > len(self._free):
            present = set(seq_ids)
            for seq_id in [seq_id for seq_id in self._rows if seq_id not in present]:
                self._free.append(self._rows.pop(seq_id))
        for seq_id in missing:
            self._rows[seq_id] = self._free.pop()
        return list(map(self._rows.__getitem__, seq_ids))


def edit_tables(
    tables: Int[Array, "max_seqs max_blocks"], edits: Int[Array, "edits 3"]
) -> Int[Array, "max_seqs max_blocks"]:
    """The tables with some entries replaced. Pure; donate them, and it happens in place.

    Args:
        tables: block of each sequence's row and place.
        edits: (row, column, block), no entry twice; a row that is not there is padding.
    """
    return tables.at[edits[:, 0], edits[:, 1]].set(edits[:, 2], mode="drop")


def padded_edits(edits: np.ndarray, size: int) -> np.ndarray:
    """The same edits, followed by padding up to `size`, int32[size, 3]."""
    padded = np.full((size, 3), np.iinfo(np.int32).max, np.int32)
    padded[: len(edits)] = edits
    return padded
