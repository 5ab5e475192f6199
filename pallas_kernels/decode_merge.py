"""Merge of the partial results of contexts that several workers of the Triton kernel shared.

A partial result is normalised, with the base-2 logarithm of its softmax denominator; partial
results are weighted by their share of the sum of all denominators.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.decode_plan import Column
from pallas_kernels.triton_attention import LOG2_E, LOWEST, power_of_two_parts

PARTS = 32  # partial results per iteration


def merge_parts(
    out: jax.Array,
    lse: jax.Array,
    part: jax.Array,
    part_lse: jax.Array,
    plan: jax.Array,
    sinks: jax.Array | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Fill in the rows of `out` and `lse` that the decode kernel left to the merge, in place.

    Args:
        out: `[seqs, queries, q_heads, head_dim]`, finished but for the contexts that `plan` names.
        lse: float32 `[seqs, queries, q_heads]`, natural logarithm, likewise.
        part: float32 `[2, parts, kv_heads, rows, head_dim]`; index 0 for the piece that begins a
            context, 1 for a later one. The rows are the heads of the group for each query in turn.
        part_lse: float32 `[2, parts, kv_heads, rows]`, base 2.
        plan: the parts of a `decode_plan.DecodePlan`.
        sinks: float32 `[q_heads]` or None.
        interpret: run on a CPU, for tests.

    Returns:
        The completed `out` and `lse`.
    """
    whole = pl.BlockSpec(memory_space=pl.ANY)
    extras = [] if sinks is None else [sinks]
    parts, kv_heads, rows = part.shape[1:4]
    group = out.shape[2] // kv_heads
    return pl.pallas_call(
        functools.partial(_merge_kernel, group=group, with_sinks=sinks is not None),
        grid=(rows, kv_heads, min(parts, out.shape[0])),
        in_specs=[whole] * (5 + len(extras)),
        out_specs=[whole] * 2,
        out_shape=[
            jax.ShapeDtypeStruct(out.shape, out.dtype),
            jax.ShapeDtypeStruct(lse.shape, lse.dtype),
        ],
        input_output_aliases={0: 0, 1: 1},
        interpret=interpret,
        name="paged_decode_merge",
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(out, lse, part, part_lse, plan, *extras)


def _merge_kernel(
    _out_in_ref: Any,
    _lse_in_ref: Any,
    part_ref: Any,
    part_lse_ref: Any,
    plan_ref: Any,
    *refs: Any,
    group: int,
    with_sinks: bool,
) -> None:
    out_ref, lse_ref = refs[-2:]
    head_dim = out_ref.shape[3]
    row, head, merge = (pl.program_id(i) for i in range(3))
    later_parts = plan_ref[merge, Column.MERGE_LATER]

    @pl.when(later_parts > 0)
    def _() -> None:
        seq = plan_ref[merge, Column.MERGE_SEQ]
        first_part = plan_ref[merge, Column.MERGE_PART]
        query, q_head = row // group, head * group + row % group
        dims = power_of_two_parts(head_dim)

        def fold(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            accs, peak, total = carry
            index = i * PARTS + jnp.arange(PARTS, dtype=jnp.int32)
            which = jnp.where(index == 0, 0, 1)
            place = first_part + jnp.minimum(index, later_parts)
            # All loads before the first use: their latencies overlap.
            outs = [part_ref[which, place, head, row, dim] for dim in dims]
            logs = part_lse_ref[which, place, head, row]
            logs = jnp.where(index <= later_parts, logs, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(logs, axis=0))
            fade, weights = jnp.exp2(peak - new_peak), jnp.exp2(logs - new_peak)
            accs = tuple(
                acc * fade + jnp.sum(out * weights[:, None], axis=0)
                for out, acc in zip(outs, accs, strict=True)
            )
            return accs, new_peak, total * fade + jnp.sum(weights, axis=0)

        init = (
            tuple(jnp.zeros((dim.size,), jnp.float32) for dim in dims),
            jnp.float32(LOWEST),
            jnp.float32(0.0),
        )
        accs, peak, total = lax.fori_loop(0, pl.cdiv(later_parts + 1, PARTS), fold, init)
        seen = total > 0  # false for a query before the sequence's first position
        if with_sinks:
            total = total + jnp.where(seen, jnp.exp2(refs[0][q_head] * LOG2_E - peak), 0.0)
        safe = jnp.where(seen, total, 1.0)
        for dim, acc in zip(dims, accs, strict=True):
            out_ref[seq, query, q_head, dim] = (acc / safe).astype(out_ref.dtype)
        lse_ref[seq, query, q_head] = jnp.where(seen, (peak + jnp.log2(safe)) / LOG2_E, -jnp.inf)
