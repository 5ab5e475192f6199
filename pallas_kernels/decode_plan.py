"""Division of a decode step's work among the thread blocks of a persistent kernel.

The context of every (sequence, key/value head) is cut into tiles of keys. All tiles of the batch,
in the order sequence, head, tile, form one line that is cut into `workers` equal parts, as Stream-K
does for matrix products (Osama et al., arXiv:2301.03598). A part may begin and end inside a
context, so short and long sequences balance to within one tile, whatever the batch. What a worker
has of one (sequence, head) is a segment; a context that lies in several parts yields one partial
result per segment, and the worker that holds its first tile also names it for the merge.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Column(enum.IntEnum):
    """Columns of a plan: one row per worker, int32."""

    SEQ = 0  # where the part begins: sequence,
    HEAD = 1  # key/value head,
    TILE = 2  # and tile, counted from the first one that the window leaves visible
    TILES = 3  # length of the part; 0 for an idle worker
    SEGMENTS = 4  # (sequence, head) pairs that the part touches
    MERGE_SEQ = 5  # the context that begins in this part and ends in a later one
    MERGE_HEAD = 6
    MERGE_PARTS = 7  # later parts that hold a piece of it; 0 if there is no such context


def plan_decode(
    seq_lens: Any, *, kv_heads: int, tile: int, workers: int, window: int | None = None
) -> Any:
    """Divide the work of one decode step; shared by all layers of the same shape.

    A numpy array is planned on the host, in microseconds; a JAX array inside the traced program,
    where equal calls of several layers are computed once.

    Args:
        seq_lens: int32 `[seqs]`; a padding row (0) counts as one tile.
        kv_heads: key/value heads of one layer.
        tile: keys per tile.
        workers: thread blocks of the kernel.
        window: as for `paged_decode_attention`.

    Returns:
        int32 `[workers, len(Column)]`, numpy or JAX like `seq_lens`.
    """
    xp = np if isinstance(seq_lens, np.ndarray) else jnp
    lens = seq_lens.astype(np.int32)
    tiles = visible_tiles(lens, tile, window)
    zero = xp.zeros(1, np.int32)
    seq_end = xp.cumsum(tiles * kv_heads).astype(np.int32)
    seq_start = xp.concatenate([zero, seq_end[:-1]])
    worker = xp.arange(workers, dtype=np.int32)
    share, rest = seq_end[-1] // workers, seq_end[-1] % workers
    start = worker * share + xp.minimum(worker, rest)
    length = share + (worker < rest).astype(np.int32)

    def locate(position: Any) -> tuple[Any, Any, Any]:
        # A search by comparing with everything: XLA's searchsorted is a loop, which CUDA graphs
        # do not capture.
        seq = xp.sum(position[:, None] >= seq_end[None, :], axis=1).astype(np.int32)
        seq = xp.minimum(seq, lens.shape[0] - 1)  # idle workers lie past the end
        offset = position - seq_start[seq]
        return seq, offset // tiles[seq], offset % tiles[seq]

    def worker_of(position: Any) -> Any:
        long_end = rest * (share + 1)  # the first `rest` parts are one tile longer
        short = rest + (position - long_end) // xp.maximum(share, 1)
        return xp.where(position < long_end, position // (share + 1), short)

    seq, head, first_tile = locate(start)
    last = xp.maximum(start + length - 1, 0)
    last_seq, last_head, last_tile = locate(last)
    segments = (last_seq - seq) * kv_heads + last_head - head + 1
    unfinished = (last_tile < tiles[last_seq] - 1) & ((segments > 1) | (first_tile == 0))
    context_end = seq_start[last_seq] + (last_head + 1) * tiles[last_seq]
    parts = xp.where(unfinished & (length > 0), worker_of(context_end - 1) - worker, 0)
    columns = (
        seq, head, first_tile, length, xp.where(length > 0, segments, 0), last_seq, last_head, parts
    )  # fmt: skip
    return xp.stack([c.astype(np.int32) for c in columns], axis=1)


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


def abstract_plan(workers: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a plan, for ahead-of-time compilation."""
    return jax.ShapeDtypeStruct((workers, len(Column)), jnp.int32)
