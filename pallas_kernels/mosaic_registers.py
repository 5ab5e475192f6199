"""8-bit keys and values in the register operands of products, which Pallas has no operation for.

Each function is a few PTX instructions per thread, written against the fragments of wgmma: a warp
holds 16 rows of 64, a thread of it the rows `lane / 4` and `lane / 4 + 8` and, of every 8 columns,
the two from `2 (lane % 4)`. (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16".)

wgmma multiplies bytes only with bytes and only untransposed, so 8-bit keys and values are widened
on their way from shared memory into its register operand. Hardware moves 16 bits at a time within
a row, which leaves the head's dimensions out of order: `KEY_ORDER` says how the queries that meet
widened keys must be laid out, and `store_columns` puts the products of widened values in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic_ptx import (
    SPLAT,
    add,
    bit,
    constant,
    extract,
    inline,
    insert,
    low_bits,
    shared_address,
    shared_pointer,
    times,
    utils,
    warp_and_lane,
)

# Dimension of a head at each place of every 16 in the queries that meet `widened_keys`.
KEY_ORDER = (0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)

BYTES_TILED = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
HALVES_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_TILE_BYTES = 8 * 128  # 8 rows of 128 bytes, of which 16 bytes trade places by row


def in_key_order(q: jax.Array) -> jax.Array:
    """Lay the last axis out as `KEY_ORDER` says."""
    thirds = q.reshape(*q.shape[:-1], q.shape[-1] // 16, 4, 2, 2)
    return jnp.swapaxes(thirds, -3, -2).reshape(q.shape)


def widened_keys(keys: Any, rows: int, head_dim: int) -> jax.Array:
    """Load a float8_e4m3fn tile as the float16 left operand of a product, `[rows, head_dim]`.

    Args:
        keys: shared memory `[rows, head_dim]`, float8_e4m3fn, tiled and swizzled as `BYTES_TILED`.
        rows: a multiple of 64.
        head_dim: a multiple of 128; this axis of the result is in `KEY_ORDER`.
    """
    row_bytes = head_dim // 128 * _TILE_BYTES  # of 8 rows

    def load(_: Any, ref: Any) -> Any:
        warp, lane = warp_and_lane()
        half, chunk, row = bit(lane, 3), bit(lane, 4), low_bits(lane, 7)
        # A lane names one row of 16 bytes: 4 matrices of 8 rows, two below and two beside another.
        start = add(
            shared_address(ref),
            times(add(times(warp, 2), half), row_bytes),
            times(row, 128),
            times(arith.xori(chunk, row), 16),
        )
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape((rows, head_dim)), dtype=object)
        for columns in range(head_dim // 32):
            place = arith.xori(start, constant(columns % 4 * 32))
            for block in range(rows // 64):
                offset = block * 8 * row_bytes + columns // 4 * _TILE_BYTES
                loaded = _load_matrices(place, offset, transposed=False)
                for matrix, four in enumerate(loaded):
                    beside, below = divmod(matrix, 2)
                    for i, pair in enumerate(_widened(four)):
                        index = 2 * (2 * columns + beside) + i
                        registers[block, index, 0, 0, below, 0, 0, 0, 0] = pair
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return _load_operand(load, (rows, head_dim), keys)


def widened_values(values: Any, rows: int, head_dim: int) -> jax.Array:
    """Load a float8_e4m3fn tile transposed, as a float16 left operand, `[head_dim, rows]`.

    Args:
        values: as `keys` of `widened_keys`.
        rows: a multiple of 64.
        head_dim: a multiple of 128; this axis of the result is in the order of `store_columns`.
    """
    row_bytes = head_dim // 128 * _TILE_BYTES

    def load(_: Any, ref: Any) -> Any:
        warp, lane = warp_and_lane()
        beside, below, row = bit(lane, 3), bit(lane, 4), low_bits(lane, 7)
        chunk = add(times(warp, 2), beside)  # of the 32 dimensions that are this warp's
        start = add(
            shared_address(ref),
            times(below, row_bytes),
            times(row, 128),
            times(arith.xori(chunk, row), 16),
        )
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape((head_dim, rows)), dtype=object)
        for step in range(rows // 16):
            for part in range(head_dim // 128):
                offset = 2 * step * row_bytes + part * _TILE_BYTES
                loaded = _load_matrices(start, offset, transposed=True)
                for matrix, four in enumerate(loaded):
                    keys, block = divmod(matrix, 2)
                    # Two dimensions of one key, then of the next: to two keys of one dimension.
                    swapped = utils.inline_ptx(
                        "prmt.b32 $0, $1, 0, 0x3120;", four, result_types=four.type
                    )
                    for i, pair in enumerate(_widened(swapped)):
                        registers[2 * part + block, 2 * step + keys, 0, 0, i, 0, 0, 0, 0] = pair
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return _load_operand(load, (head_dim, rows), values)


def widen_tile(eight_bits: Any, wide: Any, rows: int) -> None:
    """Copy a float8_e4m3fn tile to a float16 one within shared memory, `[rows, 128]`.

    Args:
        eight_bits: tiled and swizzled as `BYTES_TILED`.
        wide: tiled and swizzled as `HALVES_TILED`.
        rows: a multiple of 32.
    """

    @inline(arg_types=(plgpu.RefType(BYTES_TILED), plgpu.RefType(HALVES_TILED)))
    def widen(_: Any, source: Any, target: Any) -> None:
        warp, lane = warp_and_lane()
        # 8 lanes, which shared memory serves at a time, take 4 pieces of 16 bytes in each of two
        # rows: r and r ^ 5, whose swizzles keep both the loads and the stores on distinct banks.
        piece, other = low_bits(lane, 3), bit(lane, 2)
        row = arith.xori(arith.shrui(lane, constant(3)), times(other, 5))
        in_row = times(row, 128)
        load_from = add(
            shared_address(source),
            times(warp, _TILE_BYTES),
            in_row,
            times(arith.xori(piece, row), 16),
        )
        store_to = add(
            shared_address(target),
            times(warp, 2 * _TILE_BYTES),
            in_row,
            times(arith.xori(times(piece, 2), row), 16),
        )
        i32 = row.type
        places = [(n, half) for n in range(rows // 32) for half in range(2)]
        pieces = [
            utils.inline_ptx(
                f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {n * 4 * _TILE_BYTES}];",
                arith.xori(load_from, constant(64 * half)),
                result_types=(i32,) * 4,
                has_side_effects=True,
            )
            for n, half in places
        ]
        for (n, half), fours in zip(places, pieces, strict=True):
            pairs = [llvm.bitcast(i32, pair) for four in fours for pair in _widened(four)]
            for i in range(2):
                utils.inline_ptx(
                    f"st.shared.v4.b32 [$0 + {(8 * n + half) * _TILE_BYTES}], {{$1, $2, $3, $4}};",
                    arith.xori(store_to, constant(16 * i)),
                    *pairs[4 * i : 4 * i + 4],
                    has_side_effects=True,
                )

    widen(eight_bits, wide)


def zero_rows(values: Any, low: jax.Array, high: jax.Array) -> None:
    """Zero the rows of a tile of bytes outside `low .. high - 1`.

    Args:
        values: shared memory `[rows, head_dim]`, one byte each, tiled and swizzled as
            `BYTES_TILED`; at most 128 rows.
        low: int32 scalar.
        high: likewise.
    """

    @inline(arg_types=(plgpu.RefType(BYTES_TILED), SPLAT, SPLAT))
    def zero(_: Any, ref: Any, low: Any, high: Any) -> None:
        groups, parts = ir.MemRefType(ref.type).shape[:2]
        row = low_bits(utils.thread_idx(), 127)  # a row of each thread
        unseen = arith.ori(
            arith.cmpi(arith.CmpIPredicate.slt, row, low.registers.item()),
            arith.cmpi(arith.CmpIPredicate.sge, row, high.registers.item()),
        )
        exists = arith.cmpi(arith.CmpIPredicate.slt, row, constant(8 * groups))
        start = add(
            shared_address(ref),
            times(arith.shrui(row, constant(3)), parts * _TILE_BYTES),
            times(low_bits(row, 7), 128),
        )
        for part in range(parts):
            for offset in range(0, 128, 16):
                utils.inline_ptx(
                    f"st.shared.v4.b32 [$0 + {part * _TILE_BYTES + offset}], {{$1, $1, $1, $1}};",
                    start,
                    constant(0),
                    predicate=arith.andi(unseen, exists),
                )

    zero(values, low, high)


def store_columns(x: jax.Array, ref: Any, dtype: Any) -> None:
    """Store a product of `widened_values` transposed and in order, `[columns, head_dim]`.

    Args:
        x: float32 `[head_dim, columns]`.
        ref: shared memory `[columns, head_dim]`, not tiled.
        dtype: of `ref`.
    """

    @inline(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(_: Any, value: Any, target: Any) -> None:
        warp, lane = warp_and_lane()
        head_dim = value.shape[0]
        itemsize = jnp.dtype(dtype).itemsize
        element = utils.dtype_to_ir_type(dtype)
        row = times(low_bits(lane, 3), 2)  # of the target: a column of the product
        column = add(times(warp, 32), times(arith.shrui(lane, constant(2)), 2))
        start = add(
            shared_address(target), times(row, head_dim * itemsize), times(column, itemsize)
        )
        pair_type = ir.VectorType.get((2,), ir.F32Type.get())
        for block, group in np.ndindex(*value.registers.shape[:2]):
            halves = [value.registers[block, group, 0, 0, i, 0, 0, 0, 0] for i in range(2)]
            for i in range(2):
                pair = llvm.mlir_undef(pair_type)
                for j, half in enumerate(halves):
                    pair = insert(extract(half, i), pair, j)
                if dtype != jnp.float32:
                    pair = arith.truncf(ir.VectorType.get((2,), element), pair)
                place = (8 * group + i) * head_dim + block // 2 * 128 + block % 2 * 16
                llvm.store(pair, shared_pointer(add(start, constant(place * itemsize))))

    store(x, ref)


def _load_operand(load: Callable[..., Any], shape: tuple[int, int], ref: Any) -> jax.Array:
    result = plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=plgpu.Layout.WGMMA)
    ref_type = plgpu.RefType(BYTES_TILED)
    return inline(arg_types=(ref_type,), return_type=result)(load)(ref)


def _load_matrices(address: Any, offset: int, *, transposed: bool) -> tuple[Any, ...]:
    """Four matrices of 8 x 16 bytes; a thread gets 4 bytes of each."""
    return utils.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 "
        f"{{$0, $1, $2, $3}}, [$4 + {offset}];",
        address,
        result_types=(address.type,) * 4,
        has_side_effects=True,
    )


def _widened(four: Any) -> tuple[Any, Any]:
    """Four float8_e4m3fn in a register as two pairs of float16."""
    pairs = utils.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        four,
        result_types=(four.type, four.type),
    )
    pair_type = ir.VectorType.get((2,), ir.F16Type.get())
    low, high = (llvm.bitcast(pair_type, pair) for pair in pairs)
    return low, high
