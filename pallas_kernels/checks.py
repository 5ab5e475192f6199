"""Checks of the public operations' arguments.

Shapes and dtypes are checked when a call is traced; values only where they are known and
`jax.enable_checks` is on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from pallas_kernels.pool_parts import QUANTIZED_DTYPES, Pool, arrays_of, is_quantized, parts_of

QUERY_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_attention(
    q: jax.Array,
    kv_pool: Pool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
) -> None:
    """Check what decode and prefill have in common; q is `[rows, q_heads, head_dim]`."""
    check_pool(kv_pool)
    _, _, kv_heads, _, head_dim = parts_of(kv_pool).keys.shape
    if q.shape[2] != head_dim:
        raise ValueError(f"q must be [..., q_heads, {head_dim}] for this pool, got {q.shape}")
    if q.dtype not in QUERY_DTYPES:
        raise ValueError(f"q must be float32, bfloat16 or float16, got {q.dtype}")
    if q.shape[1] < 1 or q.shape[1] % kv_heads:
        raise ValueError(f"q must have a multiple of {kv_heads=} heads, got {q.shape[1]}")
    for array in arrays_of(kv_pool):
        if array.dtype not in (q.dtype, *QUANTIZED_DTYPES):
            raise ValueError(
                f"kv_pool must be {q.dtype} like q, float8_e4m3fn or int8, got {array.dtype}"
            )
    if block_tables.ndim != 2 or block_tables.shape[1] < 1:
        raise ValueError(
            f"block_tables must be [seqs, max_blocks] with at least one block, "
            f"got {block_tables.shape}"
        )
    check_shape("seq_lens", seq_lens, (block_tables.shape[0],), "[seqs]")
    check_int32("block_tables", block_tables)
    check_int32("seq_lens", seq_lens)
    check_scales(kv_pool, kv_scales)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (the query itself), got {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}")
    if sinks is not None:
        check_shape("sinks", sinks, (q.shape[1],), "[q_heads]")
        check_float32("sinks", sinks)


def check_values(
    kv_pool: Pool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array | None = None,
) -> None:
    """Check what only the values can tell, when `jax_enable_checks` is on and they are known."""
    if not values_known(*(x for x in (block_tables, seq_lens, query_start) if x is not None)):
        return
    blocks, _, _, block_size, _ = parts_of(kv_pool).keys.shape
    tables, lens = np.asarray(block_tables), np.asarray(seq_lens)
    room = tables.shape[1] * block_size
    if lens.size and (lens.min() < 0 or lens.max() > room):
        raise ValueError(f"seq_lens must be in 0 .. {room}, got {lens.min()} .. {lens.max()}")
    used = tables[np.arange(tables.shape[1])[None, :] * block_size < lens[:, None]]
    if used.size and (used.min() < 0 or used.max() >= blocks):
        raise ValueError(
            f"block_tables must name blocks 0 .. {blocks - 1}, got {used.min()} .. {used.max()}"
        )
    if query_start is not None:
        rows = np.diff(np.asarray(query_start))
        if rows.min(initial=0) < 0 or ((rows > lens) & (lens > 0)).any():
            raise ValueError(
                f"query_start must rise by 0 .. seq_lens rows, got rows {rows} for lengths {lens}"
            )


def check_slot_mapping(kv_pool: Pool, slot_mapping: jax.Array, tokens: int) -> None:
    """Check that there is an int32 slot per token, and that slots are few enough for int32.

    Where values are known, as for `check_values`, also that they exist, and that none but slot 0 is
    named twice.
    """
    check_shape("slot_mapping", slot_mapping, (tokens,), "[tokens]")
    check_int32("slot_mapping", slot_mapping)
    blocks, _, _, block_size, _ = parts_of(kv_pool).keys.shape
    if blocks * block_size > 2**31:
        raise ValueError(f"slots are int32, got a pool of {blocks=} times {block_size=}")
    if not slot_mapping.size or not values_known(slot_mapping):
        return
    slots, end = np.asarray(slot_mapping), blocks * block_size
    if slots.min() < 0 or slots.max() >= end:
        raise ValueError(
            f"slot_mapping must be in 0 .. {end - 1}, got {slots.min()} .. {slots.max()}"
        )
    if np.unique(slots[slots > 0]).size < (slots > 0).sum():
        raise ValueError(f"slot_mapping must name no slot but 0 twice, got {slots}")


def check_shared_blocks(
    q: jax.Array,
    kv_pool: Pool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    shared_blocks: jax.Array | None,
) -> None:
    """Check the promise of `shared_blocks` in the same way."""
    if shared_blocks is None or not values_known(block_tables, seq_lens, shared_blocks):
        return
    lens, shared = np.asarray(seq_lens), int(shared_blocks)
    block_size = parts_of(kv_pool).keys.shape[3]
    needed = shared * block_size + (q.shape[1] if q.ndim == 4 else 1)
    if shared < 0 or (lens > 0).any() and lens[lens > 0].min() < needed:
        raise ValueError(
            f"shared_blocks={shared} needs seq_lens of 0 or at least {needed}, got {lens}"
        )
    tables = np.asarray(block_tables)[lens > 0, :shared]
    if (tables != tables[:1]).any():
        raise ValueError(f"block_tables must begin with {shared} equal columns, got {tables}")


def values_known(*arrays: jax.Array) -> bool:
    """Whether `jax_enable_checks` is on and the values are at hand."""
    checks = jax.config.jax_enable_checks  # pyright: ignore[reportAttributeAccessIssue]
    return checks and not any(isinstance(x, core.Tracer) for x in arrays)


def check_pool(kv_pool: Pool) -> None:
    """A pool has five axes, the second of size 2; two arrays have the same, of size 1."""
    arrays = arrays_of(kv_pool)
    dims, size = "[blocks, 2, kv_heads, block_size, head_dim]", 2
    if isinstance(kv_pool, tuple):
        dims, size = "a pair of [blocks, 1, kv_heads, block_size, head_dim]", 1
    shapes = [array.shape for array in arrays]
    fits = all(len(shape) == 5 and shape[1] == size and 0 not in shape for shape in shapes)
    if not fits or len(arrays) != 3 - size or len(set(shapes)) > 1:
        raise ValueError(f"kv_pool must be {dims}, got {', '.join(map(str, shapes))}")
    for array in arrays:
        if array.dtype not in (*QUERY_DTYPES, *QUANTIZED_DTYPES):
            raise ValueError(
                "kv_pool must be float32, bfloat16, float16, float8_e4m3fn or int8, "
                f"got {array.dtype}"
            )


def check_scales(kv_pool: Pool, kv_scales: jax.Array | None) -> None:
    """Scales come with a quantized pool, and only with one."""
    arrays = arrays_of(kv_pool)
    dtypes = " and ".join(str(array.dtype) for array in arrays)
    quantized = any(is_quantized(array.dtype) for array in arrays)
    wanted = (2, arrays[0].shape[2])
    if quantized and kv_scales is None:
        raise ValueError(f"a pool of {dtypes} needs kv_scales of shape {wanted}, got None")
    if kv_scales is None:
        return
    if not quantized:
        raise ValueError(f"kv_scales must be None for a pool of {dtypes}, got an array")
    check_shape("kv_scales", kv_scales, wanted, "[2, kv_heads]")
    check_float32("kv_scales", kv_scales)


def check_shape(name: str, x: jax.Array, wanted: tuple[int, ...], dims: str) -> None:
    """Name the dimensions of a shape that does not fit."""
    if x.shape != wanted:
        raise ValueError(f"{name} must be {dims} = {wanted}, got {x.shape}")


def check_int32(name: str, x: jax.Array) -> None:
    """Refuse any other dtype."""
    if x.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32, got {x.dtype}")


def check_float32(name: str, x: jax.Array) -> None:
    """Refuse any other dtype."""
    if x.dtype != jnp.float32:
        raise ValueError(f"{name} must be float32, got {x.dtype}")
