"""Division of a decode step's work among the thread blocks of a persistent kernel.

The context of every sequence is cut into tiles of keys. All tiles of the batch, one sequence after
the other, form a line that is cut into equal parts, as Stream-K does for matrix products (Osama et
al., arXiv:2301.03598). A part may begin and end inside a context, so short and long sequences
balance to within one tile, whatever the batch. What a part holds of one sequence is a segment; a
context that lies in several parts yields one partial result per segment, and the part that holds
its first tile also names it for the merge. Sequences without a context, which pad a batch, have no
tile; only their outputs are to be zeroed, and each part has an equal share of them.

Every key/value head has a worker of its own for each part, and the workers of one part run next to
each other: a block of the pool holds all heads, and is then read as a whole at about one time,
which the memory's pages and address translation reward (10 % of the bandwidth on an H200).
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Column(enum.IntEnum):
    """Columns of the parts of a plan, int32.

    Those before `MERGE_SEQ` describe one part per row. The others list the contexts that several
    parts share, in the first `min(parts, seqs)` rows, for a merge by a kernel of its own
    (`decode_merge`); the Mosaic kernel does not look at them.
    """

    PLACE = 0  # where the part begins: place of a sequence in the line
    SEQ = 1  # (the sequence there, and its length: loads that others would wait for)
    SEQ_LEN = 2
    TILE = 3  # and tile, counted from the first one that the window leaves visible
    TILES = 4  # length of the part; 0 for an idle one
    SEGMENTS = 5  # sequences that the part touches
    FIRST_PART = 6  # part that holds the first tile of the sequence where the part begins
    LATER_PARTS = 7  # how many later parts hold pieces of a context that begins in this one
    EMPTY_PLACE = 8  # place of the first sequence without a context that the part has to zero
    EMPTIES = 9  # how many of them, at consecutive places
    MERGE_SEQ = 10  # the sequence
    MERGE_PART = 11  # part that holds its first tile
    MERGE_LATER = 12  # how many later parts hold a piece of it; 0: no merge in this row


BEGIN = (Column.PLACE, Column.SEQ, Column.SEQ_LEN, Column.TILE)
"""Where a part begins."""


class DecodePlan(NamedTuple):
    """The work of one decode step, as numpy or JAX arrays.

    Attributes:
        parts: int32 `[parts, len(Column)]`.
        line: int32 `[seqs, 2]`: every sequence and its length, those with a context first.
    """

    parts: Any
    line: Any


def plan_decode(seq_lens: Any, *, tile: int, parts: int, window: int | None = None) -> DecodePlan:
    """Divide the work of one decode step; shared by all layers of the same window.

    A numpy array is planned on the host, in microseconds; a JAX array inside the traced program,
    where equal calls of several layers are computed once.

    Two contexts of 2 and 5 tiles, and a sequence that pads, in three parts:

    >>> plan = plan_decode(np.array([100, 0, 300], np.int32), tile=64, parts=3)
    >>> plan.line.tolist()  # sequence and length; the one without a context at the end
    [[0, 100], [2, 300], [1, 0]]
    >>> plan.parts[:, BEGIN].tolist()  # place in the line, sequence and length there, tile
    [[0, 0, 100, 0], [1, 2, 300, 1], [1, 2, 300, 3]]
    >>> plan.parts[:, [Column.TILES, Column.SEGMENTS]].tolist()  # part 0 goes on to sequence 2
    [[3, 2], [2, 1], [2, 1]]
    >>> plan.parts[:, [Column.FIRST_PART, Column.LATER_PARTS]].tolist()  # which lies in all three
    [[0, 2], [0, 0], [0, 0]]
    >>> plan.parts[:, [Column.EMPTY_PLACE, Column.EMPTIES]].tolist()  # part 2 zeroes sequence 1
    [[2, 0], [2, 0], [2, 1]]

    Args:
        seq_lens: int32 `[seqs]`; 0 for a padding row.
        tile: keys per tile.
        parts: rows of the plan; the kernel has `parts * kv_heads` workers.
        window: as for `paged_decode_attention`.

    Returns:
        The plan, numpy or JAX like `seq_lens`.
    """
    xp = np if isinstance(seq_lens, np.ndarray) else jnp
    line = _contexts_first(seq_lens.astype(np.int32))
    seqs, (seq_at, lens) = line.shape[0], line.T
    tiles = visible_tiles(lens, tile, window)
    seq_end = xp.cumsum(tiles).astype(np.int32)
    part = xp.arange(parts, dtype=np.int32)
    # Idle parts all lie at the end: one between others would have to leave an empty piece.
    share, rest = seq_end[-1] // parts, seq_end[-1] % parts
    start = part * share + xp.minimum(part, rest)
    length = share + (part < rest).astype(np.int32)
    part_end = start + length

    def locate(position: Any) -> tuple[Any, Any]:
        place = xp.minimum(interval_of(seq_end, position), seqs - 1)  # idle: past the end
        return place, position - (seq_end[place] - tiles[place])

    place, first = locate(start)
    last_place, last = locate(xp.maximum(part_end - 1, start))
    segments = xp.where(length > 0, last_place - place + 1, 0)
    first_part = interval_of(part_end, seq_end - tiles)  # of the sequence at every place
    later_parts = xp.where(tiles > 0, interval_of(part_end, seq_end - 1) - first_part, 0)
    begins = (last_place > place) | (first == 0)
    unfinished = begins & (last < tiles[last_place] - 1) & (length > 0)
    later = xp.where(unfinished, later_parts[last_place], 0)
    contexts = xp.sum(lens > 0, dtype=np.int32)
    empty, empty_end = (contexts + (p * (seqs - contexts)) // parts for p in (part, part + 1))
    if seqs <= parts:
        merges = [seq_at, first_part, later_parts]
    else:
        merges = [seq_at[last_place], part, later]
    merges = [xp.pad(c.astype(np.int32), (0, parts - c.shape[0])) for c in merges]
    where = (place, seq_at[place], lens[place], first, length, segments)
    columns = (*where, first_part[place], later, empty, empty_end - empty, *merges)
    return DecodePlan(xp.stack([c.astype(np.int32) for c in columns], axis=1), line)


def _contexts_first(lens: Any) -> Any:
    """Sequences and their lengths, int32 `[seqs, 2]`, those of length 0 behind the others."""
    if isinstance(lens, np.ndarray):
        seqs = np.argsort(lens == 0, kind="stable").astype(np.int32)
        return np.stack([seqs, lens[seqs]], axis=1)
    empty = (lens == 0).astype(np.int32)
    full = 1 - empty
    place = jnp.where(empty > 0, jnp.sum(full) + jnp.cumsum(empty), jnp.cumsum(full)) - 1
    # By comparing everything with everything: neither a sort nor a scatter is worth its kernels.
    seqs = jnp.arange(lens.shape[0], dtype=np.int32)
    here = place[None, :] == seqs[:, None]
    at = [jnp.sum(jnp.where(here, x[None, :], 0), axis=1, dtype=np.int32) for x in (seqs, lens)]
    return jnp.stack(at, axis=1)


def interval_of(ends: Any, position: Any) -> Any:
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
    """Tiles of keys that the newest position sees."""
    return (lens + (tile - 1)) // tile - first_tile(lens, tile, window)
