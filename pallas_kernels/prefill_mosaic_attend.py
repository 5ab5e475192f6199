"""Consumer warpgroups of the Mosaic prefill kernel: products, softmax and output of 64 rows."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import prefill_plan as plan
from pallas_kernels.mosaic_global import store_rows
from pallas_kernels.prefill_mosaic_items import (
    TILE_ROWS,
    WARPGROUP_ROWS,
    Item,
    Refs,
    Shape,
    first_row,
    load_item,
    num_items,
)

Accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
LOG2_E = math.log2(math.e)
# Running maximum before any key is seen: finite, so that a row whose keys are all masked so far
# computes exp2(-inf - LOWEST) = 0 and not exp2(-inf + inf) = NaN.
LOWEST = -1e30


def consume(shape: Shape, refs: Refs, warpgroup: Any) -> None:
    """Attention of 64 rows of every item of this thread block."""
    for slot in range(shape.config.stages):
        plgpu.barrier_arrive(refs.k_free.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
    plgpu.barrier_arrive(refs.q_free.at[warpgroup])
    pl.when(warpgroup == 1)(functools.partial(plgpu.barrier_arrive, refs.turn.at[0]))

    def item_body(turn: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        base, row = carry
        item = load_item(shape, refs.work_ref, turn, row)
        next_row = first_row(shape, refs.work_ref, turn + 1)

        @pl.when(item.steps > 0)
        def _attend() -> None:
            _write_output(
                shape, refs, item, warpgroup, *_attention(shape, refs, item, warpgroup, base)
            )

        @pl.when(item.steps <= 0)
        def _padding() -> None:
            _write_output(shape, refs, item, warpgroup, *_initial_state(shape, None))

        return base + item.steps, next_row

    start = (jnp.int32(0), first_row(shape, refs.work_ref, jnp.int32(0)))
    lax.fori_loop(jnp.int32(0), num_items(shape, refs.work_ref), item_body, start)
    pl.when(warpgroup == 0)(functools.partial(plgpu.barrier_wait, refs.turn.at[0]))
    plgpu.wait_smem_to_gmem(0)


def _initial_state(shape: Shape, sink: Any) -> tuple[Any, Any, Any]:
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
    shape: Shape, refs: Refs, item: Item, warpgroup: Any, base: Any
) -> tuple[Any, Any, Any]:
    """Walk an item's tiles of keys from the diagonal back to the first."""
    stages = jnp.int32(shape.config.stages)
    sink = refs.sinks_ref[item.head] if shape.has_sinks else None
    scale = shape.scale
    if shape.converts:
        kv_head = lax.div(item.head, jnp.int32(shape.q_heads // shape.kv_heads))
        scale = refs.scales_ref[0, kv_head] * scale
    acc, m, l = _initial_state(shape, sink)  # noqa: E741
    step = functools.partial(_step, shape, refs, item, warpgroup, base, scale)
    plgpu.barrier_wait(refs.q_full.at[warpgroup])
    if shape.converts_queries:
        queries = refs.q_smem[warpgroup]
        if shape.dtype == jnp.bfloat16:
            queries = queries.astype(jnp.float32)
        refs.wide_q_smem[warpgroup] = queries.astype(shape.product_dtype)
        plgpu.commit_smem()
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
            Accumulator.init(acc)
        )
    plgpu.barrier_arrive(refs.v_free.at[slot])
    return acc, m, l


def _step(
    shape: Shape,
    refs: Refs,
    item: Item,
    warpgroup: Any,
    base: Any,
    scale: Any,
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
        refs.wide_q_smem.at[warpgroup],
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
        p, m_new, l_new, alpha = _softmax(shape, s, scale, mask, m, l)
        if not has_previous:
            return acc, m_new, l_new, p.astype(shape.product_dtype)
        if shape.interpret:
            new_acc = _interpreted_values(acc, weights, v_tile)
        else:
            p, m_new, l_new, alpha = lax.optimization_barrier((p, m_new, l_new, alpha))
            new_acc = lax.optimization_barrier(acc_ref[...])
        plgpu.barrier_arrive(refs.v_free.at[previous])
        new_acc = new_acc * lax.broadcast_in_dim(alpha, new_acc.shape, [0])
        return new_acc, m_new, l_new, p.astype(shape.product_dtype)

    accumulators = [Accumulator((WARPGROUP_ROWS, shape.config.block_kv), jnp.float32)]
    if has_previous and not shape.interpret:
        accumulators.append(Accumulator((WARPGROUP_ROWS, shape.head_dim), jnp.float32))
    return pl.run_scoped(products, *accumulators)


def _softmax(
    shape: Shape,
    s: Any,
    scale: Any,
    mask: Any,
    m: Any,
    l: Any,  # noqa: E741
) -> tuple[Any, Any, Any, Any]:
    """Unnormalized weights, new running maximum and sum, and the factor of older results."""
    factor = scale * LOG2_E
    if shape.soft_cap is not None:
        s = jnp.tanh(s * (scale / shape.soft_cap))
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


def _visible(shape: Shape, item: Item, warpgroup: Any, kv_tile: Any) -> Any:
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
    shape: Shape,
    refs: Refs,
    item: Item,
    warpgroup: Any,
    acc: Any,
    m: Any,
    l: Any,  # noqa: E741
) -> None:
    row = item.row + warpgroup * WARPGROUP_ROWS
    seen = l > 0
    inverse = 1.0 / jnp.where(seen, l, 1.0)
    if shape.converts:
        kv_head = lax.div(item.head, jnp.int32(shape.q_heads // shape.kv_heads))
        inverse = inverse * refs.scales_ref[1, kv_head]
    out = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(shape.dtype)
    o_smem = refs.o_smem if shape.config.separate_output else refs.q_smem

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's copies have read o_smem
    if shape.return_lse:
        refs.lse_smem[warpgroup] = jnp.where(
            seen, m / LOG2_E + jnp.log(jnp.where(seen, l, 1.0)), -jnp.inf
        )
    whole = (item.low <= row) & (row + WARPGROUP_ROWS <= item.high)
    if not shape.config.separate_output:
        # Where rows of nobody end a section, the queries of the next one may be in place already.
        whole &= item.steps > 0

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


def _write_rows(shape: Shape, refs: Refs, item: Item, warpgroup: Any, row: Any, out: Any) -> None:
    """Store only the rows that the sequence owns, from registers: a copy of each would take longer.

    The other rows of the tile belong to neighbours (or lie past the array).
    """
    begin = jnp.clip(item.low - row, 0, WARPGROUP_ROWS)
    end = jnp.clip(item.high - row, 0, WARPGROUP_ROWS)
    if not shape.interpret:
        first = refs.out_ref.at[row, item.head]
        store_rows(out, first, shape.q_heads * shape.head_dim, begin, end)
        return

    @pl.loop(begin, end)
    def _row(r: Any) -> None:
        refs.out_ref[row + r, item.head] = lax.dynamic_index_in_dim(out, r, keepdims=False)
