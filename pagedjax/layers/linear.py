"""The matrix products of the model, and the one place that says how they are computed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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

    Args:
        x: activations; the last `contract` axes are summed over.
        weight: its last `contract` axes match those of `x`.
        contract: number of axes to sum over.
        out_dtype: dtype of the result; that of `x` if None.

    Returns:
        `[tokens, out...]`.
    """
    x_axes = tuple(range(x.ndim - contract, x.ndim))
    w_axes = tuple(range(weight.ndim - contract, weight.ndim))
    out = jax.lax.dot_general(
        x,
        weight,
        dimension_numbers=((x_axes, w_axes), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return out.astype(out_dtype or x.dtype)
