"""Paged attention in plain numpy float64, one sequence and one head at a time."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1.5e-3}  # rounding of one output


@dataclass
class Case:
    """One random problem; `values` are the numbers that the pool stands for, in float64."""

    q: jax.Array
    pool: jax.Array | tuple[jax.Array, jax.Array]
    values: np.ndarray  # [blocks, 2, kv_heads, block_size, head_dim]
    tables: np.ndarray
    seq_lens: np.ndarray
    rows: np.ndarray  # query rows of each sequence
    kv_scales: jax.Array | None

    @property
    def query_start(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.rows)]).astype(np.int32)

    def args(self) -> tuple[Any, ...]:
        return self.q, self.pool, jnp.asarray(self.tables), jnp.asarray(self.seq_lens)


def make_case(
    seed,
    lens,
    *,
    rows=None,
    kv_heads=2,
    group=3,
    head_dim=64,
    block_size=16,
    dtype=jnp.float32,
    kv_dtype=None,
    plain_keys=False,
    extra_columns=2,
    extra_tokens=0,
    fill=np.nan,
):
    """Random queries and a shuffled pool; slots that belong to nobody hold `fill`.

    Table entries past the last used block name a block full of `fill`. With `plain_keys` the pool
    is a pair of arrays, of which only the values are of `kv_dtype`; the scales of keys are NaN.
    """
    rng = np.random.default_rng(seed)
    lens = np.asarray(lens, np.int32)
    rows = np.asarray(np.minimum(lens, 1) if rows is None else rows, np.int32)
    used = -(-lens // block_size)
    blocks = 2 + int(used.sum())  # null block, blocks in use, one block of garbage
    values = rng.normal(size=(blocks, 2, kv_heads, block_size, head_dim))
    kv_scales = None
    if kv_dtype is None:
        stored = jnp.asarray(values, dtype)
        values = np.asarray(stored, np.float64)
    else:
        spread = 20.0 if kv_dtype == jnp.int8 else 1.0
        kv_scales = (rng.uniform(0.5, 1.5, (2, kv_heads)) / spread).astype(np.float32)
        stored = jnp.asarray(values * spread, jnp.float32).astype(kv_dtype)
        values = np.asarray(stored.astype(jnp.float32), np.float64)
        values = values * kv_scales[None, :, :, None, None]
        if plain_keys:
            keys = jnp.asarray(rng.normal(size=values[:, :1].shape), dtype)
            values[:, :1] = np.asarray(keys, np.float64)
            kv_scales[0] = np.nan
    order = 1 + rng.permutation(blocks - 2)
    tables = np.full((len(lens), int(used.max(initial=0)) + extra_columns), blocks - 1, np.int32)
    owned = np.zeros((blocks, block_size), bool)
    for s, length in enumerate(lens):
        mine, order = order[: used[s]], order[used[s] :]
        tables[s, : used[s]] = mine
        for t in range(length):
            owned[mine[t // block_size], t % block_size] = True
    owned = jnp.asarray(owned)[:, None, None, :, None]

    def with_garbage(content):
        garbage = fill if content.dtype != jnp.int8 else 127
        wide = jnp.where(owned, content.astype(jnp.float32), jnp.asarray(garbage, jnp.float32))
        return wide.astype(content.dtype)

    arrays = (keys, stored[:, 1:]) if plain_keys else (stored,)
    filled = tuple(map(with_garbage, arrays))
    pool = filled if plain_keys else filled[0]
    q = jnp.asarray(
        rng.normal(size=(int(rows.sum()) + extra_tokens, kv_heads * group, head_dim)), dtype
    )
    scales = None if kv_scales is None else jnp.asarray(kv_scales)
    return Case(q, pool, values, tables, lens, rows, scales)


def make_decode_case(seed, lens, **shape):
    """One query row per sequence, padding sequences included."""
    return make_case(seed, lens, rows=np.ones(len(lens), np.int32), **shape)


def dense(case, *, scale=None, window=None, soft_cap=None, sinks=None):
    """Output and lse, float64 `[tokens, q_heads, head_dim]` and `[tokens, q_heads]`.

    A row before its sequence's first position is padding: 0 and -inf.
    """
    q = np.asarray(case.q, np.float64)
    tokens, q_heads, head_dim = q.shape
    kv_heads, block_size = case.values.shape[2:4]
    scale = head_dim**-0.5 if scale is None else scale
    out, lse = np.zeros(q.shape), np.full((tokens, q_heads), -np.inf)
    for s, length in enumerate(case.seq_lens):
        rows = case.rows[s]
        kv = case.values[case.tables[s, : -(-length // block_size)]]
        kv = kv.transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :length]
        position = length - rows + np.arange(rows)
        behind = position[:, None] - np.arange(length)[None, :]
        visible = (behind >= 0) & (behind < (length if window is None else window))
        seen = visible.any(axis=1)
        mine = case.query_start[s] + np.flatnonzero(seen)
        for h in range(q_heads):
            k, v = kv[:, h * kv_heads // q_heads]
            x = q[mine, h] @ k.T * scale
            if soft_cap is not None:
                x = soft_cap * np.tanh(x / soft_cap)
            x = np.where(visible[seen], x, -np.inf)
            sink = np.full((len(mine), 1), -np.inf if sinks is None else float(sinks[h]))
            logits = np.hstack([x, sink])
            peak = logits.max(axis=1, initial=-np.inf)
            lse[mine, h] = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
            out[mine, h] = np.exp(x - lse[mine, h][:, None]) @ v
    return out, lse
