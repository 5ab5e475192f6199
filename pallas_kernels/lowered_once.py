"""Mosaic kernels that several programs of a process have in common, lowered for all at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.custom_batching
import jax.export

_Kernel = Callable[..., Any]


def lowered_once(build: Callable[..., _Kernel], *static: Hashable) -> _Kernel:
    """The kernel `build(*static)`, for NVIDIA GPUs; programs that call it share its lowered form.

    JAX lowers a kernel anew for every program, and an attention kernel takes longer than all the
    rest of a step. Here the first program lowers it, and others with operands of the same shapes
    and dtypes take in what it has become. XLA inlines that: what is compiled is the same.

    Args:
        build: makes the kernel from hashable arguments; a function of a module, since kernels are
            told apart by it and by them.
        static: the arguments.
    """

    @jax.custom_batching.sequential_vmap
    def call(*operands: jax.Array) -> Any:
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
        mesh = jax.sharding.get_abstract_mesh()
        return _lowered(build, static, shapes, mesh).call(*operands)

    return call


@functools.lru_cache(maxsize=64)
def _lowered(
    build: Callable[..., _Kernel],
    static: tuple[Hashable, ...],
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    mesh: jax.sharding.AbstractMesh,
) -> jax.export.Exported:
    """The mesh around the call may name the device that the kernel is lowered for."""
    del mesh
    return jax.export.export(jax.jit(build(*static)), platforms=["cuda"])(*shapes)
