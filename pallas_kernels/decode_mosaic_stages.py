"""The two warpgroups of the Mosaic decode kernel: one streams tiles in, one attends to them."""

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

from pallas_kernels.decode_mosaic_merge import (
    COLUMNS,
    LOWEST,
    count_in,
    gather_pieces,
    leave_piece,
    over_rows,
)
from pallas_kernels.decode_plan import BEGIN, Column, first_tile, visible_tiles
from pallas_kernels.mosaic_registers import store_columns, widened_keys, widened_values, zero_rows

LOG2_E = math.log2(math.e)
WARPS = 4  # of a warpgroup
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
        queries: new tokens of each sequence.
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
        interpret: whether the kernel runs in the interpreter, which knows no inline code.
    """

    seqs: int
    queries: int
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
    interpret: bool = False

    @property
    def rows(self) -> int:
        """Query rows of one sequence that read the same key/value head."""
        return self.queries * (self.q_heads // self.kv_heads)

    @property
    def seq_rows(self) -> int:
        """Query rows of one sequence."""
        return self.queries * self.q_heads

    @property
    def columns(self) -> int:
        """Query rows of one product."""
        return columns_of(self.rows)

    @property
    def span(self) -> int | None:
        """Latest positions that any query of a sequence sees."""
        return None if self.window is None else self.window + self.queries - 1

    @property
    def row_period(self) -> int:
        """Query rows after which all sequences repeat at a place that is a multiple of 8."""
        return math.lcm(self.seq_rows, 8)

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
    kv_ref, table_ref, line_ref, plan_ref = sources
    k_smem, v_smem = tiles
    k_bar, v_bar, k_free, v_free = barriers
    part, head = lax.axis_index("part"), lax.axis_index("head")
    block_size, copy_rows = problem.block_size, problem.copy_rows
    total = plan_ref[part, Column.TILES]

    def locate(seq: jax.Array, length: jax.Array, index: jax.Array) -> tuple[Any, jax.Array]:
        """Pool rows of the keys of a tile, one per copy, and the number of tiles of its context."""
        start = (first_tile(length, problem.tile, problem.span) + index) * problem.tile
        # Past the line's end lie places of no tile: what is looked up there is not used.
        last_block = lax.div(jnp.maximum(length - 1, 0), jnp.int32(block_size))
        rows = []
        for i in range(problem.copies):
            token = start + i * copy_rows
            column = jnp.minimum(lax.div(token, jnp.int32(block_size)), last_block)
            offset = 0 if copy_rows == block_size else lax.rem(token, jnp.int32(block_size))
            rows.append(
                (table_ref[seq, column] * (2 * problem.kv_heads) + head) * block_size + offset
            )
        return tuple(rows), visible_tiles(length, problem.tile, problem.span)

    def copy(rows: Any, smem: Any, slot: jax.Array, barrier: Any) -> None:
        starts = [pl.multiple_of(row, 8) for row in rows]

        def one(i: int) -> None:
            plgpu.copy_gmem_to_smem(
                kv_ref.at[pl.ds(starts[i], copy_rows)],
                smem.at[slot, pl.ds(i * copy_rows, copy_rows)],
                barrier.at[slot],
            )

        if not problem.with_scales:
            # In order and a little apart, so that the workers of a part meet at the same blocks.
            for i in range(problem.copies):
                one(i)
            return

        # Copies of 8 bits are so small that a warpgroup which meets at each would be felt: single
        # warps issue them, each its share.
        @plgpu.warp_map
        def _(warp: Any) -> None:
            for w in range(min(WARPS, problem.copies)):

                @pl.when(warp == w)
                def _(w: int = w) -> None:
                    for i in range(w, problem.copies, WARPS):
                        one(i)

    def step(i: jax.Array, carry: Any) -> Any:
        place, index, tiles, rows = carry
        slot = lax.rem(i, jnp.int32(problem.stages))
        context_ends = index + 1 == tiles
        place = jnp.minimum(jnp.where(context_ends, place + 1, place), problem.seqs - 1)
        index = jnp.where(context_ends, 0, index + 1)
        # Table entries of the next tile arrive while this one waits for its slot.
        next_rows, tiles = locate(line_ref[place, 0], line_ref[place, 1], index)

        @pl.when(i >= problem.stages)
        def _() -> None:
            plgpu.barrier_wait(k_free.at[slot])

        copy(rows, k_smem, slot, k_bar)

        @pl.when(i >= problem.stages)
        def _() -> None:
            plgpu.barrier_wait(v_free.at[slot])

        value_rows = [row + problem.kv_heads * block_size for row in rows]
        copy(value_rows, v_smem, slot, v_bar)
        return place, index, tiles, next_rows

    place, seq, length, index = (plan_ref[part, c] for c in BEGIN)
    rows, tiles = locate(seq, length, index)
    lax.fori_loop(0, total, step, (place, index, tiles, rows))
    pending = jnp.minimum(total, problem.stages)

    @pl.loop(0, pending)  # every phase of a barrier is waited for, those of the last tiles too
    def _(i: jax.Array) -> None:
        slot = lax.rem(total - pending + i, jnp.int32(problem.stages))
        plgpu.barrier_wait(k_free.at[slot])
        plgpu.barrier_wait(v_free.at[slot])


def consume(problem: Problem, sources: Any, outputs: Any, smem: Any, barriers: Any) -> None:
    """Attend to this worker's tiles, segment by segment."""
    q_ref, line_ref, plan_ref, query_ref, sink_ref, scale_ref = sources
    q_smem, k_smem, v_smem, p_smem = smem
    q_bar, k_bar, v_bar, k_free, v_free = barriers
    tile, head_dim, columns = problem.tile, problem.head_dim, problem.columns
    part, head = lax.axis_index("part"), lax.axis_index("head")
    total_tiles = plan_ref[part, Column.TILES]
    k_scale, v_scale = (1.0, 1.0) if scale_ref is None else (scale_ref[i, head] for i in (0, 1))

    _zero_empty(problem, outputs, line_ref, plan_ref)

    def segment(_: jax.Array, carry: Any) -> Any:
        place, seq, length, index, done = carry
        tiles = visible_tiles(length, tile, problem.span)
        count = jnp.minimum(tiles - index, total_tiles - done)
        row = (seq * problem.kv_heads + head) * problem.rows
        first_row = pl.multiple_of(lax.div(row, jnp.int32(8)) * 8, 8)
        plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(first_row, columns)], q_smem, q_bar)
        start = (first_tile(length, tile, problem.span) + index) * tile
        oldest = 0 if problem.span is None else jnp.maximum(length - problem.span, 0)
        query = None if query_ref is None else _of_rows(query_ref, problem, first_row)
        plgpu.barrier_wait(q_bar)

        def step(i: jax.Array, carry: Any) -> Any:
            acc, peak, total = carry
            slot = lax.rem(done + i, jnp.int32(problem.stages))
            first_key = start + i * tile
            plgpu.barrier_wait(k_bar.at[slot])
            scores = _score_tile(problem, k_smem.at[slot], q_smem, k_free.at[slot])
            scores = _scaled(scores, problem, k_scale)
            key = lax.broadcasted_iota(jnp.int32, scores.shape, 0) + first_key
            if query is None:
                seen = (key >= oldest) & (key < length)
            else:
                behind = over_rows(query, key.shape) + (length - problem.queries) - key
                seen = behind >= 0
                if problem.window is not None:
                    seen &= behind < problem.window
            scores = jnp.where(seen, scores, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=0))
            fade = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(scores - over_rows(new_peak, scores.shape))
            total = total * over_rows(fade, total.shape) + weights
            p_smem.T[...] = plgpu.layout_cast(weights.astype(p_smem.dtype), TRANSPOSED)
            plgpu.barrier_wait(v_bar.at[slot])

            @pl.when((first_key + tile > length) | (first_key < oldest))
            def _() -> None:  # a weight of 0 would not silence a NaN in a slot that is not seen
                _zero_unseen(problem, v_smem.at[slot], first_key, oldest, length)

            plgpu.commit_smem()
            product = _weigh_tile(problem, v_smem.at[slot], p_smem, v_free.at[slot])
            return acc * over_rows(fade, acc.shape) + product, new_peak, total

        zeros = [jnp.zeros((m, columns), jnp.float32) for m in (head_dim, tile)]
        acc, total = (plgpu.layout_cast(z, plgpu.Layout.WGMMA) for z in zeros)
        peak = plgpu.layout_cast(jnp.full((columns,), LOWEST, jnp.float32), COLUMNS)
        acc, peak, total = lax.fori_loop(0, count, step, (acc, peak, total))
        state = (acc * v_scale, peak, jnp.sum(total, axis=0))
        finish = functools.partial(_finish, problem, outputs, sink_ref, row, first_row)

        @pl.when(count == tiles)
        def _() -> None:
            finish(state)

        @pl.when(count < tiles)
        def _() -> None:
            _share(problem, sources, outputs, state, finish, begins=index == 0)

        place = jnp.minimum(place + 1, problem.seqs - 1)
        return place, line_ref[place, 0], line_ref[place, 1], jnp.int32(0), done + count

    init = (*(plan_ref[part, c] for c in BEGIN), jnp.int32(0))
    lax.fori_loop(0, plan_ref[part, Column.SEGMENTS], segment, init)
    plgpu.wait_smem_to_gmem(0)


def _zero_empty(problem: Problem, outputs: Any, line_ref: Any, plan_ref: Any) -> None:
    """Write the outputs of this worker's share of the sequences without a context."""
    out_ref, lse_ref, o_smem = outputs[:3]
    part, head = lax.axis_index("part"), lax.axis_index("head")
    first, empties = plan_ref[part, Column.EMPTY_PLACE], plan_ref[part, Column.EMPTIES]

    @pl.when(empties > 0)
    def _() -> None:
        zeros = jnp.zeros((problem.head_dim, problem.columns), o_smem.dtype)
        o_smem.T[...] = plgpu.layout_cast(zeros, TRANSPOSED)
        plgpu.commit_smem()

        @pl.loop(0, empties)
        def _(i: jax.Array) -> None:
            row = (line_ref[first + i, 0] * problem.kv_heads + head) * problem.rows
            mine = o_smem.at[pl.ds(0, problem.rows)]
            plgpu.copy_smem_to_gmem(mine, out_ref.at[pl.ds(row, problem.rows)])
            if problem.with_lse:
                for j in range(problem.rows):
                    lse_ref[row + j] = jnp.float32(-jnp.inf)


def _score_tile(problem: Problem, keys: Any, q_smem: Any, free: Any) -> jax.Array:
    """Products of a tile of keys with the queries, float32 `[tile, columns]`; frees the tile."""
    shape = (problem.tile, problem.columns)
    if not problem.with_scales:
        scores = _product(keys, q_smem.T, shape)
        plgpu.barrier_arrive(free)
        return scores
    if problem.interpret:
        scores = _interpreted_product(keys[...], q_smem)
        plgpu.barrier_arrive(free)
        return scores
    wide = widened_keys(keys, problem.tile, problem.head_dim)
    plgpu.barrier_arrive(free)
    return _product(wide, q_smem.T, shape)


def _weigh_tile(problem: Problem, values: Any, p_smem: Any, free: Any) -> jax.Array:
    """Values of a tile times their weights, float32 `[head_dim, columns]`; frees the tile."""
    shape = (problem.head_dim, problem.columns)
    if not problem.with_scales:
        product = _product(values.T, p_smem.T, shape)
        plgpu.barrier_arrive(free)
        return product
    if problem.interpret:
        product = _interpreted_product(values[...].T, p_smem)
        plgpu.barrier_arrive(free)
        return product
    wide = widened_values(values, problem.tile, problem.head_dim)
    plgpu.barrier_arrive(free)
    return _product(wide, p_smem.T, shape)


def _zero_unseen(
    problem: Problem, values: Any, first_key: jax.Array, oldest: Any, length: jax.Array
) -> None:
    """Zero the values of a tile that the query does not see, in shared memory."""
    if problem.with_scales and not problem.interpret:
        zero_rows(values, oldest - first_key, length - first_key)
        return
    value = values[...]
    key = lax.broadcasted_iota(jnp.int32, value.shape, 0) + first_key
    seen = (key >= oldest) & (key < length)
    values[...] = jnp.where(seen, value, jnp.zeros_like(value))


def _share(
    problem: Problem,
    sources: Any,
    outputs: Any,
    state: Any,
    finish: Callable[[Any], None],
    *,
    begins: jax.Array,
) -> None:
    """Leave a piece of a context to the others; the last one of them finishes it."""
    plan_ref = sources[2]
    pieces, counter_ref, flag_smem = outputs[-3:]
    part, head = lax.axis_index("part"), lax.axis_index("head")
    place = (jnp.where(begins, 0, 1), part, head)
    first = jnp.where(begins, part, plan_ref[part, Column.FIRST_PART])
    later = plan_ref[first, Column.LATER_PARTS]
    leave_piece(pieces, state, place, problem.interpret)
    before = count_in(counter_ref.at[first, head], flag_smem, problem.interpret)

    @pl.when(before == later)
    def _() -> None:
        counter_ref[first, head] = 0  # as the next call wants to find it
        finish(gather_pieces(pieces, first, later, head, problem.interpret))


def _finish(
    problem: Problem, outputs: Any, sink_ref: Any, row: jax.Array, first_row: jax.Array, state: Any
) -> None:
    """Normalise what a context amounts to and send it to the output."""
    out_ref, lse_ref, o_smem, lse_smem = outputs[:4]
    acc, peak, total = state
    if sink_ref is not None:
        extra = jnp.exp2(_of_rows(sink_ref, problem, first_row) * LOG2_E - peak)
        total = total + jnp.where(total > 0, extra, jnp.zeros_like(extra))
    safe = jnp.where(total > 0, total, jnp.ones_like(total))  # 0: before the first position
    acc = acc / over_rows(safe, acc.shape)
    lse = jnp.where(total > 0, peak + jnp.log2(safe), -jnp.inf)
    mine = pl.ds(row - first_row, problem.rows)  # the other rows belong to neighbours
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the buffers may still be leaving
    if problem.with_scales and not problem.interpret:
        store_columns(acc, o_smem, o_smem.dtype)
    else:
        o_smem.T[...] = plgpu.layout_cast(acc.astype(o_smem.dtype), TRANSPOSED)
    if problem.with_lse:
        lse_smem[...] = lse / LOG2_E
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem.at[mine], out_ref.at[pl.ds(row, problem.rows)])
    if problem.with_lse:
        for i in range(problem.rows):
            lse_ref[row + i] = lse_smem[row - first_row + i]


def _of_rows(ref: Any, problem: Problem, first_row: jax.Array) -> jax.Array:
    """Load what `paged_decode_mosaic` repeated for all query rows, for those of one product."""
    place = lax.rem(first_row, jnp.int32(problem.row_period))
    return _load(ref.at[pl.ds(place, problem.columns)], layout=COLUMNS, optimized=False)


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


def _interpreted_product(a: jax.Array, b_transposed: Any) -> jax.Array:
    """The interpreter has no products of registers."""
    return jnp.dot(a.astype(jnp.float32), b_transposed[...].astype(jnp.float32).T)
