"""Residual addition and root-mean-square normalisation in one pass (Pallas Triton).

A decode step works on so few rows that each kernel takes a microsecond or two whatever it does,
and XLA makes two or three of these operations: the sum, the mean square of each row, the product.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import xla
from pallas_kernels.triton_attention import power_of_two_parts, sum_of_pieces


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def add_rms_norm(
    x: jax.Array, delta: jax.Array, scale: jax.Array, eps: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.add_rms_norm`; its gradient is that of the XLA version."""
    return _launch(x, delta, scale, eps, interpret)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _launch(
    x: jax.Array, delta: jax.Array, scale: jax.Array, eps: float, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Jitted, so that the norms of a program that are alike are traced and lowered once."""
    rows, dim = x.shape
    whole = pl.BlockSpec(memory_space=pl.ANY)
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        grid=(rows,),
        in_specs=[whole] * 3,
        out_specs=[whole] * 2,
        out_shape=[like_x, like_x],
        interpret=interpret,
        name="add_rms_norm",
        compiler_params=plt.CompilerParams(num_warps=4 if dim <= 1024 else 8, num_stages=1),
    )(x, delta, scale)


def _kernel(
    x_ref: Any, delta_ref: Any, scale_ref: Any, sum_ref: Any, out_ref: Any, *, eps: float
) -> None:
    row, dim = pl.program_id(0), x_ref.shape[1]
    parts = power_of_two_parts(dim)
    # Rounded before it is normalised, as it is where the two operations are apart.
    sums = [
        (x_ref[row, part].astype(jnp.float32) + sum_of_pieces(delta_ref, row, part)).astype(
            x_ref.dtype
        )
        for part in parts
    ]
    wide = [part.astype(jnp.float32) for part in sums]
    square = functools.reduce(lambda a, b: a + b, [jnp.sum(part * part) for part in wide])
    factor = lax.rsqrt(square / dim + eps)
    for part, total, value in zip(parts, sums, wide, strict=True):
        sum_ref[row, part] = total
        out_ref[row, part] = (value * factor).astype(out_ref.dtype) * scale_ref[part]


_Residuals = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    x: jax.Array, delta: jax.Array, scale: jax.Array, eps: float, interpret: bool
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    return add_rms_norm(x, delta, scale, eps, interpret), (x, delta, scale)


def _backward(eps: float, interpret: bool, saved: _Residuals, cotangents: Any) -> Any:
    del interpret
    _, pull = jax.vjp(functools.partial(xla.add_rms_norm, eps=eps), *saved)
    return pull(cotangents)


add_rms_norm.defvjp(_forward, _backward)
