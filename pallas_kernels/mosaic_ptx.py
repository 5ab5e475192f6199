"""Addresses and 32-bit arithmetic for the Mosaic kernels' own PTX."""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

SPLAT: Any = plgpu.Layout.WG_SPLAT(())
inline: Any = plgpu.inline_mgpu  # its type is that of the code, not of the function
utils: Any = mosaic_utils  # JAX 0.10 lacks some, but does not come here


def warp_and_lane() -> tuple[Any, Any]:
    """Of the thread, the warp within its warpgroup."""
    thread = utils.thread_idx()
    return low_bits(arith.shrui(thread, constant(5)), 3), low_bits(thread, 31)


def shared_address(ref: Any) -> Any:
    """The 32-bit address of a reference to shared memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def shared_pointer(address: Any) -> Any:
    """Shared memory at a 32-bit address."""
    return llvm.inttoptr(llvm.PointerType.get(3), address)


def global_pointer(ref: Any, start: Any, offset: int) -> Any:
    """Global memory so many bytes, `start` plus `offset`, behind the begin of a reference."""
    bytes_ = arith.extui(ir.IntegerType.get_signless(64), add(start, constant(offset)))
    return utils.getelementptr(utils.memref_ptr(ref), [bytes_], ir.IntegerType.get_signless(8))


def extract(vector_: Any, i: int) -> Any:
    """An element of a vector."""
    where = ir.DenseI64ArrayAttr.get([i])
    return vector.extract(vector_, dynamic_position=[], static_position=where)


def insert(x: Any, vector_: Any, i: int) -> Any:
    """A vector with one element replaced."""
    where = ir.DenseI64ArrayAttr.get([i])
    return vector.insert(x, vector_, dynamic_position=[], static_position=where)


def constant(x: int) -> Any:
    """A 32-bit integer."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, x))


def times(x: Any, factor: int) -> Any:
    """A 32-bit integer times a constant."""
    return arith.muli(x, constant(factor))


def add(*terms: Any) -> Any:
    """The sum of 32-bit integers."""
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def bit(x: Any, position: int) -> Any:
    """A bit of a 32-bit integer."""
    return low_bits(arith.shrui(x, constant(position)), 1)


def low_bits(x: Any, mask: int) -> Any:
    """What a mask leaves of a 32-bit integer."""
    return arith.andi(x, constant(mask))
