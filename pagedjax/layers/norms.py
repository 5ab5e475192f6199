"""Root-mean-square normalisation."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels import add_rms_norm


class RMSNorm(nnx.Module):
    """Divide by the root mean square, then scale (Zhang and Sennrich, arXiv:1910.07467).

    The statistics are float32 whatever the activations are.
    """

    def __init__(self, dim: int, eps: float, *, dtype: jnp.dtype, axis: str | None = None):
        self.scale = nnx.Param(jnp.ones((dim,), dtype), axes=(axis,))
        self.eps = eps

    def add(
        self, x: Float[Array, "tokens dim"], delta: Float[Array, "pieces tokens dim"]
    ) -> tuple[Float[Array, "tokens dim"], Float[Array, "tokens dim"]]:
        """The residual stream with all of `delta` added to it, and that normalised."""
        return add_rms_norm(x, delta, self.scale[...], eps=self.eps)
