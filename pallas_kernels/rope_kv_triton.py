"""Normalisation, rotation and write of keys and values as one kernel (Pallas Triton)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.pool_parts import Pool, PoolParts, arrays_of, parts_of, pool_like
from pallas_kernels.triton_attention import check_addresses, power_of_two_parts, sum_of_pieces
from pallas_kernels.write_kv_triton import MOST_HEADS, store_heads

PROGRAMS = 1024  # fill the device; more heads per program only while there are as many


def rope_and_write_kv(
    kv_pool: Pool,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    key_mean: jax.Array | None,
    kv_scales: jax.Array | None,
    *,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    eps: float,
    dtype: jnp.dtype,
    interpret: bool = False,
) -> tuple[jax.Array, Pool]:
    """See `pallas_kernels.rope_and_write_kv`; one program has one token and some heads."""
    check_addresses(kv_pool)
    _, tokens, kv_heads, rows, head_dim = qkv.shape
    group = rows - 2
    arrays = arrays_of(kv_pool)
    named = {
        "qkv": qkv, "cos": cos, "sin": sin, "slots": slot_mapping, "key_mean": key_mean,
        "kv_scales": kv_scales, "q_norm": q_norm, "k_norm": k_norm,
    }  # fmt: skip
    named = {name: x for name, x in named.items() if x is not None}
    heads = _heads_per_program(tokens, kv_heads)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    q, *written = pl.pallas_call(
        functools.partial(
            _kernel, names=tuple(named), num_arrays=len(arrays), eps=eps, heads=heads,
            value_index=parts_of(kv_pool).value_index,
        ),
        grid=(kv_heads // heads, tokens),
        in_specs=[whole] * (len(arrays) + len(named)),
        out_specs=[whole] * (1 + len(arrays)),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, kv_heads, group, head_dim), dtype),
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays),
        ],
        input_output_aliases={index: 1 + index for index in range(len(arrays))},
        interpret=interpret,
        name="rope_and_write_kv",
        compiler_params=plt.CompilerParams(num_warps=2 if heads > 1 else 1, num_stages=1),
    )(*arrays, *named.values())  # fmt: skip
    return q.reshape(tokens, kv_heads * group, head_dim), pool_like(kv_pool, tuple(written))


def _heads_per_program(tokens: int, kv_heads: int) -> int:
    """A power of two that divides the heads."""
    heads = 1
    while (
        heads < MOST_HEADS
        and kv_heads % (2 * heads) == 0
        and tokens * kv_heads >= 2 * heads * PROGRAMS
    ):
        heads *= 2
    return heads


def _kernel(
    *refs: Any, names: Sequence[str], num_arrays: int, eps: float, heads: int, value_index: int
) -> None:
    inputs = dict(zip(names, refs[num_arrays : num_arrays + len(names)], strict=True))
    q_ref = refs[num_arrays + len(names)]
    pool = PoolParts(refs[-num_arrays], refs[-1], value_index)
    qkv, dtype = inputs["qkv"], q_ref.dtype
    group, head_dim = qkv.shape[3] - 2, qkv.shape[4]
    half = head_dim // 2
    low = power_of_two_parts(half)
    high = [pl.ds(half + part.start, part.size) for part in low]
    head = pl.program_id(0) * heads + jnp.arange(heads, dtype=jnp.int32)
    token = pl.program_id(1)
    angles = [(inputs["cos"][token, part][None], inputs["sin"][token, part][None]) for part in low]

    @functools.cache
    def row(index: int) -> list[list[jax.Array]]:
        """A row of every head, in float32: the halves of a head, in parts."""
        return [
            [sum_of_pieces(qkv, token, head, index, part) for part in parts]
            for parts in (low, high)
        ]

    def normalised(index: int, norm: Any | None) -> list[list[jax.Array]]:
        halves = row(index)
        if norm is not None:
            squares = [jnp.sum(x * x, axis=-1) for parts in halves for x in parts]
            mean = functools.reduce(lambda a, b: a + b, squares) / head_dim
            factor = lax.rsqrt(mean + eps)[:, None]
            halves = [
                [
                    ((x * factor).astype(dtype) * norm[part].astype(dtype)[None]).astype(
                        jnp.float32
                    )
                    for x, part in zip(parts, places, strict=True)
                ]
                for parts, places in zip(halves, (low, high), strict=True)
            ]
        return halves

    def rotated(index: int, norm: Any | None) -> list[tuple[Any, jax.Array]]:
        firsts, seconds = normalised(index, norm)
        turned = []
        for first, second, (cos, sin), lower, upper in zip(
            firsts, seconds, angles, low, high, strict=True
        ):
            turned.append((lower, first * cos - second * sin))
            turned.append((upper, second * cos + first * sin))
        return [(part, x.astype(dtype)) for part, x in turned]

    if heads == 1:  # all reads are under way before a write, which those after it would wait for
        for index in range(group + 2):
            row(index)
    for index in range(group):
        for part, x in rotated(index, inputs.get("q_norm")):
            q_ref[token, head, index, part] = x

    slot, scales = inputs["slots"][token], inputs.get("kv_scales")
    for part, x in rotated(group, inputs.get("k_norm")):
        if "key_mean" in inputs:
            x = x.astype(jnp.float32) - inputs["key_mean"][head, part]
        store_heads(pool, 0, slot, head, part, x, scales)
    for parts, values in zip((low, high), row(group + 1), strict=True):
        for part, x in zip(parts, values, strict=True):
            store_heads(pool, 1, slot, head, part, x.astype(dtype), scales)
