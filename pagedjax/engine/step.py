"""The functions XLA sees: a forward pass over the paged cache, and the draw of the next tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pagedjax.engine.kv_pool import KVPool
from pagedjax.engine.kv_scales import KVScales
from pagedjax.engine.penalties import count_drawn
from pagedjax.engine.sampler import SampleOutputs, sample
from pagedjax.engine.step_inputs import SamplingArrays, StepInputs
from pagedjax.layers.attention import Heads
from pagedjax.models.arch import ArchConfig
from pagedjax.models.params import Params, decoder_from_params
from pallas_kernels import (
    Implementation,
    paged_decode_attention,
    paged_prefill_attention,
    rope_and_write_kv,
)
from pallas_kernels.pool_parts import Pool


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pool", "kv_scales", "slot_mapping", "block_tables", "seq_lens", "query_start"],
    meta_fields=["decode", "implementation"],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class PagedMemory:
    """One layer's `Memory`: its part of the pool, and where this step's sequences lie in it.

    Attributes:
        pool: keys and values of all sequences.
        kv_scales: how a compressed pool stores them; else None.
        slot_mapping: where the step's tokens go.
        block_tables: blocks of each sequence.
        seq_lens: positions of each sequence, the step's tokens included.
        query_start: token rows of each sequence.
        decode: every sequence has one token row (static).
        implementation: backend of the paged operations (static).
    """

    pool: Pool
    kv_scales: KVScales | None
    slot_mapping: Int[Array, " tokens"]
    block_tables: Int[Array, "seqs max_blocks"]
    seq_lens: Int[Array, " seqs"]
    query_start: Int[Array, " seqs+1"]
    decode: bool
    implementation: Implementation | None

    def attend(self, heads: Heads, *, window: int | None) -> tuple[jax.Array, "PagedMemory"]:
        """Write the new keys and values into the pool, then attend through the block tables."""
        scales = key_mean = None
        if self.kv_scales is not None:
            scales, key_mean = self.kv_scales.scales, self.kv_scales.key_mean
        how: dict[str, Any] = {"implementation": self.implementation, "kv_scales": scales}
        q, pool = rope_and_write_kv(
            self.pool,
            heads.qkv,
            heads.rotation.cos,
            heads.rotation.sin,
            self.slot_mapping,
            key_mean=key_mean,
            **heads.normalisation(),
            **how,
        )
        where = (pool, self.block_tables, self.seq_lens)
        if self.decode:
            mixed = paged_decode_attention(q, *where, window=window, **how)
        else:
            mixed = paged_prefill_attention(q, *where, self.query_start, window=window, **how)
        return mixed, replace(self, pool=pool)


def run_step(
    arch: ArchConfig,
    params: Params,
    pool: KVPool,
    fed_tokens: Int[Array, " max_seqs"],
    inputs: StepInputs,
    *,
    decode: bool,
    kv_scales: Sequence[KVScales] | None = None,
    implementation: Implementation | None = None,
) -> tuple[KVPool, Int[Array, " max_seqs"], Float[Array, "seqs vocab"], SampleOutputs]:
    """Advance every sequence of the step by the tokens it has in it. Pure; jit it.

    The likeliest token of each row is drawn; `redraw` replaces it where something else is wanted.

    Args:
        arch: the model (static).
        params: its parameters by name.
        pool: the KV cache; donate it, and it is updated in place.
        fed_tokens: the previous step's drawn tokens, by sampled row.
        inputs: what to compute, padded to a bucket.
        decode: every sequence has one token (static).
        kv_scales: of each layer, for a compressed pool.
        implementation: backend of the paged operations (static).

    Returns:
        The pool, this step's drawn tokens for the next step, the logits of the sampled rows
        (float32), and the rows' outputs.
    """
    fed = fed_tokens[jnp.maximum(inputs.feed_rows, 0)]
    tokens = jnp.where(inputs.feed_rows >= 0, fed, inputs.token_ids)
    model = decoder_from_params(arch, params)
    memories = [
        PagedMemory(
            pool=layer_pool,
            kv_scales=layer_scales,
            slot_mapping=inputs.slot_mapping,
            block_tables=inputs.block_tables,
            seq_lens=inputs.seq_lens,
            query_start=inputs.query_start,
            decode=decode,
            implementation=implementation,
        )
        for layer_pool, layer_scales in zip(pool, kv_scales or [None] * len(pool), strict=True)
    ]
    hidden, memories = model.hidden(tokens, inputs.positions, memories)
    logits = model.logits(hidden[inputs.sample_rows])
    drawn = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    pool = [memory.pool for memory in memories]
    return pool, _fed(fed_tokens, drawn), logits, SampleOutputs(token_ids=drawn)


def redraw(
    logits: Float[Array, "rows vocab"],
    fed_tokens: Int[Array, " max_seqs"],
    sampling: SamplingArrays,
    seen: Int[Array, "max_seqs vocab"] | None = None,
    *,
    full: bool,
    num_top: int,
) -> tuple[Int[Array, " max_seqs"], SampleOutputs, Int[Array, "max_seqs vocab"] | None]:
    """Draw the rows of a step as their requests want it. Pure; jit it.

    Args:
        logits: from `run_step`.
        fed_tokens: its drawn tokens, to be replaced.
        sampling: how to draw each row.
        seen: what its penalties go by, if it has any; donate it.
        full: see `sample` (static).
        num_top: see `sample` (static).

    Returns:
        The drawn tokens for the next step, the rows' outputs, and `seen` with what was drawn.
    """
    outputs = sample(logits, sampling, seen, full=full, num_top=num_top)
    if sampling.penalties is not None and seen is not None:
        seen = count_drawn(seen, sampling.penalties, outputs.token_ids)
    return _fed(fed_tokens, outputs.token_ids), outputs, seen


def _fed(fed_tokens: Int[Array, " max_seqs"], drawn: Int[Array, " rows"]) -> jax.Array:
    return fed_tokens.at[: drawn.shape[0]].set(drawn)
