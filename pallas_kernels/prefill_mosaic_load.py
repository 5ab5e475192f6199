"""Producer warpgroup of the Mosaic prefill kernel: queries, keys and values into shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import prefill_plan as plan
from pallas_kernels.mosaic_registers import widen_tile
from pallas_kernels.prefill_mosaic_items import (
    CONSUMERS,
    TILE_ROWS,
    WARPGROUP_ROWS,
    Item,
    Refs,
    Shape,
    first_row,
    load_item,
    num_items,
)

WARPS = 4  # of a warpgroup


def produce(shape: Shape, refs: Refs) -> None:
    """Copy the queries, keys and values of all items of this thread block, in order."""
    stages = shape.config.stages

    def item_body(turn: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        base, row = carry
        item = load_item(shape, refs.work_ref, turn, row)
        next_row = first_row(shape, refs.work_ref, turn + 1)

        def step_body(i: Any, _: None) -> None:
            slot = lax.rem(base + i, jnp.int32(stages))
            _copy_step(shape, refs, item, i, slot)

        lax.fori_loop(jnp.int32(0), item.steps, step_body, None)
        return base + item.steps, next_row

    start = (jnp.int32(0), first_row(shape, refs.work_ref, jnp.int32(0)))
    lax.fori_loop(jnp.int32(0), num_items(shape, refs.work_ref), item_body, start)
    _drain(shape, refs)


def _copy_step(shape: Shape, refs: Refs, item: Item, i: Any, slot: Any) -> None:
    """Copy step `i` of an item, the tiles from the last to the first: keys, then values."""
    keys, values = _copy_sources(shape, refs, item, i)
    plgpu.barrier_wait(refs.k_free.at[slot])
    _copy_tile(shape, refs, keys, refs.k_smem.at[slot], refs.k_full.at[slot])
    pl.when(i == 0)(lambda: _copy_queries(refs, item))
    plgpu.barrier_wait(refs.v_free.at[slot])
    partial = _is_partial(shape, item, i)

    @pl.when(jnp.logical_not(partial))
    def _values() -> None:
        _copy_tile(shape, refs, values, refs.v_smem.at[slot], refs.v_full.at[slot])

    @pl.when(partial)
    def _last_values() -> None:
        _copy_tile(shape, refs, values, refs.v_smem.at[slot], refs.tail_full)
        plgpu.barrier_wait(refs.tail_full)
        _zero_past_end(shape, refs.v_smem.at[slot], item, i)
        plgpu.commit_smem()
        for _ in range(shape.copies):
            plgpu.barrier_arrive(refs.v_full.at[slot])


def produce_widened(shape: Shape, refs: Refs) -> None:
    """`produce` for a pool of one-byte elements.

    A tile is copied as it is, one step ahead, and widened to the dtype of the products between two
    places of shared memory. (wgmma takes bytes only for both operands and only untransposed.)
    """
    stages = shape.config.stages
    items = num_items(shape, refs.work_ref)

    def item_body(turn: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        base, row, requested = carry
        item = load_item(shape, refs.work_ref, turn, row)
        next_row = first_row(shape, refs.work_ref, turn + 1)
        following = load_item(shape, refs.work_ref, turn + 1, next_row)
        follows = (turn + 1 < items) & (following.steps > 0)

        @pl.when((item.steps > 0) & (requested == 0))
        def _first() -> None:
            for part, sources in enumerate(_copy_sources(shape, refs, item, jnp.int32(0))):
                _copy_tile(shape, refs, sources, refs.raw_smem.at[part], refs.raw_full.at[part])

        def step_body(i: Any, _: None) -> None:
            slot = lax.rem(base + i, jnp.int32(stages))
            more = i + 1 < item.steps
            ahead = _choose(more, item, following)
            sources = _copy_sources(shape, refs, ahead, jnp.where(more, i + 1, 0))
            for part, (tile, free, full) in enumerate(
                ((refs.k_smem, refs.k_free, refs.k_full), (refs.v_smem, refs.v_free, refs.v_full))
            ):
                plgpu.barrier_wait(refs.raw_full.at[part])
                plgpu.barrier_wait(free.at[slot])
                _widen(shape, refs.raw_smem.at[part], tile.at[slot])
                if part == 1:

                    @pl.when(_is_partial(shape, item, i))
                    def _zero_rest() -> None:
                        plgpu.commit_smem()  # a warp zeroes rows that others have widened
                        _zero_past_end(shape, refs.v_smem.at[slot], item, i)

                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])

                @pl.when(more | follows)
                def _ahead(part: int = part) -> None:
                    raw = refs.raw_smem.at[part]
                    _copy_tile(shape, refs, sources[part], raw, refs.raw_full.at[part])

                if part == 0:
                    pl.when(i == 0)(lambda: _copy_queries(refs, item))

        lax.fori_loop(jnp.int32(0), item.steps, step_body, None)
        requested = ((item.steps > 0) & follows).astype(jnp.int32)
        return base + item.steps, next_row, requested

    start = (jnp.int32(0), first_row(shape, refs.work_ref, jnp.int32(0)), jnp.int32(0))
    lax.fori_loop(jnp.int32(0), items, item_body, start)
    _drain(shape, refs)


def _choose(first: Any, a: Item, b: Item) -> Item:
    values = {
        field.name: jnp.where(first, getattr(a, field.name), getattr(b, field.name))
        for field in dataclasses.fields(Item)
    }
    return Item(**values)


def _widen(shape: Shape, raw: Any, tile: Any) -> None:
    """Convert a tile; in few large pieces, since each waits for the whole warpgroup twice."""
    if shape.widens_by_hand and not shape.interpret:
        widen_tile(raw, tile, shape.config.block_kv)
        return
    rows, columns = min(shape.config.block_kv, TILE_ROWS), shape.swizzle_columns
    for r in range(0, shape.config.block_kv, rows):
        for c in range(0, shape.head_dim, columns):
            window = (pl.ds(r, rows), pl.ds(c, columns))
            x = _load(raw.at[window], plgpu.Layout.WGMMA_UPCAST_4X)
            tile.at[window][...] = x.astype(shape.product_dtype)


def _load(ref: Any, layout: Any) -> Any:
    return plgpu.load(ref, layout=layout)  # pyright: ignore[reportCallIssue] (JAX 0.10's index)


def _drain(shape: Shape, refs: Refs) -> None:
    """Wait for every arrival that nobody has waited for: the consumers' last ones."""
    for slot in range(shape.config.stages):
        plgpu.barrier_wait(refs.k_free.at[slot])
        plgpu.barrier_wait(refs.v_free.at[slot])
    for w in range(CONSUMERS):
        plgpu.barrier_wait(refs.q_free.at[w])


def _copy_queries(refs: Refs, item: Item) -> None:
    for w in range(CONSUMERS):
        start = pl.multiple_of(item.row + w * WARPGROUP_ROWS, plan.ROW_ALIGNMENT)
        plgpu.barrier_wait(refs.q_free.at[w])
        plgpu.copy_gmem_to_smem(
            refs.q_ref.at[pl.ds(start, WARPGROUP_ROWS), item.head],
            refs.q_smem.at[w],
            refs.q_full.at[w],
        )


def _is_partial(shape: Shape, item: Item, i: Any) -> Any:
    """Whether a tile reaches unused slots of the sequence's last block."""
    past_end = (item.end - i) * shape.config.block_kv > item.seq_len
    return past_end & (lax.rem(item.seq_len, jnp.int32(shape.block_size)) != 0)


def _copy_sources(shape: Shape, refs: Refs, item: Item, i: Any) -> tuple[list[Any], list[Any]]:
    """First pool rows of the copies of step `i`: keys, values.

    Blocks past the sequence are never followed: its last block stands in, masked by position.
    """
    block_size = shape.block_size
    last_block = lax.div(item.seq_len - 1, jnp.int32(block_size))
    kv_head = lax.div(item.head, jnp.int32(shape.q_heads // shape.kv_heads))
    sources = []
    for j in range(shape.copies):
        position = (item.end - 1 - i) * shape.config.block_kv + j * shape.copy_rows
        index = jnp.clip(lax.div(position, jnp.int32(block_size)), 0, last_block)
        within = 0
        if shape.copy_rows < block_size:
            within = lax.rem(position, jnp.int32(block_size))
        block = refs.tables_ref[item.seq, index]
        row = (block * (2 * shape.kv_heads) + kv_head) * block_size + within
        sources.append(pl.multiple_of(row, 16))
    return sources, [s + shape.kv_heads * block_size for s in sources]


def _copy_tile(shape: Shape, refs: Refs, sources: list[Any], tile: Any, barrier: Any) -> None:
    """Copy the blocks that make up a tile of keys or values.

    Single warps issue the copies, each its share: a copy of 16 rows is so small that arrivals of
    the whole warpgroup for every copy would be felt.
    """

    @plgpu.warp_map
    def _issue(warp: Any) -> None:
        for w in range(min(WARPS, shape.copies)):

            @pl.when(warp == w)
            def _share(w: int = w) -> None:
                for j in range(w, shape.copies, WARPS):
                    plgpu.copy_gmem_to_smem(
                        refs.kv_ref.at[pl.ds(sources[j], shape.copy_rows)],
                        tile.at[pl.ds(j * shape.copy_rows, shape.copy_rows)],
                        barrier,
                    )


def _zero_past_end(shape: Shape, tile: Any, item: Item, i: Any) -> None:
    """Zero the values past a sequence whose last block is partly filled.

    Their weight is 0, but 0 times a NaN in an unused slot would be NaN.
    """
    columns = shape.swizzle_columns
    for r in range(0, shape.config.block_kv, WARPGROUP_ROWS):
        start = (item.end - 1 - i) * shape.config.block_kv + r

        @pl.when(start + WARPGROUP_ROWS > item.seq_len)
        def _zero(r: int = r, start: Any = start) -> None:
            for c in range(0, shape.head_dim, columns):
                piece = tile.at[pl.ds(r, WARPGROUP_ROWS), pl.ds(c, columns)]
                x = _load(piece, plgpu.Layout.WGMMA)
                row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
                piece[...] = jnp.where(row + start < item.seq_len, x, jnp.zeros_like(x))
