"""The gated feed-forward block."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pagedjax.layers.linear import project, project_in_pieces
from pagedjax.models.arch import ArchConfig


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202).

    Gate and up share one weight, so that a step reads `x` once and launches one product.
    """

    def __init__(self, arch: ArchConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        init = nnx.initializers.normal(0.02)
        self.gate_up = nnx.Param(
            init(rngs.params(), (2, arch.mlp, arch.embed), dtype), axes=(None, "mlp", "embed")
        )
        self.down = nnx.Param(
            init(rngs.params(), (arch.embed, arch.mlp), dtype), axes=("embed", "mlp")
        )

    def __call__(self, x: Float[Array, "tokens embed"]) -> Float[Array, "pieces tokens embed"]:
        """Apply to each token; the result as `project_in_pieces` leaves it."""
        gate_up = project(x, self.gate_up[...])
        inner = jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]
        return project_in_pieces(inner.astype(x.dtype), self.down[...])
