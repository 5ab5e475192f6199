"""Named decode workloads at the shapes of real models, shared by tests, tuning and benchmarks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

# q_heads, kv_heads, head_dim of public checkpoints.
MODEL_HEADS = {
    "Llama-2-13B": (40, 40, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "Llama-3.1-70B": (64, 8, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "SmolLM2-135M": (9, 3, 64),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """One decode step of one layer.

    Attributes:
        name: short and unique.
        q_heads: query heads.
        kv_heads: key/value heads.
        head_dim: width of a head.
        block_size: tokens per block of the pool.
        kv_dtype: dtype of the pool; queries are bfloat16.
        seq_lens: context of each sequence, in tokens.
    """

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str
    seq_lens: tuple[int, ...]

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the step must read."""
        item = jnp.dtype(self.kv_dtype).itemsize
        return 2 * sum(self.seq_lens) * self.kv_heads * self.head_dim * item

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool."""
        item = jnp.dtype(self.kv_dtype).itemsize
        return 2 * self.kv_heads * self.block_size * self.head_dim * item

    @property
    def blocks(self) -> int:
        """Blocks that the contexts fill."""
        return sum(-(-length // self.block_size) for length in self.seq_lens)

    @property
    def pool_key(self) -> tuple[int, int, int, str]:
        """Cases with equal keys can share a pool."""
        return self.kv_heads, self.head_dim, self.block_size, self.kv_dtype


def decode_cases(
    *,
    heads: Sequence[tuple[int, ...]],
    seqs: Sequence[int],
    contexts: Sequence[int],
    block_sizes: Sequence[int],
    kv_dtypes: Sequence[str],
) -> list[DecodeCase]:
    """Uniform batches, every combination; `heads` holds (q_heads, kv_heads, head_dim)."""
    return [
        DecodeCase(
            name=f"{q}:{kv}:{dim} {dtype} b{size} {n}x{context}",
            q_heads=q,
            kv_heads=kv,
            head_dim=dim,
            block_size=size,
            kv_dtype=dtype,
            seq_lens=(context,) * n,
        )
        for (q, kv, dim), dtype, size, n, context in itertools.product(
            heads, kv_dtypes, block_sizes, seqs, contexts
        )
    ]


def ragged_case(case: DecodeCase, seed: int) -> DecodeCase:
    """The same batch with lognormal lengths (sigma 1) that sum to the same number of tokens."""
    total = sum(case.seq_lens)
    draw = np.random.default_rng(seed).lognormal(sigma=1.0, size=len(case.seq_lens))
    lens = np.maximum(1, np.floor(draw * total / draw.sum())).astype(int)
    lens[np.argmax(lens)] += total - int(lens.sum())
    return dataclasses.replace(
        case, name=case.name + " lognormal", seq_lens=tuple(int(x) for x in lens)
    )
