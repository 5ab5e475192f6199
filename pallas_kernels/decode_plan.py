"""Division of a decode step's work among the thread blocks of a persistent kernel.

The context of every sequence is cut into tiles of keys. All tiles of the batch, one sequence after
the other, form a line that is cut into equal parts, as Stream-K does for matrix products (Osama et
al., arXiv:2301.03598). A part may begin and end inside a context, so short and long sequences
balance to within one tile, whatever the batch. What a part holds of one sequence is a segment; a
context that lies in several parts yields one partial result per segment, and the part that holds
its first tile also names it for the merge.

Every key/value head has a worker of its own for each part, and the workers of one part run next to
each other: a block of the pool holds all heads, and is then read as a whole at about one time,
which the memory's pages and address translation reward (10 % of the bandwidth on an H200).
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Column(enum.IntEnum):
    """Columns of a plan, int32.

    The first seven describe one part per row. The others list the contexts that several parts
    share, in the first `min(parts, seqs)` rows, for a merge by a kernel of its own.
    """

    SEQ = 0  # where the part begins: sequence
    SEQ_LEN = 1  # (its length, which saves the kernel a load that others wait for)
    TILE = 2  # and tile, counted from the first one that the window leaves visible
    TILES = 3  # length of the part; 0 for an idle one
    SEGMENTS = 4  # sequences that the part touches
    FIRST_PART = 5  # part that holds the first tile of the sequence where the part begins
    LATER_PARTS = 6  # how many later parts hold pieces of a context that begins in this one
    MERGE_SEQ = 7  # the sequence
    MERGE_PART = 8  # part that holds its first tile
    MERGE_LATER = 9  # how many later parts hold a piece of it; 0: no merge in this row


def plan_decode(seq_lens: Any, *, tile: int, parts: int, window: int | None = None) -> Any:
    """Divide the work of one decode step; shared by all layers of the same window.

    A numpy array is planned on the host, in microseconds; a JAX array inside the traced program,
    where equal calls of several layers are computed once.

    Args:
        seq_lens: int32 `[seqs]`; a padding row (0) counts as one tile.
        tile: keys per tile.
        parts: rows of the plan; the kernel has `parts * kv_heads` workers.
        window: as for `paged_decode_attention`.

    Returns:
        int32 `[parts, len(Column)]`, numpy or JAX like `seq_lens`.
    """
    xp = np if isinstance(seq_lens, np.ndarray) else jnp
    lens = seq_lens.astype(np.int32)
    tiles = visible_tiles(lens, tile, window)
    seq_end = xp.cumsum(tiles).astype(np.int32)
    part = xp.arange(parts, dtype=np.int32)
    # Idle parts all lie at the end: one between others would have to leave an empty piece.
    share, rest = seq_end[-1] // parts, seq_end[-1] % parts
    start = part * share + xp.minimum(part, rest)
    length = share + (part < rest).astype(np.int32)
    part_end = start + length

    def locate(position: Any) -> tuple[Any, Any]:
        seq = xp.minimum(_interval(seq_end, position), lens.shape[0] - 1)  # idle: past the end
        return seq, position - (seq_end[seq] - tiles[seq])

    seq, first = locate(start)
    last_seq, last = locate(xp.maximum(part_end - 1, start))
    segments = xp.where(length > 0, last_seq - seq + 1, 0)
    seq_part = _interval(part_end, seq_end - tiles)  # of every sequence's first tile
    seq_later = _interval(part_end, seq_end - 1) - seq_part
    begins = (last_seq > seq) | (first == 0)
    unfinished = begins & (last < tiles[last_seq] - 1) & (length > 0)
    later = xp.where(unfinished, seq_later[last_seq], 0)
    if lens.shape[0] <= parts:
        merges = [xp.arange(lens.shape[0], dtype=np.int32), seq_part, seq_later]
    else:
        merges = [last_seq, part, later]
    merges = [xp.pad(c.astype(np.int32), (0, parts - c.shape[0])) for c in merges]
    columns = (seq, lens[seq], first, length, segments, seq_part[seq], later, *merges)
    return xp.stack([c.astype(np.int32) for c in columns], axis=1)


def _interval(ends: Any, position: Any) -> Any:
    """Index of the interval that holds a position, of intervals that follow one another."""
    if isinstance(ends, np.ndarray):
        return np.searchsorted(ends, position, side="right").astype(np.int32)
    # By comparing with everything: XLA's searchsorted is a loop, which CUDA graphs do not capture.
    return jnp.sum(position[:, None] >= ends[None, :], axis=1, dtype=np.int32)


def first_tile(lens: Any, tile: int, window: int | None) -> Any:
    """Index of the first tile of keys that the newest position sees."""
    if window is None:
        return lens * 0
    xp = np if isinstance(lens, np.ndarray) else jnp
    return xp.maximum(lens - window, 0) // tile


def visible_tiles(lens: Any, tile: int, window: int | None) -> Any:
    """Tiles of keys that the newest position sees; 1 for an empty context."""
    xp = np if isinstance(lens, np.ndarray) else jnp
    return xp.maximum((lens + (tile - 1)) // tile - first_tile(lens, tile, window), 1)


def abstract_plan(parts: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a plan, for ahead-of-time compilation."""
    return jax.ShapeDtypeStruct((parts, len(Column)), jnp.int32)
