"""The matrix products of the model, and the one place that says how they are computed."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# From here on the products of a step are left to the device's library, see
# `pagedjax.engine.runner`.
MANY_TOKENS = 256


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

    With few tokens the product is asked for in float32, so that parts of a divided inner dimension
    are not rounded before they are added. With many it is never divided, and a library writes what
    it is asked for: rounding is left to it, instead of a pass over twice the bytes.

    Args:
        x: activations; the last `contract` axes are summed over.
        weight: its last `contract` axes match those of `x`.
        contract: number of axes to sum over.
        out_dtype: dtype of the result; that of `x` if None.

    Returns:
        `[tokens, out...]`.
    """
    inner = weight.shape[weight.ndim - contract :]
    outer = weight.shape[: weight.ndim - contract]
    out_dtype = out_dtype or x.dtype
    # As plain matrices: XLA copies a weight with several outer or inner axes on every call.
    out = jax.lax.dot_general(
        x.reshape(x.shape[0], math.prod(inner)),
        weight.reshape(math.prod(outer), math.prod(inner)),
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32 if x.shape[0] < MANY_TOKENS else out_dtype,
    )
    return out.reshape(x.shape[0], *outer).astype(out_dtype)
