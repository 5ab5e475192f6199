"""The two warpgroups of the Mosaic decode kernel: one streams tiles in, one attends to them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_plan import Column, first_tile, visible_tiles

LOG2_E = math.log2(math.e)
# The running maximum before any key is seen: finite, so that masked scores (-inf) weigh 0.
LOWEST = -1e30
COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # one number per query row, the columns of the products
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
_load: Any = plgpu.load  # JAX 0.10 demands an index here, 0.11 frowns on one


def columns_of(group: int) -> int:
    """Query rows of one product: the group, and its neighbours up to multiples of 8.

    Copies start at multiples of 8 rows, so a group that can straddle one needs a row more.
    """
    return 8 * -(-(group if aligned(group) else group + 7) // 8)


def aligned(group: int) -> bool:
    """Whether no group of rows straddles a multiple of 8 that it does not begin at."""
    return 8 % group == 0 or group % 8 == 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything about a call that is known when it is compiled.

    Attributes:
        seqs: rows of the block table.
        q_heads: query heads.
        kv_heads: key/value heads.
        head_dim: width of a head.
        block_size: tokens per block of the pool.
        tile: keys per iteration.
        stages: tiles in flight.
        scale: factor on the scores.
        window: latest positions that a query sees, or None.
        soft_cap: bound of the scores, or None.
        with_sinks: whether there is an array of sinks.
        with_scales: whether the pool has 8 bits and an array of scales.
        with_lse: whether the caller wants the lse.
    """

    seqs: int
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    tile: int
    stages: int
    scale: float
    window: int | None
    soft_cap: float | None
    with_sinks: bool
    with_scales: bool
    with_lse: bool

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q_heads // self.kv_heads

    @property
    def columns(self) -> int:
        """Query rows of one product."""
        return columns_of(self.group)

    @property
    def copy_rows(self) -> int:
        """Rows of one copy: a block, or a tile of a larger block."""
        return min(self.block_size, self.tile)

    @property
    def copies(self) -> int:
        """Copies that fetch one tile of keys, or of values."""
        return self.tile // self.copy_rows


def produce(problem: Problem, sources: Any, tiles: Any, barriers: Any) -> None:
    """Stream this worker's tiles of keys and values into shared memory."""
    kv_ref, table_ref, len_ref, plan_ref = sources
    k_smem, v_smem = tiles
    k_bar, v_bar, k_free, v_free = barriers
    part, head = lax.axis_index("part"), lax.axis_index("head")
    block_size, copy_rows = problem.block_size, problem.copy_rows
    total = plan_ref[part, Column.TILES]

    def locate(seq: jax.Array, length: jax.Array, index: jax.Array) -> tuple[Any, jax.Array]:
        """Pool rows of the keys of a tile, one per copy, and the number of tiles of its context."""
        start = (first_tile(length, problem.tile, problem.window) + index) * problem.tile
        last_block = lax.div(jnp.maximum(length - 1, 0), jnp.int32(block_size))
        rows = []
        for i in range(problem.copies):
            token = start + i * copy_rows
            column = jnp.minimum(lax.div(token, jnp.int32(block_size)), last_block)
            offset = 0 if copy_rows == block_size else lax.rem(token, jnp.int32(block_size))
            block = table_ref[seq, column]
            rows.append((block * (2 * problem.kv_heads) + head) * block_size + offset)
        return tuple(rows), visible_tiles(length, problem.tile, problem.window)

    def copy(rows: Any, smem: Any, slot: jax.Array, barrier: Any) -> None:
        for i, row in enumerate(rows):
            plgpu.copy_gmem_to_smem(
                kv_ref.at[pl.ds(pl.multiple_of(row, 8), copy_rows)],
                smem.at[slot, pl.ds(i * copy_rows, copy_rows)],
                barrier.at[slot],
            )

    def step(i: jax.Array, carry: Any) -> Any:
        seq, index, tiles, rows = carry
        slot = lax.rem(i, jnp.int32(problem.stages))
        context_ends = index + 1 == tiles
        seq = jnp.minimum(jnp.where(context_ends, seq + 1, seq), problem.seqs - 1)
        index = jnp.where(context_ends, 0, index + 1)
        # Table entries of the next tile arrive while this one waits for its slot.
        next_rows, tiles = locate(seq, len_ref[seq], index)

        @pl.when(i >= problem.stages)
        def _() -> None:
            plgpu.barrier_wait(k_free.at[slot])

        copy(rows, k_smem, slot, k_bar)

        @pl.when(i >= problem.stages)
        def _() -> None:
            plgpu.barrier_wait(v_free.at[slot])

        value_rows = [row + problem.kv_heads * block_size for row in rows]
        copy(value_rows, v_smem, slot, v_bar)
        return seq, index, tiles, next_rows

    seq, length, index = (plan_ref[part, c] for c in (Column.SEQ, Column.SEQ_LEN, Column.TILE))
    rows, tiles = locate(seq, length, index)
    lax.fori_loop(0, total, step, (seq, index, tiles, rows))
    pending = jnp.minimum(total, problem.stages)

    @pl.loop(0, pending)  # every phase of a barrier is waited for, those of the last tiles too
    def _(i: jax.Array) -> None:
        slot = lax.rem(total - pending + i, jnp.int32(problem.stages))
        plgpu.barrier_wait(k_free.at[slot])
        plgpu.barrier_wait(v_free.at[slot])


def consume(problem: Problem, sources: Any, outputs: Any, smem: Any, barriers: Any) -> None:
    """Attend to this worker's tiles, segment by segment."""
    q_ref, len_ref, plan_ref, sink_ref, scale_ref = sources
    q_smem, k_smem, v_smem, p_smem, wide_smem = smem
    q_bar, k_bar, v_bar, k_free, v_free = barriers
    tile, head_dim, columns = problem.tile, problem.head_dim, problem.columns
    part, head = lax.axis_index("part"), lax.axis_index("head")
    total_tiles = plan_ref[part, Column.TILES]
    k_scale, v_scale = (1.0, 1.0) if scale_ref is None else (scale_ref[i, head] for i in (0, 1))

    def segment(_: jax.Array, carry: Any) -> Any:
        seq, length, index, done = carry
        tiles = visible_tiles(length, tile, problem.window)
        count = jnp.minimum(tiles - index, total_tiles - done)
        row = (seq * problem.kv_heads + head) * problem.group
        first_row = pl.multiple_of(lax.div(row, jnp.int32(8)) * 8, 8)
        plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(first_row, columns)], q_smem, q_bar)
        start = (first_tile(length, tile, problem.window) + index) * tile
        oldest = 0 if problem.window is None else jnp.maximum(length - problem.window, 0)
        plgpu.barrier_wait(q_bar)

        def step(i: jax.Array, carry: Any) -> Any:
            acc, peak, total = carry
            slot = lax.rem(done + i, jnp.int32(problem.stages))
            first_key = start + i * tile
            plgpu.barrier_wait(k_bar.at[slot])
            keys = k_smem.at[slot]
            if problem.with_scales:
                _convert(keys, wide_smem.at[0])
                plgpu.barrier_arrive(k_free.at[slot])
                plgpu.commit_smem()
                keys = wide_smem.at[0]
            scores = _product(keys, q_smem.T, (tile, columns))
            if not problem.with_scales:
                plgpu.barrier_arrive(k_free.at[slot])
            scores = _scaled(scores, problem, k_scale)
            key = lax.broadcasted_iota(jnp.int32, scores.shape, 0) + first_key
            scores = jnp.where((key >= oldest) & (key < length), scores, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=0))
            fade = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(scores - _over_rows(new_peak, scores.shape))
            total = total * _over_rows(fade, total.shape) + weights
            p_smem.T[...] = plgpu.layout_cast(weights.astype(p_smem.dtype), TRANSPOSED)
            plgpu.barrier_wait(v_bar.at[slot])

            values = v_smem.at[slot]
            if problem.with_scales:
                _convert(values, wide_smem.at[1])
                plgpu.barrier_arrive(v_free.at[slot])
                values = wide_smem.at[1]

            @pl.when((first_key + tile > length) | (first_key < oldest))
            def _() -> None:  # a weight of 0 would not silence a NaN in a slot that is not seen
                value = values[...]
                key = lax.broadcasted_iota(jnp.int32, value.shape, 0) + first_key
                seen = (key >= oldest) & (key < length)
                values[...] = jnp.where(seen, value, jnp.zeros_like(value))

            plgpu.commit_smem()
            product = _product(values.T, p_smem.T, (head_dim, columns))
            if not problem.with_scales:
                plgpu.barrier_arrive(v_free.at[slot])
            return acc * _over_rows(fade, acc.shape) + product, new_peak, total

        zeros = [jnp.zeros((m, columns), jnp.float32) for m in (head_dim, tile)]
        acc, total = (plgpu.layout_cast(z, plgpu.Layout.WGMMA) for z in zeros)
        peak = plgpu.layout_cast(jnp.full((columns,), LOWEST, jnp.float32), COLUMNS)
        acc, peak, total = lax.fori_loop(0, count, step, (acc, peak, total))
        sink = None
        if sink_ref is not None:
            mine = sink_ref.at[pl.ds(lax.rem(first_row, problem.q_heads), columns)]
            sink = _load(mine, layout=COLUMNS, optimized=False)
        _finish(
            problem, outputs, acc * v_scale, peak, jnp.sum(total, axis=0), sink,
            row=row, first_row=first_row, complete=count == tiles, begins=index == 0,
        )  # fmt: skip
        following = jnp.minimum(seq + 1, problem.seqs - 1)
        return following, len_ref[following], jnp.int32(0), done + count

    begin = [plan_ref[part, c] for c in (Column.SEQ, Column.SEQ_LEN, Column.TILE)]
    lax.fori_loop(0, plan_ref[part, Column.SEGMENTS], segment, (*begin, jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)


def _finish(
    problem: Problem,
    outputs: Any,
    acc: jax.Array,
    peak: jax.Array,
    total: jax.Array,
    sink: jax.Array | None,
    *,
    row: jax.Array,
    first_row: jax.Array,
    complete: jax.Array,
    begins: jax.Array,
) -> None:
    """Normalise a segment and send it to the output, or to the merge if it is not complete."""
    out_ref, lse_ref, part_ref, part_lse_ref, o_smem, part_smem, lse_smem = outputs
    if sink is not None:
        extra = jnp.exp2(sink * LOG2_E - peak)
        total = total + jnp.where(complete & (total > 0), extra, jnp.zeros_like(extra))
    safe = jnp.where(total > 0, total, jnp.ones_like(total))  # 0: a padding row
    acc = acc / _over_rows(safe, acc.shape)
    lse = jnp.where(total > 0, peak + jnp.log2(safe), -jnp.inf)
    mine = pl.ds(row - first_row, problem.group)  # the other rows belong to neighbours
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the buffers may still be leaving

    @pl.when(complete)
    def _() -> None:
        o_smem.T[...] = plgpu.layout_cast(acc.astype(o_smem.dtype), TRANSPOSED)
        if problem.with_lse:
            lse_smem[...] = lse / LOG2_E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[mine], out_ref.at[pl.ds(row, problem.group)])
        if problem.with_lse:
            for i in range(problem.group):
                lse_ref[row + i] = lse_smem[row - first_row + i]

    @pl.when(jnp.logical_not(complete))
    def _() -> None:
        place = (jnp.where(begins, 0, 1), lax.axis_index("part"), lax.axis_index("head"))
        part_smem.T[...] = plgpu.layout_cast(acc, TRANSPOSED)
        part_lse_ref[place] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(part_smem, part_ref.at[place])


def _product(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """A matrix product of two references into shared memory, in float32."""

    def multiply(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _scaled(scores: jax.Array, problem: Problem, k_scale: Any) -> jax.Array:
    """Scaled (and capped) scores, times log2(e): the softmax works in base 2."""
    if problem.soft_cap is None:
        return scores * (k_scale * (problem.scale * LOG2_E))
    capped = jnp.tanh(scores * (k_scale * (problem.scale / problem.soft_cap)))
    return capped * (problem.soft_cap * LOG2_E)


def _convert(eight_bit: Any, wide: Any) -> None:
    """Copy a tile within shared memory, from 8 to 16 bits.

    In this layout a thread holds 8 neighbouring columns: it loads 8 bytes and stores 16.
    """
    layout: Any = plgpu.Layout.WGMMA_UPCAST_4X
    wide[...] = _load(eight_bit, layout=layout).astype(wide.dtype)


def _over_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number per column, repeated down the rows."""
    return lax.broadcast_in_dim(x, shape, [1])
