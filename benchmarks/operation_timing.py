"""Times of whole operations as an engine calls them: shared prefixes, and writing keys and values.

See `bench_kernels`. Calls are chained in one compiled program: a query is the output of the call
before, a pool what the call before has written.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks.kernel_timing import copy_bandwidth, median_seconds, random_pool
from benchmarks.record import record

ROTATIONS = 4  # different blocks in turn, together larger than the L2 cache
WRITE_CALLS = 32  # per program
SEQS, PREFIX, OWN = 64, 32768, 256


def bench_cascade(args: argparse.Namespace) -> None:
    """Time a decode over a common prefix: read by every sequence, and read once."""
    block_size = int(args.block_sizes.split(",")[0])
    for heads in args.heads.split(","):
        for dtype in args.kv_dtypes.split(","):
            q_heads, kv_heads, head_dim = map(int, heads.split(":"))
            tables = shared_tables(block_size)
            blocks = int(max(t.max() for t in tables)) + 1
            pool = random_pool(blocks, kv_heads, block_size, head_dim, dtype)
            q = jax.random.normal(jax.random.key(1), (SEQS, q_heads, head_dim), jnp.bfloat16)
            case = f"{heads} {dtype} b{block_size} {SEQS}x({PREFIX}+{OWN})"
            plain = None
            for backend in (None, *args.backends.split(",")):
                for shared in (None, PREFIX // block_size):
                    seconds, spread = time_shared(q, pool, tables, shared, backend)
                    plain = plain or seconds
                    record(
                        "paged_decode_shared", case, args.out,
                        implementation=backend or "default", shared_blocks=shared or 0,
                        median_us=round(seconds * 1e6, 2), spread=round(spread, 4),
                        times_faster_than_plain=round(plain / seconds, 2),
                    )  # fmt: skip
            del pool


def shared_tables(block_size: int) -> list[np.ndarray]:
    """Block tables that begin alike, over blocks in random order; each list element its own."""
    prefix, own = PREFIX // block_size, OWN // block_size
    rng = np.random.default_rng(0)
    order = 1 + rng.permutation(ROTATIONS * (prefix + SEQS * own)).astype(np.int32)
    tables = []
    for mine in np.split(order, ROTATIONS):
        common = np.broadcast_to(mine[:prefix], (SEQS, prefix))
        tables.append(np.hstack([common, mine[prefix:].reshape(SEQS, own)]))
    return tables


def time_shared(
    q: jax.Array, pool: jax.Array, tables: list[np.ndarray], shared: int | None, backend: Any
) -> tuple[float, float]:
    """Median and spread of one call; the chain is unrolled, so that it is one CUDA graph."""
    scales = None if pool.dtype == q.dtype else jnp.ones((2, pool.shape[2]), jnp.float32)
    lens = jnp.full((SEQS,), PREFIX + OWN, jnp.int32)

    def chain(q: jax.Array, pool: jax.Array, tables: Any, lens: jax.Array, shared: Any) -> Any:
        for table in tables:
            q = pallas_kernels.paged_decode_attention(
                q, pool, table, lens, kv_scales=scales, shared_blocks=shared,
                implementation=backend,
            )  # fmt: skip
        return q

    shared_blocks = None if shared is None else jnp.int32(shared)
    args = (q, pool, [jnp.asarray(t) for t in tables], lens, shared_blocks)
    return median_seconds(jax.jit(chain).lower(*args).compile(), args, len(tables))


def bench_write(args: argparse.Namespace) -> None:
    """Time `write_kv` into a donated pool, and count the bytes that it must move."""
    ceiling = copy_bandwidth()
    block_size = int(args.block_sizes.split(",")[0])
    for heads in args.heads.split(","):
        for dtype in args.kv_dtypes.split(","):
            _, kv_heads, head_dim = map(int, heads.split(":"))
            for tokens in (8, 64, 512, 2048, 8192):
                blocks = 2 + WRITE_CALLS * tokens // block_size
                pool = random_pool(blocks, kv_heads, block_size, head_dim, dtype)
                for backend in args.writers.split(","):
                    seconds, spread, pool = time_write(pool, tokens, backend)
                    moved = 2 * tokens * kv_heads * head_dim * (2 + pool.dtype.itemsize)
                    record(
                        "write_kv", f"{heads} {dtype} b{block_size} {tokens} tokens", args.out,
                        implementation=backend, median_us=round(seconds * 1e6, 3),
                        spread=round(spread, 4), moved_bytes=moved,
                        copy_share=round(moved / seconds / ceiling, 4),
                        copy_tb_per_s=round(ceiling / 1e12, 3),
                    )  # fmt: skip
                del pool


def time_write(pool: jax.Array, tokens: int, backend: Any) -> tuple[float, float, jax.Array]:
    """Median and spread of one call, and the pool, which every run consumes."""
    _, _, kv_heads, block_size, head_dim = pool.shape
    rng = np.random.default_rng(0)
    slots = block_size + rng.permutation(WRITE_CALLS * tokens).astype(np.int32)
    k, v = (
        jax.random.normal(jax.random.key(i), (tokens, kv_heads, head_dim), jnp.bfloat16)
        for i in range(2)
    )
    quantized = pool.dtype.itemsize == 1
    scales = jnp.ones((2, kv_heads), jnp.float32) if quantized else None

    def chain(pool: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
        for call in range(WRITE_CALLS):
            pool = pallas_kernels.write_kv(
                pool, k, v, slots[call], kv_scales=scales, implementation=backend
            )
        return pool

    args = (pool, k, v, jnp.asarray(slots.reshape(WRITE_CALLS, tokens)))
    compiled = jax.jit(chain, donate_argnums=0).lower(*args).compile()
    held = [pool]

    def run(*rest: Any) -> jax.Array:
        held[0] = compiled(held[0], *rest)
        return held[0]

    seconds, spread = median_seconds(run, args[1:], WRITE_CALLS)
    return seconds, spread, held[0]
