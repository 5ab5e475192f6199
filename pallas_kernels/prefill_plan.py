"""Work list of the ragged prefill kernels: which tile of query rows to compute, longest first.

Every sequence's rows are cut into tiles of `tile_rows` rows of the flat query array; one tile and
one query head are one work item. The list depends on the lengths alone, so one list serves all
layers of a step: an engine makes it on the host with NumPy in microseconds, and inside a jitted
function XLA computes it once for all layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_plan import interval_of

# Columns of a work list.
ROW = 0  # first row of the tile in the flat query array, a multiple of the alignment
LOW = 1  # first row of the tile that the sequence owns
HIGH = 2  # end of the rows of the tile that the sequence owns
OFFSET = 3  # position in the sequence = row in the flat array + OFFSET
SEQ = 4  # row of the block table
SEQ_LEN = 5  # cached positions of the sequence; 0 for padding
COUNT = 6  # number of tiles in use, the same in every row of the list
COLUMNS = 8

# Copies of swizzled tiles by the tensor copy engine start at multiples of 8 rows. A sequence that
# starts between them shares the leading rows of its first tile with its neighbour, who owns and
# writes them.
ROW_ALIGNMENT = 8


def num_tiles(tokens: int, seqs: int, tile_rows: int, alignment: int) -> int:
    """Static length of a work list: enough tiles for any split of `tokens` among `seqs`."""
    return -(-(tokens + (seqs + 1) * (alignment - 1)) // tile_rows) + seqs + 1


def plan_prefill(
    seq_lens: np.ndarray,
    query_start: np.ndarray,
    *,
    tokens: int,
    tile_rows: int,
    alignment: int = ROW_ALIGNMENT,
    single_rows: bool = True,
    causal: bool = True,
) -> np.ndarray:
    """Make the work list on the host.

    Args:
        seq_lens: int32 `[seqs]`, cached positions per sequence, new tokens included.
        query_start: int32 `[seqs + 1]`, rows of each sequence in the flat query array.
        tokens: rows of the flat query array; rows past `query_start[-1]` become padding tiles.
        tile_rows: query rows of one tile.
        alignment: a tile's first row is a multiple of this.
        single_rows: False leaves out the sequences that own exactly one row, for a caller that
            computes them in another way; nobody writes their rows then.
        causal: False lets every row see all positions of its sequence, whose number must then be a
            multiple of the tile of keys: the kernels only mask what lies behind a row.

    Returns:
        int32 `[num_tiles(tokens, seqs, tile_rows, alignment), 8]`; the tiles in use come first,
        ordered by falling number of visible positions.
    """
    lens, start = np.asarray(seq_lens), np.asarray(query_start)
    return _plan(np, lens, start, tokens, tile_rows, alignment, single_rows, causal)


def plan_prefill_traced(
    seq_lens: jax.Array,
    query_start: jax.Array,
    *,
    tokens: int,
    tile_rows: int,
    alignment: int = ROW_ALIGNMENT,
    single_rows: bool = True,
    causal: bool = True,
) -> jax.Array:
    """`plan_prefill` for traced lengths, inside a jitted function."""
    return _plan(jnp, seq_lens, query_start, tokens, tile_rows, alignment, single_rows, causal)


def _plan(
    xp: Any,
    seq_lens: Any,
    query_start: Any,
    tokens: int,
    tile_rows: int,
    alignment: int,
    single_rows: bool,
    causal: bool,
) -> Any:
    seqs = seq_lens.shape[0]
    length = num_tiles(tokens, seqs, tile_rows, alignment)
    # The rows past the last sequence form one more sequence, of length 0: padding.
    start = xp.minimum(query_start, xp.int32(tokens))
    end = xp.concatenate([start[1:], xp.full((1,), tokens, xp.int32)])
    lens = xp.concatenate([seq_lens, xp.zeros((1,), xp.int32)])
    aligned = start - start % xp.int32(alignment)
    tiles = (end - aligned + xp.int32(tile_rows - 1)) // xp.int32(tile_rows)
    listed = end > start
    if not single_rows:  # a single row of padding, past the last sequence, stays
        listed &= (end - start != 1) | (xp.arange(seqs + 1, dtype=xp.int32) == seqs)
    tiles = xp.where(listed, tiles, xp.int32(0))
    last = xp.cumsum(tiles, dtype=xp.int32)

    slot = xp.arange(length, dtype=xp.int32)
    seq = interval_of(last, slot)
    used = seq <= xp.int32(seqs)
    seq = xp.minimum(seq, xp.int32(seqs))
    row = aligned[seq] + (slot - (last[seq] - tiles[seq])) * xp.int32(tile_rows)
    low = xp.maximum(row, start[seq])
    high = xp.minimum(row + xp.int32(tile_rows), end[seq])
    offset = lens[seq] - (end[seq] if causal else start[seq] + xp.int32(1))
    visible = xp.where(used, xp.clip(high + offset, xp.int32(0), lens[seq]), xp.int32(-1))
    order = xp.argsort(-visible, kind="stable") if xp is np else xp.argsort(-visible, stable=True)
    count = xp.full((length,), 0, xp.int32) + last[-1]
    columns = [row, low, high, offset, xp.minimum(seq, xp.int32(seqs - 1)), lens[seq], count]
    columns += [xp.zeros((length,), xp.int32)] * (COLUMNS - len(columns))
    return xp.stack(columns, axis=1)[order].astype(xp.int32)
