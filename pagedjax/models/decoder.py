"""The one decoder for all families, driven by `ArchConfig`.

The paged step and the plain differentiable forward run the same `hidden`; they differ only in
the memories they pass. A researcher trains with the one and serves with the other, on the very
same parameters.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pagedjax.layers.attention import Attention, MemoryT, WithinSequence
from pagedjax.layers.linear import project
from pagedjax.layers.mlp import MLP
from pagedjax.layers.norms import RMSNorm
from pagedjax.layers.rope import Rotation
from pagedjax.models.arch import ArchConfig

# The residual stream `[tokens, embed]`, and what is still to be added to it, in pieces.
Stream = tuple[Float[Array, "tokens embed"], Float[Array, "pieces tokens embed"]]


class Embedding(nnx.Module):
    """A table with a row per token id; also serves as the output projection when tied."""

    def __init__(self, arch: ArchConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        init = nnx.initializers.normal(0.02)
        self.table = nnx.Param(
            init(rngs.params(), (arch.vocab, arch.embed), dtype), axes=("vocab", "embed")
        )


class Layer(nnx.Module):
    """Pre-norm transformer layer: attention, then MLP, each added to the residual stream.

    What a layer's MLP adds is handed on beside the stream: the next norm adds it, in one pass.
    """

    def __init__(self, arch: ArchConfig, window: int | None, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.attention_norm = RMSNorm(arch.embed, arch.norm_eps, dtype=dtype, axis="embed")
        self.attention = Attention(arch, window, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(arch.embed, arch.norm_eps, dtype=dtype, axis="embed")
        self.mlp = MLP(arch, rngs=rngs, dtype=dtype)

    def __call__(
        self, stream: Stream, rotation: Rotation, memory: MemoryT
    ) -> tuple[Stream, MemoryT]:
        """One layer's update of the residual stream, and of its memory."""
        x, normed = self.attention_norm.add(*stream)
        mixed, memory = self.attention(normed, rotation, memory)
        x, normed = self.mlp_norm.add(x, mixed)
        return (x, self.mlp(normed)), memory


@jax.jit
def run_layer(
    layer: Layer, stream: Stream, rotation: Rotation, memory: MemoryT
) -> tuple[Stream, MemoryT]:
    """`layer(stream, rotation, memory)`, traced once for all layers that are alike.

    XLA inlines the calls, so this saves tracing and lowering time and changes no step.
    """
    return layer(stream, rotation, memory)


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
            memories = [WithinSequence() for _ in self.layers]
            return self.logits(self.hidden(row, positions, memories)[0])

        return jax.vmap(one)(tokens)

    def hidden(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        memories: Sequence[MemoryT],
    ) -> tuple[Float[Array, "tokens embed"], list[MemoryT]]:
        """Run the layers over a flat row of tokens, of one sequence or of many.

        The layers are unrolled in Python: a scan over them would copy the cache or keep the
        step out of CUDA graphs.

        Args:
            tokens: token ids.
            positions: each token's position in its own sequence.
            memories: each layer's keys and values of earlier tokens.

        Returns:
            The normalised residual stream, ready for `logits`, and the memories as they are now.
        """
        embedded = self.embed.table[...][tokens]
        # Zeros like what an MLP adds, so that the first layer is like all others.
        added = jax.eval_shape(lambda x: self.layers[0].mlp(x), embedded)
        stream = embedded, jnp.zeros(added.shape, added.dtype)
        rotation = Rotation.at(positions, self.arch.rope, self.arch.head_dim)
        after = []
        for layer, memory in zip(self.layers, memories, strict=True):
            stream, memory = run_layer(layer, stream, rotation, memory)
            after.append(memory)
        return self.norm.add(*stream)[1], after

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """Unnormalised log-probabilities of the next token, float32."""
        head = self.embed if self.arch.tied else self.unembed
        return project(hidden, head.table[...], out_dtype=jnp.float32)
