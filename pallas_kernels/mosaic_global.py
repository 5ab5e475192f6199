"""Products between registers and global memory, for which Pallas has no operation.

Each thread stores and loads the pairs of columns that it holds (see `mosaic_registers`), without a
detour through shared memory. What thread blocks hand to each other within a kernel is published by
`arrive`, and read past the L1 cache.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    constant,
    global_pointer,
    inline,
    insert,
    low_bits,
    shared_address,
    shared_pointer,
    times,
    utils,
    warp_and_lane,
)


def store_piece(x: jax.Array, ref: Any) -> None:
    """Store float32 `[m, n]` of a product to global memory, for `load_piece`."""

    @inline(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(_: Any, value: Any, target: Any) -> None:
        for register, place in _places(value.shape, target):
            llvm.store(value.registers[register], place)

    store(x, ref)


def store_rows(x: jax.Array, ref: Any, stride: int, begin: jax.Array, end: jax.Array) -> None:
    """Store some rows of a product, each as it is in global memory.

    Args:
        x: 16 bits each, `[64, n]`.
        ref: global memory `[n]` where row 0 belongs, which need not be there if it is not stored.
        stride: elements from one row in global memory to the next.
        begin: int32 scalar, the first row to store.
        end: int32 scalar, the row behind the last.
    """

    @inline(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), SPLAT, SPLAT))
    def store(_: Any, value: Any, target: Any, begin: Any, end: Any) -> None:
        warp, lane = warp_and_lane()
        for half in range(2):
            row = add(times(warp, 16), arith.shrui(lane, constant(2)), constant(8 * half))
            wanted = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, row, begin.registers.item()),
                arith.cmpi(arith.CmpIPredicate.slt, row, end.registers.item()),
            )
            start = add(times(row, 2 * stride), times(low_bits(lane, 3), 2 * 2))
            place = global_pointer(target, start, 0)
            for group in range(value.shape[1] // 8):
                pair = value.registers[0, group, 0, 0, half, 0, 0, 0, 0]
                utils.inline_ptx(
                    f"st.global.b32 [$0 + {group * 8 * 2}], $1;",
                    place,
                    llvm.bitcast(ir.IntegerType.get_signless(32), pair),
                    predicate=wanted,
                    has_side_effects=True,
                )

    store(x, ref, begin, end)


def load_piece(ref: Any, shape: tuple[int, int]) -> jax.Array:
    """Load what another thread block stored with `store_piece` during this kernel."""

    @inline(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def load(_: Any, source: Any) -> Any:
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for register, place in _places(shape, source):
            registers[register] = _load_pair(place)
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return load(ref)


def load_per_column(ref: Any, columns: int) -> jax.Array:
    """Load float32 `[columns]` that another thread block stored during this kernel."""
    layout = plgpu.Layout.WGMMA.reduce(0)

    @inline(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=layout),
    )
    def load(_: Any, source: Any) -> Any:
        _, lane = warp_and_lane()
        start = times(low_bits(lane, 3), 2 * 4)
        registers = np.empty((columns // 8, 1, 1), dtype=object)
        for i in range(columns // 8):
            registers[i, 0, 0] = _load_pair(global_pointer(source, start, i * 8 * 4))
        return fa.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return load(ref)


def arrive(counter: Any, flag: Any) -> jax.Array:
    """Publish this warpgroup's stores to global memory and count it in.

    Args:
        counter: int32 element of global memory.
        flag: int32 `[1]` of shared memory, this warpgroup's own.

    Returns:
        How many had arrived before. Whatever those stored is visible to all threads afterwards.
    """

    @inline(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT),
    )
    def count(_: Any, counter: Any, flag: Any) -> Any:
        place, pointer = shared_address(flag), utils.memref_ptr(counter)
        utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        utils.warpgroup_barrier()
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            before = utils.inline_ptx(
                "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;",
                pointer,
                result_types=place.type,
                has_side_effects=True,
            )
            llvm.store(before, shared_pointer(place))
        utils.warpgroup_barrier()
        before = llvm.load(place.type, shared_pointer(place), volatile_=True)
        utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        return fa.FragmentedArray.splat(before, (), is_signed=True)

    return count(counter, flag)


def _places(shape: tuple[int, int], ref: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Registers of a float32 fragment, and where in row-major global memory each belongs."""
    warp, lane = warp_and_lane()
    row = add(times(warp, 16), arith.shrui(lane, constant(2)))
    start = add(times(row, shape[1] * 4), times(low_bits(lane, 3), 2 * 4))
    for block, group in np.ndindex(shape[0] // 64, shape[1] // 8):
        for half in range(2):
            offset = (block * 64 + half * 8) * shape[1] + group * 8
            place = global_pointer(ref, start, offset * 4)
            yield (block, group, 0, 0, half, 0, 0, 0, 0), place


def _load_pair(pointer: Any) -> Any:
    """Two float32 that another multiprocessor may have stored: past the L1 cache."""
    f32 = ir.F32Type.get()
    pair = utils.inline_ptx(
        "ld.relaxed.gpu.global.v2.f32 {$0, $1}, [$2];",
        pointer,
        result_types=(f32, f32),
        has_side_effects=True,
    )
    both = llvm.mlir_undef(ir.VectorType.get((2,), f32))
    for i, x in enumerate(pair):
        both = insert(x, both, i)
    return both
