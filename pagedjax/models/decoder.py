"""The one decoder for all families, driven by `ArchConfig`.

The paged step and the plain differentiable forward run the same `hidden`; they differ only in
the `attend` they pass. A researcher trains with the one and serves with the other, on the very
same parameters.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pagedjax.layers.attention import Attend, Attention, attend_within
from pagedjax.layers.linear import project
from pagedjax.layers.mlp import MLP
from pagedjax.layers.norms import RMSNorm
from pagedjax.layers.rope import Rotation
from pagedjax.models.arch import ArchConfig


class Embedding(nnx.Module):
    """A table with a row per token id; also serves as the output projection when tied."""

    def __init__(self, arch: ArchConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        init = nnx.initializers.normal(0.02)
        self.table = nnx.Param(
            init(rngs.params(), (arch.vocab, arch.embed), dtype), axes=("vocab", "embed")
        )


class Layer(nnx.Module):
    """Pre-norm transformer layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, arch: ArchConfig, window: int | None, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.attention_norm = RMSNorm(arch.embed, arch.norm_eps, dtype=dtype, axis="embed")
        self.attention = Attention(arch, window, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(arch.embed, arch.norm_eps, dtype=dtype, axis="embed")
        self.mlp = MLP(arch, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "tokens embed"], rotate: Rotation, attend: Attend
    ) -> Float[Array, "tokens embed"]:
        """One layer's update of the residual stream."""
        x = x + self.attention(self.attention_norm(x), rotate, attend)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Decoder-only transformer.

    Args:
        arch: what to build.
        rngs: stream `params` initialises the weights (normal, sigma 0.02).
        dtype: dtype of weights and activations.
    """

    def __init__(self, arch: ArchConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.embed = Embedding(arch, rngs=rngs, dtype=dtype)
        self.layers = nnx.List(
            [Layer(arch, window, rngs=rngs, dtype=dtype) for window in arch.windows]
        )
        self.norm = RMSNorm(arch.embed, arch.norm_eps, dtype=dtype, axis="embed")
        if not arch.tied:
            self.unembed = Embedding(arch, rngs=rngs, dtype=dtype)
        self.arch = arch

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab"]:
        """Logits (float32) after every token of whole sequences; differentiable, no cache."""
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)

        def one(row: jax.Array) -> jax.Array:
            return self.logits(self.hidden(row, positions, lambda layer: attend_within))

        return jax.vmap(one)(tokens)

    def hidden(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        attend_of: Callable[[int], Attend],
    ) -> Float[Array, "tokens embed"]:
        """Run the layers over a flat row of tokens, of one sequence or of many.

        The layers are unrolled in Python: a scan over them would copy the cache or keep the
        step out of CUDA graphs.

        Args:
            tokens: token ids.
            positions: each token's position in its own sequence.
            attend_of: gives layer `i` its way to attend.

        Returns:
            The normalised residual stream, ready for `logits`.
        """
        x = self.embed.table[...][tokens]
        rotate = Rotation.at(positions, self.arch.rope, self.arch.head_dim)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotate, attend_of(index))
        return self.norm(x)

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """Unnormalised log-probabilities of the next token, float32."""
        head = self.embed if self.arch.tied else self.unembed
        return project(hidden, head.table[...], out_dtype=jnp.float32)
