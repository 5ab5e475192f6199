"""The matrix products of the model, and the one place that says how they are computed."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# From here on the products of a step are left to the device's library, see
# `pagedjax.engine.runner`.
MANY_TOKENS = 256


def product_dtype(tokens: int, dtype: jnp.dtype) -> jnp.dtype:
    """What a product of activations of this dtype is returned in.

    With few tokens it is float32: so a divided inner dimension is summed up without rounding its
    parts, a library does not need a kernel of its own to round the sum, and the bytes do not count.
    With many tokens they do, and the inner dimension is never divided.
    """
    return jnp.dtype(jnp.float32) if tokens < MANY_TOKENS else jnp.dtype(dtype)


def project(
    x: Float[Array, "tokens ..."],
    weight: Float[Array, "..."],
    *,
    contract: int = 1,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "tokens ..."]:
    """Multiply each token's vector by a weight stored as `[out..., in...]`.

    Checkpoints keep the inner dimension last, so both operands are contiguous along it and
    conversion never transposes. Accumulation is float32; float32 operands are multiplied
    in full float32 on every device (an NVIDIA GPU would otherwise round them to TF32).

    The result is rounded to `product_dtype`, which is wider for few tokens: whoever takes it next
    computes in float32 and rounds what comes of it.

    Args:
        x: activations; the last `contract` axes are summed over.
        weight: its last `contract` axes match those of `x`.
        contract: number of axes to sum over.
        out_dtype: dtype of the result; `product_dtype` if None.

    Returns:
        `[tokens, out...]`.
    """
    inner = weight.shape[weight.ndim - contract :]
    outer = weight.shape[: weight.ndim - contract]
    out_dtype = out_dtype or product_dtype(x.shape[0], x.dtype)
    # As plain matrices: XLA copies a weight with several outer or inner axes on every call.
    out = jax.lax.dot_general(
        x.reshape(x.shape[0], math.prod(inner)),
        weight.reshape(math.prod(outer), math.prod(inner)),
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )
    return out.reshape(x.shape[0], *outer)
