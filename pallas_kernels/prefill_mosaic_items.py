"""Shapes, operands and work items of the Mosaic prefill kernel, shared by its warpgroups."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import prefill_plan as plan
from pallas_kernels.tuning import MosaicPrefillConfig

WARPGROUP_ROWS = 64  # the M of one wgmma
CONSUMERS = 2
TILE_ROWS = CONSUMERS * WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything static that the kernel body depends on."""

    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: Any  # of queries, output and products
    kv_dtype: Any  # of the pool
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    return_lse: bool
    config: MosaicPrefillConfig
    interpret: bool

    @property
    def copy_rows(self) -> int:
        """Rows of one copy from the pool: a block, or the part of it that one tile needs."""
        return min(self.block_size, self.config.block_kv)

    @property
    def copies(self) -> int:
        """Copies that fill one tile of keys or values."""
        return self.config.block_kv // self.copy_rows

    @property
    def swizzle_columns(self) -> int:
        """Columns of the widest swizzle (128, 64 or 32 bytes) that divides the head."""
        return next(c for c in (64, 32, 16) if self.head_dim % c == 0)

    @property
    def widens_by_hand(self) -> bool:
        """Whether `mosaic_registers.widen_tile` serves this shape."""
        return self.kv_dtype == jnp.float8_e4m3fn and self.head_dim == 128

    @property
    def raw_columns(self) -> int:
        """Columns of the swizzle of tiles of 8 bits."""
        return 128 if self.widens_by_hand else self.swizzle_columns

    @property
    def product_dtype(self) -> Any:
        """Of both sides of the products: numbers of 8 bits are exact in float16, and near it."""
        return jnp.dtype(jnp.float16) if self.converts else self.dtype

    @property
    def converts_queries(self) -> bool:
        """Whether the queries are converted for the products."""
        return self.product_dtype != self.dtype

    @property
    def converts(self) -> bool:
        """Whether keys and values are widened on their way to the products."""
        return self.kv_dtype != self.dtype


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refs:
    """Operands, outputs, shared memory and barriers of one thread block."""

    q_ref: Any  # [tokens, q_heads, head_dim]
    kv_ref: Any  # [blocks * 2 * kv_heads * block_size, head_dim]
    tables_ref: Any  # int32 [seqs, max_blocks]
    work_ref: Any  # int32 [tiles, 8]
    sinks_ref: Any = None  # float32 [q_heads]
    scales_ref: Any = None  # float32 [2, kv_heads]
    out_ref: Any  # [tokens, q_heads, head_dim]
    lse_ref: Any = None  # float32 [q_heads, tiles * 128]
    q_smem: Any  # [2, 64, head_dim]
    wide_q_smem: Any  # the same memory, as the products want it
    k_smem: Any  # [stages, block_kv, head_dim]
    v_smem: Any  # [stages, block_kv, head_dim]
    o_smem: Any = None  # [2, 64, head_dim]
    lse_smem: Any = None  # float32 [2, 64]
    q_full: Any  # barriers [2]: query rows have arrived
    q_free: Any  # barriers [2]: query rows are no longer needed
    k_full: Any  # barriers [stages]
    v_full: Any  # barriers [stages]
    k_free: Any  # barriers [stages]
    v_free: Any  # barriers [stages]
    raw_smem: Any = None  # pool dtype [2, block_kv, head_dim]: a tile of keys, one of values
    raw_full: Any = None  # barriers [2]
    tail_full: Any = None  # barrier: the last, partly filled tile of values has arrived
    turn: Any  # barriers [2]: the consumers hand the tensor cores to each other


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One work item; every field is an int32 scalar in registers."""

    tile: Any
    head: Any
    row: Any
    low: Any
    high: Any
    offset: Any
    seq: Any
    seq_len: Any
    first: Any  # first tile of keys that any row sees
    end: Any  # end of the tiles of keys
    full_first: Any  # tiles full_first .. full_end - 1 are visible to every row
    full_end: Any

    @property
    def steps(self) -> Any:
        """Tiles of keys that the item walks; 0 for padding."""
        return self.end - self.first


def num_items(shape: Shape, work_ref: Any) -> Any:
    """Items of this thread block."""
    config = shape.config
    total = work_ref[0, plan.COUNT] * shape.q_heads
    rounds = lax.div(total, jnp.int32(config.thread_blocks))
    left = total - rounds * config.thread_blocks
    place = _place(config, rounds)
    return rounds + (place < left).astype(jnp.int32)


def _place(config: MosaicPrefillConfig, turn: Any) -> Any:
    """This block's place in a round: forwards in even rounds, backwards in odd ones."""
    block = lax.axis_index("block")
    backwards = lax.rem(turn, jnp.int32(2)) == 1
    return jnp.where(backwards, config.thread_blocks - 1 - block, block)


def _tile_and_head(shape: Shape, work_ref: Any, turn: Any) -> tuple[Any, Any]:
    """Row of the work list and query head of this block's item in round `turn`."""
    config = shape.config
    index = turn * config.thread_blocks + _place(config, turn)
    heads = shape.q_heads // config.head_sections
    section = jnp.int32(0)
    if config.head_sections > 1:
        section_items = jnp.maximum(work_ref[0, plan.COUNT] * heads, 1)  # 0: an empty list
        section = lax.div(index, section_items)
        index = index - section * section_items
    tile = lax.div(index, jnp.int32(heads))
    head = section * heads + (index - tile * heads)
    return jnp.minimum(tile, work_ref.shape[0] - 1), head  # in range past the last round, too


def first_row(shape: Shape, work_ref: Any, turn: Any) -> Any:
    """First query row of an item; loaded a round ahead, it brings its record into the L1 cache."""
    tile, _ = _tile_and_head(shape, work_ref, turn)
    return work_ref[tile, plan.ROW]


def load_item(shape: Shape, work_ref: Any, turn: Any, row: Any) -> Item:
    """This block's item in round `turn`, whose first row has been loaded already."""
    config = shape.config
    tile, head = _tile_and_head(shape, work_ref, turn)
    low, high = work_ref[tile, plan.LOW], work_ref[tile, plan.HIGH]
    offset, seq_len = work_ref[tile, plan.OFFSET], work_ref[tile, plan.SEQ_LEN]

    block_kv = jnp.int32(config.block_kv)
    first_position = jnp.maximum(low + offset, 0)
    visible = jnp.clip(high + offset, 0, seq_len)
    end = lax.div(visible + (block_kv - 1), block_kv)
    # The last tile counts as masked: it is the peeled first step of an item.
    full_end = jnp.minimum(lax.div(first_position + 1, block_kv), end - 1)
    first, full_first = jnp.int32(0), jnp.int32(0)
    if shape.window is not None:
        first = lax.div(jnp.maximum(first_position - (shape.window - 1), 0), block_kv)
        first = jnp.minimum(first, end)
        full_first = jnp.maximum(visible - shape.window, 0)
        full_first = lax.div(full_first + (block_kv - 1), block_kv)
        full_first = jnp.clip(full_first, first, jnp.maximum(end - 1, first))
    full_end = jnp.maximum(full_end, full_first)
    return Item(
        tile=tile, head=head, row=row, low=low, high=high, offset=offset,
        seq=work_ref[tile, plan.SEQ], seq_len=seq_len,
        first=first, end=end, full_first=full_first, full_end=full_end,
    )  # fmt: skip
