"""How thread blocks of the Mosaic decode kernel that share a context put its pieces together.

Every block leaves its piece in global memory and counts itself in; the last one to arrive reads all
pieces of the context, adds them up in their order along the context, and goes on to the output. So
a call is one kernel, nobody waits for anybody, and the sum does not depend on who was last.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_global import arrive, load_per_column, load_piece, store_piece

# The running maximum before any key is seen: finite, so that masked scores (-inf) weigh 0.
LOWEST = -1e30
COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # one number per query row, the columns of the products
State = tuple[jax.Array, jax.Array, jax.Array]  # weighted values, maximum, sum of the weights


def empty_state(head_dim: int, columns: int) -> State:
    """The softmax of no keys: float32 `[head_dim, columns]`, and twice `[columns]`."""
    acc = jnp.zeros((head_dim, columns), jnp.float32)
    peak = jnp.full((columns,), LOWEST, jnp.float32)
    return (
        plgpu.layout_cast(acc, plgpu.Layout.WGMMA),
        plgpu.layout_cast(peak, COLUMNS),
        plgpu.layout_cast(jnp.zeros_like(peak), COLUMNS),
    )


def leave_piece(memory: Any, state: State, place: tuple[Any, ...], interpret: bool) -> None:
    """Write a piece where `gather_pieces` will look for it.

    Args:
        memory: float32 `[2, parts, kv_heads, head_dim, columns]` and twice `[..., columns]`.
        state: the piece.
        place: which piece of which part it is, and its key/value head.
        interpret: whether this runs in the interpreter, which knows no inline code.
    """
    acc_ref, peak_ref, total_ref = (ref.at[place] for ref in memory)
    acc, peak, total = state
    if interpret:
        acc_ref[...] = acc
    else:
        store_piece(acc, acc_ref)
    peak_ref[...] = peak
    total_ref[...] = total


def count_in(counter: Any, flag: Any, interpret: bool) -> jax.Array:
    """How many pieces of this context had been left before; see `mosaic_global.arrive`."""
    if not interpret:
        return arrive(counter, flag)
    before = counter[...]  # there, thread blocks run one after the other
    counter[...] = before + 1
    return before


def gather_pieces(
    memory: Any, first: jax.Array, later: jax.Array, head: jax.Array, interpret: bool
) -> State:
    """Add up the piece of part `first` and those of the `later` parts that follow it."""
    acc_ref, peak_ref, total_ref = memory
    head_dim, columns = acc_ref.shape[3:]
    together = max(1, 32 // columns)  # pieces on their way at a time

    def load(index: jax.Array) -> State:
        place = (jnp.minimum(index, 1), first + jnp.minimum(index, later), head)
        if interpret:
            refs = (acc_ref, peak_ref, total_ref)
            layouts = (plgpu.Layout.WGMMA, COLUMNS, COLUMNS)
            acc, peak, total = (
                plgpu.layout_cast(ref[place], layout)
                for ref, layout in zip(refs, layouts, strict=True)
            )
        else:
            acc = load_piece(acc_ref.at[place], (head_dim, columns))
            peak = load_per_column(peak_ref.at[place], columns)
            total = load_per_column(total_ref.at[place], columns)
        return acc, peak, total * jnp.where(index <= later, jnp.float32(1.0), jnp.float32(0.0))

    def add(i: jax.Array, state: State) -> State:
        pieces = [load(i * together + j) for j in range(together)]
        acc, peak, total = state
        new_peak = peak
        for _, piece_peak, _ in pieces:
            new_peak = jnp.maximum(new_peak, piece_peak)
        fade = jnp.exp2(peak - new_peak)
        acc, total = acc * over_rows(fade, acc.shape), total * fade
        for piece_acc, piece_peak, piece_total in pieces:
            weight = jnp.where(
                piece_total > 0, jnp.exp2(piece_peak - new_peak), jnp.zeros_like(peak)
            )
            acc = acc + piece_acc * over_rows(weight, acc.shape)
            total = total + piece_total * weight
        return acc, new_peak, total

    rounds = lax.div(later + together, jnp.int32(together))
    return lax.fori_loop(0, rounds, add, empty_state(head_dim, columns))


def over_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number per column, repeated down the rows."""
    return lax.broadcast_in_dim(x, shape, [1])
