"""Ragged paged prefill attention for Hopper GPUs, in Pallas Mosaic GPU.

The schedule is FlashAttention 3's (arXiv:2407.08608): a producer warpgroup copies key and value
blocks through the block table with the tensor copy engine, two consumer warpgroups own 64 query
rows each and take turns on the tensor cores (one multiplies while the other is in its softmax).

Around that, for ragged batches over a paged cache:

* The grid is persistent: one thread block per multiprocessor walks a work list of (tile of 128
  query rows, query head) items, longest first, in boustrophedon order, so that all blocks end
  together. Barriers, pipeline slots and the alternation of the consumers run on across items: the
  keys of the next item arrive while the last one is being written.
* One tile of keys is `block_kv / block_size` copies that complete one barrier.
* Query rows are tokens of one head, not tokens times the heads of a group: whole tiles then load
  and store as one copy for any group size, 7 included, and the heads of a group run next to each
  other on different multiprocessors, so that they share their keys in the L2 cache.
* Only tiles at the ends of a sequence or at the diagonal are masked. A tile that holds rows of two
  sequences is stored row by row, so that neighbours never overwrite each other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import prefill_plan as plan

WARPGROUP_ROWS = 64  # the M of one wgmma
CONSUMERS = 2
TILE_ROWS = CONSUMERS * WARPGROUP_ROWS
WARPS = 4  # of the producer
SUPPORTED_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
SMEM_BYTES = 227 * 1024  # per thread block on Hopper
# Registers a thread: 128 * (24 + 2 * 240) just fit a multiprocessor's 65536.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
LOG2_E = math.log2(math.e)
# Running maximum before any key is seen: finite, so that a row whose keys are all masked so far
# computes exp2(-inf - LOWEST) = 0 and not exp2(-inf + inf) = NaN.
LOWEST = -1e30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Tile sizes and schedule of the kernel.

    Attributes:
        block_kv: keys per tile, a multiple of 64.
        stages: tiles of keys (and of values) in flight.
        thread_blocks: size of the persistent grid, the number of multiprocessors.
        head_sections: the query heads are worked off in this many equal parts, so that the keys
            of one part stay in the L2 cache.
        separate_output: stage the output in its own shared memory instead of the query's; the
            next item's query can then load while the output is being written.
        lane_semantics: lower for single lanes instead of whole warpgroups.
    """

    block_kv: int
    stages: int = 2
    thread_blocks: int = 132
    head_sections: int = 1
    separate_output: bool = True
    lane_semantics: bool = False

    def __post_init__(self) -> None:
        if self.block_kv < 64 or self.block_kv % 64:
            raise ValueError(f"block_kv must be a positive multiple of 64, got {self.block_kv}")
        if self.stages < 1 or self.thread_blocks < 1 or self.head_sections < 1:
            raise ValueError(f"stages, thread_blocks and head_sections must be positive: {self}")


def default_config(tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> PrefillConfig:
    """The configuration for a shape outside any tuned table."""
    small = head_dim <= 128
    items = -(-tokens // TILE_ROWS) * q_heads
    thread_blocks = _multiprocessors()
    # Sections cost balance at their seams; from some 16 rounds a section on they are cheap.
    sections = 1
    while kv_heads % (2 * sections) == 0 and items >= 32 * sections * thread_blocks:
        sections *= 2
    return PrefillConfig(
        block_kv=128 if small else 64,
        thread_blocks=thread_blocks,
        head_sections=sections,
        separate_output=small,
    )


def paged_prefill_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    return_lse: bool = False,
    work: jax.Array | None = None,
    config: PrefillConfig | None = None,
    interpret: Any = None,
) -> Any:
    """See `pallas_kernels.paged_prefill_attention` for the semantics; arguments are checked there.

    Args:
        q: `[tokens, q_heads, head_dim]`, bfloat16 or float16.
        kv_pool: `[blocks, 2, kv_heads, block_size, head_dim]`, q's dtype.
        block_tables: int32 `[seqs, max_blocks]`.
        seq_lens: int32 `[seqs]`.
        query_start: int32 `[seqs + 1]`.
        scale: factor on the scores.
        window: visible positions per query, or None.
        soft_cap: bound of the scores, or None.
        sinks: float32 `[q_heads]`, or None.
        kv_scales: must be None, quantized pools are not supported here.
        return_lse: also return the natural log-sum-exp, float32 `[tokens, q_heads]`.
        work: `prefill_plan.plan_prefill(..., tile_rows=128)`; made from the lengths if None.
        config: tile sizes; chosen from the shape if None.
        interpret: `plgpu.InterpretGPUParams()` to run on a CPU.

    Raises:
        NotImplementedError: a dtype, head size or block size that this kernel does not cover.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, block_size = kv_pool.shape[2:4]
    _check_supported(q, kv_pool)
    config = config or default_config(tokens, q_heads, kv_heads, head_dim)
    if kv_heads % config.head_sections:
        raise ValueError(f"{config.head_sections=} must divide {kv_heads=}")
    if kv_scales is not None:
        raise NotImplementedError("quantized pools are left to the Triton kernel")

    # Row tiles of the copy engine: at least one whole tile, and a multiple of 8 rows.
    padded = max(TILE_ROWS, -(-tokens // plan.ROW_ALIGNMENT) * plan.ROW_ALIGNMENT)
    if padded != tokens:
        q = jnp.pad(q, ((0, padded - tokens), (0, 0), (0, 0)))
    if work is None or padded != tokens:
        work = plan.plan_prefill_traced(seq_lens, query_start, tokens=padded, tile_rows=TILE_ROWS)
    shape = _Shape(
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        max_blocks=block_tables.shape[1], dtype=jnp.dtype(q.dtype), scale=scale, window=window,
        soft_cap=soft_cap, has_sinks=sinks is not None, return_lse=return_lse, config=config,
        interpret=interpret is not None,
    )  # fmt: skip
    rows = kv_pool.reshape(-1, head_dim)
    operands = [q, rows, block_tables, work] + ([] if sinks is None else [sinks])
    outputs = _build(shape, padded, work.shape[0], interpret)(*operands)
    out = outputs[0][:tokens]
    if not return_lse:
        return out
    return out, _rows_of_tiles(outputs[1], work, padded)[:tokens]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Everything static that the kernel body depends on."""

    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    max_blocks: int
    dtype: Any
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    return_lse: bool
    config: PrefillConfig
    interpret: bool

    @property
    def copy_rows(self) -> int:
        """Rows of one copy from the pool: a block, or the part of it that one tile needs."""
        return min(self.block_size, self.config.block_kv)

    @property
    def copies(self) -> int:
        return self.config.block_kv // self.copy_rows

    @property
    def swizzle_columns(self) -> int:
        """Columns of the widest swizzle (128, 64 or 32 bytes) that divides the head."""
        return next(c for c in (64, 32, 16) if self.head_dim % c == 0)

    @property
    def staging_columns(self) -> int:
        """Columns that a partial tile stages at once for its row-wise stores."""
        return self.swizzle_columns


def _check_supported(q: jax.Array, kv_pool: jax.Array) -> None:
    if q.dtype not in (jnp.bfloat16, jnp.float16) or kv_pool.dtype != q.dtype:
        raise NotImplementedError(
            f"needs bfloat16 or float16 queries and a pool of their dtype, got {q.dtype} queries "
            f"and a pool of {kv_pool.dtype}"
        )
    if q.shape[2] not in SUPPORTED_HEAD_DIMS:
        raise NotImplementedError(f"head_dim must be in {SUPPORTED_HEAD_DIMS}, got {q.shape[2]}")
    if kv_pool.shape[3] not in (16, 32, 64, 128):
        raise NotImplementedError(f"block_size must be 16 to 128, got {kv_pool.shape[3]}")


def _multiprocessors() -> int:
    """Multiprocessors of the default GPU, or an H200's where there is none."""
    if jax.default_backend() != "gpu":
        return 132
    return int(jax.devices()[0].core_count)


def _rows_of_tiles(lse_tiles: jax.Array, work: jax.Array, tokens: int) -> jax.Array:
    """Gather `[q_heads, tiles * 128]` tile-wise values into `[tokens, q_heads]`."""
    row = work[:, plan.ROW, None] + jnp.arange(TILE_ROWS, dtype=jnp.int32)[None, :]
    owned = (row >= work[:, plan.LOW, None]) & (row < work[:, plan.HIGH, None])
    source = jnp.arange(row.size, dtype=jnp.int32).reshape(row.shape)
    target = jnp.where(owned, row, jnp.int32(tokens))
    index = jnp.zeros((tokens,), jnp.int32).at[target].set(source, mode="drop")
    return lse_tiles[:, index].T


def _build(
    shape: _Shape, tokens: int, tiles: int, interpret: Any
) -> Callable[..., list[jax.Array]]:
    """The kernel as a function of (q, pool rows, block_tables, work, sinks if any)."""
    config, dtype, head_dim = shape.config, shape.dtype, shape.head_dim
    swizzled = (
        plgpu.TilingTransform((8, shape.swizzle_columns)),
        plgpu.SwizzleTransform(shape.swizzle_columns * dtype.itemsize),
    )
    rows_shape = (CONSUMERS, WARPGROUP_ROWS, head_dim)
    tiles_shape = (config.stages, config.block_kv, head_dim)
    scratch = {
        "q_smem": plgpu.SMEM(rows_shape, dtype, transforms=swizzled),
        "k_smem": plgpu.SMEM(tiles_shape, dtype, transforms=swizzled),
        "v_smem": plgpu.SMEM(tiles_shape, dtype, transforms=swizzled),
        "stage_smem": plgpu.SMEM((CONSUMERS, WARPGROUP_ROWS, shape.staging_columns), dtype),
        "q_full": plgpu.Barrier(num_barriers=CONSUMERS),
        "q_free": plgpu.Barrier(num_barriers=CONSUMERS),
        "k_full": plgpu.Barrier(num_arrivals=shape.copies, num_barriers=config.stages),
        "v_full": plgpu.Barrier(num_arrivals=shape.copies, num_barriers=config.stages),
        "k_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=config.stages),
        "v_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=config.stages),
        "tail_full": plgpu.Barrier(num_arrivals=shape.copies),
        "turn": plgpu.Barrier(num_barriers=CONSUMERS),
    }
    if config.separate_output:
        scratch["o_smem"] = plgpu.SMEM(rows_shape, dtype, transforms=swizzled)
    out_type = [jax.ShapeDtypeStruct((tokens, shape.q_heads, head_dim), dtype)]
    if shape.return_lse:
        scratch["lse_smem"] = plgpu.SMEM((CONSUMERS, WARPGROUP_ROWS), jnp.float32)
        out_type.append(jax.ShapeDtypeStruct((shape.q_heads, tiles * TILE_ROWS), jnp.float32))
    names = ["q_ref", "kv_ref", "tables_ref", "work_ref"]
    names += ["sinks_ref"] * shape.has_sinks + ["out_ref"] + ["lse_ref"] * shape.return_lse
    names += list(scratch)

    def body(*refs: Any) -> None:
        bound = _Refs(**dict(zip(names, refs, strict=True)))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == CONSUMERS)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            _produce(shape, bound)

        @pl.when(warpgroup < CONSUMERS)
        def _consumer() -> None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            _consume(shape, bound, warpgroup)

    semantics = plgpu.LoweringSemantics
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=list(scratch.values()),
        grid=(config.thread_blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=semantics.Lane if config.lane_semantics else semantics.Warpgroup,
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """Operands, outputs, shared memory and barriers of one thread block."""

    q_ref: Any  # [tokens, q_heads, head_dim]
    kv_ref: Any  # [blocks * 2 * kv_heads * block_size, head_dim]
    tables_ref: Any  # int32 [seqs, max_blocks]
    work_ref: Any  # int32 [tiles, 8]
    sinks_ref: Any = None  # float32 [q_heads]
    out_ref: Any  # [tokens, q_heads, head_dim]
    lse_ref: Any = None  # float32 [q_heads, tiles * 128]
    q_smem: Any  # [2, 64, head_dim]
    k_smem: Any  # [stages, block_kv, head_dim]
    v_smem: Any  # [stages, block_kv, head_dim]
    stage_smem: Any  # [2, 64, staging_columns], not swizzled
    o_smem: Any = None  # [2, 64, head_dim]
    lse_smem: Any = None  # float32 [2, 64]
    q_full: Any  # barriers [2]: query rows have arrived
    q_free: Any  # barriers [2]: query rows are no longer needed
    k_full: Any  # barriers [stages]
    v_full: Any  # barriers [stages]
    k_free: Any  # barriers [stages]
    v_free: Any  # barriers [stages]
    tail_full: Any  # barrier: the last, partly filled tile of values has arrived
    turn: Any  # barrier: the consumers hand the tensor cores to each other


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
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
        return self.end - self.first


def _num_items(shape: _Shape, work_ref: Any) -> Any:
    """Items of this thread block."""
    config = shape.config
    total = work_ref[0, plan.COUNT] * shape.q_heads
    rounds = lax.div(total, jnp.int32(config.thread_blocks))
    left = total - rounds * config.thread_blocks
    place = _place(config, rounds)
    return rounds + (place < left).astype(jnp.int32)


def _place(config: PrefillConfig, turn: Any) -> Any:
    """This block's place in a round: forwards in even rounds, backwards in odd ones."""
    block = lax.axis_index("block")
    backwards = lax.rem(turn, jnp.int32(2)) == 1
    return jnp.where(backwards, config.thread_blocks - 1 - block, block)


def _tile_and_head(shape: _Shape, work_ref: Any, turn: Any) -> tuple[Any, Any]:
    """Row of the work list and query head of this block's item in round `turn`."""
    config = shape.config
    index = turn * config.thread_blocks + _place(config, turn)
    heads = shape.q_heads // config.head_sections
    section = jnp.int32(0)
    if config.head_sections > 1:
        section_items = work_ref[0, plan.COUNT] * heads
        section = lax.div(index, section_items)
        index = index - section * section_items
    tile = lax.div(index, jnp.int32(heads))
    return tile, section * heads + (index - tile * heads)


def _first_row(shape: _Shape, work_ref: Any, turn: Any) -> Any:
    """First query row of an item; loaded a round ahead, it brings its record into the L1 cache."""
    tile, _ = _tile_and_head(shape, work_ref, turn)
    return work_ref[jnp.minimum(tile, work_ref.shape[0] - 1), plan.ROW]


def _load_item(shape: _Shape, work_ref: Any, turn: Any, row: Any) -> _Item:
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
    return _Item(
        tile=tile, head=head, row=row, low=low, high=high, offset=offset,
        seq=work_ref[tile, plan.SEQ], seq_len=seq_len,
        first=first, end=end, full_first=full_first, full_end=full_end,
    )  # fmt: skip


def _produce(shape: _Shape, refs: _Refs) -> None:
    """Copy the queries, keys and values of all items of this thread block, in order."""
    stages = shape.config.stages

    def item_body(turn: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        base, row = carry
        item = _load_item(shape, refs.work_ref, turn, row)
        next_row = _first_row(shape, refs.work_ref, turn + 1)

        def step_body(i: Any, _: None) -> None:
            slot = lax.rem(base + i, jnp.int32(stages))
            _copy_step(shape, refs, item, i, slot)

        lax.fori_loop(jnp.int32(0), item.steps, step_body, None)
        return base + item.steps, next_row

    start = (jnp.int32(0), _first_row(shape, refs.work_ref, jnp.int32(0)))
    lax.fori_loop(jnp.int32(0), _num_items(shape, refs.work_ref), item_body, start)
    # Every arrival is waited for, the consumers' last ones too.
    for slot in range(stages):
        plgpu.barrier_wait(refs.k_free.at[slot])
        plgpu.barrier_wait(refs.v_free.at[slot])
    for w in range(CONSUMERS):
        plgpu.barrier_wait(refs.q_free.at[w])


def _copy_step(shape: _Shape, refs: _Refs, item: _Item, i: Any, slot: Any) -> None:
    """Copy step `i` of an item, the tiles from the last to the first: keys, then values."""
    kv_tile = item.end - 1 - i
    sources = _copy_sources(shape, refs, item, kv_tile)
    values = [s + shape.kv_heads * shape.block_size for s in sources]
    past_end = (kv_tile + 1) * shape.config.block_kv > item.seq_len
    partial = past_end & (lax.rem(item.seq_len, jnp.int32(shape.block_size)) != 0)

    plgpu.barrier_wait(refs.k_free.at[slot])
    _copy_tile(shape, refs, sources, refs.k_smem.at[slot], refs.k_full.at[slot])

    @pl.when(i == 0)
    def _queries() -> None:
        for w in range(CONSUMERS):
            start = pl.multiple_of(item.row + w * WARPGROUP_ROWS, plan.ROW_ALIGNMENT)
            plgpu.barrier_wait(refs.q_free.at[w])
            plgpu.copy_gmem_to_smem(
                refs.q_ref.at[pl.ds(start, WARPGROUP_ROWS), item.head],
                refs.q_smem.at[w],
                refs.q_full.at[w],
            )

    plgpu.barrier_wait(refs.v_free.at[slot])

    @pl.when(jnp.logical_not(partial))
    def _values() -> None:
        _copy_tile(shape, refs, values, refs.v_smem.at[slot], refs.v_full.at[slot])

    @pl.when(partial)
    def _last_values() -> None:
        _copy_tile(shape, refs, values, refs.v_smem.at[slot], refs.tail_full)
        plgpu.barrier_wait(refs.tail_full)
        _zero_past_end(shape, refs.v_smem.at[slot], kv_tile, item.seq_len)
        plgpu.commit_smem()
        for _ in range(shape.copies):
            plgpu.barrier_arrive(refs.v_full.at[slot])


def _copy_sources(shape: _Shape, refs: _Refs, item: _Item, kv_tile: Any) -> list[Any]:
    """First pool row of each copy of a tile of keys.

    Blocks past the sequence are never followed: its last block stands in, masked by position.
    """
    block_size = shape.block_size
    last_block = lax.div(item.seq_len - 1, jnp.int32(block_size))
    kv_head = lax.div(item.head, jnp.int32(shape.q_heads // shape.kv_heads))
    sources = []
    for j in range(shape.copies):
        position = kv_tile * shape.config.block_kv + j * shape.copy_rows
        index = jnp.minimum(lax.div(position, jnp.int32(block_size)), last_block)
        within = 0
        if shape.copy_rows < block_size:
            within = lax.rem(position, jnp.int32(block_size))
        block = refs.tables_ref[item.seq, index]
        row = (block * (2 * shape.kv_heads) + kv_head) * block_size + within
        sources.append(pl.multiple_of(row, 16))
    return sources


def _copy_tile(shape: _Shape, refs: _Refs, sources: list[Any], tile: Any, barrier: Any) -> None:
    """Copy the blocks that make up a tile of keys or values.

    Single warps issue the copies, each its share: a copy of 16 rows is so small that arrivals of
    the whole warpgroup for every copy would be felt.
    """

    @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
    def _issue() -> None:
        warp = lax.axis_index("warp")
        for w in range(min(WARPS, shape.copies)):

            @pl.when(warp == w)
            def _share(w: int = w) -> None:
                for j in range(w, shape.copies, WARPS):
                    plgpu.copy_gmem_to_smem(
                        refs.kv_ref.at[pl.ds(sources[j], shape.copy_rows)],
                        tile.at[pl.ds(j * shape.copy_rows, shape.copy_rows)],
                        barrier,
                    )


def _zero_past_end(shape: _Shape, tile: Any, kv_tile: Any, seq_len: Any) -> None:
    """Zero the values past a sequence whose last block is partly filled.

    Their weight is 0, but 0 times a NaN in an unused slot would be NaN.
    """
    columns = shape.swizzle_columns
    for r in range(0, shape.config.block_kv, WARPGROUP_ROWS):
        start = kv_tile * shape.config.block_kv + r

        @pl.when(start + WARPGROUP_ROWS > seq_len)
        def _zero(r: int = r, start: Any = start) -> None:
            for c in range(0, shape.head_dim, columns):
                piece = tile.at[pl.ds(r, WARPGROUP_ROWS), pl.ds(c, columns)]
                x = plgpu.load(piece, layout=plgpu.Layout.WGMMA)
                row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
                piece[...] = jnp.where(row + start < seq_len, x, jnp.zeros_like(x))


def _consume(shape: _Shape, refs: _Refs, warpgroup: Any) -> None:
    """Attention of 64 rows of every item of this thread block."""
    for slot in range(shape.config.stages):
        plgpu.barrier_arrive(refs.k_free.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
    plgpu.barrier_arrive(refs.q_free.at[warpgroup])
    pl.when(warpgroup == 1)(functools.partial(plgpu.barrier_arrive, refs.turn.at[0]))

    def item_body(turn: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        base, row = carry
        item = _load_item(shape, refs.work_ref, turn, row)
        next_row = _first_row(shape, refs.work_ref, turn + 1)

        @pl.when(item.steps > 0)
        def _attend() -> None:
            _write_output(
                shape, refs, item, warpgroup, *_attention(shape, refs, item, warpgroup, base)
            )

        @pl.when(item.steps <= 0)
        def _padding() -> None:
            _write_output(shape, refs, item, warpgroup, *_initial_state(shape, None))

        return base + item.steps, next_row

    start = (jnp.int32(0), _first_row(shape, refs.work_ref, jnp.int32(0)))
    lax.fori_loop(jnp.int32(0), _num_items(shape, refs.work_ref), item_body, start)
    pl.when(warpgroup == 0)(functools.partial(plgpu.barrier_wait, refs.turn.at[0]))
    plgpu.wait_smem_to_gmem(0)


def _initial_state(shape: _Shape, sink: Any) -> tuple[Any, Any, Any]:
    """Accumulator, running maximum (in powers of two) and sum, before any key."""
    per_row = plgpu.Layout.WGMMA.reduce(1)
    highest = jnp.float32(LOWEST) if sink is None else sink * LOG2_E
    total = jnp.float32(0.0 if sink is None else 1.0)
    acc = jnp.full((WARPGROUP_ROWS, shape.head_dim), 0.0, jnp.float32)
    m = jnp.full((WARPGROUP_ROWS,), highest, jnp.float32)
    l = jnp.full((WARPGROUP_ROWS,), total, jnp.float32)  # noqa: E741
    return (
        plgpu.layout_cast(acc, plgpu.Layout.WGMMA),
        plgpu.layout_cast(m, per_row),
        plgpu.layout_cast(l, per_row),
    )


def _attention(
    shape: _Shape, refs: _Refs, item: _Item, warpgroup: Any, base: Any
) -> tuple[Any, Any, Any]:
    """Walk an item's tiles of keys from the diagonal back to the first."""
    stages = jnp.int32(shape.config.stages)
    sink = refs.sinks_ref[item.head] if shape.has_sinks else None
    acc, m, l = _initial_state(shape, sink)  # noqa: E741
    step = functools.partial(_step, shape, refs, item, warpgroup, base)
    plgpu.barrier_wait(refs.q_full.at[warpgroup])
    _, m, l, weights = step(True, None, jnp.int32(0), (acc, m, l, None))  # noqa: E741
    carry = (acc, m, l, weights)
    tiles = [(item.full_end, item.end - 1, True), (item.full_first, item.full_end, False)]
    if shape.window is not None:
        tiles.append((item.first, item.full_first, True))
    for low, high, masked in tiles:
        body = functools.partial(step, masked, True)
        carry = lax.fori_loop(item.end - high, item.end - low, body, carry)
    acc, m, l, weights = carry  # noqa: E741
    slot = lax.rem(base + item.steps - 1, stages)
    plgpu.barrier_wait(refs.v_full.at[slot])
    if shape.interpret:
        acc = _interpreted_values(acc, weights, refs.v_smem.at[slot])
    else:
        acc = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, refs.v_smem.at[slot]))(
            plgpu.ACC.init(acc)
        )
    plgpu.barrier_arrive(refs.v_free.at[slot])
    return acc, m, l


def _step(
    shape: _Shape,
    refs: _Refs,
    item: _Item,
    warpgroup: Any,
    base: Any,
    masked: bool,
    has_previous: bool | None,
    i: Any,
    carry: tuple[Any, Any, Any, Any],
) -> tuple[Any, Any, Any, Any]:
    """Scores and softmax of step `i`, while the values of step `i - 1` are being weighted.

    The consumers take turns: each issues its two products and hands the tensor cores over for the
    time of its softmax.
    """
    acc, m, l, weights = carry  # noqa: E741
    stages = jnp.int32(shape.config.stages)
    slot, previous = lax.rem(base + i, stages), lax.rem(base + i + (stages - 1), stages)
    q_tile, k_tile, v_tile = (
        refs.q_smem.at[warpgroup],
        refs.k_smem.at[slot],
        refs.v_smem.at[previous],
    )
    plgpu.barrier_wait(refs.k_full.at[slot])
    if has_previous:
        plgpu.barrier_wait(refs.v_full.at[previous])
    plgpu.barrier_wait(refs.turn.at[warpgroup])

    def products(s_ref: Any, acc_ref: Any = None) -> tuple[Any, Any, Any, Any]:
        if has_previous and not shape.interpret:
            acc_ref[...] = acc
        plgpu.wgmma(s_ref, q_tile, k_tile.T)
        if has_previous and not shape.interpret:
            plgpu.wgmma(acc_ref, weights, v_tile)
        plgpu.barrier_arrive(refs.turn.at[1 - warpgroup])
        if has_previous and not shape.interpret:
            s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(s_ref, wait_n=1))
        else:
            s = s_ref[...]
        plgpu.barrier_arrive(refs.k_free.at[slot])
        if shape.config.separate_output:
            free_queries = functools.partial(plgpu.barrier_arrive, refs.q_free.at[warpgroup])
            pl.when(i + 1 == item.steps)(free_queries)
        mask = _visible(shape, item, warpgroup, item.end - 1 - i) if masked else None
        p, m_new, l_new, alpha = _softmax(shape, s, mask, m, l)
        if not has_previous:
            return acc, m_new, l_new, p.astype(shape.dtype)
        if shape.interpret:
            new_acc = _interpreted_values(acc, weights, v_tile)
        else:
            p, m_new, l_new, alpha = lax.optimization_barrier((p, m_new, l_new, alpha))
            new_acc = lax.optimization_barrier(acc_ref[...])
        plgpu.barrier_arrive(refs.v_free.at[previous])
        new_acc = new_acc * lax.broadcast_in_dim(alpha, new_acc.shape, [0])
        return new_acc, m_new, l_new, p.astype(shape.dtype)

    accumulators = [plgpu.ACC((WARPGROUP_ROWS, shape.config.block_kv), jnp.float32)]
    if has_previous and not shape.interpret:
        accumulators.append(plgpu.ACC((WARPGROUP_ROWS, shape.head_dim), jnp.float32))
    return pl.run_scoped(products, *accumulators)


def _softmax(shape: _Shape, s: Any, mask: Any, m: Any, l: Any) -> tuple[Any, Any, Any, Any]:  # noqa: E741
    """Unnormalized weights, new running maximum and sum, and the factor of older results."""
    factor = shape.scale * LOG2_E
    if shape.soft_cap is not None:
        s = jnp.tanh(s * (shape.scale / shape.soft_cap))
        factor = shape.soft_cap * LOG2_E
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    # The maximum is kept scaled, so that a weight is one fused multiply-add and one exp2.
    m_new = jnp.maximum(m, s.max(axis=1) * factor)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s * factor - lax.broadcast_in_dim(m_new, s.shape, [0]))
    return p, m_new, l * alpha + p.sum(axis=1), alpha


def _interpreted_values(acc: Any, weights: Any, v_tile: Any) -> Any:
    """The interpreter has no register operand of wgmma."""
    return acc + jnp.dot(weights.astype(jnp.float32), v_tile[...].astype(jnp.float32))


def _visible(shape: _Shape, item: _Item, warpgroup: Any, kv_tile: Any) -> Any:
    """Which keys of a tile each of this consumer's rows sees, bool [64, block_kv]."""
    size = (WARPGROUP_ROWS, shape.config.block_kv)
    row = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=plgpu.Layout.WGMMA)
    column = plgpu.broadcasted_iota(jnp.int32, size, 1, layout=plgpu.Layout.WGMMA)
    position = item.row + warpgroup * WARPGROUP_ROWS + item.offset
    behind = row - column + (position - kv_tile * shape.config.block_kv)
    visible = behind >= 0
    if shape.window is not None:
        visible &= behind < shape.window
    return visible


def _write_output(
    shape: _Shape,
    refs: _Refs,
    item: _Item,
    warpgroup: Any,
    acc: Any,
    m: Any,
    l: Any,  # noqa: E741
) -> None:
    row = item.row + warpgroup * WARPGROUP_ROWS
    seen = l > 0
    inverse = 1.0 / jnp.where(seen, l, 1.0)
    out = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(shape.dtype)
    o_smem = refs.o_smem if shape.config.separate_output else refs.q_smem

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's copies have read o_smem
    if shape.return_lse:
        refs.lse_smem[warpgroup] = jnp.where(
            seen, m / LOG2_E + jnp.log(jnp.where(seen, l, 1.0)), -jnp.inf
        )
    whole = (item.low <= row) & (row + WARPGROUP_ROWS <= item.high)

    @pl.when(whole)
    def _whole() -> None:
        o_smem[warpgroup] = out
        plgpu.commit_smem()
        start = pl.multiple_of(row, plan.ROW_ALIGNMENT)
        plgpu.copy_smem_to_gmem(
            o_smem.at[warpgroup], refs.out_ref.at[pl.ds(start, WARPGROUP_ROWS), item.head]
        )

    @pl.when(jnp.logical_not(whole))
    def _partial() -> None:
        _write_rows(shape, refs, item, warpgroup, row, out)

    if shape.return_lse:
        plgpu.commit_smem()
        start = pl.multiple_of(item.tile * TILE_ROWS + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        plgpu.copy_smem_to_gmem(
            refs.lse_smem.at[warpgroup], refs.lse_ref.at[item.head, pl.ds(start, WARPGROUP_ROWS)]
        )
    if not shape.config.separate_output:

        @pl.when(item.steps > 0)
        def _release() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(refs.q_free.at[warpgroup])


def _write_rows(
    shape: _Shape, refs: _Refs, item: _Item, warpgroup: Any, row: Any, out: Any
) -> None:
    """Store only the rows that the sequence owns, one copy a row.

    The other rows of the tile belong to neighbours (or lie past the array).
    """
    begin = jnp.clip(item.low - row, 0, WARPGROUP_ROWS)
    end = jnp.clip(item.high - row, 0, WARPGROUP_ROWS)
    columns = shape.staging_columns
    for c in range(0, shape.head_dim, columns):
        if c:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        piece = out if columns == shape.head_dim else out[:, c : c + columns]
        refs.stage_smem[warpgroup] = piece
        plgpu.commit_smem()

        @pl.loop(begin, end)
        def _row(r: Any, c: int = c) -> None:
            plgpu.copy_smem_to_gmem(
                refs.stage_smem.at[warpgroup, r],
                refs.out_ref.at[row + r, item.head, pl.ds(c, columns)],
            )
